"""Whether p-values of the null are uniform for random circuits, and whether refine's circuits hold on test prompts: simulated."""

import pytest
import torch
from scipy.stats import kstest

import swd_lens as swd
from swd_lens.circuits import Circuit, UnitScores
from swd_lens.circuits.null import _Pool
from swd_lens.hosts.embedded import load_default_model
from tests.benchmarks.calibration import p_values, random_circuits, refinements, uniformity

SITE = "blocks.3.mlp_out"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("match", ["edges", "score"])
def test_p_is_uniform_where_effects_follow_scores(match):
    """Without a model: what a circuit does is the sum of what its units do, which is nearly what their scores say."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(64, generator=generator) ** 4  # most units have hardly any
    edges = torch.randint(2, 40, (64,), generator=generator)
    effects = scores.double() + 0.05 * torch.randn(64, dtype=torch.float64, generator=generator)
    of_units = UnitScores({"a": scores}, {"a": torch.zeros(64)}, {})

    def done(units: tuple[tuple[str, int], ...]) -> float:
        return float(effects[[unit for _, unit in units]].sum())

    p = []
    for _ in range(150):
        members = torch.randperm(64, generator=generator)[:6].tolist()
        circuit = Circuit(tuple(("a", i) for i in members), of_units, {"a": edges})
        pool = _Pool.of(circuit, match)
        others = [done(pool.draw(generator)) for _ in range(9)]
        own = done(circuit.units)
        better, equal = sum(o > own + 1e-12 for o in others), sum(abs(o - own) <= 1e-12 for o in others)
        p.append((better + float(torch.rand(1, generator=generator)) * (1 + equal)) / 10)
    assert kstest(p, "uniform").pvalue > 0.01
    assert sum(each <= 0.1 for each in p) < 0.2 * len(p)


@pytest.mark.slow
@pytest.mark.parametrize(("match", "n_units", "best"), [("edges", 4, 1.0), ("score", 4, 1.0), ("score", 16, 0.5)])
def test_p_is_uniform_for_random_circuits_of_the_embedded_model(match, n_units, best):
    model = load_default_model()
    factors = swd.baselines.neurons(model, SITE)
    task = swd.load_task("gendered_pronoun", model, n_train=200, n_validation=20, n_test=12)
    scores = swd.attribute(model, factors, task)
    circuits = random_circuits(factors, scores, n_units, 200, best)
    found = uniformity(p_values(model, factors, task.test, circuits, match))
    assert min(found["KS recovered"], found["KS drop"]) > 0.005, found
    assert max(found["recovered <= .05"], found["drop <= .05"]) < 0.11, found  # .05 give or take 2 * .015, twice


@pytest.mark.slow
def test_refined_circuits_reach_their_threshold_on_test_prompts():
    """Six of the fifty seeds of tests/benchmarks/calibration.py, where 46 to 50 of 50 do."""
    model = load_default_model()
    factors = swd.baselines.neurons(model, SITE)
    found = list(refinements(model, factors, "gendered_pronoun", range(6), (200, 100, 100)))
    assert sum(row["refined test"] >= 0.9 for row in found) >= 5
    assert all(row["refined"] <= row["prefix"] for row in found)
