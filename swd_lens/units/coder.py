"""Units and CoderUnits: unit sources seen through one protocol, so that every method takes one code path.

1. `Units` is what attaching and counting need of any source: sizes, edges per unit, provenance. `Factors` fit as they are.
2. `CoderUnits` are units made by an encode/decode pair (a transcoder, an SAE): z = encode(x), decode(z). What x is, and
   what decode gives, is said by `reads` and `writes`, each "input" or "output" of the site's dense product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from swd_lens.base.checks import one_of
from swd_lens.base.errors import UnitSourceError, legible, quoted, seen

SIDES = ("input", "output")


@runtime_checkable
class Units(Protocol):
    """Sizes, edges and provenance of a unit source at one site, which attaching and the circuit code need; Factors have them.

    For annotations. Nothing may hang on isinstance(source, Units): up to Python 3.11 it asks for the value of each property,
    from 3.12 on only whether the class has one, so that an SAE that does not know its site passes. Ask `is_counted`.
    """

    @property
    def d_in(self) -> int: ...

    @property
    def d_out(self) -> int: ...

    @property
    def n_units(self) -> int: ...

    @property
    def edges_per_unit(self) -> Int[Tensor, " unit"]:
        """Active edges of each unit: its read edges plus its write edges."""
        ...

    @property
    def valid_units(self) -> Bool[Tensor, " unit"]:
        """Units with at least one read and one write edge."""
        ...

    @property
    def edges(self) -> int: ...

    @property
    def sparsity(self) -> float: ...

    @property
    def provenance(self) -> Mapping[str, Any]: ...


def is_counted(source: Any) -> bool:
    """Whether a source says how many edges its units have; CoderUnits that lack a width of their site cannot yet."""
    return all(hasattr(source, name) for name in ("n_units", "edges_per_unit", "valid_units"))


@dataclass(frozen=True, repr=False)
class CoderUnits:
    """Units made by an encode/decode pair, in place of y = dense(h) = h @ W + bias.

    The pair is used as it is, never copied, moved or cast: tensors are cast to its dtype on the way in and back on the way
    out. Its decode gives the whole output, so the site's own bias is not added to it.
    """

    coder: Any  # an object with encode(x) -> z (..., unit) and decode(z), a function of the position alone
    # d_in, d_out: the site's widths. 0 where the source alone does not say (an SAE sees one side of the site only): `as_units`
    # fills it in from the site, and until then what depends on it raises AttributeError.
    d_in: int
    d_out: int
    n_units: int  # the width of z
    reads: str = "input"  # "input": encode takes h (a transcoder); "output": encode takes dense(h) (an SAE on that activation)
    # "output": decode gives y; "input": decode gives a reconstruction of h, and y = dense(decode(z)) (an SAE on the site's input,
    # such as attn.hook_z for attn_o)
    writes: str = "output"
    name: str = "coder"  # what the source calls itself, for printing
    provenance: Mapping[str, Any] = field(default_factory=dict)  # of what and from where (site, hooks, model); plain JSON values

    def __post_init__(self) -> None:
        one_of("reads", self.reads, SIDES, UnitSourceError)
        one_of("writes", self.writes, SIDES, UnitSourceError)
        if (self.reads, self.writes) == ("output", "input"):
            raise UnitSourceError("units cannot read the site's output and write its input; reads='input' or writes='output'")
        if self.n_units:  # 0 before a trial has shown the width
            for name in ("edges_per_unit", "valid_units"):
                self._own(name)

    @property
    def d_read(self) -> int:
        """The width of what encode takes."""
        return self.d_in if self.reads == "input" else self.d_out

    @property
    def d_write(self) -> int:
        """The width of what decode gives."""
        return self.d_out if self.writes == "output" else self.d_in

    def encode(self, x: Float[Tensor, "*batch d_read"]) -> Float[Tensor, "*batch unit"]:
        """z, in x's dtype. x is the site's input h or its dense output, see `reads`."""
        return self._call(self.coder.encode, x)

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_write"]:
        """The site's output, bias included, or a reconstruction of its input, see `writes`; in z's dtype."""
        return self._call(self.coder.decode, z)

    def run(
        self, h: Float[Tensor, "*batch d_in"], dense: Callable[[Tensor], Tensor], hook: Callable[[Tensor], Tensor] = lambda z: z
    ) -> Float[Tensor, "*batch d_out"]:
        """The site's output through the units. dense: the site's own h -> h @ W + bias; called only where the units read or write
        beyond it; hook: sees z and may replace it."""
        written = self.decode(hook(self.encode(h if self.reads == "input" else dense(h))))
        return written if self.writes == "output" else dense(written)

    def change(
        self, h: Float[Tensor, "*batch d_in"], dense: Callable[[Tensor], Tensor], hook: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*batch d_out"]:
        """How much the hook changes the site's output through the units; see `run`."""
        z = self.encode(h if self.reads == "input" else dense(h))
        after, before = self.decode(hook(z)), self.decode(z)
        return after - before if self.writes == "output" else dense(after) - dense(before)

    def _call(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        device, dtype = place_of(self.coder)
        if device != x.device and device is not None:
            raise UnitSourceError(
                f"{self.name} is on {device}, the host computes on {x.device}; move it first: coder.to({quoted(str(x.device))})"
            )
        return function(x.to(dtype or x.dtype)).to(x.dtype)

    @property
    def edges_per_unit(self) -> Int[Tensor, " unit"]:
        """Read edges plus write edges of each unit, biases not counted (method.md §2.3).

        Nonzeros of W_enc[:, i] and W_dec[i] where the coder shows such weights: that is the paper's definition, and it is
        d_in + d_out for a dense transcoder (2 d_out for an SAE on the output). A coder that hides them counts as dense. A
        unit that writes the input reaches the output through W, which is dense: d_out edges if it writes anything.

        A coder whose units have other edges than its weights show (an MLP's channels, whose read weights lie in the matrix
        before) has an `edges_per_unit` (unit,) of its own, and may have `valid_units` (unit,): they are taken as they are.
        """
        own = self._own("edges_per_unit")
        reads, writes = self.edges_by_side()
        return reads + writes if own is None else own

    @property
    def says_its_edges(self) -> bool:
        """Whether the coder has an `edges_per_unit` of its own, which its weights do not show."""
        return self._own("edges_per_unit") is not None

    @property
    def valid_units(self) -> Bool[Tensor, " unit"]:
        """Units with at least one read and one write edge; the others contribute nothing but a constant."""
        own = self._own("valid_units")
        reads, writes = self.edges_by_side()
        return (reads > 0) & (writes > 0) if own is None else own

    @property
    def edges(self) -> int:
        return int(self.edges_per_unit.sum())

    @property
    def sparsity(self) -> float:
        """s = 1 - K / numel(W); below zero where the units hold more weights than W."""
        return 1.0 - self.edges / (self._known(self.d_in) * self._known(self.d_out))

    def _own(self, name: str) -> Tensor | None:
        """A tensor that the coder holds of its units itself, on the CPU; None where it has none of this name."""
        own = getattr(self.coder, name, None)
        if own is None:
            return None
        if not isinstance(own, Tensor) or own.shape != (self.n_units,):
            what = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
            raise UnitSourceError(
                f"{self.name}.{name} is {what}; it must be a tensor of one number for each of {self.n_units} units"
            )
        return own.detach().cpu()

    @property
    def read_weights(self) -> Float[Tensor, "d_read unit"] | None:
        """(d_read, unit), one column per unit; None where the coder shows no such weight."""
        return self._shown("W_enc", (self.d_read, self.n_units))

    @property
    def write_weights(self) -> Float[Tensor, "unit d_write"] | None:
        """(unit, d_write), one row per unit; None where the coder shows no such weight."""
        return self._shown("W_dec", (self.n_units, self.d_write))

    def _shown(self, name: str, shape: tuple[int, int]) -> Tensor | None:
        weight = getattr(self.coder, name, None)
        return weight if isinstance(weight, Tensor) and weight.shape == shape else None

    def edges_by_side(self) -> tuple[Int[Tensor, " unit"], Int[Tensor, " unit"]]:
        """(read edges, write edges) of each unit, as its weights show them; see `edges_per_unit`."""
        d_read, d_out = self._known(self.d_read), self._known(self.d_out)
        reads, writes = torch.full((self.n_units,), d_read), torch.full((self.n_units,), d_out)
        if (encoder := self.read_weights) is not None:
            reads = (encoder != 0).sum(0).cpu()
        if (decoder := self.write_weights) is not None:
            written = decoder != 0
            writes = (written.sum(1) if self.writes == "output" else d_out * written.any(1)).cpu()
        return reads, writes

    def _known(self, width: int) -> int:
        if not width:
            # Not a ValueError: units that lack a width are no `Units` yet.
            raise AttributeError(
                f"{legible(self.name)} sees one side of its site only, so it cannot be counted yet; as_units(units, site) "
                f"fills in the other width (now d_in={self.d_in}, d_out={self.d_out})"
            )
        return width

    @seen
    def __repr__(self) -> str:
        site = self.provenance.get("site", "matrix")
        shape = f"({self.d_in or '?'}, {self.d_out or '?'}) -> {self.n_units} units"
        counts = f", {self.edges:,} edges, s={self.sparsity:.4f}" if self.d_in and self.d_out else ""
        return f"CoderUnits({site}: {self.name}, {shape}, reads {self.reads}, writes {self.writes}{counts})"


def place_of(coder: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype of a coder's weights; (None, None) where it shows none."""
    if isinstance(coder, nn.Module):
        tensors = [*coder.parameters(), *coder.buffers()]
    else:
        tensors = [t for t in vars(coder).values() if isinstance(t, Tensor)] if hasattr(coder, "__dict__") else []
    floating = [t for t in tensors if t.is_floating_point()]
    return (floating[0].device, floating[0].dtype) if floating else (None, None)


def has_pair(source: Any) -> bool:
    # A class has the methods, too, but not yet an object to call them on.
    pair = (getattr(source, "encode", None), getattr(source, "decode", None))
    return all(map(callable, pair)) and not isinstance(source, type | str | bytes)


def tried(what: str, function: Callable[[Any], Any], x: Tensor) -> Tensor:
    """function(x), checked: a dense floating tensor on x's device with x's leading axes."""
    try:
        result = function(x)
    except Exception as cause:
        raise UnitSourceError(f"{what} failed on {x.dtype} of shape {tuple(x.shape)}: {cause}") from cause
    if not isinstance(result, Tensor):
        raise UnitSourceError(f"{what} gave a {type(result).__name__}, expected one tensor")
    if not result.is_floating_point() or result.is_sparse:
        raise UnitSourceError(f"{what} gave {result.dtype} in layout {result.layout}, expected a dense floating tensor")
    if result.device != x.device:
        raise UnitSourceError(f"{what} took {x.device} and gave {result.device}; keep the device")
    if result.shape[:-1] != x.shape[:-1]:
        raise UnitSourceError(f"{what} gave {tuple(result.shape)} for {tuple(x.shape)}; keep the batch and position axes")
    return result
