"""The protocol through which swd_lens speaks to a model, and what holds of every kind of host.

1. `Host` has one implementation for each kind: hooked/ (HookedTransformer) and bridge/ (TransformerBridge).
   `swd_lens.hosts.host_of` makes one of a model; nothing in this file knows which kinds there are.
2. `require_...` are checks that callers and hosts share; `shape_only` and `appended` are for the keys and values of a prompt's
   earlier positions, which copies of a batch hold once. `frozen`: a host without gradients of its own.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.base.interrupts import Step, Undo
from swd_lens.base.surroundings import claim
from swd_lens.hosts.families import DROPOUT_RATES
from swd_lens.hosts.sites import PACKED, BlockShapes, Pattern, Site, overlapping, select_sites, sites_of_blocks

# Is given an undo before anything is changed; the undo may be called more than once.
Register = Callable[[Step], object]
Use = Callable[[Site, Tensor], None]


@dataclass(frozen=True)
class Affine:
    """How a site's input is written: h = x * scale + shift, with x what weight processing would leave.

    For a site that reads a normalization these are its weight and bias. For attn_o there is no scale, and the shift is what the
    values hold whatever the tokens: b_V and (bias of the normalization) @ W_V, which arrive whole because attention patterns
    sum to one. Folding moves both into the weights and biases that follow: then both are None.
    """

    scale: Float[Tensor, " d_in"] | None = None
    shift: Float[Tensor, " d_in"] | None = None


@dataclass(frozen=True)
class Start:
    """Where a run takes up: the residual stream before block `layer` (layer = number of blocks: behind the last one)."""

    layer: int  # blocks before it are not run
    residual: Float[Tensor, "batch pos d_model"]  # (batch, pos, d_model); with a kept prefix pos is 1, the last position


@dataclass(frozen=True)
class Begun:
    """Prompts run up to a block, once for everything that is tried in that block and later ones: `Host.begin`."""

    layer: int  # the block
    earlier: Float[Tensor, "batch _earlier d_model"]  # (batch, pos - 1, d_model), what enters it at all positions but the last
    last: Float[Tensor, "batch 1 d_model"]  # (batch, 1, d_model), what enters it at the last one
    prefix: Any  # the shapes alone of what the blocks before it keep


@runtime_checkable
class Host(Protocol):
    """A model as the rest of swd_lens sees it."""

    model: Any

    def blocks(self) -> tuple[BlockShapes, ...]:
        """The matrices of each block, read off the model as it is now."""
        ...

    def sites(self) -> list[Site]:
        """Every factorizable matrix once, in execution order; no two overlap."""
        return list(sites_of_blocks(self.blocks())[0])

    def alternatives(self) -> list[Site]:
        """Further sites that overlap those of `sites()`: q, k, v apart where they are packed, or packed where apart; and
        "mlp", the whole MLP, which has no single matrix but may hold a transcoder."""
        return list(sites_of_blocks(self.blocks())[1])

    def weight(self, site: Site) -> Float[Tensor, "d_in d_out"]:
        """The dense matrix, float32, detached; a copy or a view, never to be written to. Also while the site is swapped.
        Raises UnsupportedHostError: the site is a whole MLP."""
        ...

    def stored_parameters(self, site: Site) -> list[tuple[Mapping[str, Any], str]]:
        """Where the parameters that make up the site's matrix are kept: (a module's `_parameters`, name); those of q, k and v
        for a packed site, those of all its matrices for a whole MLP."""
        ...

    def stores_transposed(self, site: Site) -> bool:
        """Whether the matrix of an mlp_out or attn_o site is kept as (d_out, d_in)."""
        return False

    def affine(self, site: Site) -> Affine | None:
        """Scale and shift in the site's input that weight processing can fold away; None where it has none to fold."""
        ...

    def norm_before(self, site: Site) -> Affine | None:
        """Scale and shift of the norm through which the site reads the residual stream; neither where it reads the stream itself.

        None where that is not known, and for sites that read something else. Whatever else a block does (RWKV mixes positions)
        is not considered.
        """
        ...

    def norm_behind(self, site: Site) -> nn.Module | None:
        """The norm between the site's output and the residual stream (Gemma 2 and 3, OLMo 2, BERT); None where there is none."""
        ...

    def processing(self) -> dict[str, bool]:
        """Which weight processing the weights bear: fold_ln, center_writing_weights, fold_value_biases (True, too, where there
        are none), and compatibility_mode of a bridge."""
        ...

    @contextmanager
    def inputs(self, sites: Iterable[Site], use: Use) -> Iterator[None]:
        """While open, every forward calls use(site, h) with h (batch, pos, d_in), the site's input."""
        with ExitStack() as stack:
            for site in sites:
                self.watch_input(site, use, stack.callback)
            yield

    @contextmanager
    def outputs(self, sites: Iterable[Site], use: Use) -> Iterator[None]:
        """While open, every forward calls use(site, y) with y (batch, pos, d_out), the projection's output, bias included."""
        with ExitStack() as stack:
            for site in sites:
                self.watch_output(site, use, stack.callback)
            yield

    def watch_input(self, site: Site, use: Use, register: Register) -> None:
        """Have forwards call use(site, h) until the undo; see `inputs`."""
        ...

    def watch_output(self, site: Site, use: Use, register: Register) -> None:
        """Have forwards call use(site, y) until the undo; see `outputs`."""
        ...

    def run(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos vocab"]:
        """Logits of whole rows, none of them padded."""
        ...

    def run_blocks(self, tokens: Int[Tensor, "batch pos"], n_blocks: int, start: Start | None = None) -> None:
        """Run blocks 0 .. n_blocks - 1 only, for what hooks see there; with a start from its block on."""
        ...

    def freeze_prefix(self, tokens: Int[Tensor, "batch pos"], begun: Begun | None = None) -> Any:
        """Run all positions but the last (no gradient) and keep what later positions need of them.

        None for one-token prompts, and where the host cannot (it attends both ways); `last_logits` then runs whole prompts.
        begun: go on from there; the prefix is for runs that start at its block or later.
        """
        ...

    def begin(self, tokens: Int[Tensor, "batch pos"], layer: int) -> Begun | None:
        """Run the blocks before `layer` (no gradient), as `freeze_prefix` and then `residual` with that prefix would.

        Later blocks can then be run any number of times. None where there is no prefix.
        """
        ...

    def repeat_prefix(self, prefix: Any, times: int, from_layer: int = 0) -> Any:
        """Repeat a prefix for `times` copies of the batch, one after the other, for runs that start at `from_layer` or later:
        what earlier layers keep is dropped."""
        ...

    def residual(
        self, tokens: Int[Tensor, "batch pos"], layer: int, prefix: Any = None, start: Start | None = None
    ) -> Float[Tensor, "batch _pos d_model"]:
        """The residual stream before block `layer` (layer = number of blocks: behind the last one), earlier hooks included.

        At every position; with a prefix at the last one only. Blocks from `layer` on are not run. start: take up from there, at
        every position (with a prefix at the last one); the bits are then those that `run_blocks` sees. Raises ValueError: the
        start lies behind `layer`, or before the layers that the prefix keeps.
        """
        ...

    def last_logits(
        self,
        tokens: Int[Tensor, "batch pos"],
        prefix: Any = None,
        *,
        start: Start | None = None,
        token_ids: Int[Tensor, " answer"] | None = None,
        short: bool = False,
    ) -> Float[Tensor, "batch _vocab"]:
        """Logits at the last position; with a prefix only that position is run (exact, since attention is causal).

        The prefix is left as it was: the same one can be used any number of times.

        Args:
            start: take up from there; what enters earlier blocks is not computed, their units and hooks do not run.
            token_ids: only these tokens' logits, in this order; None = the whole vocabulary.
            short: in the last block compute keys and values of all positions, and the rest of the last position only. Hooks
                there see it in two parts, all positions but the last and the last, or see the last one only. A host may
                ignore it; without hooks in the last block the logits are the same.
        """
        ...

    def unembed(
        self, tokens: Int[Tensor, "batch pos"], residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits of what leaves the last block at some positions of rows. tokens: of these positions; only their number
        counts."""
        ...

    def readout(self) -> tuple[Float[Tensor, " d_model"] | None, Float[Tensor, "d_model vocab"]]:
        """Weight of the final normalization (None: none, or folded) and the unembedding."""
        ...

    def norm_affine(self, norm: nn.Module) -> Affine:
        """The vectors that a norm of this host multiplies by and adds; None where that is one or zero."""
        ...

    def swap(self, site: Site, projection: nn.Module, hook: HookPoint, register: Register) -> None:
        """Run `projection(h, bias, dense)` in place of the dense product and mount `hook` at site.hook_name.

        The projection gets h (batch, pos, d_in), the live bias (d_out,) or None, and the host's own h -> h @ W + bias, which
        factors never call. `register` is given the undo before anything is touched, so that no interruption finds the host
        half changed with nobody to mend it; the undo may be called more than once.
        """
        ...

    def is_swapped(self, site: Site) -> bool:
        """Whether a projection is mounted at the site now."""
        ...

    def fuse_attention(self, register: Register) -> bool:
        """Have the layers that can compute their attention fused until the undo; False where none can.

        Passes are made under `swd_lens.hosts.fused.fused_attention`, which verifies it.
        """
        ...

    def share_prefix(self, register: Register) -> bool:
        """Have the layers that can attend to a repeated prefix without copying it do so until the undo; False where none can."""
        return False

    def join_prefixes(self, prefixes: Sequence[Any]) -> Any:
        """One prefix for the rows of several, which keep the same layers and may have other lengths; None of a host that shares
        none."""
        return None

    def guard(self, reason: str, register: Register) -> None:
        """Make every method that rewrites weights raise RuntimeError(reason), until the last registered undo is called."""
        ...


# In a model's own __dict__: its guards (`swd_lens.hosts.weights.listed_in`). Whenever a function of swd_lens takes up the host,
# their `at_call(host)` raises AttachError where what they guard was changed. A deep copy has copies of them.
STANDING = "_standing_units"


def sites_of(host: Host, pattern: Pattern) -> list[Site]:
    """`find_sites` for a host that is wrapped already."""
    return select_sites(host.sites(), pattern, host.alternatives())


def matrix_entries(host: Host) -> int:
    """Entries of all matrices of the host's blocks, those included that are no sites (routers, convolutions, scans)."""
    return sum(site.numel for site in host.sites()) + sum(block.numel_left for block in host.blocks())


def is_centered(weight: Float[Tensor, "d_in d_out"]) -> bool:
    """Whether every row writes nothing along the all-ones direction, as center_writing_weights leaves it."""
    return bool(weight.mean(1).abs().max() < 1e-5 * weight.abs().max())


def value_constant(
    bias: Float[Tensor, "*head d_head"],
    shift: Float[Tensor, " d_model"] | None,
    weight: Float[Tensor, "d_model width"],
    d_head: int,
    d_in: int,
) -> Float[Tensor, " d_in"]:
    """The part of attn_o's input that is there whatever the tokens: b_V + shift @ W_V, repeated where value heads are shared.
    shift: of the norm that the values read; None: nothing; d_in: of attn_o."""
    constant = bias.detach().float().flatten()
    constant = constant if shift is None else constant + shift @ weight
    return constant.view(-1, d_head).repeat_interleave(d_in // constant.numel(), dim=0).flatten()


def require_matrix(site: Site) -> None:
    """Raise UnsupportedHostError for a whole MLP."""
    if site.kind == "mlp":
        raise UnsupportedHostError(f"{site.name} is a whole MLP, not one matrix; its matrices are {', '.join(PACKED['mlp'])}")


def require_unattached(site: Site, attached: Container[str | None]) -> None:
    """Raise RuntimeError where the site, or one that overlaps it, is among the names of those that are attached."""
    for name in (site.name, *overlapping(site.name)):
        if name in attached:
            raise RuntimeError(f"{site.name} cannot be attached: {name} is attached already; detach it first")


def drops_out(model: Any) -> bool:
    """Whether a forward is random: dropout in train mode. (A HookedTransformer has none, whatever its mode.)"""
    for module in model.modules():
        if not module.training:
            continue
        rates = [module.p] if isinstance(module, nn.Dropout) else [vars(module).get(name) for name in DROPOUT_RATES]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return True
    return False


def require_no_dropout(model: Any) -> None:
    """Raise ValueError where what is about to be measured would be random, HostInUseError for another thread's host."""
    claim(model)  # before its modules are gone through: another thread may be attaching units to them
    if drops_out(model):
        raise ValueError(
            "this host is in train mode and drops activations out: what is measured would be random. Call model.eval()"
        )


def require_gradients(model: Any) -> None:
    """Raise UnsupportedHostError where no gradient passes the host's weights: tensors of torch.inference_mode()."""
    claim(model)
    if any(p.is_inference() for p in model.blocks.parameters()):
        raise UnsupportedHostError(
            "this host was made under torch.inference_mode(), and no gradient passes its weights; load it outside of it, "
            "or with swd_lens.load_host, which may be called there"
        )


@contextmanager
def frozen(host: Host, reason: str) -> Iterator[Undo]:
    """A host whose parameters ask for no gradients and whose weights are not rewritten; afterwards it is what it was. reason:
    ends the message of a refused rewriting: "fold_layer_norm was called ...". Yields: Undo: for what else is changed about the
    host."""
    # Flags of inference tensors cannot be set back, and no gradient comes to them anyway.
    asking = [p for p in host.model.parameters() if p.requires_grad and not p.is_inference()]
    with Undo() as undo:
        host.guard(reason, undo.push)
        undo.push(lambda: _require_gradients(asking, True))
        _require_gradients(asking, False)
        yield undo


def _require_gradients(parameters: list[nn.Parameter], required: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(required)


def require_before(start: Start | None, layer: int) -> None:
    """Raise ValueError where a run to `layer` would start behind it."""
    if start is not None and start.layer > layer:
        raise ValueError(f"this run ends before block {layer}, but its start is block {start.layer}; take an earlier start")


def require_kept(prefix: Any, layer: int) -> None:
    """Raise ValueError where a run would start before the first layer that a prefix keeps (`repeat_prefix(..., from_layer)`)."""
    first = getattr(prefix, "from_layer", 0)
    if layer < first:
        raise ValueError(
            f"this prefix keeps layers from {first} on only (repeat_prefix with from_layer={first}), but the run starts "
            f"at layer {layer}; take the whole prefix, or a start at layer {first} or later"
        )


def shape_only(tensor: Tensor, times: int) -> Tensor:
    """As many rows as `times` copies would have, all one element; not a view, which would keep the whole alive."""
    return tensor.new_zeros((1,) * tensor.ndim).expand(times * tensor.shape[0], *tensor.shape[1:])


def appended(kept: Tensor, new: Tensor, times: int, dim: int) -> Tensor:
    """Append keys or values of `times` copies of the batch to those that are kept once, along their dimension of positions."""
    copies = kept.expand(times, *kept.shape), new.unflatten(0, (times, -1))
    return torch.cat(copies, dim=dim if dim < 0 else dim + 1).flatten(0, 1)
