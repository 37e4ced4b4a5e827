"""Running parts of a TransformerBridge: starting at a block, stopping before one, and unembedding a few tokens only.

`BridgeRuns` is the part of the host that runs it.

1. Hugging Face's own forward runs, so that positions, masks, rotary embeddings and caches are its own; for its duration some
   modules are called otherwise (`with_stand_ins`): a block that is not to run hands on, the block where a run stops raises,
   the unembedding multiplies by a few rows. It is the call that is replaced, not `forward`: PyTorch hooks on such a module
   (a watch on its units, say) are not called either.
2. The replacement is a change of class, as in leaves.py: an assignment to `block.forward` would be handed on to the
   Hugging Face module.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.base.interrupts import Undo
from swd_lens.hosts.bridge.cache import is_known, joined, repeated, to_run_on
from swd_lens.hosts.bridge.leaves import arguments_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.host import Begun, Start, require_before, require_kept

StandIn = tuple[nn.Module, Callable[..., Any]]  # a module, and what is called in its place, for the time being


class Reached(Exception):
    """Carries the residual out of Hugging Face's forward, its only argument."""


_STANDING_IN: dict[type, type] = {}  # plain class -> the class of the same module while another call stands in
_PLAIN: dict[type, type] = {}  # and back
_ATTRIBUTE = "unit_stand_in"


def with_stand_ins(model: Any, stand_ins: Sequence[StandIn], run: Callable[[], Any]) -> Any:
    """run(), with something else called in place of some of the model's modules. Raises RuntimeError: it is called from within
    such a run: what stands in there would stand in here, too."""
    if any(type(module) in _PLAIN for module in (*model.blocks, _unembedding(model))):
        raise RuntimeError("a hook ran this host in the middle of one of its runs; run it before or after, or run a copy")
    plain = [(module, type(module)) for module, _ in stand_ins]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_ATTRIBUTE](*args, **kwargs)

    for _, former in plain:
        if former not in _STANDING_IN:
            _STANDING_IN[former] = type(former.__name__, (former,), {"__call__": call})
            _PLAIN[_STANDING_IN[former]] = former

    def restore() -> None:
        for module, former in plain:
            module.__class__ = former
            module.__dict__.pop(_ATTRIBUTE, None)

    undo = Undo()
    with undo, undo:  # twice: where nothing holds it back, Ctrl-C on the way into the inner end is inside of the outer
        undo.push(restore)
        for module, call in stand_ins:
            module.__dict__[_ATTRIBUTE] = call
            module.__class__ = _STANDING_IN[type(module)]
        return run()


def _call_itself(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    plain: Any = _PLAIN[type(module)]
    return plain.__call__(module, *args, **kwargs)


class _HandedOn(Tensor):
    """A block's output whatever its form: used as a tensor it is the residual, and so is its first item; further ones are None.

    Some models' blocks return a tensor, some a tuple or list that begins with it (GPT-J's: patterns, which a bridge asks for).
    """

    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        plain = self.as_subclass(Tensor)
        if type(index) is int:
            return plain if index == 0 else None
        return plain[index]

    def __iter__(self) -> Any:
        return iter((self.as_subclass(Tensor), None))


def starting(model: Any, start: Start) -> list[StandIn]:
    """Blocks before start.layer hand on without running; what follows them takes up start.residual."""
    handed_on = start.residual.as_subclass(_HandedOn)  # type: ignore[arg-type]
    blocks = list(model.blocks)
    skipped: list[StandIn] = [(block, lambda *_, **__: handed_on) for block in blocks[: start.layer]]
    norm = model._modules.get("ln_final")

    def normalize(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _call_itself(norm, hidden.as_subclass(Tensor), *args, **kwargs)  # type: ignore[arg-type]

    def take_up(*args: Any, **kwargs: Any) -> Any:
        if args:
            return _call_itself(first, start.residual, *args[1:], **kwargs)
        return _call_itself(first, **{**kwargs, "hidden_states": start.residual})

    if start.layer == len(blocks):
        # The norm is mostly next, and then hooks there see a plain tensor.
        return skipped if norm is None else [*skipped, (norm, normalize)]
    first = blocks[start.layer]
    return [*skipped, (first, take_up)]


def stopping(model: Any, layer: int, start: Start | None = None) -> list[StandIn]:
    """Raise the residual stream before block `layer` (number of blocks: behind the last one), as `Reached`. start: take up
    there, at a block before `layer`."""

    def raise_input(*args: Any, **kwargs: Any) -> Any:
        raise Reached(args[0] if args else kwargs["hidden_states"])

    def raise_output(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        raise Reached(output if isinstance(output, Tensor) else output[0])

    blocks = list(model.blocks)
    stand_ins = [] if start is None else starting(model, start)
    if layer < len(blocks):
        return [*stand_ins, (blocks[layer], raise_input)]
    last = blocks[-1]
    # The last block may be the one that takes up, too.
    call = dict(stand_ins).get(last, partial(_call_itself, last))
    return [*(stand_in for stand_in in stand_ins if stand_in[0] is not last), (last, raise_output)]


def _unembedding(model: Any) -> Any:
    unembed = model._modules.get("unembed")
    return None if unembed is None else unembed._modules.get("_original_component")


class BridgeRuns:
    """How a TransformerBridge runs; see `swd_lens.hosts.Host`."""

    model: Any

    def run(self, tokens: Int[Tensor, "batch pos"], **how: Any) -> Any:
        device = self.model.cfg.device
        mask = how.pop("attention_mask", torch.ones_like(tokens))
        if any("linear_attn" in block._modules for block in self.model.blocks):
            # Without a cache 3.9 recomputes the layer itself and asks Hugging Face's module for causal_conv1d_fn
            # (gated_delta_net.py:180), which transformers 5.15 moved out of it.
            how.setdefault("use_cache", True)
        return self.model(tokens.to(device), attention_mask=mask.to(device), **how)

    def run_blocks(self, tokens: Int[Tensor, "batch pos"], n_blocks: int, start: Start | None = None) -> None:
        if start is not None:
            self.residual(tokens, n_blocks, start=start)
            return
        # Where no block knows its number (BERT: block.py:_check_stop_at_layer), upstream runs them all; behind the last one it
        # runs the rest of the model.
        self.run(tokens, stop_at_layer=n_blocks, **self._last_only())

    def freeze_prefix(self, tokens: Int[Tensor, "batch pos"], begun: Begun | None = None) -> Any:
        if tokens.shape[1] == 1 or not self._keeps_cache():
            return None
        stand_ins = [] if begun is None else starting(self.model, Start(begun.layer, begun.earlier))
        how: dict[str, Any] = {"return_type": "logits_and_cache", "use_cache": True, **self._last_only()}
        with torch.no_grad():
            _, cache = with_stand_ins(self.model, stand_ins, lambda: self.run(tokens[:, :-1], **how))
        if not is_known(cache) or begun is None:
            return cache if is_known(cache) else None
        return joined(begun.prefix, cache, begun.layer)

    def begin(self, tokens: Int[Tensor, "batch pos"], layer: int) -> Begun | None:
        if tokens.shape[1] == 1 or not self._keeps_cache():
            return None
        from transformers import DynamicCache  # at its use: slow to import

        cache: Any = DynamicCache(config=self.model.original_model.config)  # of the layers that the model's own would have
        run = partial(self.run, tokens[:, :-1], use_cache=True, past_key_values=cache)
        with torch.no_grad():
            try:
                with_stand_ins(self.model, stopping(self.model, layer), run)
            except Reached as reached:
                last = self.residual(tokens, layer, cache)
                return Begun(layer, reached.args[0], last, repeated(cache, 1, len(cache.layers)))
        return None

    def repeat_prefix(self, prefix: Any, times: int, from_layer: int = 0) -> Any:
        if prefix is None or (times == 1 and from_layer == 0):
            return prefix
        return repeated(prefix, times, from_layer)

    def residual(
        self, tokens: Int[Tensor, "batch pos"], layer: int, prefix: Any = None, start: Start | None = None
    ) -> Float[Tensor, "batch _pos d_model"]:
        require_before(start, layer)
        if start is not None and start.layer == layer:
            return start.residual
        # With a start as `run_blocks` runs it: whether keys and values are kept changes GPT-2's last bits.
        first, whole = (0, False) if start is None else (start.layer, prefix is None)
        run = (lambda: self.run(tokens)) if whole else (lambda: self._run_last(tokens, prefix, first))
        try:
            with_stand_ins(self.model, stopping(self.model, layer, start), run)
        except Reached as reached:
            return reached.args[0]
        raise RuntimeError(f"this {type(self.model.adapter).__name__} did not run block {layer}; please report it")

    def last_logits(
        self,
        tokens: Int[Tensor, "batch pos"],
        prefix: Any = None,
        *,
        start: Start | None = None,
        token_ids: Int[Tensor, " answer"] | None = None,
        short: bool = False,
    ) -> Float[Tensor, "batch _vocab"]:
        stand_ins, first = [], 0
        if start is not None:
            if start.layer == len(self.model.blocks):
                # No block runs: what is before the last position is of no use, and neither are positions.
                tokens, prefix, start = tokens[:, -1:], None, replace(start, residual=start.residual[:, -1:])
            stand_ins, first = starting(self.model, start), start.layer
        # These tokens' logits only, where the unembedding is a plain matrix; what the model does to logits (soft caps) it does to
        # them.
        linear, unembedding = _unembedding(self.model), []
        if token_ids is not None and type(linear) is nn.Linear:
            rows = token_ids.to(linear.weight.device)

            def some(hidden: Tensor) -> Tensor:
                return F.linear(hidden, linear.weight[rows], None if linear.bias is None else linear.bias[rows])

            unembedding.append((linear, some))
        stand_ins = stand_ins + unembedding
        logits = with_stand_ins(self.model, stand_ins, lambda: self._run_last(tokens, prefix, first))[:, -1]
        # Where the unembedding is no plain matrix it was computed whole.
        return logits if token_ids is None or unembedding else logits[:, token_ids.to(logits.device)]

    def unembed(
        self, tokens: Int[Tensor, "batch pos"], residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        stand_ins = starting(self.model, Start(len(self.model.blocks), residual))
        return with_stand_ins(self.model, stand_ins, lambda: self.run(tokens, **self._without_cache()))

    def _run_last(self, tokens: Tensor, prefix: Any, first: int) -> Tensor:
        """Logits (batch, pos, vocab), of the last position at least; with a prefix only that position is run. first: the first
        block that is run; what the prefix keeps of earlier ones is not asked for."""
        if prefix is None:
            return self.run(tokens, **self._last_only(), **self._without_cache())
        require_kept(prefix, first)
        cache = to_run_on(prefix, first)
        return self.run(tokens[:, -1:], attention_mask=torch.ones_like(tokens), past_key_values=cache)

    def _last_only(self) -> dict[str, int]:
        """Unembed the last position only: for long prompts the rest is most of the work and memory."""
        return {"logits_to_keep": 1} if "logits_to_keep" in arguments_of(type(self.model.original_model).forward) else {}

    def _without_cache(self) -> dict[str, bool]:
        """Keep no keys and values that nobody asks for; where nothing is said, Hugging Face keeps them."""
        linear = any("linear_attn" in block._modules for block in self.model.blocks)  # see `run`
        return {"use_cache": False} if self._keeps_cache() and not linear else {}

    def _keeps_cache(self) -> bool:
        accepted = arguments_of(type(self.model.original_model).forward)
        return facts_of(self.model).reads_out and "past_key_values" in accepted
