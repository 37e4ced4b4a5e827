"""save_checkpoint: a replaced model as a plain Hugging Face checkpoint, which any other tool loads and evaluates.

1. transformers' own model is loaded from where the host came from (its tokenizer's folder or name; the embedded model is made).
2. Every replaced matrix is looked for in it by its values: a site's column is an output of an nn.Linear or Conv1D of the same
   layer. So packed matrices need no names (GPT-2's c_attn, NeoX's interleaved heads), and a host whose weights are no longer the
   checkpoint's is refused.
3. The outputs get read @ write. Of a circuit only its units stay in the product; what the others are set to is a constant, which
   goes into the bias (`_with_bias`: Llama and its kin have none until their configuration asks for them).
4. The new model must give the logits that the host gives with its units attached (and the circuit kept), on one row of tokens.
5. The folder is written beside its place, and moved there whole.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swd_lens.base.errors import UnitSourceError, UnsupportedHostError, errors_seen, quoted
from swd_lens.base.files import atomic, naming, workplace_beside
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits.ablation import ablation_values, replaced_masks
from swd_lens.circuits.circuit import Circuit
from swd_lens.hosts import Host, host_of
from swd_lens.hosts.embedded import is_embedded, network_of_embedded
from swd_lens.hosts.sites import Site
from swd_lens.study.replacement import ModelReplacement
from swd_lens.units import attach
from swd_lens.units.attach import probe_tokens
from swd_lens.units.factors import Factors
from swd_lens.units.unit_set import require_made_for, sources_by_site

# Of the largest logit; in half precision in steps of the dtype, as a matrix is rounded where the host rounds two products.
TOLERANCE, _STEPS = 1e-5, 8
# How configurations call biases that are off unless asked for.
_FLAGS = ("attention_bias", "mlp_bias", "use_bias", "bias")


@with_torch_defaults
@errors_seen
def save_checkpoint(
    model: Any,
    factors: Any,
    folder: str | Path,
    *,
    circuit: Circuit | None = None,
    ablation: str = "mean",
    source: str | Path | None = None,
) -> Path:
    """Write the replaced model as a Hugging Face checkpoint of the same architecture: config.json, weights, tokenizer.

    Its matrices are read @ write, in the host's dtype. transformers loads it, and so does any tool that takes a checkpoint.

    Args:
        model: the host, bare; its weights are those of its checkpoint.
        factors: a FactorSet, what `replace_model` returned, or what else `swd_lens.attach` takes of factors.
        folder: made, or written into where it is there; files of the same names are replaced.
        circuit: only these units stay, at every position and for every token; the others are set to what `ablation` says.
        ablation: of a circuit, "mean" (its scores' means over all tokens) or "zero".
        source: the checkpoint that the host was loaded from, a folder or a name on the hub; None: where its tokenizer lies.

    Returns:
        The folder.

    Raises:
        UnsupportedHostError: no checkpoint is known; a matrix of the host is not in it, as it was folded, centred or edited; the
            constant of ablated units needs a bias that the architecture has not; or the checkpoint gives other logits.
        UnitSourceError: units that are no factors.
        ValueError: a circuit of other factors, or one whose means are of single positions.
        OSError, FolderInUseError: the folder cannot be written.
    """
    factors = factors.best if isinstance(factors, ModelReplacement) else factors
    host, replaced = host_of(model), dict(sources_by_site(factors))
    for name, of in replaced.items():
        if not isinstance(of, Factors):
            raise UnitSourceError(
                f"the units of {name} are a {type(of).__name__}: a checkpoint holds matrices, read @ write of Factors"
            )
    kept, constants = _kept(replaced, circuit, ablation)
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with writing(folder, "save_checkpoint", n_bytes) as place:
        network, tokenizer = _network(model, source)
        sites = [site for site in (*host.sites(), *host.alternatives()) if site.name in replaced]
        places = {site.name: _place(network, host, site) for site in sites}
        network = _with_bias(network, places, constants)
        with torch.no_grad():
            for name, of in replaced.items():
                _write(network, places[name], of, kept.get(name), constants.get(name))
        _require_same_logits(model, network, replaced, circuit, ablation)
        with workplace_beside(place / "checkpoint") as part, naming(place):
            network.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            for path in sorted(part.iterdir(), key=lambda path: path.name == "config.json"):  # without it no checkpoint
                with atomic(place / path.name) as temporary:
                    shutil.move(path, temporary)
    return Path(folder)


# ---------------------------------------------------------------------------------------------- what is kept


def _kept(replaced: Mapping[str, Factors], circuit: Circuit | None, ablation: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give, of a circuit, site -> (unit,) True where a unit stays; and site -> (d_out,) what the other units and offsets add."""
    constants = {
        name: of.offsets.unit.float() @ of.write.float() + of.offsets.out.float()
        for name, of in replaced.items()
        if of.offsets is not None
    }
    if circuit is None:
        return {}, constants
    require_made_for(replaced, circuit.scores.settings, "this circuit")
    values = ablation_values(circuit.scores, ablation)
    if circuit.scores.settings["positions"] != "all" or any(value.ndim > 1 for value in values.values()):
        raise ValueError(
            f"this circuit's scores are of positions={quoted(circuit.scores.settings['positions'])}, with means of their "
            'own: a checkpoint ablates at every position. Attribute with positions="all", mean_over="all_tokens"'
        )
    kept = {}
    for name, gone in replaced_masks(circuit.scores, circuit.units, "keep").items():
        of = replaced[name]
        kept[name] = ~gone
        constant = (values[name].to(of.write) * gone.to(of.write)) @ of.write
        if of.offsets is not None:  # a unit that stays still begins at its own
            constant = constant + (of.offsets.unit * ~gone.to(of.offsets.unit.device)) @ of.write + of.offsets.out
        constants[name] = constant.float()
    return kept, constants


# ---------------------------------------------------------------------------------------------- the network


def _network(model: Any, source: str | Path | None) -> tuple[Any, Any]:
    """transformers' own model of what the host was loaded from, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    if source is None and is_embedded(model):
        return network_of_embedded(model.cfg.dtype), model.tokenizer
    source = source or getattr(model.tokenizer, "name_or_path", None)
    if not source:
        raise UnsupportedHostError(
            f"{model.cfg.model_name} has no tokenizer that says where it was loaded from; give source=, a checkpoint "
            "folder or a name on the hub"
        )
    try:
        network = AutoModelForCausalLM.from_pretrained(str(source), dtype=model.cfg.dtype, attn_implementation="eager")
    except (OSError, ValueError) as cause:
        raise UnsupportedHostError(
            f"transformers cannot load {source}, which the host's tokenizer is of: {cause}; give source="
        ) from cause
    return network.eval(), model.tokenizer


class _Place(NamedTuple):
    """Where a site's outputs stand in a network: a module's name, and (output,) which of its outputs they are."""

    module: str
    outputs: Tensor


def _place(network: nn.Module, host: Host, site: Site) -> _Place:
    wanted = host.weight(site).cpu()
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and f".{site.layer}." in f"{name}.":
            held = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
            outputs = _outputs(held.float(), wanted.T)
            if outputs is not None:
                return _Place(name, outputs)
    raise UnsupportedHostError(
        f"{site.name} is no matrix of the checkpoint: the host's weights were folded, centred or edited, or are of "
        "another checkpoint. Load it with swd_lens.load_host, or give source="
    )


def _outputs(held: Float[Tensor, "_held _in"], wanted: Float[Tensor, "output _input"]) -> Int[Tensor, " output"] | None:
    """Which rows of `held` those of `wanted` are, in order; None where one is missing."""
    if held.shape[1] != wanted.shape[1] or len(held) < len(wanted):
        return None
    if held.shape == wanted.shape and torch.equal(held, wanted):
        return torch.arange(len(held))
    rows: dict[bytes, list[int]] = {}
    for index, row in enumerate(held.contiguous().numpy()):
        rows.setdefault(row.tobytes(), []).append(index)
    outputs = []
    for row in wanted.contiguous().numpy():
        equal = rows.get(row.tobytes())
        if not equal:
            return None
        outputs.append(equal.pop(0))  # of equal rows (zeros, say) each is taken once
    return torch.tensor(outputs)


def _with_bias(network: Any, places: Mapping[str, _Place], constants: Mapping[str, Tensor]) -> Any:
    """The network, with zero biases where a constant needs one and the configuration can have them."""
    lacking = [name for name in constants if network.get_submodule(places[name].module).bias is None]
    if not lacking:
        return network
    config = network.config
    for flag in _FLAGS:
        if getattr(config, flag, None) is False:
            setattr(config, flag, True)
    biased = type(network)(config).to(network.dtype).eval()
    still = [name for name in lacking if biased.get_submodule(places[name].module).bias is None]
    if still:
        raise UnsupportedHostError(
            f"{still[0]} has no bias in {type(network).__name__}, where what its ablated units are set to would go; take "
            'ablation="zero"'
        )
    with torch.no_grad():
        for name, parameter in biased.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    biased.load_state_dict(network.state_dict(), strict=False)
    return biased


def _write(network: Any, place: _Place, of: Factors, kept: Tensor | None, constant: Tensor | None) -> None:
    read, write = of.read.float().cpu(), of.write.float().cpu()
    if kept is not None:
        read, write = read[:, kept.cpu()], write[kept.cpu()]
    module = network.get_submodule(place.module)
    by_output = module.weight if isinstance(module, nn.Linear) else module.weight.T
    by_output[place.outputs] = (read @ write).T.to(by_output.dtype)
    if constant is not None:
        module.bias[place.outputs] += constant.cpu().to(module.bias.dtype)


# ---------------------------------------------------------------------------------------------- the check


def _require_same_logits(
    model: Any, network: Any, replaced: Mapping[str, Factors], circuit: Circuit | None, ablation: str
) -> None:
    row = torch.tensor([probe_tokens(None, int(model.cfg.d_vocab), int(model.cfg.n_ctx))])
    with torch.no_grad(), attach(model, replaced) if circuit is None else circuit.attach(model, replaced, ablation=ablation):
        host = model(row).float().cpu()
        written = network(row, attention_mask=torch.ones_like(row)).logits.float()
    n_words = min(host.shape[-1], written.shape[-1])
    difference = float((host[..., :n_words] - written[..., :n_words]).abs().max() / host.abs().max())
    half = network.dtype.itemsize <= 2
    if not difference <= (_STEPS * torch.finfo(network.dtype).eps if half else TOLERANCE):
        raise UnsupportedHostError(
            f"the checkpoint's logits are off by {difference:.1e} of the largest from the host's; nothing was written"
        )
