"""from_saelens: a SAELens SAE or transcoder as units, without importing sae_lens.

1. Its metadata says on which hooks it stands, and so at which site it reads and writes.
2. What would run and be silently wrong is refused: an activation norm that is not folded, an error term, a skip
   connection, head-shaped hook_z, a training SAE.
3. The rest is proved on random input: decode(encode(x)) is its own forward, and a unit at one position depends on that
   position only.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swd_lens.base.errors import UnitSourceError, quoted
from swd_lens.units.coder import CoderUnits, has_pair, place_of, tried

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
_KEPT = ("model_name", "model_from_pretrained_kwargs", "hf_hook_name", "hf_hook_name_out", "sae_lens_version", "prepend_bos")


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

    What is not a unit: an SAE's reconstruction takes the place of what it stands on, and what it misses is gone, without an error
    term; `fidelity` says what that costs. Biases belong to decode, and are kept whatever is ablated. Edges are the nonzeros of
    W_enc[:, i] and W_dec[i]; thresholds and the gate's own bias are none. With an activation norm at run time
    (provenance["normalize_activations"]) decode undoes the norm of the latest encode: call the two in turn.

    Returns: One entry, site name -> CoderUnits.

    Raises UnitSourceError: no SAELens object; a hook that no site reads or writes; one head; a training SAE; an activation norm
    that was not folded; head-shaped hook_z; an error term; a skip connection that is not zero; a forward that is not
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
    elif (
        kind in ("mlp", "mlp_in")
        and reads == "input"
        and (_meta(sae, "model_from_pretrained_kwargs") or {}).get("fold_ln") is False
    ):
        provenance["needs_folded_ln"] = False
    # What one SAE does not see of its site, the site says later.
    d_in = cfg.d_in if reads == "input" else 0
    d_out = (getattr(cfg, "d_out", None) or cfg.d_in) if writes == "output" else 0
    units = CoderUnits(sae, d_in, d_out, cfg.d_sae, reads, writes, name, provenance)
    _prove(sae, units)
    return {provenance["site"]: units}


def is_saelens(source: Any) -> bool:
    """Whether it looks like a SAELens SAE or transcoder: encode, decode and a cfg with d_sae."""
    return has_pair(source) and hasattr(getattr(source, "cfg", None), "d_sae")


def _refuse_wrong(sae: Any, name: str) -> None:
    """Refuse what would run and be wrong."""
    if callable(getattr(sae, "training_forward_pass", None)):
        raise UnitSourceError(
            f"{name} is a training SAE: its norm may not be folded yet, and a batch top-k looks at other tokens. Save it "
            "with save_inference_model(path) and load it with SAE.load_from_disk(path)"
        )
    if _norm(sae) not in _NORMS_AT_RUN_TIME:
        raise UnitSourceError(
            f"{name} was trained with normalize_activations={quoted(_norm(sae))}, which is not folded into its weights: "
            "encode would see activations at another scale. Fold it (sae.fold_activation_norm_scaling_factor(factor), or "
            "sae.fold_activation_whitening(...)), then pass it again"
        )
    if getattr(sae, "hook_z_reshaping_mode", False):
        raise UnitSourceError(
            f"{name} takes z as (..., head, d_head), attn_o's input is flat; call "
            "sae.turn_off_forward_pass_hook_z_reshaping() first"
        )
    if getattr(sae, "use_error_term", False):
        raise UnitSourceError(
            f"{name} has use_error_term on, which adds back what its units miss: the host would compute as if there were "
            "no units. Set sae.use_error_term = False"
        )
    skip = getattr(sae, "W_skip", None)
    if isinstance(skip, Tensor) and bool((skip != 0).any()):
        raise UnitSourceError(
            f"{name} has a skip connection W_skip {tuple(skip.shape)} that is not zero: part of its output passes no "
            "unit, so no circuit of units could be its whole. Use a transcoder without skip"
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
            f"{name} reads {given[0]} and does not say what it writes; set it: sae.cfg.metadata.hook_name_out = "
            "'blocks.8.hook_mlp_out'"
        )
    matches = [_HOOK.match(hook) for hook in given]
    layers = {match[1] if match else None for match in matches}
    if None in layers or len(layers) > 1:
        raise UnitSourceError(
            f"{name} stands on {' -> '.join(given)}: expected hooks of one block, such as blocks.8.hook_mlp_out"
        )
    below = tuple(dict.fromkeys(match[2] for match in matches if match))
    # Refuse hook names that SAELens uses for another activation than TransformerLens does.
    real_in, real_out = _meta(sae, "hf_hook_name") or "", _meta(sae, "hf_hook_name_out") or ""
    if below[0] == "hook_mlp_in" and not real_in.endswith("layernorm.output"):
        raise UnitSourceError(
            f"{name} reads hook_mlp_in, which in TransformerLens is the residual stream before ln2, not the MLP's input. "
            "If it was trained on the normalized input, say so: sae.cfg.metadata.hook_name = "
            "'blocks.8.ln2.hook_normalized'"
        )
    written = real_out if len(below) == 2 else real_in
    if "post_" in written and "layernorm" in written:
        raise UnitSourceError(
            f"{name} is of {written}: a norm stands between the matrix and that activation, so no matrix writes it"
        )
    if len(below) == 1 and below[0] in _SAE_SITES:
        stands = _SAE_SITES[below[0]]
    elif (below[0], below[-1]) in _TRANSCODER_SITES:
        stands = (_TRANSCODER_SITES[below[0], below[-1]], "input", "output")
    else:
        pairs = ", ".join(" -> ".join(pair) for pair in _TRANSCODER_SITES)
        raise UnitSourceError(
            f"{name} stands on {' -> '.join(given)}, which is no matrix' input or output (the residual stream is written "
            f"by many). An SAE can stand on {', '.join(_SAE_SITES)}; a transcoder on {pairs}"
        )
    return int(layers.pop() or 0), tuple(given), stands


def _prove(sae: Any, units: CoderUnits) -> None:
    """Check on three random positions that decode(encode(x)) is its forward, and the last z depends on the last x only."""
    device, dtype = place_of(sae)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, units.d_read, generator=draw, dtype=torch.float32).to(device=device, dtype=dtype)
    # The last position as it is, among positions that drown it, and among positions that it drowns.
    loud, quiet = (x * torch.tensor([scale, scale, 1.0], device=device, dtype=dtype)[:, None] for scale in (100.0, 0.01))
    with torch.no_grad():
        # In this order: with a norm at run time a decode belongs to the encode before it.
        among_loud, among_quiet = (tried(f"{units.name}.encode", sae.encode, others)[:, -1] for others in (loud, quiet))
        z = tried(f"{units.name}.encode", sae.encode, x)
        y = tried(f"{units.name}.decode", sae.decode, z)
        forward = sae(x)
    if z.shape[-1] != units.n_units or y.shape[-1] != units.d_write:
        raise UnitSourceError(
            f"{units.name} gave z {tuple(z.shape)} and y {tuple(y.shape)}; its cfg says {units.n_units} units and "
            f"d_out={units.d_write}: it was changed after it was loaded; load it again"
        )
    if (apart := _apart(y, forward)) is not None:
        raise UnitSourceError(
            f"{units.name}'s own forward is not decode(encode(x)) (on random x they are {apart:.1%} "
            "apart): part of its output passes no unit, or its hooks change it (sae.reset_hooks())"
        )
    if (apart := _apart(among_loud, among_quiet)) is not None:
        raise UnitSourceError(
            f"{units.name}'s units at one position change with the other positions (by {apart:.1%} on random x): it is no "
            "function of the site's input there"
        )


def _apart(left: Tensor, right: Tensor) -> float | None:
    """How far two outputs are apart, relative to the second; None where they agree."""
    left, right = left.float(), right.float()
    # The same arithmetic in the same shapes: what differs here is not rounding, in any dtype.
    equal = torch.allclose(left, right, rtol=1e-3, atol=1e-6, equal_nan=True)
    return None if equal else float((left - right).norm() / right.norm())


def _meta(sae: Any, key: str) -> Any:
    """A metadata entry: sae-lens 6 keeps them in cfg.metadata, older versions in cfg itself; None if it is in neither."""
    held = getattr(sae.cfg, "metadata", None)
    value = held.get(key) if isinstance(held, Mapping) else getattr(held, key, None)
    return getattr(sae.cfg, key, None) if value is None else value


def _norm(sae: Any) -> str:
    return getattr(sae.cfg, "normalize_activations", None) or "none"


def _json(value: Any) -> Any:
    """A metadata value as plain JSON: what is not plain becomes its text (a dtype among the loading arguments)."""
    if isinstance(value, Mapping):
        return {str(key): _json(entry) for key, entry in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
