"""The leaves of a TransformerBridge: the nn.Linear or Conv1D modules that hold its dense matrices, and how one is swapped.

1. Every matrix of a bridge sits in a leaf, under a LinearBridge or, in linear attention, in the Hugging Face module itself.
   `leaves_of_block` finds them and names the components of a block in which it finds none. Where a component is not one whose
   parts have a kind (latent attention, short convolutions, state spaces, experts), its linear maps are leaves by the names that
   they have within it, and experts' matrices are leaves of their own (experts.py).
2. `mount` changes the leaf's `__class__` to a subclass whose forward asks a projection. The leaf keeps its parameters,
   hooks, mode and place in the module tree, so state_dict and parameters() stay the same; `unmount` restores the class. A
   whole MLP (`whole_mlp`) is swapped in the same way.
3. A mounted leaf refuses to show `.weight`: code upstream that multiplies by it itself (attention.py:_compute_per_head_result,
   attention.py:_project_per_head_qkv) then fails with the reason instead of using a matrix that is not in use.
4. Three leaves q, k, v can share one projection, `Packed`: it runs once per input and hands out the slices.
5. Some blocks (OPT's) flatten rows and positions before their matrices. `Rows` notes the shape in which a block is entered, and
   whoever looks at a leaf gets (batch, pos, d) all the same.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    GatedMLPBridge,
    JointQKVAttentionBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.generalized_components.conv1d import Conv1DBridge
from transformer_lens.model_bridge.generalized_components.gated_delta_net import GatedDeltaNetBridge
from transformers.pytorch_utils import Conv1D

from swd_lens.hosts.bridge.experts import ExpertMatrix, matrices_of, stack_in
from swd_lens.hosts.sites import PACKED, BlockShapes


class Rows:
    """Batch and positions of what a block runs on, noted when it is entered: a pre-hook of the block.

    An object, not a closure: a deep copy of the host has its own.
    """

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        self.shape = tuple(hidden.shape[:-1]) if isinstance(hidden, Tensor) else ()

    def watch(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self, with_kwargs=True)

    def leave(self, block: nn.Module) -> None:
        """The step back; it serves twice, and where nothing was watched."""
        for key in [key for key, hook in block._forward_pre_hooks.items() if hook is self]:
            del block._forward_pre_hooks[key]
            block._forward_pre_hooks_with_kwargs.pop(key, None)

    def apart(self, h: Float[Tensor, "*flat d"]) -> Float[Tensor, "*batch d"]:
        """With batch and positions each in its axis; h itself, where the block has not made one axis of them."""
        is_flat = h.ndim == 2 and len(self.shape) == 2 and h.shape[0] == self.shape[0] * self.shape[1]
        return h.unflatten(0, self.shape) if is_flat else h


def _with_projection(plain: Any, name: str) -> type:
    """The class of a leaf that a projection stands in for."""

    class Factored(plain):
        def forward(self, h: Tensor) -> Tensor:
            apart = self.unit_rows.apart(h)
            if isinstance(self.unit_projection, Packed):
                y = self.unit_projection.take(self.unit_part, apart)
            else:
                y = self.unit_projection(apart, self.bias, lambda h: _dense(self, h))
            return y if apart is h else y.flatten(0, 1)

        def __getattr__(self, name: str) -> Any:
            # An AttributeError, because upstream probes for weights: getattr(o, "weight", None) in
            # position_embeddings_attention.py.
            if name == "weight":
                raise AttributeError(
                    f"{self.__dict__.get('unit_site')} is attached: its dense weight is not in use. Detach first to read "
                    "it, to edit it, or to use use_attn_result, use_split_qkv_input or use_attn_in, which multiply by it "
                    "head by head."
                )
            return super().__getattr__(name)

    Factored.__name__ = Factored.__qualname__ = name  # as a class at module level: it is named in prints
    return Factored


FactoredLinear = _with_projection(nn.Linear, "FactoredLinear")
FactoredConv1D = _with_projection(Conv1D, "FactoredConv1D")  # GPT-2's transposed linear layer
_LEAVES = (nn.Linear, Conv1D, ExpertMatrix)
# Subclasses that compute the same product in their own words.
_PLAIN_SUBCLASSES = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
# Plain class -> the class of the same module while a projection is mounted; those of MLPs are made when first needed.
_MOUNTED: dict[type, type] = {nn.Linear: FactoredLinear, Conv1D: FactoredConv1D}


def _dense(leaf: Any, h: Tensor) -> Tensor:
    """Compute the leaf's dense product; its own forward would ask for `.weight`."""
    if isinstance(leaf, ExpertMatrix):
        return ExpertMatrix.forward(leaf, h)
    weight, bias = leaf._parameters["weight"], leaf._parameters["bias"]
    if isinstance(leaf, nn.Linear):
        return F.linear(h, weight, bias)
    return torch.addmm(bias, h.reshape(-1, h.shape[-1]), weight).view(*h.shape[:-1], -1)


def _is_leaf(plain: type) -> bool:
    """Exactly these classes: another subclass (quantized, scaled) need not compute h @ W + b."""
    return plain in _LEAVES or f"{plain.__module__}.{plain.__qualname__}" in _PLAIN_SUBCLASSES


def _mounted_class(plain: Any) -> type:
    """The class of a leaf or a whole MLP while a projection is mounted."""

    def whole_mlp_forward(self: Any, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.unit_projection(h, None, lambda h: plain.forward(self, h, *args, **kwargs))

    if plain not in _MOUNTED:
        name = f"Factored{plain.__name__}"
        whole = {"forward": whole_mlp_forward}
        _MOUNTED[plain] = _with_projection(plain, name) if _is_leaf(plain) else type(name, (plain,), whole)
    return _MOUNTED[plain]


def _plain_class(mounted: type) -> type:
    return next((plain for plain, factored in _MOUNTED.items() if factored is mounted), mounted)


def matrix(leaf: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """The leaf's weight as (d_in, d_out), mounted or not."""
    if isinstance(leaf, ExpertMatrix):
        return leaf.weight_of(leaf.holder._parameters[leaf.parameter])
    weight = leaf._parameters["weight"]
    assert weight is not None
    return weight.T if isinstance(leaf, nn.Linear) else weight


def mounted_site(module: nn.Module) -> str | None:
    """Name of the site whose projection stands in for this leaf or MLP."""
    return module.__dict__.get("unit_site")


def mount(modules: Sequence[nn.Module], projection: nn.Module, site_name: str, rows: Rows) -> None:
    """Put the projection in place of the modules: a leaf, a whole MLP, or (then it is a `Packed`) the leaves q, k, v. rows: of
    their block, which it watches."""
    for part, module in enumerate(modules):
        # A child of the first only: parameters and state_dict list it once.
        (module._modules if part == 0 else module.__dict__)["unit_projection"] = projection
        module.__dict__.update(unit_site=site_name, unit_part=part, unit_rows=rows)
        if _is_leaf(type(module)) and "forward" in module.__dict__:
            # Upstream's own of Falcon's leaves, which would go before the class's.
            module.__dict__["unit_forward"] = module.__dict__["forward"]
            del module.__dict__["forward"]
        module.__class__ = _mounted_class(type(module))


def unmount(modules: Sequence[nn.Module], projection: nn.Module) -> None:
    """Take this projection away wherever it is mounted; any other stays."""
    for module in modules:
        if projection not in (module._modules.get("unit_projection"), module.__dict__.get("unit_projection")):
            continue
        module.__class__ = _plain_class(type(module))
        if "unit_forward" in module.__dict__:
            module.__dict__["forward"] = module.__dict__["unit_forward"]
        for name in ("unit_forward", "unit_site", "unit_part", "unit_rows", "unit_projection"):
            module.__dict__.pop(name, None)
        # Last: a second call, after an interruption, knows by it that there is something left to do.
        module._modules.pop("unit_projection", None)


class Packed(nn.Module):
    """One projection for the leaves q, k, v: h, and the biases of the three -> the outputs of the three, side by side.

    Each leaf asks with its own input, in any order. The projection runs at the first; what is kept is dropped once all three
    have been served, or when one asks twice (an earlier forward was left half-way).
    """

    leaves: list[Any]

    def __init__(self, projection: nn.Module, leaves: Sequence[nn.Module]):
        super().__init__()
        self.projection = projection
        self.training = leaves[0].training
        self.widths = [matrix(leaf).shape[1] for leaf in leaves]
        # Past nn.Module.__setattr__: the leaves have their places in the module tree already.
        self.__dict__["leaves"] = list(leaves)
        self.h: Tensor | None = None
        self.slices: dict[int, Tensor] = {}

    def take(self, part: int, h: Tensor) -> Tensor:
        if self.h is None or part not in self.slices:
            biases = [leaf.bias for leaf in self.leaves]
            joint = next((bias for bias in biases if bias is not None), None)
            if joint is not None:  # some models have a bias on some of the three only
                sized = zip(biases, self.widths, strict=True)
                joint = torch.cat([joint.new_zeros(n) if bias is None else bias for bias, n in sized])
            y = self.projection(h, joint, lambda h: torch.cat([_dense(leaf, h) for leaf in self.leaves], dim=-1))
            self.h, self.slices = h, dict(enumerate(y.split(self.widths, dim=-1)))
        elif h is not self.h and not torch.equal(h, self.h):
            # Backward hooks upstream copy the tensor, so equal values are enough.
            self.h, self.slices = None, {}
            raise RuntimeError(
                f"{mounted_site(self.leaves[0])} is attached: q, k and v are one projection of one input, but "
                f"{'qkv'[part]} got another input than the parts before it. Attach attn_q, attn_k and attn_v instead to "
                "intervene on one of their inputs."
            )
        taken = self.slices.pop(part)
        if not self.slices:
            self.h = None
        return taken


_WRAPPERS = ("_original_component", "unit_projection")  # in a module's path: the bridge's, and what is mounted
_ATTENTION = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_o"}
_LINEAR_ATTENTION = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "attn_beta",
    "in_proj_a": "attn_decay",
    "out_proj": "attn_o",
}
_MLP = {"gate": "mlp_gate", "in": "mlp_in", "input": "mlp_in", "out": "mlp_out"}


# Children of a component that are of a kind, though not all that the kinds' components have are there.
_KINDS_BY_NAME = {
    "attn": {"q_proj": "attn_q", "o_proj": "attn_o"},
    "mlp": {
        **{"gate_proj": "mlp_gate", "up_proj": "mlp_in", "down_proj": "mlp_out"},
        **{"w1": "mlp_gate", "w3": "mlp_in", "w2": "mlp_out"},
    },
}
# Hugging Face multiplies by their weight itself (the step sizes of Mamba's selective scan).
_NOT_CALLED = ("dt_proj",)


def shapes_of_block(block: nn.Module) -> BlockShapes:
    """The block's matrices, packed ones and the whole MLP included."""
    leaves, others = leaves_of_block(block)
    shapes = {kind: (matrix(leaf).shape[0], matrix(leaf).shape[1]) for kind, leaf in leaves.items()}
    parts, alternatives = PACKED["attn_qkv"], ()
    if shapes.keys() >= set(parts):
        shapes["attn_qkv"] = (shapes["attn_q"][0], sum(shapes[part][1] for part in parts))
        # The checkpoints of GPT-2 and NeoX hold q, k and v as one matrix.
        packed = isinstance(block._modules.get("attn"), JointQKVAttentionBridge)
        alternatives += parts if packed else ("attn_qkv",)
    if {"mlp_in", "mlp_out"} <= shapes.keys() and whole_mlp(block) is not None:
        shapes["mlp"] = (shapes["mlp_in"][0], shapes["mlp_out"][1])
        alternatives += ("mlp",)
    by_kind = tuple((kind, *shape) for kind, shape in shapes.items())
    return BlockShapes(by_kind, alternatives, tuple(others), sum(others.values()))


def leaves_of_block(block: nn.Module) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """The block's leaves by site kind (q, k, v apart), and the parts of it whose matrices are no leaf, with these matrices'
    entries: "mlp.gate: MixtralTopKRouter"."""
    leaves: dict[str, nn.Module] = {}
    others: dict[str, int] = {}
    for name, component in block._modules.items():
        if not isinstance(component, GeneralizedComponent) or isinstance(component, NormalizationBridge):
            continue
        if matrices := _leaves_of(component):
            for kind, leaf in matrices.items():
                if _is_leaf(_plain_class(type(leaf))):
                    leaves[kind] = leaf
                else:
                    others[f"{name}.{kind}: {type(leaf).__name__}"] = sum(p.numel() for p in leaf.parameters())
            continue
        # Its experts and linear maps: "mlp_in.3", "attn_o", "attn.kv_a_proj_with_mqa"; and what else holds matrices.
        stack = stack_in(component)
        experts = {} if stack is None else matrices_of(stack)
        leaves |= experts
        stacked = {id(leaf.holder) for leaf in experts.values()}
        for path, module in component.named_modules():
            own = [p for key, p in module._parameters.items() if p is not None and p.ndim > 1 and not key.endswith("bias")]
            if not own or id(module) in stacked:
                continue
            path = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
            kind = _KINDS_BY_NAME.get(name, {}).get(path, f"{name}.{path or 'linear'}")  # a component may be one linear map
            called = path.rpartition(".")[2] not in _NOT_CALLED
            if called and _is_leaf(_plain_class(type(module))) and min(matrix(module).shape) > 1:
                leaves[kind] = module
            else:
                others[f"{name}.{path}: {type(module).__name__}".replace(".:", ":")] = sum(p.numel() for p in own)
    return leaves, others


def whole_mlp(block: nn.Module) -> nn.Module | None:
    """The Hugging Face module that computes the whole MLP from one tensor; None where there is no such module."""
    component = block._modules.get("mlp")
    # Exactly these: others compute the MLP themselves or feed it more. BERT's has no module of its own (name None).
    if type(component) not in (MLPBridge, GatedMLPBridge) or component.name is None:  # type: ignore[union-attr]
        return None
    module = component._modules.get("_original_component")  # type: ignore[union-attr]
    if module is None:
        return None
    arguments = arguments_of(_plain_class(type(module)).forward).values()
    needed = [p for p in arguments if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return module if len(needed) == 2 else None  # self and the tensor (MPT's takes the residual as well)


@lru_cache(maxsize=128)
def arguments_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a forward by name, remembered: a signature is slow to read."""
    return inspect.signature(function).parameters


def _leaves_of(component: Any) -> dict[str, nn.Module]:
    """The leaves of a component whose parts have a kind, by kind; none where one that it needs is missing."""
    module: Any = component
    kinds, needed = {}, set[str]()
    if isinstance(component, GatedDeltaNetBridge):
        # Not wrapped by the bridge: the projections are the Hugging Face module's own.
        module, kinds = component._modules["_original_component"], _LINEAR_ATTENTION
    elif isinstance(component, AttentionBridge):
        kinds, needed = _ATTENTION, set(_ATTENTION.values())
    elif isinstance(component, MLPBridge):
        kinds, needed = _MLP, {"mlp_in", "mlp_out"}
    leaves: dict[str, nn.Module] = {}
    for name, kind in kinds.items():
        child = module._modules.get(name)
        if child is not None:
            wraps = isinstance(child, LinearBridge | Conv1DBridge)
            inner = child._modules.get("_original_component") if wraps else None
            leaves[kind] = child if inner is None else inner
    return leaves if needed <= leaves.keys() else {}
