"""Experts: the matrices of a mixture of experts whose weights are stacked, one leaf for each expert and kind.

1. `stack_in` finds a component's stack: a Hugging Face module with `gate_up_proj` (or `up_proj`) and `down_proj`,
   (expert, out, in) or (expert, in, out), which says of itself how they are kept (transformers' `use_experts_implementation`), or
   Llama 4's, whose experts get all tokens, zeros those that are not routed to them; or JetMoe's, of MLPs and of attention heads
   ("attn_q.5", "attn_o.5"), which sort tokens by expert.
2. `matrices_of` makes the leaves: "mlp_in.5" is expert 5's slice of the stack, as (d_in, d_out). They are no modules of the
   model's tree, hold no parameters of their own, and can be mounted and hooked like any other leaf (leaves.py).
3. While one is mounted or watched the stack calls them (`call_matrices`): its class is then a subclass that goes through the
   experts one by one. A leaf that somebody watches gets all tokens, those that are not routed to its expert as zeros, so that
   its input and its z have (batch, pos) axes; what comes of them there is dropped. `routed` says which these tokens are, also
   of the mounted units' hook point: `model.hook_dict["blocks.3.hook_mlp_in_5_unit"].routed`, (batch, pos).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from swd_lens.hosts.host import Register
from swd_lens.hosts.weights import while_wanted

_MLP_KINDS = ("mlp_gate", "mlp_in", "mlp_out")
_IN, _OUT = ("gate_up_proj", "up_proj"), "down_proj"
_ARGUMENTS = 3  # hidden states, experts of each token, their weights
_OF_ALL_TOKENS = "Llama4TextExperts"
_SORTED = {"JetMoeMoE": ("mlp_gate", "mlp_in", "mlp_out"), "JetMoeMoA": ("attn_q", "attn_o")}
# Class of a stack -> the class of the same module while it calls its leaves.
_CALLING: dict[type, type] = {}


@dataclass(frozen=True)
class Layout:
    """How a stack keeps its matrices: gate and up in one, one behind the other or interleaved; as (in, out); with biases."""

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = True
    is_concatenated: bool = True

    @classmethod
    def of(cls, stack: nn.Module) -> "Layout | None":
        """None where the stack does not say."""
        names = [each.name for each in fields(cls)]
        if all(name in stack.__dict__ for name in names):
            return cls(**{name: bool(stack.__dict__[name]) for name in names})
        name = _plain(type(stack)).__name__
        if name in _SORTED:
            return cls(has_gate="mlp_gate" in _SORTED[name], is_transposed=False)
        return cls() if name == _OF_ALL_TOKENS else None


class _Slice(Mapping[str, Tensor | None]):
    """Where an expert's matrix is kept, in the form of a module's `_parameters`: "weight" -> a detached (d_in, d_out) view.

    It gives one tensor as long as the stack is one parameter, which is how changes are noticed (base/snapshots.py).
    """

    def __init__(self, matrix: "ExpertMatrix"):
        self.matrix, self.kept = matrix, None

    def __getitem__(self, name: str) -> Tensor:
        stacked = self.matrix.holder._parameters[self.matrix.parameter]
        if name != "weight" or stacked is None:
            raise KeyError(name)
        if self.kept is None or self.kept[0] is not stacked:
            self.kept: Any = (stacked, self.matrix.weight_of(stacked.detach()))
        return self.kept[1]

    def __iter__(self) -> Iterator[str]:
        return iter(("weight",))

    def __len__(self) -> int:
        return 1

    def __getstate__(self) -> dict[str, Any]:
        return {"matrix": self.matrix, "kept": None}  # a copy of the view would be no view


class ExpertMatrix(nn.Module):
    """One expert's matrix of one kind: h -> h @ W + b.

    Attributes:
        stack: the module whose forward goes through the experts.
        holder, parameter: the module, and of its parameters the one that holds this matrix beside the other experts'.
        expert, kind: which one; "mlp_gate", "mlp_in" or "mlp_out", in JetMoe's attention "attn_q" or "attn_o".
        routed: (token,) in the last forward that called the leaf with all tokens; None before.
    """

    stack: Any
    holder: Any
    parameter: str

    def __init__(self, stack: nn.Module, layout: Layout, expert: int, kind: str):
        super().__init__()
        holder, parameter = _held(stack, kind)
        # Past nn.Module.__setattr__: the stack has its place in the module tree already.
        self.__dict__.update(stack=stack, holder=holder, stored_in=_Slice(self), training=stack.training)
        self.layout, self.parameter = layout, parameter
        self.expert, self.kind = expert, kind
        self.routed: Tensor | None = None

    def weight_of(self, stacked: Float[Tensor, "expert _ _"]) -> Float[Tensor, "d_in d_out"]:
        """This matrix of the stack's parameter."""
        own = stacked[self.expert]
        return self._part(own if self.layout.is_transposed else own.T)

    @property
    def bias(self) -> Float[Tensor, " d_out"] | None:
        return self._part(getattr(self.stack, f"{self.parameter}_bias")[self.expert]) if self.layout.has_bias else None

    def _part(self, both: Float[Tensor, "*d_in width"]) -> Float[Tensor, "*d_in d_out"]:
        """This matrix of a pair: gate and up share one parameter."""
        if self.kind not in ("mlp_gate", "mlp_in") or not self.layout.has_gate:
            return both
        first = self.kind == "mlp_gate"
        if not self.layout.is_concatenated:
            return both[..., 0 if first else 1 :: 2]
        half = both.shape[-1] // 2
        return both[..., :half] if first else both[..., half:]

    def forward(self, h: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        product = h @ self.weight_of(self.holder._parameters[self.parameter])
        return product if self.bias is None else product + self.bias

    def is_watched(self) -> bool:
        """Whether something is mounted on it, or a hook wants to see what it reads or writes."""
        return "unit_site" in self.__dict__ or bool(self._forward_pre_hooks or self._forward_hooks)

    def on_routed(self, h: Float[Tensor, "routed d_in"], routed: Bool[Tensor, " token"]) -> Tensor:
        """Outputs for the tokens that are routed to the expert; who watches sees all tokens, the others as zeros."""
        if not self.is_watched():
            return self(h)
        self.routed = routed
        if "unit_site" in self.__dict__:
            shape, mounted = self.__dict__["unit_rows"].shape, self._modules["unit_projection"]
            hook: Any = mounted.__dict__.get("hook")
            if hook is not None:
                hook.routed = routed.view(shape) if prod(shape) == len(routed) else routed
        everywhere = h.new_zeros(len(routed), h.shape[1]).index_copy(0, routed.nonzero()[:, 0], h)
        return self(everywhere)[routed]


def stack_in(component: nn.Module) -> Any:
    """Find the stack of experts in a component of a block; None where there is none, or where it is computed in other ways."""
    for module in component.modules():
        if _plain(type(module)).__name__ in _SORTED:
            return module
        held = [p for name, p in module._parameters.items() if p is not None and name in (*_IN, _OUT)]
        if _OUT not in module._parameters or len(held) != 2 or any(p.ndim != 3 for p in held):
            continue
        if Layout.of(module) is not None and not module.__dict__.get("has_post_expert_norm", False):
            return module
    return None


def _held(stack: Any, kind: str) -> tuple[nn.Module, str]:
    """The module and its parameter that hold the stacked matrices of a kind."""
    if _plain(type(stack)).__name__ in _SORTED:
        return (stack.output_linear if kind in ("mlp_out", "attn_o") else stack.input_linear), "weight"
    return stack, _OUT if kind == "mlp_out" else next(name for name in _IN if name in stack._parameters)


def matrices_of(stack: Any) -> dict[str, ExpertMatrix]:
    """The leaves, "mlp_in.0" and so on; the same objects at every call."""
    if "unit_matrices" not in stack.__dict__:
        layout = Layout.of(stack)
        assert layout is not None, "of what `stack_in` found"
        of_mlps = [kind for kind in _MLP_KINDS if layout.has_gate or kind != "mlp_gate"]
        kinds = _SORTED.get(_plain(type(stack)).__name__, of_mlps)
        holder, parameter = _held(stack, kinds[-1])
        stacked = holder._parameters[parameter]
        assert stacked is not None, "of what `stack_in` found"
        experts = range(len(stacked))
        made = {f"{kind}.{i}": ExpertMatrix(stack, layout, i, kind) for i in experts for kind in kinds}
        stack.__dict__["unit_matrices"] = made
    return stack.__dict__["unit_matrices"]


def call_matrices(stack: Any, register: Register) -> None:
    """Have the stack's forward call its leaves, until the last undo."""
    plain = _plain(type(stack))
    if plain not in _CALLING:
        own: dict[str, dict[str, Any]] = {
            _OF_ALL_TOKENS: {"forward": _forward_on_all},
            "JetMoeMoE": {"forward": _forward_on_sorted},
            "JetMoeMoA": {"map": _queries_of_experts, "reduce": _merged_by_experts},
        }
        methods = own.get(plain.__name__) or {"forward": _forward_like(plain)}
        _CALLING[plain] = type(f"Factored{plain.__name__}", (plain,), methods)
    become = partial(setattr, stack, "__class__")
    while_wanted(stack.__dict__, partial(become, _CALLING[plain]), partial(become, plain), register)


def _plain(cls: type) -> type:
    return next((plain for plain, calling in _CALLING.items() if calling is cls), cls)


def _forward_on_all(self: Any, hidden_states: Float[Tensor, "expert_token d"]) -> Float[Tensor, "expert_token d"]:
    """Run Llama 4's experts, each of which gets every token, times its weight there."""
    written = []
    for i, h in enumerate(hidden_states.view(self._parameters[_OUT].shape[0], -1, hidden_states.shape[-1])):
        routed = h.any(1)
        whole = torch.zeros_like(h)
        written.append(whole.index_copy(0, routed.nonzero()[:, 0], _written(self, i, h[routed], routed)))
    return torch.cat(written)


def _forward_like(plain: Any) -> Callable[..., Tensor]:
    """A forward that calls the leaves, with the names that the stack's own has for hidden states, experts and weights."""
    names = list(inspect.signature(plain.forward).parameters)[1 : 1 + _ARGUMENTS]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        hidden, experts, weights = (given[name] for name in names)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return _run(self, flat, experts.reshape(len(flat), -1), weights.reshape(len(flat), -1)).view_as(hidden)

    return forward


def _run(
    stack: Any, hidden: Float[Tensor, "token d"], experts: Int[Tensor, "token k"], weights: Float[Tensor, "token k"]
) -> Float[Tensor, "token d"]:
    """The stack's output: each expert on the tokens that are routed to it, times their weights."""
    total = torch.zeros_like(hidden)
    for i, chosen, routed in _by_expert(stack, experts):
        written = _written(stack, i, hidden[routed], routed) * (weights * chosen).sum(1)[routed, None]
        total = total.index_add(0, routed.nonzero()[:, 0], written.to(total.dtype))
    return total


def _by_expert(
    stack: Any, experts: Int[Tensor, "token k"]
) -> Iterator[tuple[int, Bool[Tensor, "token k"], Bool[Tensor, " token"]]]:
    """Every expert that has tokens, or is watched: its number, where it was chosen, and the tokens that are routed to it."""
    matrices = matrices_of(stack)
    watched = {matrix.expert for matrix in matrices.values() if matrix.is_watched()}
    for i in sorted({matrix.expert for matrix in matrices.values()}):
        chosen = experts == i
        routed = chosen.any(1)
        if i in watched or routed.any():
            yield i, chosen, routed


def _written(stack: Any, expert: int, h: Float[Tensor, "routed d"], routed: Bool[Tensor, " token"]) -> Float[Tensor, "routed d"]:
    """One expert's output on the tokens that are routed to it."""
    matrices = matrices_of(stack)
    act: Any = getattr(stack, "act_fn", getattr(stack, "activation", None))  # GPT-OSS has none: its gate is its own
    up, layout = matrices[f"mlp_in.{expert}"].on_routed(h, routed), matrices[f"mlp_in.{expert}"].layout
    if not layout.has_gate:
        inner = act(up)
    else:
        gate = matrices[f"mlp_gate.{expert}"].on_routed(h, routed)
        joined = torch.cat([gate, up], -1) if layout.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
        inner = stack._apply_gate(joined) if hasattr(stack, "_apply_gate") else up * act(gate)
    return matrices[f"mlp_out.{expert}"].on_routed(inner, routed)


def _slots(
    topology: tuple[Tensor, Tensor, Tensor, list[int]], n_tokens: int
) -> tuple[Int[Tensor, "token k"], Float[Tensor, "token k"]]:
    """Experts of each token and their weights, read off what JetMoe's router says of tokens that are sorted by expert."""
    order, _, weights, sizes = topology
    of_sorted = torch.repeat_interleave(torch.arange(len(sizes), device=order.device), order.new_tensor(sizes))
    experts = torch.empty_like(order).index_copy(0, order, of_sorted)
    return experts.view(n_tokens, -1), torch.zeros_like(weights).index_copy(0, order, weights).view(n_tokens, -1)


def _forward_on_sorted(self: Any, layer_input: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos d"]:
    """Run JetMoe's MLP."""
    flat = layer_input.reshape(-1, layer_input.shape[-1])
    *topology, _ = self.router(flat)
    return (_run(self, flat, *_slots(tuple(topology), len(flat))) + self.bias).view_as(layer_input)


def _queries_of_experts(self: Any, layer_input: Float[Tensor, "batch pos d"]) -> tuple[Tensor, Tensor, Any]:
    """Make the queries of JetMoe's attention: those of each token's experts, side by side."""
    batch, pos, _ = layer_input.shape
    flat = layer_input.reshape(batch * pos, -1)
    *topology, router_logits = self.router(flat)
    experts, _ = _slots(tuple(topology), len(flat))
    queries = flat.new_zeros(*experts.shape, self.hidden_size)
    for i, chosen, routed in _by_expert(self, experts):
        # A token chooses an expert once, so that both sides are in the order of tokens.
        queries = queries.masked_scatter(chosen[..., None], matrices_of(self)[f"attn_q.{i}"].on_routed(flat[routed], routed))
    return queries.view(batch, pos, *queries.shape[1:]), router_logits, tuple(topology)


def _merged_by_experts(self: Any, layer_input: Float[Tensor, "batch pos k d"], topo_info: Any) -> Float[Tensor, "batch pos _"]:
    """Write the output of JetMoe's attention: what its experts make of the heads' outputs, times their weights."""
    batch, pos, k, width = layer_input.shape
    heads, total = layer_input.reshape(batch * pos, k, width), layer_input.new_zeros(batch * pos, self.input_size)
    experts, weights = _slots(topo_info, batch * pos)
    for i, chosen, routed in _by_expert(self, experts):
        written = matrices_of(self)[f"attn_o.{i}"].on_routed(heads[chosen], routed) * weights[chosen][:, None]
        total = total.index_add(0, routed.nonzero()[:, 0], written)
    return (total + self.bias).view(batch, pos, -1)
