"""Second differences: pairs on paper, blocks and threads, interruptions."""

import json

import pytest
import torch
from transformer_lens import HookedTransformer

from swd_lens.analysis.interactions import UnitInteractions, difference, unit_interactions
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests.analysis.interaction_checks import TOKENS, by_definition, gelu_new, sparse_factors
from tests.micro import micro_model, toy_model

SITE = "blocks.1.mlp_in"


def test_a_pair_computed_on_paper():
    """micro_model, token 2: x = (1, 1). Units read (1, 0) and (0, 1), write (1, -2) and (0, 1): z = (1, 1), h = (1, -1).

    relu(h) = (1, 0); without unit 0: h = (0, 1) -> (0, 1); without unit 1: h = (1, -2) -> (1, 0); without both (0, 0).
    Delta = (1, 0) - (0, 1) - (1, 0) + (0, 0) = (0, -1), q = -(3, 4), |q| = 5 (W_out = [[1, 2], [3, 4]]).
    m_0 = ((1, 0) - (0, 1)) W = (-2, -2), |m_0| = sqrt(8); m_1 = (0, 0): unit 1 has no effect, and R is undefined.
    """
    factors = Factors(torch.eye(2), torch.tensor([[1.0, -2.0], [0.0, 1.0]]))
    found = unit_interactions(micro_model(), {"blocks.0.mlp_in": factors}, "mlp_in", [[2]], progress=False)
    assert found.units == (0, 1)  # energies |(1 - 6, 2 - 8)|^2 = 61 and |(3, 4)|^2 = 25
    assert found.energy.tolist() == [61, 25]
    assert found.interaction_rms.tolist() == [[0, 5], [5, 0]]
    assert found.marginal_rms.tolist() == pytest.approx([8**0.5, 0])
    assert found.silent == (1,) and found.n_pairs == 0 and found.ratio.isnan().all()
    assert "left out: 1 without any effect" in repr(found)
    assert found.table()["pairs"].item() == 0 and found.pairs().empty
    found.plot(), found.plot_pairs()


def test_a_pair_of_gate_and_up_computed_on_paper():
    """micro_model with a gate, token 2: x = (1, 1), so every z is 1.

    Gate units write (1, -2) and (0, 1): g = (1, -1), relu (1, 0). Up units write (2, 0) and (1, 3): u = (3, 3).
    f(g) - f(g - c_0) = (1, 0) - (0, 1) = (1, -1); without gate unit 1: (1, 0) - (1, 0) = 0. W_out = [[1, 2], [3, 4]].
    q_00 = (1, -1) * (2, 0) W = (2, 4); q_01 = (1, -3) W = (-8, -10); q_10 = q_11 = 0.
    Gate: m_0 = (3, -3) W = (-6, -6), m_1 = 0. Up: m_0 = (2, 0) W = (2, 4), m_1 = (1, 0) W = (1, 2).
    Energies: gate |(-5, -6)|^2 = 61 and |(3, 4)|^2 = 25, up |(2, 4)|^2 = 20 and |(10, 14)|^2 = 296: up unit 1 comes first.
    """
    model = micro_model(gated_mlp=True)
    gate, up = (Factors(torch.eye(2), torch.tensor(write)) for write in ([[1.0, -2], [0, 1]], [[2.0, 0], [1, 3]]))
    factors = {"blocks.0.mlp_gate": gate, "blocks.0.mlp_in": up}
    found = unit_interactions(model, factors, list(factors), [[2]], progress=False)
    assert found.units == (0, 1) and found.energy.tolist() == [61, 25]
    assert found.up.units == (1, 0) and found.up.energy.tolist() == [296, 20]
    torch.testing.assert_close(found.interaction_rms, torch.tensor([[164.0, 20.0], [0.0, 0.0]]).double().sqrt())
    assert found.marginal_rms.tolist() == pytest.approx([72**0.5, 0])
    assert found.up.marginal_rms.tolist() == pytest.approx([5**0.5, 20**0.5])
    assert found.silent == (1,) and found.up.silent == () and found.n_pairs == 2
    best = found.pairs(1).iloc[0]
    assert (best["unit"], best["other unit"]) == ("blocks.0.mlp_gate/0", "blocks.0.mlp_in/1")
    assert best["R"] == found.table()["max"].item() == pytest.approx((164 / (72 * 5) ** 0.5) ** 0.5)
    assert "blocks.0.mlp_gate x blocks.0.mlp_in, 2 pairs" in repr(found)
    again = UnitInteractions.from_dict(json.loads(json.dumps(found.as_dict())))
    assert again.up.units == (1, 0) and again.n_pairs == 2
    found.plot(), found.plot_pairs()


def test_neither_blocks_nor_batches_nor_threads_nor_a_stream_change_the_sums(monkeypatch):
    model, factors = toy_model().double(), {}  # in float32 the forward's own rounding would be what is compared
    factors[SITE] = sparse_factors(model, SITE)
    whole = unit_interactions(model, factors, SITE, TOKENS, batch_size=8, progress=False)
    monkeypatch.setattr(difference, "_LONGEST_BLOCK", 3)
    stream = TokenStream(lambda: iter(TOKENS), len(TOKENS))
    parts = unit_interactions(model, factors, SITE, stream, batch_size=2, progress=False)
    torch.testing.assert_close(parts.ratio, whole.ratio, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert parts.settings["tokens_sha256"] == whole.settings["tokens_sha256"]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threaded = unit_interactions(model, factors, SITE, stream, batch_size=2, progress=False)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(threaded.ratio, parts.ratio, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_the_sums_bits_do_not_depend_on_the_number_of_threads():
    """Wide enough that four threads would share W W^T, and round it otherwise."""
    generator = torch.Generator().manual_seed(0)
    write = torch.randn(3, 1024, generator=generator) * (torch.rand(3, 1024, generator=generator) < 0.2)
    weight, z, pre = (torch.randn(*shape, generator=generator) for shape in ((1024, 256), (300, 3), (300, 1024)))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3, 4):
            torch.set_num_threads(threads)
            sums = difference.PairSums(write, weight, torch.nn.functional.gelu, torch.float32)
            sums.add(z, pre, None)
            assert torch.get_num_threads() == threads
            found.append((sums.pairs, sums.marginals))
    finally:
        torch.set_num_threads(before)
    for pairs, marginals in found[1:]:
        assert torch.equal(pairs, found[0][0]) and torch.equal(marginals, found[0][1])


@pytest.mark.parametrize("twice", [False, True])
def test_torchs_threads_are_as_before_after_one_and_two_interruptions(monkeypatch, twice):
    """The second one hits while the first waits for its threads."""
    model = toy_model()

    def stop(*_):
        raise KeyboardInterrupt

    def shut(pool, **how):
        waited(pool, **how)
        raise KeyboardInterrupt

    waited = difference.ThreadPoolExecutor.shutdown
    monkeypatch.setattr(difference.PairSums, "_squared", stop)
    if twice:
        monkeypatch.setattr(difference.ThreadPoolExecutor, "shutdown", shut)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_float64_host_gives_float64_sums():
    model: HookedTransformer = toy_model().double()
    model.cfg.dtype = torch.float64
    factors = {SITE: sparse_factors(model, SITE)}
    found = unit_interactions(model, factors, SITE, TOKENS, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    units = list(found.units)
    z, pre = (cache[name].flatten(0, 1) for name in ("blocks.1.hook_mlp_in_unit", "blocks.1.mlp.hook_pre"))
    ratio, _, _ = by_definition(gelu_new, z[:, units], pre, factors[SITE].write[units], model.blocks[1].mlp.W_out.float())
    torch.testing.assert_close(found.ratio, ratio, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_units_that_share_no_channel_do_not_interact_at_all():
    model = toy_model()
    factors = Factors(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.eye(4, 32))
    found = unit_interactions(model, {SITE: factors}, SITE, TOKENS, progress=False)
    assert found.n_pairs == 6 and found.values().tolist() == [0.0] * 6
