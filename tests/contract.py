"""The unit sources that the contract tests run on: everything that gives units for a site of a host.

`CASES` says on which sites each one is tried. What is asked of them is worked out here once more, by hand: `taken_by`,
`path_of` and `constant_of` (z, what a unit writes, what is written without units), `read_edges_of` and `write_edges_of`.
"""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factorization.factorize import stamp
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.sites import Site
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.saelens import from_saelens
from swd_lens.units.unit_set import as_units


def identity(model: Any, sites: str) -> FactorSet:
    """A = W, B = I: units are output coordinates."""
    host = host_of(model)
    made = {}
    for site in find_sites(model, sites):
        weight = host.weight(site).clone()  # it may be the host's own memory
        made[site.name] = stamp(Factors(weight, torch.eye(site.d_out), weight=weight), model, site)
    return FactorSet(made)


def swd_calibrated(model: Any, sites: str) -> FactorSet:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.cfg.d_vocab, (16, 12), generator=generator)
    return swd.factorize(model, sites, sparsity=0.4, tokens=tokens, outer_iterations=4, progress=False)


def swd_zero_data(model: Any, sites: str) -> FactorSet:
    return swd.factorize(model, sites, sparsity=0.4, basis="paper", outer_iterations=4, progress=False)


def svd_whitened(model: Any, sites: str) -> FactorSet:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.cfg.d_vocab, (16, 12), generator=generator)
    return baselines.svd(model, sites, whitened=True, tokens=tokens)


def _learned(train: Callable[..., baselines.LearnedUnits]) -> Callable[[Any, str], dict[str, Any]]:
    """A few steps of training at every site: what the contract asks holds for every weight."""

    def make(model: Any, sites: str) -> dict[str, Any]:
        tokens = torch.randint(0, model.cfg.d_vocab, (16, 12), generator=torch.Generator().manual_seed(2))
        how = {"n_tokens": 288, "tokens_per_step": 96, "keep": (), "progress": False}
        # Of a whole MLP, VPD makes units of each of its matrices.
        return {name: units for site in find_sites(model, sites) for name, units in train(model, site, tokens, **how).items()}

    return make


# ---------------------------------------------------------------------------------------------- SAELens

# Kind of site -> hook read, hook written: the pairs that released transcoders stand on, in both spellings of the output.
_TRANSCODER_HOOKS = {
    "attn_o": ("attn.hook_z", "attn.hook_out"),
    "mlp_in": ("mlp.hook_in", "mlp.hook_pre"),
    "mlp_out": ("mlp.hook_post", "hook_mlp_out"),
    "mlp": ("mlp.hook_in", "mlp.hook_out"),
}
_OUTPUT_HOOKS = {"attn_o": "hook_attn_out", "mlp_in": "mlp.hook_pre", "mlp_out": "hook_mlp_out"}
_INPUT_HOOKS = {"attn_o": "attn.hook_z", "mlp_out": "mlp.hook_post"}
_SAE_UNITS = 24


def saelens_transcoder(model: Any, sites: str) -> dict[str, Any]:
    def of(site: Site) -> Any:
        from sae_lens import saes

        read, write = (f"blocks.{site.layer}.{hook}" for hook in _TRANSCODER_HOOKS[site.kind])
        about = saes.sae.SAEMetadata(hook_name=read, hook_name_out=write)
        how: dict[str, Any] = {"d_in": site.d_in, "d_out": site.d_out, "d_sae": _SAE_UNITS, "metadata": about}
        return saes.JumpReLUTranscoder(saes.JumpReLUTranscoderConfig(**how, apply_b_dec_to_input=False))

    return _from_disk(model, sites, of)


def saelens_sae(model: Any, sites: str) -> dict[str, Any]:
    """SAEs on the sites' outputs."""

    def of(site: Site) -> Any:
        from sae_lens import saes

        about = saes.sae.SAEMetadata(hook_name=f"blocks.{site.layer}.{_OUTPUT_HOOKS[site.kind]}")
        return saes.JumpReLUSAE(saes.JumpReLUSAEConfig(d_in=site.d_out, d_sae=_SAE_UNITS, metadata=about))

    return _from_disk(model, sites, of)


def saelens_sae_on_input(model: Any, sites: str) -> dict[str, Any]:
    """SAEs on the sites' inputs."""

    def of(site: Site) -> Any:
        from sae_lens import saes

        about = saes.sae.SAEMetadata(hook_name=f"blocks.{site.layer}.{_INPUT_HOOKS[site.kind]}")
        return saes.TopKSAE(saes.TopKSAEConfig(d_in=site.d_in, d_sae=_SAE_UNITS, k=6, metadata=about))

    return _from_disk(model, sites, of)


def _from_disk(model: Any, sites: str, of: Callable[[Site], Any]) -> dict[str, Any]:
    """Random weights with zeros among them, through SAELens' own files: what its users hand over."""
    from sae_lens import SAE

    made: dict[str, Any] = {}
    draw = torch.Generator().manual_seed(3)
    for site in find_sites(model, sites):
        sae = of(site)
        with torch.no_grad():
            for parameter in sae.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
            for weight in (sae.W_enc, sae.W_dec):
                weight.masked_fill_(torch.rand(weight.shape, generator=draw) < 0.4, 0.0)
            sae.W_dec[5] = 0.0  # a unit that writes nothing
        with tempfile.TemporaryDirectory() as folder:
            sae.save_model(folder)
            ((name, units),) = from_saelens(SAE.load_from_disk(folder)).items()
        made[name] = as_units(units, site)  # an SAE sees one side of its site; the other width is the site's
    return made


UNIT_SOURCES: dict[str, Callable[[Any, str], Mapping[str, Any]]] = {
    "identity": identity,
    "svd": baselines.svd,
    "svd_whitened": svd_whitened,
    "random_b": baselines.random_b,
    "neurons": baselines.neurons,
    "swd": swd_calibrated,
    "swd_zero_data": swd_zero_data,
    "transcoder": _learned(baselines.transcoder),
    "vpd_recon": _learned(baselines.vpd_recon),
    "vpd_kl": _learned(baselines.vpd_kl),
    "channels": baselines.channels_of,
    "saelens_transcoder": saelens_transcoder,
    "saelens_sae": saelens_sae,
    "saelens_sae_on_input": saelens_sae_on_input,
}
EXACT = ("identity", "svd", "svd_whitened", "random_b", "neurons")
# Those that need sae_lens, which asks for transformer_lens < 4.
NEED_SAELENS = ("saelens_transcoder", "saelens_sae", "saelens_sae_on_input")
# What each source is asked of; the others of all sites.
_EVERYWHERE = ("blocks.1.attn_qkv", "blocks.0.attn_o", "blocks.0.mlp_in", "blocks.1.mlp_out", "all")
_SOME = {
    "svd_whitened": ("blocks.1.mlp_out", "all"),
    "transcoder": ("blocks.1.attn_qkv", "blocks.1.mlp_out", "blocks.1.mlp", "all"),
    "vpd_recon": ("blocks.1.mlp_out", "blocks.1.mlp", "all"),
    "vpd_kl": ("blocks.1.attn_qkv", "blocks.0.attn_o", "blocks.1.mlp_out", "blocks.1.mlp"),
    "channels": ("blocks.1.mlp_out", "mlp_out"),
    "saelens_transcoder": ("blocks.0.attn_o", "blocks.0.mlp_in", "mlp_out", "blocks.1.mlp"),
    "saelens_sae": ("blocks.0.attn_o", "blocks.0.mlp_in", "mlp_out"),
    "saelens_sae_on_input": ("blocks.0.attn_o", "mlp_out"),
}
CASES = [(name, sites) for name in UNIT_SOURCES for sites in _SOME.get(name, _EVERYWHERE)]


# ---------------------------------------------------------------------------------------------- by hand


def host_bias(model: Any, site: Site) -> torch.Tensor:
    """(d_out,): what the host adds behind W."""
    block = model.blocks[site.layer]
    if site.kind == "attn_qkv":
        return torch.cat([block.attn.b_Q.flatten(), block.attn.b_K.flatten(), block.attn.b_V.flatten()])
    return {"mlp_in": block.mlp.b_in, "mlp_out": block.mlp.b_out, "attn_o": block.attn.b_O}[site.kind]


def taken_by(units: Any, model: Any, site: Site, h: torch.Tensor) -> torch.Tensor:
    """z of the site's input h (batch, pos, d_in)."""
    if isinstance(units, Factors):
        return h @ units.read
    if units.reads == "input":
        return units.coder.encode(h)
    return units.coder.encode(h @ host_of(model).weight(site) + host_bias(model, site))


def path_of(units: Any, model: Any, site: Site) -> torch.Tensor:
    """(unit, d_out): what one of each unit adds to the site's output."""
    if isinstance(units, Factors):
        return units.write
    written = units.coder.W_dec
    return written if units.writes == "output" else written @ host_of(model).weight(site)


def constant_of(units: Any, model: Any, site: Site) -> torch.Tensor:
    """(d_out,): the site's output where every unit is zero."""
    if isinstance(units, Factors) or units.name in ("vpd_recon_ci", "vpd_kl", "channels"):
        return host_bias(model, site)
    # Transcoders and SAEs have learned theirs; what a SAELens object adds is its b_dec.
    learned = units.coder.b_out if units.name == "transcoder" else units.coder.b_dec
    if units.writes == "input":
        return learned @ host_of(model).weight(site) + host_bias(model, site)
    return learned


def read_edges_of(units: Any, model: Any, site: Site) -> list[int]:
    """The nonzeros that each unit reads, counted one by one."""
    if isinstance(units, Factors):
        read = units.read
    elif units.name == "channels":
        # A channel reads with the matrix before; its bias is one more edge of the paper's count.
        mlp = model.blocks[site.layer].mlp
        read = torch.cat([mlp.W_in, mlp.b_in[None]])
    else:
        read = units.coder.W_enc
    return [sum(value != 0 for value in column) for column in read.T.tolist()]


def write_edges_of(units: Any, site: Site) -> list[int]:
    """The nonzeros that each unit writes; through W, which is dense, each that writes at all writes every output."""
    rows = (units.write if isinstance(units, Factors) else units.coder.W_dec).tolist()
    written = [sum(value != 0 for value in row) for row in rows]
    if isinstance(units, Factors) or units.writes == "output":
        return written
    return [site.d_out if count else 0 for count in written]
