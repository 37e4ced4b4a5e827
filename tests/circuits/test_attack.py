"""attack: by arithmetic on the micro model, its gradient against differences, its guarantees and its null on a toy."""

import pandas as pd
import pytest
import torch
from scipy.stats import kstest

import swd_lens as swd
from swd_lens.circuits import Circuit, attribute, evaluate_circuits
from swd_lens.circuits.attack import Adversary, Attack, attack, deal, in_ranking, partial_masks, project, valid_in_ranking
from swd_lens.circuits.interventions import InterventionRunner
from swd_lens.circuits.null import ROUNDING
from swd_lens.hosts import host_of
from swd_lens.tasks.task import Task
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests.circuits.slow import able_split, carried_by
from tests.circuits.worked import kept
from tests.contract import UNIT_SOURCES, swd_zero_data
from tests.forwards import block_runs
from tests.micro import micro_model, random_split, split_of, toy_model

SITE = "blocks.0.mlp_out"
# W_out writes 3 z0 - z1 into the margin "token 1 over token 0"; z of the test prompt is (4, 6), means are (2, 3):
#   full 12 - 6 = 6, empty 6 - 3 = 3;   circuit {0}: 12 - 3 = 9, with a of unit 1 restored 9 - 3 a
WRITE = torch.tensor([[1.0, 4.0], [4.0, 3.0]])
TRAIN = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
TEST = split_of([[2]], [[1]], [[0]], d_vocab=3, name="test")


@pytest.fixture
def micro():
    model = micro_model()
    with torch.no_grad():
        model.blocks[0].mlp.W_out.copy_(WRITE)
    factors = {SITE: Factors(torch.eye(2), WRITE.clone(), weight=WRITE.clone())}
    return model, factors, Task("by hand", TRAIN, TEST, TEST, "by hand", False), attribute(model, factors, TRAIN)


def test_the_worst_restoration_by_hand(micro, tmp_path):
    model, factors, task, scores = micro
    circuit = Circuit.of(factors, scores, [f"{SITE}/0"])
    found = swd.attack(model, factors, task, circuit, budget=[1, 0.5, 0], n=3)
    assert found.q_full == pytest.approx(6) and found.q_empty == pytest.approx(3) and found.outside == 1
    assert found.own == pytest.approx(2.0)
    assert [found.recovered_at(b) for b in found.budgets] == pytest.approx([2.0, 1.5, 1.0])
    assert found.shares[["budget", "unit"]].values.tolist() == [[0.5, f"{SITE}/1"], [1.0, f"{SITE}/1"]]
    assert found.shares["share"].tolist() == pytest.approx([0.5, 1.0], abs=1e-6)
    # There is one unit to deal the shares to: random restorations are the adversary's.
    assert found.table()["as low"].tolist() == [3, 3, 3] and found.p == 1.0
    assert "recover 200% of by hand, and 100% where up to 1 of the 1 outside" in repr(found)
    pd.testing.assert_frame_equal(kept(found, tmp_path).shares, found.shares)
    # Where restoring helps, the adversary restores nothing.
    found = swd.attack(model, factors, task, Circuit.of(factors, scores, [f"{SITE}/1"]), n=2)
    assert found.own == found.recovered == pytest.approx(-1.0) and found.shares.empty and found.p == 1.0


def test_a_task_that_is_not_carried_has_a_sentence(micro):
    model, factors, _, scores = micro
    wrong = split_of([[2]], [[0]], [[1]], d_vocab=3, name="test")
    with pytest.warns(swd.errors.UndefinedSufficiencyWarning):
        found = swd.attack(model, factors, wrong, Circuit.of(factors, scores, [f"{SITE}/0"]), n=2)
    assert "does not carry by hand" in repr(found) and "%" not in repr(found)
    assert pd.isna(found.recovered) and pd.isna(found.p) and pd.isna(found.own)
    assert found.table()[["recovered", "under attack", "p"]].isna().all(axis=None) and len(found.plot().axes) == 1


def test_what_is_refused(micro):
    model, factors, task, scores = micro
    circuit = Circuit.of(factors, scores, [f"{SITE}/0"])
    for how, message in (
        ({"budget": 1.5}, "budget, a share of the outside units, must be a number from 0 to 1, got 1.5"),
        ({"budget": []}, "budget= names nothing"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            swd.attack(model, factors, task, circuit, **how)
    with pytest.raises(ValueError, match="the circuit has all 2 units that read and write"):
        swd.attack(model, factors, task, Circuit.of(factors, scores, scores.ranking()))


def test_a_projection_is_the_nearest_point_that_is_allowed():
    generator = torch.Generator().manual_seed(0)
    for most in (0.0, 0.7, 2.0, 9.0):
        given = torch.randn(5, 6, generator=generator, dtype=torch.float64) * 2
        limit = torch.full((5,), most, dtype=torch.float64)
        nearest = project(given, limit)
        assert bool((nearest >= 0).all() and (nearest <= 1).all() and (nearest.sum(1) <= most + 1e-9).all())
        distance = (nearest - given).norm(dim=1)
        for _ in range(300):  # no allowed point is nearer
            other = torch.rand(5, 6, generator=generator, dtype=torch.float64)
            other = other * (limit / other.sum(1)).clamp(max=1)[:, None]
            assert bool((distance <= (other - given).norm(dim=1) + 1e-9).all())
            along = nearest + 0.01 * (other - nearest)
            assert bool((distance <= (along - given).norm(dim=1) + 1e-9).all())


def test_dealt_shares_are_the_same_shares():
    may = torch.tensor([False, True, True, False, True, True])
    shares = torch.tensor([0.0, 0.5, 0.0, 0.0, 1.0, 0.25])
    dealt = deal(shares, may, 40, seed=0)
    assert all(sorted(each.tolist()) == sorted(shares.tolist()) and not bool(each[~may].any()) for each in dealt)
    assert {tuple(each.tolist()) for each in dealt}.__len__() > 10


@pytest.fixture(scope="module")
def toy():
    model = toy_model()
    factors = swd_zero_data(model, ["blocks.0.attn_o", "blocks.1.mlp_out"])
    others = [random_split(12, seed=seed, name=name) for name, seed in (("validation", 6), ("test", 5))]
    scores = attribute(model, factors, random_split(12))
    others = [carried_by(model, factors, scores, split) for split in others]
    return model, factors, Task("toy", random_split(12), *others, "random", False), scores


def prefix_of(toy, n: int) -> Circuit:
    return Circuit.of(toy[1], toy[3], toy[3].ranking()[:n])


def test_an_interrupted_call_goes_on_where_it_was(toy, tmp_path, monkeypatch):
    """Stopped in the descent: finished steps are not made again, and the result is the whole call's."""
    model, factors, task, _ = toy
    how = {"budget": [0.1, 0.3], "steps": 5, "starts": 2, "n": 3}
    whole, made = swd.attack(model, factors, task, prefix_of(toy, 4), **how), []
    step = Adversary._step
    weights = {name: p.clone() for name, p in model.named_parameters()}

    def stopped(self, number, *rest):
        if number == 3 and 3 not in made:
            made.append(number)
            raise KeyboardInterrupt
        made.append(number)
        return step(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Adversary, "_step", stopped)
        with pytest.raises(KeyboardInterrupt, match=r"attack was interrupted, 3 of 6 steps of the adversary finished"):
            swd.attack(model, factors, task, prefix_of(toy, 4), **how, out=tmp_path)
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        assert not any(hook.fwd_hooks for hook in model.hook_dict.values())
        done = swd.attack(model, factors, task, prefix_of(toy, 4), **how, out=tmp_path)
        assert made == [0, 1, 2, 3, 3, 4, 5]
        again = swd.attack(model, factors, task, prefix_of(toy, 4), **how, out=tmp_path)
        assert len(made) == 7
    for found in (done, again, Attack.load(tmp_path / "attack.json")):
        pd.testing.assert_frame_equal(found.rows, whole.rows)
        pd.testing.assert_frame_equal(found.shares, whole.shares)
    with pytest.raises(swd.errors.ResumeError, match="units of the circuit"):
        swd.attack(model, factors, task, prefix_of(toy, 5), **how, out=tmp_path)
    other = swd.attack(model, factors, task, prefix_of(toy, 5), **how, out=tmp_path, overwrite=True)
    assert other.units == 5


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("positions", "ablation"), [("scoring", "mean"), ("all", "zero"), ("all", "resample")])
def test_the_gradient_is_that_of_differences(positions, ablation):
    model = toy_model().double()
    factors = swd_zero_data(model, ["blocks.0.mlp_out", "blocks.1.attn_o", "blocks.1.mlp_out"])
    split = able_split(5)
    scores = attribute(model, factors, split, positions=positions)
    with attach(model, factors) as attachment:
        runner = InterventionRunner(host_of(model), attachment, split, scores, ablation, tokens_per_forward=24)
        generator = torch.Generator().manual_seed(0)
        shares = torch.rand(3, scores.n_units, generator=generator)
        kept = torch.rand(3, scores.n_units, generator=generator) < 0.3
        masks = partial_masks(scores, kept, shares)
        margins, gradients = runner.gradients(lambda rows: {site: mask[rows] for site, mask in masks.items()}, 3)
        plain, _ = runner.run(3, lambda rows: {site: mask[rows] for site, mask in masks.items()})
        assert torch.allclose(margins, plain.margins, atol=1e-6)
        for site in scores.scores:
            for unit in (0, 3):
                step = 1e-3
                moved = [
                    {s: m.double() + d * (s == site) * torch.eye(m.shape[1])[unit] for s, m in masks.items()}
                    for d in (step, -step)
                ]
                up, down = (runner.run(3, lambda rows, m=m: {s: of[rows] for s, of in m.items()})[0].q for m in moved)
                assert torch.allclose(gradients[site][:, unit], (up - down) / (2 * step), atol=2e-4)
    assert not any(p.requires_grad is False for p in model.parameters())


def test_whole_restorations_are_the_circuits_runs_to_the_bit(toy):
    model, factors, task, scores = toy
    kept = torch.rand(4, scores.n_units, generator=torch.Generator().manual_seed(0)) < 0.5
    masks = {site: ~kept[:, ranks - 1] for site, ranks in scores.ranks().items()}
    partly = partial_masks(scores, torch.zeros_like(kept), kept.double())
    with attach(model, factors) as attachment:
        runner = InterventionRunner(host_of(model), attachment, task.test, scores, "mean")
        whole, part = (runner.run(4, lambda rows, m=m: {s: of[rows] for s, of in m.items()})[0] for m in (masks, partly))
    assert torch.equal(whole.margins, part.margins)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ablation", ["mean", "zero"])
def test_it_never_recovers_more_than_the_circuit_and_as_much_without_a_budget(toy, ablation):
    model, factors, task, _ = toy
    for n_units in (2, 8):
        circuit = prefix_of(toy, n_units)
        own = evaluate_circuits(model, factors, task, circuit, ablation=ablation).iloc[0]["recovered"]
        found = attack(model, factors, task, circuit, budget=[0, 0.02, 0.2, 1], n=3, steps=4, starts=2, ablation=ablation)
        values = [found.recovered_at(budget) for budget in found.budgets]
        assert found.own == pytest.approx(own, abs=1e-5)
        assert values[0] == pytest.approx(own, abs=1e-5)
        assert values == sorted(values, reverse=True)
        restored = found.rows[found.rows["run"] != "circuit"]
        assert (restored["restored"] <= restored["budget"] + 1e-9).all()
    favoured = attack(model, factors, task.validation, circuit, budget=0.2, n=9, steps=6, starts=2, ablation=ablation)
    assert favoured.recovered < favoured.own - 0.05 and favoured.p == 0.1


def test_it_finds_the_worst_there_is_where_effects_add_up(toy):
    """The last layer's mlp_out writes to the stream that is unembedded: without a norm margins are linear in what is restored."""
    model = toy_model(normalization_type=None)
    factors = swd_zero_data(model, "blocks.1.mlp_out")
    split = able_split(9)
    scores = attribute(model, factors, split)
    circuit = Circuit.of(factors, scores, scores.ranking()[:5])
    inside, valid = in_ranking(scores, circuit), valid_in_ranking(scores, circuit.edges)
    with attach(model, factors) as attachment:
        runner = InterventionRunner(host_of(model), attachment, split, scores, "mean", keep=True)
        ones = torch.eye(len(inside))[valid & ~inside]
        sets = inside.expand(1 + len(ones), -1)
        given = torch.cat([torch.zeros(1, len(inside)), ones])
        q = runner.run(len(given), lambda rows: partial_masks(scores, sets[rows], given[rows]))[0].q
        effects = (q[1:] - q[0]).sort().values
        for budget in (0.1, 0.5):
            (found,) = Adversary(runner, scores, valid).worst(inside, [budget])
            (lowest,) = runner.run(1, lambda rows, f=found: partial_masks(scores, inside[None], f[None]))[0].q
            most = budget * len(ones)
            whole = int(most)
            best = float(effects[:whole].clamp(max=0).sum() + (most - whole) * effects[whole].clamp(max=0))
            assert best < -0.1
            assert float(lowest - q[0]) == pytest.approx(best, rel=0.02)


def test_what_comes_before_the_first_replaced_layer_is_run_once(toy):
    model, _, task, _ = toy
    factors = swd_zero_data(model, "blocks.1.mlp_out")
    scores = attribute(model, factors, task)
    circuit = Circuit.of(factors, scores, scores.ranking()[:4])
    counts = []
    for steps, n in ((1, 1), (9, 9)):
        with block_runs(model, 0) as runs:
            attack(model, factors, task, circuit, n=n, steps=steps)
        counts.append(runs.rows)
    assert counts[0] == counts[1]


def test_units_of_a_transcoder():
    model, split = toy_model(), able_split(9)
    units = UNIT_SOURCES["transcoder"](model, "blocks.1.mlp_out")
    scores = attribute(model, units, split)
    curve = swd.evaluate(model, units, split, scores, random_sets=0)
    found = attack(model, units, split, curve.circuit(4), n=2, steps=4, budget=[0, 0.2])
    q = found.rows.set_index("run")["q keep"]
    assert q["circuit"] == pytest.approx(curve.rows.set_index("units").loc[4, "q keep"], abs=1e-5)
    # Judged on the prompts that it was fitted on, the adversary is never above the circuit.
    without, with_budget = q["adversary"]
    assert without == pytest.approx(q["circuit"], abs=1e-5) and with_budget < q["circuit"] - 1e-3


def blind(monkeypatch, generator: torch.Generator) -> None:
    """An adversary that has learned nothing: a few units, restored to shares by chance."""

    def worst(self: Adversary, kept, budgets):
        may = self.valid & ~kept
        drawn = torch.rand(1, len(kept), generator=generator, dtype=torch.float64) ** 4
        return project(drawn * may, torch.tensor([budgets[0] * int(may.sum())], dtype=torch.float64))

    monkeypatch.setattr(Adversary, "worst", worst)


def unbound(found: Attack, generator: torch.Generator) -> float:
    """p with ties broken at random."""
    low = float(found._run("adversary")["q keep"].iloc[0])
    values, tolerance = found._run("random")["q keep"], ROUNDING * abs(found.q_full)
    lower = int((values < low - tolerance).sum())
    tied = found._as_low(found.budgets[0]) - lower
    return (lower + float(torch.rand(1, generator=generator)) * (1 + tied)) / (1 + len(values))


@pytest.mark.slow
def test_p_is_uniform_on_the_embedded_model(default_model, monkeypatch):
    """200 adversaries that learned nothing, on neurons of the last MLP."""
    factors = swd.baselines.neurons(default_model, "blocks.3.mlp_out")
    task = swd.load_task("gendered_pronoun", default_model, n_train=200, n_validation=20, n_test=24)
    scores = swd.attribute(default_model, factors, task)
    generator, p, dense = torch.Generator().manual_seed(1), [], swd.circuits.dense_cache.DenseCache()
    blind(monkeypatch, generator)
    circuit = Circuit.of(factors, scores, scores.ranking()[:8])
    for draw in range(200):
        found = attack(default_model, factors, task, circuit, n=19, seed=100 * draw, max_prompts=1, dense=dense)
        p.append(unbound(found, generator))
    assert kstest(p, "uniform").pvalue > 0.01
    assert sum(each <= 0.05 for each in p) <= 22  # .05 of 200, give or take 2 * 3.1, twice
