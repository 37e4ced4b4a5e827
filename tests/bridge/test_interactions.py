"""Interactions on a TransformerBridge: the same numbers as on a HookedTransformer, or as the formulas where there is none."""

import pytest
import torch

from swd_lens.analysis.interactions import unit_interactions, unit_overlap
from swd_lens.hosts import host_of
from tests import families

TOKENS = families.some_tokens(rows=3, pos=11)


def _factors(model, site):
    # Imported here: that module needs a HookedTransformer, which transformer_lens 4 does not have.
    from swd_lens.units.factors import Factors

    d_in, d_out = next((s.d_in, s.d_out) for s in host_of(model).sites() if s.name == site)
    generator = torch.Generator().manual_seed(1)
    read, write = (torch.randn(shape, generator=generator) for shape in ((d_in, 6), (6, d_out)))
    return {site: Factors(read * (read > 0.3), write * 0.3 * (write > 0.3))}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_gives_the_definition(name):
    model = families.bridge(name)
    host = host_of(model)
    kinds = {site.kind for site in host.sites() if site.layer == 1}
    kind = "mlp_gate" if "mlp_gate" in kinds else "mlp_in"
    site = f"blocks.1.{kind}"
    factors = _factors(model, site)
    found = unit_interactions(model, factors, site, TOKENS, batch_size=2, progress=False)
    act = {"gpt2": "tanh", "gemma2": "tanh", "pythia": "none", "bert": "none"}.get(name)
    f = torch.nn.functional.silu if act is None else lambda x: torch.nn.functional.gelu(x, approximate=act)
    z, pre, up = _seen(host, factors, site)
    write, weight = factors[site].write, host.weight(next(s for s in host.sites() if s.name == "blocks.1.mlp_out"))
    i, j = 0, 1
    ci, cj = (z[:, found.units[k], None].double() * write[found.units[k]].double() for k in (i, j))
    factor = 1 if up is None else up.double()
    h = pre.double()
    q = ((f(h) - f(h - ci) - f(h - cj) + f(h - ci - cj)) * factor) @ weight.double()
    m = [((f(h) - f(h - c)) * factor) @ weight.double() for c in (ci, cj)]
    size = [x.square().sum().sqrt() for x in (q, *m)]
    assert float(found.ratio[i, j]) == pytest.approx(float(size[0] / (size[1] * size[2]) ** 0.5), rel=2e-4, abs=1e-6)


def _seen(host, factors, site):
    from swd_lens.units import attach

    at = {one.name: one for one in host.sites()}
    watched = [at[site]] + ([at["blocks.1.mlp_in"]] if site.endswith("mlp_gate") else [])
    outputs, units = {}, {}
    with attach(host.model, factors), torch.no_grad():
        hooks = [(at[site].hook_name, lambda z, hook: units.update(z=z))]
        with host.model.hooks(fwd_hooks=hooks), host.outputs(watched, lambda one, y: outputs.update({one.name: y})):
            host.run(TOKENS)
    flat = [outputs[one.name].flatten(0, 1) for one in watched]
    return units["z"].flatten(0, 1), flat[0], flat[1] if len(flat) > 1 else None


def test_overlap_on_a_bridge():
    model = families.bridge("gpt2")
    factors = _factors(model, "blocks.1.mlp_out")
    found = unit_overlap(model, factors, "blocks.1.mlp_out", TOKENS, batch_size=2, progress=False)
    z, _, _ = _seen(host_of(model), factors, "blocks.1.mlp_out")
    torch.testing.assert_close(found.read_correlation, torch.corrcoef(z.double().T), rtol=1e-5, atol=1e-6)
