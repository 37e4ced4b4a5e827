"""Overlap of units: every measure against its definition written out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swd_lens.analysis.interactions import unit_overlap
from swd_lens.base.errors import TokenError
from swd_lens.hosts import host_of
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests.analysis.interaction_checks import sparse_factors
from tests.micro import random_tokens, toy_model
from tests.refusals import refuses

SITE = "blocks.1.mlp_out"
TOKENS = random_tokens(5, 7)


def z_of(model, factors, site) -> torch.Tensor:
    layer, kind = site.split(".")[1:]
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    return cache[f"blocks.{layer}.hook_{kind}_unit"].flatten(0, 1).double()


@pytest.mark.parametrize("site", [SITE, "blocks.1.mlp_in", "blocks.1.attn_qkv", "blocks.1.attn_o"])
def test_all_three_measures_are_their_definitions(site):
    model = toy_model()
    factors = {site: sparse_factors(model, site)}
    stream = TokenStream(lambda: iter(TOKENS), len(TOKENS))
    found = unit_overlap(model, factors, site, stream, batch_size=2, progress=False)
    z, write = z_of(model, factors, site), factors[site].write.double()
    torch.testing.assert_close(found.read_correlation, torch.corrcoef(z.T), rtol=1e-5, atol=1e-6)
    # The whole contributions, centred and flattened over tokens and coordinates.
    contributions = ((z - z.mean(0))[:, :, None] * write).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.contribution_correlation, torch.corrcoef(contributions), rtol=1e-5, atol=1e-6)
    cosine = torch.nn.functional.cosine_similarity(write[:, None], write[None], dim=-1)
    torch.testing.assert_close(found.write_cosine, cosine, rtol=1e-9, atol=1e-12)
    energy = z.var(0, correction=0) * write.square().sum(1)
    torch.testing.assert_close(found.energy, energy, rtol=1e-5, atol=1e-9)
    assert found.top_units().tolist() == energy.argsort(descending=True).tolist()


def test_table_and_pairs_are_over_every_pair_once():
    model = toy_model()
    found = unit_overlap(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, shown=5, progress=False)
    values = found.contribution_correlation.numpy()[np.triu_indices(12, 1)]
    row = found.table().set_index("|measure|").loc["contribution correlation"]
    assert row["95th"] == np.percentile(np.abs(values), 95) and row["max"] == np.abs(values).max()
    assert found.n_pairs == 66 and len(found.top_units()) == 5
    pairs = found.pairs(4)
    assert list(np.abs(pairs["contribution correlation"])) == sorted(np.abs(values), reverse=True)[:4]
    product = pairs["read correlation"] * pairs["write cosine"]
    assert list(product) == pytest.approx(list(pairs["contribution correlation"]))
    bars = found.plot_tail(4).axes[1]
    assert [bar.get_width() for bar in bars.patches] == list(pairs["contribution correlation"])
    assert len(found.plot().axes) == 7 and "<svg" in found._repr_html_() and "66 pairs" in repr(found)


def test_undefined_correlations_are_counted_and_said():
    """Unit 2 is constant: it reads the mean that LayerNorm leaves, which is the norm's bias summed; unit 3 writes nothing."""
    model = toy_model()
    site = "blocks.1.mlp_in"
    with torch.no_grad():
        model.blocks[1].ln2.w.fill_(1)
    whole = sparse_factors(model, site)
    read, write = whole.read.clone(), whole.write.clone()
    read[:, 2], write[3] = 1.0, 0
    factors = Factors(read, write)
    found = unit_overlap(model, {site: factors}, site, TOKENS, progress=False)
    assert found.constant == (2,) and found.no_edges == (3,)
    assert found.read_correlation[2].isnan().all() and found.contribution_correlation[:, 3].isnan().all()
    assert found.n_pairs == 45 and not np.isnan(found.values(found.contribution_correlation)).any()
    assert "left out: 1 without edges, 1 constant on these tokens" in repr(found)
    assert not {2, 3} & set(found.top_units().tolist()) and found.plot() and found.plot_tail()


def test_a_large_mean_does_not_eat_the_variance():
    model = toy_model()
    factors = {SITE: sparse_factors(model, SITE)}
    found = unit_overlap(model, factors, SITE, TOKENS, progress=False)
    with model.hooks(fwd_hooks=[("blocks.1.mlp.hook_post", lambda post, hook: post + 1000.0)]):
        moved = unit_overlap(model, factors, SITE, TOKENS, progress=False)
    # float32 z of size 1e3 know their last digits to 1e-4.
    torch.testing.assert_close(moved.read_correlation, found.read_correlation, rtol=0, atol=5e-3)


def test_errors_say_what_to_do():
    model = toy_model()
    factors = {SITE: sparse_factors(model, SITE)}
    refuses(TokenError, "got 1 token; a correlation needs at least 2 positions", unit_overlap, model, factors, SITE, [[3]])
    refuses(ValueError, "same z on all 2 tokens", unit_overlap, model, factors, SITE, [[3], [3]], progress=False)
    with pytest.raises(ValueError, match=r"hold nothing for blocks\.0\.mlp_out"):
        unit_overlap(model, factors, "blocks.0.mlp_out", TOKENS, progress=False)
    coder = {SITE: SimpleNamespace(encode=lambda h: h.relu(), decode=lambda z: z[..., :16])}
    refuses(ValueError, "which shows no write vectors", unit_overlap, model, coder, SITE, TOKENS, progress=False)
    broken = Factors(torch.full((32, 2), 1e38), torch.ones(2, 16))
    refuses(ValueError, "not finite", unit_overlap, model, {SITE: broken}, SITE, TOKENS, progress=False)
    assert not host_of(model).is_swapped(host_of(model).sites()[-1])
