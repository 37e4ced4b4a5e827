"""Unit sources: whatever turns a site into units, seen through one protocol, so that every method takes one code path.

1. `Units` is what attaching and counting need of any source: sizes, edges per unit, provenance. `Factors` fit as they are.
2. `CoderUnits` are units made by an encode/decode pair (a transcoder, an SAE): z = encode(x), decode(z). What x is, and
   what decode gives, is said by `reads` and `writes`, each "input" or "output" of the site's dense product.
3. `as_units` takes a source for one site and gives Units: Factors and CoderUnits as they are, read/write tensors as
   Factors, a SAELens object by its metadata, any other encode/decode pair after a trial on a vector of zeros.
4. `from_saelens` finds a SAELens object's site in its metadata, refuses what would be silently wrong (an activation norm
   that is not folded, an error term, a skip connection, head-shaped hook_z), and proves the rest: decode(encode(x)) is
   its own forward, and a unit at one position depends on that position only. sae_lens itself is never imported.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from swd_lens.factors import Factors
from swd_lens.sites import Site

SIDES = ("input", "output")


class UnitSourceError(ValueError):
    """A unit source does not fit its site, or would compute something else than it seems to."""


@runtime_checkable
class Units(Protocol):
    """What attaching and the circuit code need of a unit source at one site. `swd_lens.factors.Factors` are Units."""

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


# ---------------------------------------------------------------------------------------------- encode / decode


@dataclass(frozen=True, repr=False)
class CoderUnits:
    """Units made by an encode/decode pair, in place of y = dense(h) = h @ W + bias.

    The pair is used as it is, never copied, moved or cast: tensors are cast to its dtype on the way in and back on the way
    out. Its decode gives the whole output, so the site's own bias is not added to it.

    Attributes:
        coder: an object with encode(x) -> z (..., unit) and decode(z), a function of the position alone.
        d_in, d_out: the site's widths. 0 where the source alone does not say (an SAE sees one side of the site only):
            `as_units` fills it in from the site, and until then what depends on it raises AttributeError.
        n_units: the width of z.
        reads: "input": encode takes h (a transcoder); "output": encode takes dense(h) (an SAE on that activation).
        writes: "output": decode gives y; "input": decode gives a reconstruction of h, and y = dense(decode(z)) (an SAE on
            the site's input, such as attn.hook_z for attn_o).
        name: what the source calls itself, for printing.
        provenance: of what and from where (site, hooks, model); plain JSON values.
    """

    coder: Any
    d_in: int
    d_out: int
    n_units: int
    reads: str = "input"
    writes: str = "output"
    name: str = "coder"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, side in (("reads", self.reads), ("writes", self.writes)):
            if side not in SIDES:
                raise UnitSourceError(f"{what} must be one of {SIDES}, got {side!r}")
        if (self.reads, self.writes) == ("output", "input"):
            raise UnitSourceError(
                "units cannot read the site's output and write its input; reads='input' or writes='output'"
            )

    # ------------------------------------------------------------------ running

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
        self,
        h: Float[Tensor, "*batch d_in"],
        dense: Callable[[Tensor], Tensor],
        hook: Callable[[Tensor], Tensor] = lambda z: z,
    ) -> Float[Tensor, "*batch d_out"]:
        """The site's output through the units.

        Args:
            h: (batch, pos, d_in) the site's input.
            dense: the site's own h -> h @ W + bias; called only where the units read or write beyond it.
            hook: sees z and may replace it.
        """
        written = self.decode(hook(self.encode(h if self.reads == "input" else dense(h))))
        return written if self.writes == "output" else dense(written)

    def _call(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        device, dtype = _place(self.coder)
        if device != x.device and device is not None:
            raise UnitSourceError(
                f"{self.name} is on {device}, the host computes on {x.device}; move it first: coder.to({str(x.device)!r})"
            )
        return function(x.to(dtype or x.dtype)).to(x.dtype)

    # ------------------------------------------------------------------ counts

    @property
    def edges_per_unit(self) -> Int[Tensor, " unit"]:
        """Read edges plus write edges of each unit, biases not counted (method.md §2.3).

        Nonzeros of W_enc[:, i] and W_dec[i] where the coder shows such weights: that is the paper's definition, and it is
        d_in + d_out for a dense transcoder (2 d_out for an SAE on the output). A coder that hides them counts as dense. A
        unit that writes the input reaches the output through W, which is dense: d_out edges if it writes anything.
        """
        reads, writes = self._edges()
        return reads + writes

    @property
    def valid_units(self) -> Bool[Tensor, " unit"]:
        """Units with at least one read and one write edge; the others contribute nothing but a constant."""
        reads, writes = self._edges()
        return (reads > 0) & (writes > 0)

    @property
    def edges(self) -> int:
        return int(self.edges_per_unit.sum())

    @property
    def sparsity(self) -> float:
        """s = 1 - K / numel(W); below zero where the units hold more weights than W."""
        return 1.0 - self.edges / (self._known(self.d_in) * self._known(self.d_out))

    def _edges(self) -> tuple[Int[Tensor, " unit"], Int[Tensor, " unit"]]:
        """(read edges, write edges) of each unit."""
        d_read, d_out = self._known(self.d_read), self._known(self.d_out)
        reads, writes = torch.full((self.n_units,), d_read), torch.full((self.n_units,), d_out)
        encoder, decoder = getattr(self.coder, "W_enc", None), getattr(self.coder, "W_dec", None)
        if isinstance(encoder, Tensor) and encoder.shape == (d_read, self.n_units):
            reads = (encoder != 0).sum(0).cpu()
        if isinstance(decoder, Tensor) and decoder.shape == (self.n_units, self.d_write):
            written = decoder != 0
            writes = (written.sum(1) if self.writes == "output" else d_out * written.any(1)).cpu()
        return reads, writes

    def _known(self, width: int) -> int:
        if not width:
            # Not a ValueError: units that lack a width are no `Units` yet.
            raise AttributeError(
                f"{self.name} sees one side of its site only, so it cannot be counted yet; as_units(units, site) fills in "
                f"the other width (now d_in={self.d_in}, d_out={self.d_out})"
            )
        return width

    def __repr__(self) -> str:
        site = self.provenance.get("site", "matrix")
        shape = f"({self.d_in or '?'}, {self.d_out or '?'}) -> {self.n_units} units"
        counts = f", {self.edges:,} edges, s={self.sparsity:.4f}" if self.d_in and self.d_out else ""
        return f"CoderUnits({site}: {self.name}, {shape}, reads {self.reads}, writes {self.writes}{counts})"


def _place(coder: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype of a coder's weights; (None, None) where it shows none."""
    if isinstance(coder, nn.Module):
        tensors = [*coder.parameters(), *coder.buffers()]
    else:
        tensors = [t for t in vars(coder).values() if isinstance(t, Tensor)] if hasattr(coder, "__dict__") else []
    floating = [t for t in tensors if t.is_floating_point()]
    return (floating[0].device, floating[0].dtype) if floating else (None, None)


# ---------------------------------------------------------------------------------------------- one site


def as_units(source: Any, site: Site) -> Units:
    """A unit source as Units of one site.

    Args:
        source: Factors or CoderUnits (taken as they are); an object with .read (d_in, unit) and .write (unit, d_out); a
            SAELens SAE or transcoder; any object with encode(x) and decode(z), whose own .reads and .writes ("input" or
            "output"; default: reads the input, writes the output) say what x and decode(z) are.
        site: where they will stand.

    Raises:
        UnitSourceError: the source is of another site or of other widths, its trial run failed, or see `from_saelens`.
        TypeError: none of the above.
    """
    if isinstance(source, Factors):
        return source
    if isinstance(source, CoderUnits):
        return _of_site(source, site)
    if is_saelens(source):
        return _of_site(next(iter(from_saelens(source).values())), site)
    if isinstance(getattr(source, "read", None), Tensor) and isinstance(getattr(source, "write", None), Tensor):
        return _from_read_write(source, site)
    if _has_pair(source):
        return _from_pair(source, site)
    raise TypeError(
        f"{type(source).__name__} is no unit source for {site.name}. Accepted: Factors; CoderUnits; a SAELens SAE or "
        "transcoder; an object with tensors .read (d_in, unit) and .write (unit, d_out); an object with encode(x) and decode(z)"
    )


def _has_pair(source: Any) -> bool:
    # A class has the methods, too, but not yet an object to call them on.
    pair = (getattr(source, "encode", None), getattr(source, "decode", None))
    return all(map(callable, pair)) and not isinstance(source, type | str | bytes)


def _of_site(units: CoderUnits, site: Site) -> CoderUnits:
    made_for = units.provenance.get("site", site.name)
    if made_for != site.name:
        raise UnitSourceError(
            f"{units.name} makes units of {made_for}, not of {site.name}; attach it under {made_for!r}"
        )
    whole = replace(units, d_in=units.d_in or site.d_in, d_out=units.d_out or site.d_out)
    if (whole.d_in, whole.d_out) != (site.d_in, site.d_out):
        raise UnitSourceError(
            f"{units.name} is for ({units.d_in or '?'}, {units.d_out or '?'}), {site.name} is ({site.d_in}, {site.d_out}): "
            "it was made for another model"
        )
    return whole


def _from_read_write(source: Any, site: Site) -> Factors:
    read, write = source.read.detach().float(), source.write.detach().float()
    shapes = f"read {tuple(read.shape)} and write {tuple(write.shape)}"
    if read.ndim != 2 or write.ndim != 2 or read.shape[1] != write.shape[0]:
        raise UnitSourceError(f"{shapes} are no pair of factors: expected (d_in, unit) and (unit, d_out)")
    if (read.shape[0], write.shape[1]) != (site.d_in, site.d_out):
        raise UnitSourceError(f"{shapes} do not fit {site.name}, which is ({site.d_in}, {site.d_out})")
    if not (torch.isfinite(read).all() and torch.isfinite(write).all()):
        raise UnitSourceError(
            f"{shapes} for {site.name} hold values that are not finite; mend or leave out their units"
        )
    provenance = {**getattr(source, "provenance", {}), "site": site.name}
    return Factors(read, write, dict(getattr(source, "settings", {})), provenance)


def _from_pair(source: Any, site: Site) -> CoderUnits:
    reads, writes = getattr(source, "reads", "input"), getattr(source, "writes", "output")
    provenance = {**getattr(source, "provenance", {}), "site": site.name}
    # The width of z is not known before the trial.
    units = CoderUnits(source, site.d_in, site.d_out, 0, reads, writes, type(source).__name__, provenance)
    device, dtype = _place(source)
    zeros = torch.zeros(1, 1, units.d_read, device=device, dtype=dtype)
    with torch.no_grad():
        z = _try(f"{units.name}.encode", source.encode, zeros)
        y = _try(f"{units.name}.decode", source.decode, z)
    if y.shape != (1, 1, units.d_write):
        raise UnitSourceError(
            f"{units.name}.decode gave {tuple(y.shape)} for z {tuple(z.shape)}; {site.name} needs (1, 1, {units.d_write})"
        )
    return CoderUnits(source, site.d_in, site.d_out, z.shape[-1], reads, writes, units.name, provenance)


def _try(what: str, function: Callable[[Any], Any], x: Tensor) -> Tensor:
    """function(x), checked: a dense floating tensor on x's device with x's leading axes."""
    try:
        result = function(x)
    except Exception as error:
        raise UnitSourceError(f"{what} failed on {x.dtype} of shape {tuple(x.shape)}: {error}") from error
    if not isinstance(result, Tensor):
        raise UnitSourceError(f"{what} gave a {type(result).__name__}, expected one tensor")
    if not result.is_floating_point() or result.is_sparse:
        raise UnitSourceError(f"{what} gave {result.dtype} in layout {result.layout}, expected a dense floating tensor")
    if result.device != x.device:
        raise UnitSourceError(f"{what} took {x.device} and gave {result.device}; keep the device")
    if result.shape[:-1] != x.shape[:-1]:
        raise UnitSourceError(
            f"{what} gave {tuple(result.shape)} for {tuple(x.shape)}; keep the batch and position axes"
        )
    return result


# ---------------------------------------------------------------------------------------------- SAELens

# Hook below blocks.{L} that an SAE stands on -> (kind of site, reads, writes). An SAE on a matrix' output takes and gives
# that output; one on a matrix' input gives that input back, and the matrix itself is applied to it.
_SAE_SITES = {
    "hook_mlp_out": ("mlp_out", "output", "output"),
    "mlp.hook_out": ("mlp_out", "output", "output"),
    "hook_attn_out": ("attn_o", "output", "output"),
    "attn.hook_out": ("attn_o", "output", "output"),
    "mlp.hook_pre": ("mlp_in", "output", "output"),
    "mlp.hook_post": ("mlp_out", "input", "input"),
    "attn.hook_z": ("attn_o", "input", "input"),
}
_MLP_INPUTS = ("ln2.hook_normalized", "mlp.hook_in", "hook_mlp_in")
_MLP_OUTPUTS = ("hook_mlp_out", "mlp.hook_out")
_ATTN_OUTPUTS = ("hook_attn_out", "attn.hook_out")
# (hook read, hook written) of a transcoder -> kind of site. "mlp" is the whole MLP, d_model to d_model.
_TRANSCODER_SITES = {
    **{("mlp.hook_post", out): "mlp_out" for out in _MLP_OUTPUTS},
    **{("attn.hook_z", out): "attn_o" for out in _ATTN_OUTPUTS},
    **{(read, "mlp.hook_pre"): "mlp_in" for read in _MLP_INPUTS},
    **{(read, out): "mlp" for read in _MLP_INPUTS for out in _MLP_OUTPUTS},
}
_HOOK = re.compile(r"^blocks\.(\d+)\.(.+)$")
# Activation norms that SAELens computes inside encode and undoes inside decode, or has nothing to compute for; of the
# others ("expected_average_only_in", "covariance_whitening") the weights are wrong until the norm is folded into them.
_NORMS_AT_RUN_TIME = ("none", "layer_norm", "constant_norm_rescale", "constant_scalar_rescale")
# Metadata worth keeping: what the SAE was trained on, and how that model was loaded.
_KEPT = (
    "model_name",
    "model_from_pretrained_kwargs",
    "hf_hook_name",
    "hf_hook_name_out",
    "sae_lens_version",
    "prepend_bos",
)


def from_saelens(sae: Any) -> dict[str, CoderUnits]:
    """A SAELens SAE or transcoder as units, under the name of the site that its metadata says it was trained on.

    Of sae-lens 6 its cfg.metadata is read, of older versions its cfg. An SAE on hook_mlp_out, hook_attn_out or mlp.hook_pre
    reads and writes the output of mlp_out, attn_o or mlp_in; one on mlp.hook_post or attn.hook_z reads and writes the
    input of mlp_out or attn_o. A transcoder reads the input and writes the output of mlp_out, attn_o, mlp_in, or of the
    whole MLP, whose name is blocks.{L}.mlp.

    What the metadata cannot tell, the host must be asked; provenance says what. "needs_folded_ln": True where the units read
    ln2.hook_normalized, which is the MLP's input only in a host whose LayerNorm weights are folded; False where they read
    the MLP's own input in a model that was not folded. "needs_ungated_mlp": on a gated MLP, TransformerLens' mlp.hook_pre is
    the output of the gate, not of mlp_in. "needs_no_post_norm": where a norm follows the MLP or attention (Gemma),
    hook_mlp_out and hook_attn_out stand after it.

    With an activation norm at run time (provenance["normalize_activations"]) decode undoes the norm of the latest encode:
    call the two in turn, as `CoderUnits.run` does.

    Returns:
        One entry, site name -> CoderUnits.

    Raises:
        UnitSourceError: no SAELens object; a hook that no site reads or writes; one head; a training SAE; an activation
            norm that was not folded; head-shaped hook_z; an error term; a skip connection; a forward that is not
            decode(encode(x)); units that depend on other positions.
    """
    if not is_saelens(sae):
        raise UnitSourceError(f"{type(sae).__name__} is no SAELens object: it needs encode, decode and cfg.d_sae")
    name, cfg = type(sae).__name__, sae.cfg
    _refuse_wrong(sae, name)
    layer, hooks, (kind, reads, writes) = _stands_on(sae, name)
    provenance: dict[str, Any] = {
        "site": f"blocks.{layer}.{kind}",
        "source": name,
        "hook_name": hooks[0],
        "hook_name_out": hooks[-1],
    }
    provenance |= {key: _json(_meta(sae, key)) for key in _KEPT if _meta(sae, key) is not None}
    provenance["normalize_activations"] = _norm(sae)
    if hooks[-1].endswith("mlp.hook_pre"):
        provenance["needs_ungated_mlp"] = True
    if hooks[-1].endswith(("hook_mlp_out", "hook_attn_out")):
        provenance["needs_no_post_norm"] = True
    if hooks[0].endswith("ln2.hook_normalized"):
        provenance["needs_folded_ln"] = True
    elif kind in ("mlp", "mlp_in") and reads == "input" and _loaded_with(sae).get("fold_ln") is False:
        provenance["needs_folded_ln"] = False
    # What one SAE does not see of its site, the site says later.
    d_in = cfg.d_in if reads == "input" else 0
    d_out = _d_out(sae) if writes == "output" else 0
    units = CoderUnits(sae, d_in, d_out, cfg.d_sae, reads, writes, name, provenance)
    _prove(sae, units)
    return {provenance["site"]: units}


def is_saelens(source: Any) -> bool:
    """Whether it looks like a SAELens SAE or transcoder: encode, decode and a cfg with d_sae."""
    return _has_pair(source) and hasattr(getattr(source, "cfg", None), "d_sae")


def _refuse_wrong(sae: Any, name: str) -> None:
    """Refuse what would run and be wrong."""
    if callable(getattr(sae, "training_forward_pass", None)):
        raise UnitSourceError(
            f"{name} is a training SAE: its norm may not be folded yet, and a batch top-k looks at other tokens. Save it with "
            "save_inference_model(path) and load it with SAE.load_from_disk(path)"
        )
    if _norm(sae) not in _NORMS_AT_RUN_TIME:
        raise UnitSourceError(
            f"{name} was trained with normalize_activations={_norm(sae)!r}, which is not folded into its weights: encode "
            "would see activations at another scale. Fold it (sae.fold_activation_norm_scaling_factor(factor), or "
            "sae.fold_activation_whitening(...)), then pass it again"
        )
    if getattr(sae, "hook_z_reshaping_mode", False):
        raise UnitSourceError(
            f"{name} takes z as (..., head, d_head), attn_o's input is flat; call "
            "sae.turn_off_forward_pass_hook_z_reshaping() first"
        )
    if getattr(sae, "use_error_term", False):
        raise UnitSourceError(
            f"{name} has use_error_term on, which adds back what its units miss: the host would compute as if there were no "
            "units. Set sae.use_error_term = False"
        )
    skip = getattr(sae, "W_skip", None)
    if isinstance(skip, Tensor) and bool((skip != 0).any()):
        raise UnitSourceError(
            f"{name} has a skip connection W_skip {tuple(skip.shape)} that is not zero: part of its output passes no unit, so "
            "no circuit of units could be its whole. Use a transcoder without skip"
        )
    for key in ("hook_head_index", "hook_head_index_out"):
        if _meta(sae, key) is not None:
            raise UnitSourceError(f"{name} is of one attention head ({key}={_meta(sae, key)}); a site holds all heads")


def _stands_on(sae: Any, name: str) -> tuple[int, tuple[str, ...], tuple[str, str, str]]:
    """(layer, hooks read and written, (kind of site, reads, writes)) of a SAELens object."""
    given = [hook for key in ("hook_name", "hook_name_out") if (hook := _meta(sae, key))]
    if not _meta(sae, "hook_name"):
        raise UnitSourceError(
            f"{name} does not say where it stands; set it: sae.cfg.metadata.hook_name = 'blocks.8.hook_mlp_out'"
        )
    if len(given) == 1 and (hasattr(sae.cfg, "d_out") or "ranscoder" in name):
        raise UnitSourceError(
            f"{name} reads {given[0]} and does not say what it writes; set it: "
            "sae.cfg.metadata.hook_name_out = 'blocks.8.hook_mlp_out'"
        )
    matches = [_HOOK.match(hook) for hook in given]
    layers = {match[1] if match else None for match in matches}
    if None in layers or len(layers) > 1:
        raise UnitSourceError(
            f"{name} stands on {' -> '.join(given)}: expected hooks of one block, such as blocks.8.hook_mlp_out"
        )
    below = tuple(dict.fromkeys(match[2] for match in matches if match))
    _refuse_ambiguous(sae, name, below)
    if len(below) == 1 and below[0] in _SAE_SITES:
        found = _SAE_SITES[below[0]]
    elif (below[0], below[-1]) in _TRANSCODER_SITES:
        found = (_TRANSCODER_SITES[below[0], below[-1]], "input", "output")
    else:
        pairs = ", ".join(" -> ".join(pair) for pair in _TRANSCODER_SITES)
        raise UnitSourceError(
            f"{name} stands on {' -> '.join(given)}, which is no matrix' input or output (the residual stream is written by "
            f"many). An SAE can stand on {', '.join(_SAE_SITES)}; a transcoder on {pairs}"
        )
    return int(layers.pop() or 0), tuple(given), found


def _refuse_ambiguous(sae: Any, name: str, below: tuple[str, ...]) -> None:
    """Hook names that SAELens uses for another activation than TransformerLens does."""
    real_in, real_out = _meta(sae, "hf_hook_name") or "", _meta(sae, "hf_hook_name_out") or ""
    if below[0] == "hook_mlp_in" and not real_in.endswith("layernorm.output"):
        raise UnitSourceError(
            f"{name} reads hook_mlp_in, which in TransformerLens is the residual stream before ln2, not the MLP's input. If it "
            "was trained on the normalized input, say so: sae.cfg.metadata.hook_name = 'blocks.8.ln2.hook_normalized'"
        )
    written = real_out if len(below) == 2 else real_in
    if "post_" in written and "layernorm" in written:
        raise UnitSourceError(
            f"{name} is of {written}: a norm stands between the matrix and that activation, so no matrix writes it"
        )


def _prove(sae: Any, units: CoderUnits) -> None:
    """Run it on three random positions: decode(encode(x)) is its forward, and the last z depends on the last x only."""
    device, dtype = _place(sae)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, units.d_read, generator=draw).to(device=device, dtype=dtype)
    # The last position as it is, among positions that drown it, and among positions that it drowns.
    loud, quiet = (
        x * torch.tensor([scale, scale, 1.0], device=device, dtype=dtype)[:, None] for scale in (100.0, 0.01)
    )
    with torch.no_grad():
        # In this order: with a norm at run time a decode belongs to the encode before it.
        among_loud, among_quiet = (_try(f"{units.name}.encode", sae.encode, one)[:, -1] for one in (loud, quiet))
        z = _try(f"{units.name}.encode", sae.encode, x)
        y = _try(f"{units.name}.decode", sae.decode, z)
        forward = sae(x)
    if z.shape[-1] != units.n_units or y.shape[-1] != units.d_write:
        raise UnitSourceError(
            f"{units.name} gave z {tuple(z.shape)} and y {tuple(y.shape)}; its cfg says {units.n_units} units "
            f"and d_out={units.d_write}: it was changed after it was loaded; load it again"
        )
    if _differ(y, forward):
        raise UnitSourceError(
            f"{units.name}'s own forward is not decode(encode(x)) (on random x they are {_distance(y, forward):.1%} apart): "
            "part of its output passes no unit, or its hooks change it (sae.reset_hooks())"
        )
    if _differ(among_loud, among_quiet):
        raise UnitSourceError(
            f"{units.name}'s units at one position change with the other positions (by {_distance(among_loud, among_quiet):.1%}"
            " on random x): it is no function of the site's input there"
        )


def _differ(left: Tensor, right: Tensor) -> bool:
    # The same arithmetic in the same shapes: what differs here is not rounding, in any dtype.
    return not torch.allclose(left.float(), right.float(), rtol=1e-3, atol=1e-6, equal_nan=True)


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left.float() - right.float()).norm() / right.float().norm())


def _meta(sae: Any, key: str) -> Any:
    """A metadata entry: sae-lens 6 keeps them in cfg.metadata, older versions in cfg itself; None if it is in neither."""
    held = getattr(sae.cfg, "metadata", None)
    found = held.get(key) if isinstance(held, Mapping) else getattr(held, key, None)
    return getattr(sae.cfg, key, None) if found is None else found


def _norm(sae: Any) -> str:
    return getattr(sae.cfg, "normalize_activations", None) or "none"


def _loaded_with(sae: Any) -> Mapping[str, Any]:
    return _meta(sae, "model_from_pretrained_kwargs") or {}


def _d_out(sae: Any) -> int:
    return getattr(sae.cfg, "d_out", None) or sae.cfg.d_in


def _json(value: Any) -> Any:
    """A metadata value as plain JSON: what is not plain becomes its text (a dtype among the loading arguments)."""
    if isinstance(value, Mapping):
        return {str(key): _json(one) for key, one in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
