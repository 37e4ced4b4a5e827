"""Pair interactions through the activation, against the paper's formulas written out in float64."""

import json

import pytest
import torch
from transformer_lens import HookedTransformer

from swd_lens import baselines
from swd_lens.analysis.interactions import UnitInteractions, difference, unit_interactions
from swd_lens.base.errors import TokenError, UnsupportedHostError
from swd_lens.hosts import host_of
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from swd_lens.units.integrity import Offsets
from tests.micro import micro_model, random_tokens, toy_model

SITE = "blocks.1.mlp_in"
TOKENS = random_tokens(5, 7)


def sparse_factors(model, site: str, n_units: int = 12, density: float = 0.4, seed: int = 0) -> Factors:
    """Random sparse factors of the right shape; how well they stand for W does not matter here."""
    d_in, d_out = next((s.d_in, s.d_out) for s in host_of(model).sites() if s.name == site)
    generator = torch.Generator().manual_seed(seed)
    read, write = (
        torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)
        for shape in ((d_in, n_units), (n_units, d_out))
    )
    return Factors(read, write * 0.4)


def by_definition(f, z, pre, write, weight, up=None):
    """R, RMS of q and RMS of m in float64, every token, channel and pair written out."""
    z, pre, write, weight = (t.detach().double() for t in (z, pre, write, weight))
    factor = torch.ones_like(pre) if up is None else up.double()
    c = z[:, :, None] * write  # (token, unit, d_mlp)
    n = len(write)
    q, m = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        m[i] = (((f(pre) - f(pre - c[:, i])) * factor) @ weight).square().sum()
        for j in range(n):
            if i != j:
                delta = f(pre) - f(pre - c[:, i]) - f(pre - c[:, j]) + f(pre - c[:, i] - c[:, j])
                q[i, j] = ((delta * factor) @ weight).square().sum()
    return (q.sqrt() / (m[:, None] * m).pow(0.25)).fill_diagonal_(torch.nan), (q / len(z)).sqrt(), (m / len(z)).sqrt()


def gelu_new(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu_new": gelu_new,
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "relu": lambda x: x.clamp_min(0),
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu_fast": gelu_new,
    "relu2": lambda x: x.clamp_min(0) ** 2,
}


def check(found, f, cache, layer: int, factors: Factors, weight, site_kind: str, up=None):
    z = cache[f"blocks.{layer}.hook_{site_kind}_unit"].flatten(0, 1)
    pre = cache[f"blocks.{layer}.mlp.hook_pre"].flatten(0, 1)
    units = list(found.units)
    ratio, q, m = by_definition(f, z[:, units], pre, factors.write[units], weight, up)
    torch.testing.assert_close(found.interaction_rms, q, rtol=1e-4, atol=1e-5 * float(q.max()))
    torch.testing.assert_close(found.marginal_rms, m, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.ratio, ratio, rtol=1e-4, atol=1e-5, equal_nan=True)
    energy = z.double().square().mean(0) * (factors.write.double() @ weight.detach().double()).square().sum(1)
    assert units == energy.argsort(descending=True)[: len(units)].tolist()
    torch.testing.assert_close(found.energy, energy[units], rtol=1e-5, atol=0)


@pytest.mark.parametrize("act_fn", ACTIVATIONS)
@pytest.mark.parametrize("density", [0.3, 1.0])  # common channels fewer than d_model, and more
def test_it_is_the_papers_definition(act_fn, density):
    model = toy_model(act_fn=act_fn)
    # A lower layer is replaced as well, as in the paper.
    factors = {
        site: sparse_factors(model, site, density=density, seed=i) for i, site in enumerate(("blocks.0.mlp_in", SITE))
    }
    found = unit_interactions(model, factors, SITE, TOKENS, top=8, batch_size=2, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    check(found, ACTIVATIONS[act_fn], cache, 1, factors[SITE], model.blocks[1].mlp.W_out, "mlp_in")
    assert found.n_pairs == 28 and found.settings["tokens"] == 35


def test_in_a_gated_mlp_the_gates_units_are_taken_out_and_the_other_branch_is_held():
    model = toy_model(act_fn="silu", gated_mlp=True)
    factors = {"blocks.1.mlp_gate": sparse_factors(model, "blocks.1.mlp_gate")}
    found = unit_interactions(model, factors, "blocks.1.mlp_gate", TOKENS, top=6, batch_size=2, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    up = cache["blocks.1.mlp.hook_pre_linear"].flatten(0, 1)
    weight = model.blocks[1].mlp.W_out
    check(found, ACTIVATIONS["silu"], cache, 1, factors["blocks.1.mlp_gate"], weight, "mlp_gate", up)
    with pytest.raises(
        ValueError, match=r"is gated: units of blocks\.1\.mlp_in enter .* linearly.*blocks\.1\.mlp_gate"
    ):
        unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS)


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


GATE = "blocks.1.mlp_gate"


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


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_gate_x_up_is_the_mixed_difference_of_the_product(density, monkeypatch):
    model = toy_model(act_fn="silu", gated_mlp=True)
    factors = {site: sparse_factors(model, site, density=density, seed=i) for i, site in enumerate((GATE, SITE))}
    monkeypatch.setattr(difference, "_LONGEST_BLOCK", 3)
    found = unit_interactions(model, factors, "blocks.1.mlp_[gi]*", TOKENS, top=5, batch_size=2, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    seen = [cache[f"blocks.1.{name}"].flatten(0, 1).double() for name in ("mlp.hook_pre", "mlp.hook_pre_linear")]
    weight, f, (g, u) = model.blocks[1].mlp.W_out.detach().double(), ACTIVATIONS["silu"], seen
    taken = []
    for kind, units in (("mlp_gate", found.units), ("mlp_in", found.up.units)):
        z = cache[f"blocks.1.hook_{kind}_unit"].flatten(0, 1).double()
        taken.append([z[:, i, None] * factors[f"blocks.1.{kind}"].write[i].double() for i in units])

    def rms(delta):
        return float((delta @ weight).square().sum(1).mean().sqrt())

    for i, c in enumerate(taken[0]):
        assert float(found.marginal_rms[i]) == pytest.approx(rms(f(g) * u - f(g - c) * u), rel=1e-4)
        for j, d in enumerate(taken[1]):
            q = f(g) * u - f(g - c) * u - f(g) * (u - d) + f(g - c) * (u - d)
            assert float(found.interaction_rms[i, j]) == pytest.approx(rms(q), rel=1e-4, abs=1e-6)
            assert float(found.up.marginal_rms[j]) == pytest.approx(rms(f(g) * u - f(g) * (u - d)), rel=1e-4)
    alone = unit_interactions(model, factors, GATE, TOKENS, top=5, batch_size=2, progress=False)
    assert alone.up is None and alone.units == found.units
    torch.testing.assert_close(alone.marginal_rms, found.marginal_rms, rtol=1e-6, atol=0)


def test_gate_x_up_wants_factors_of_both_and_one_layer():
    model = toy_model(act_fn="silu", gated_mlp=True)
    factors = {GATE: sparse_factors(model, GATE)}
    with pytest.raises(ValueError, match=r"hold nothing for blocks\.1\.mlp_in"):
        unit_interactions(model, factors, [GATE, SITE], TOKENS, progress=False)
    with pytest.raises(ValueError, match="names 2 sites"):
        unit_interactions(model, factors, [GATE, "blocks.0.mlp_in"], TOKENS, progress=False)


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


def test_pairs_table_and_figures_say_the_same():
    model = toy_model()
    found = unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)
    pairs, row = found.pairs(3), found.table().iloc[0]
    best = pairs.iloc[0]
    assert best["R"] == row["max"] == found.values().max()
    scale = (best["marginal RMS"] * best["other's marginal RMS"]) ** 0.5
    assert best["R"] == pytest.approx(
        best["interaction RMS"] / scale
    )  # as the paper's 2.096 / sqrt(11.127 x 8.089) = .221
    assert list(pairs["R"]) == sorted(found.values(), reverse=True)[:3]
    assert row["R >= 0.10"] == sum(found.values() >= 0.1)
    bars = found.plot_pairs(3).axes[0]
    assert [bar.get_width() for bar in bars.patches] == list(pairs["R"])
    assert bars.get_yticklabels()[0].get_text() == " – ".join(
        best[name].split("/")[1] for name in ("unit", "other unit")
    )
    assert len(found.plot().axes) == 3 and "<svg" in found._repr_html_()


def test_the_host_is_as_before_also_after_an_interruption(monkeypatch):
    model = toy_model()
    factors = {SITE: sparse_factors(model, SITE)}
    with torch.no_grad():
        before = model(TOKENS)
    names = set(model.hook_dict)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(difference.PairSums, "_squared", stop)
    with pytest.raises(KeyboardInterrupt):
        unit_interactions(model, factors, SITE, TOKENS, progress=False)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), before)
    assert set(model.hook_dict) == names and not any(hook.fwd_hooks for hook in model.hook_dict.values())


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


@pytest.mark.parametrize("act_fn", ["solu", "solu_ln"])
def test_an_activation_that_mixes_channels_is_refused(act_fn):
    model = toy_model(act_fn=act_fn)
    with pytest.raises(UnsupportedHostError, match="activation that acts on each channel by itself"):
        unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)


def test_a_step_behind_the_activation_is_refused():
    model = toy_model()
    model.add_hook("blocks.1.mlp.hook_post", lambda post, hook: 2 * post)
    with pytest.raises(UnsupportedHostError, match="another step stands there"):
        unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)


def test_errors_say_what_to_do():
    model = toy_model()
    factors = {SITE: sparse_factors(model, SITE)}
    with pytest.raises(ValueError, match=r"summed after the activation.*unit_overlap"):
        unit_interactions(model, factors, "blocks.1.mlp_out", TOKENS)
    with pytest.raises(ValueError, match=r"hold nothing for blocks\.0\.mlp_in; they are for blocks\.1\.mlp_in"):
        unit_interactions(model, factors, "blocks.0.mlp_in", TOKENS, progress=False)
    with pytest.raises(ValueError, match="names 2 sites"):
        unit_interactions(model, factors, "mlp_in", TOKENS)
    for batch_size in (0, -1, True):
        with pytest.raises(ValueError, match=f"batch_size={batch_size}: give how many rows"):
            unit_interactions(model, factors, SITE, TOKENS, batch_size=batch_size)
    with pytest.raises(ValueError, match=r"top must be .* got 1"):
        unit_interactions(model, factors, SITE, TOKENS, top=1)
    one = Factors(torch.randn(16, 3), torch.eye(3, 32) * torch.tensor([[1.0], [0.0], [0.0]]))
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp_in has 1 valid units"):
        unit_interactions(model, {SITE: one}, SITE, TOKENS, progress=False)
    with pytest.raises(TokenError):
        unit_interactions(model, factors, SITE, torch.zeros(0, 3, dtype=torch.int64))


def test_units_without_edges_are_never_paired():
    model = toy_model()
    whole = sparse_factors(model, SITE)
    read, write = whole.read.clone(), whole.write.clone()
    write[3], read[:, 5] = 0, 0
    factors = Factors(read, write)
    # Transported factors add constants to z: unit 5 has the most energy, and no read edge.
    constants = Offsets(torch.zeros(12).index_fill(0, torch.tensor([5]), 50.0), torch.zeros(32))
    moved = Factors(factors.read, factors.write, offsets=constants)
    for some in (factors, moved):
        found = unit_interactions(model, {SITE: some}, SITE, TOKENS, progress=False)
        assert sorted(found.units) == [i for i in range(12) if i not in (3, 5)]


def test_a_float64_host_gives_float64_sums():
    model: HookedTransformer = toy_model().double()
    model.cfg.dtype = torch.float64
    factors = {SITE: sparse_factors(model, SITE)}
    found = unit_interactions(model, factors, SITE, TOKENS, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    units = list(found.units)
    z, pre = (cache[name].flatten(0, 1) for name in ("blocks.1.hook_mlp_in_unit", "blocks.1.mlp.hook_pre"))
    ratio, _, _ = by_definition(
        gelu_new, z[:, units], pre, factors[SITE].write[units], model.blocks[1].mlp.W_out.float()
    )
    torch.testing.assert_close(found.ratio, ratio, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_the_site_may_be_attached_with_other_baselines():
    model = toy_model()
    found = unit_interactions(model, baselines.svd(model, SITE), SITE, TOKENS, top=4, progress=False)
    assert len(found.units) == 4 and found.settings["attached"] == [SITE]


def test_units_that_share_no_channel_do_not_interact_at_all():
    model = toy_model()
    factors = Factors(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.eye(4, 32))
    found = unit_interactions(model, {SITE: factors}, SITE, TOKENS, progress=False)
    assert found.n_pairs == 6 and found.values().tolist() == [0.0] * 6
