"""evaluate and judge against whole prompts run one by one (slow.py), and what must hold exactly."""

import sys
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from swd_lens.base.errors import TaskError, UndefinedSufficiencyWarning
from swd_lens.circuits import Circuit, attribute, evaluate, evaluate_circuits, prefix_grid
from swd_lens.circuits.ablation import ABLATIONS
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.evaluate import random_set
from swd_lens.circuits.fast_forward import Runner
from swd_lens.tasks.task import Task
from swd_lens.units import attach
from tests.circuits.slow import able_split, activations, carried_by, last_logits, margin_of, margin_with, replacing, rows_for
from tests.contract import swd_zero_data
from tests.micro import random_split, split_of, toy_model

TRAIN, TEST = random_split(), able_split()
KNOWN, SURFACES = "blocks.1.mlp_out", ("blocks.0.mlp_out", "blocks.1.mlp_out", "*.attn_o", "*.mlp_in", "all")


@pytest.fixture(scope="module")
def sets(model):
    return {pattern: swd_zero_data(model, pattern) for pattern in SURFACES}


def slow_rows(model, factors, split, scores, sets_of_units, mode, ablation):
    """margins (set, prompt), correct, KL to unpruned: all plain."""
    positions, found = scores.settings["positions"], {"margin": [], "correct": [], "kl": []}
    plain_logits = {}
    with attach(model, factors), torch.no_grad():
        for chosen in sets_of_units:
            inside = {site: torch.zeros(f.n_units, dtype=torch.bool) for site, f in factors.items()}
            for site, unit in chosen:
                inside[site][unit] = True
            masks = inside if mode == "ablate" else {site: ~mask for site, mask in inside.items()}
            row = {name: [] for name in found}
            for i, prompt in enumerate(split.tokens):
                if ablation == "resample":
                    z = activations(model, factors, split.corrupt[i])
                    # At the scoring position: z at the end of the corrupt prompt, whatever its length.
                    last = positions == "scoring"
                    values = {site: one[-1].expand(len(prompt), -1) if last else one for site, one in z.items()}
                else:
                    means = scores.means if ablation == "mean" else {s: m * 0 for s, m in scores.means.items()}
                    values = {site: rows_for(means[site], len(prompt)) for site in factors}
                hooks = [replacing(site, masks[site], values[site], positions) for site in factors]
                plain = plain_logits[i] if i in plain_logits else last_logits(model, prompt)
                plain_logits[i] = plain
                changed = last_logits(model, prompt, hooks)
                row["margin"].append(float(margin_of(changed, split, i)))
                right, wrong = changed[list(split.answer_ids[i])].max(), changed[list(split.distractor_ids[i])].max()
                row["correct"].append(float(right > wrong))
                p, q = plain.softmax(-1), changed.softmax(-1)
                row["kl"].append(float((p * (p / q).log()).sum()))
            for name, values in row.items():
                found[name].append(values)
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("pattern", "positions", "ablation"),  # every pair of values
    [(p, ("scoring", "all")[(i + j) % 2], a) for i, p in enumerate(SURFACES) for j, a in enumerate(ABLATIONS)],
)
def test_every_number_is_that_of_whole_prompts_one_by_one(model, sets, pattern, positions, ablation):
    factors, split = sets[pattern], able_split(5, same_lengths=positions == "all")
    scores = attribute(model, factors, TRAIN, positions=positions)
    k = [0, 1, 7, scores.n_units]
    how = {"ablation": ablation, "kl": True, "batch_size": 3, "tokens_per_forward": 30}
    curve = evaluate(model, factors, split, scores, grid=k, **how)
    assert curve.rows["units"].tolist() == k
    for mode in ("keep", "ablate"):
        slow = slow_rows(model, factors, split, scores, [scores.ranking()[:n] for n in k], mode, ablation)
        np.testing.assert_allclose(curve.margins[mode], slow["margin"], atol=5e-5)  # logits reach 10
        np.testing.assert_allclose(curve.rows[f"q {mode}"], slow["margin"].mean(1), atol=2e-5)
        np.testing.assert_allclose(curve.rows[f"KL {mode}"], slow["kl"].mean(1), rtol=1e-4, atol=1e-6)
        assert curve.rows[f"accuracy {mode}"].tolist() == slow["correct"].mean(1).tolist()
        if mode == "keep":
            assert curve.q_full == pytest.approx(slow["margin"][-1].mean(), abs=1e-5)
            assert curve.q_empty == pytest.approx(slow["margin"][0].mean(), abs=1e-5)
            carried = slow["margin"][-1] - slow["margin"][0]
            assert curve.carried.logits == pytest.approx(carried.mean(), abs=2e-5)
            assert curve.carried_se == pytest.approx(carried.std(ddof=1) / len(carried) ** 0.5, rel=1e-3, abs=1e-5)
            assert curve.carries == (curve.carried.logits > max(2 * curve.carried_se, 0.05 * abs(curve.q_dense)))
            if curve.carries:
                recovered = (slow["margin"].mean(1) - slow["margin"][0].mean()) / carried.mean()
                np.testing.assert_allclose(curve.rows["recovered"], recovered, atol=1e-3)
            else:
                assert curve.rows["recovered"].isna().all()
            ratio = slow["margin"].mean(1) / slow["margin"][-1].mean()
            np.testing.assert_allclose(curve.rows["sufficiency"], ratio, atol=2e-5)
        else:
            drop = slow["margin"][0].mean() - slow["margin"].mean(1)
            np.testing.assert_allclose(curve.rows["drop"], drop, atol=2e-5)
    edges = {site: f.edges_per_unit * f.valid_units for site, f in factors.items()}
    assert curve.rows["edges"].tolist() == [sum(int(edges[s][u]) for s, u in scores.ranking()[:n]) for n in k]
    with torch.no_grad():
        dense = [float(margin_of(last_logits(model, p), split, i)) for i, p in enumerate(split.tokens)]
    np.testing.assert_allclose(curve.margins["dense"], dense, atol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("positions", "mean_over"), [("scoring", "per_position"), ("all", "scoring"), ("all", "all_tokens"), ("all", "per_position")]
)
def test_means_of_every_kind_are_put_in_also_in_prompts_longer_than_any_of_training(model, sets, positions, mean_over):
    factors = sets["all"]
    short = [i for i, prompt in enumerate(TRAIN.tokens) if len(prompt) <= 5]
    parts = ("examples", "tokens", "answer_ids", "distractor_ids")
    few = replace(TRAIN, **{name: tuple(getattr(TRAIN, name)[i] for i in short) for name in parts})
    assert max(map(len, TEST.tokens)) > 5 > min(map(len, TEST.tokens))
    scores = attribute(model, factors, few, positions=positions, mean_over=mean_over)
    curve = evaluate(model, factors, TEST, scores, grid=[0, 9])
    for mode in ("keep", "ablate"):
        chosen = [scores.ranking()[:n] for n in (0, 9, scores.n_units)]
        slow = slow_rows(model, factors, TEST, scores, chosen, mode, "mean")
        np.testing.assert_allclose(curve.margins[mode], slow["margin"], atol=5e-5)


def test_prefixes_judged_as_circuits_have_the_rows_of_the_curve(model, sets):
    factors = sets["all"]
    scores = attribute(model, factors, TRAIN)
    curve = evaluate(model, factors, TEST, scores, kl=True, grid=[0, 1, 9, scores.n_units])
    named = {str(n): curve.circuit(n) for n in curve.rows["units"]}
    rows = evaluate_circuits(model, factors, Task("t", TRAIN, TEST, TEST, "", False), named, kl=True)
    assert rows["circuit"].tolist() == list(named)
    numbers = rows.drop(columns="circuit")
    assert list(numbers.columns) == list(curve.rows.columns)
    np.testing.assert_allclose(numbers.to_numpy(), curve.rows.to_numpy(), rtol=1e-5, atol=1e-5)


def test_a_margin_that_is_not_positive_gives_nan_and_a_warning(model, sets):
    factors = sets[KNOWN]
    scores = attribute(model, factors, TRAIN)
    wrong = replace(TEST, answer_ids=TEST.distractor_ids, distractor_ids=TEST.answer_ids)
    with pytest.warns(UndefinedSufficiencyWarning, match=r"mean margin of 'by hand' with all units is -\d\.\d+, not positive"):
        curve = evaluate(model, factors, wrong, scores)
    assert curve.rows[["sufficiency", "sufficiency low", "sufficiency high"]].isna().all().all()
    assert curve.rows["drop"].notna().all()
    zero = split_of([[1, 2]], [[3]], [[3]], 20)  # right = wrong: a margin of exactly zero
    with pytest.warns(UndefinedSufficiencyWarning):
        assert evaluate_circuits(model, factors, zero, Circuit.of(factors, scores, []))["sufficiency"].isna().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndefinedSufficiencyWarning)
        assert evaluate(model, factors, TEST, scores).rows["sufficiency"].notna().all()


def test_a_metric_takes_the_margins_place(model, sets):
    factors = sets["all"]
    place = {example.prompt: i for i, example in enumerate(TEST.examples)}

    def metric(logits, examples):
        return torch.stack([logits[r, place[e.prompt]] - logits[r].mean() + 3 for r, e in enumerate(examples)])

    split = replace(TEST, metric=metric)
    scores = attribute(model, factors, TRAIN)
    curve = evaluate(model, factors, split, scores, grid=[5], tokens_per_forward=50)
    with attach(model, factors):
        assert curve.rows["units"].tolist() == [0, 5, scores.n_units]
        for row, n in enumerate([0, 5, scores.n_units]):
            masks = {site: rank > n for site, rank in scores.ranks().items()}
            values = {site: mean.expand(8, -1) for site, mean in scores.means.items()}
            slow = [margin_with(model, split, i, masks, values, "scoring") for i in range(len(split))]
            np.testing.assert_allclose(curve.margins["keep"][row], slow, atol=5e-5)
    assert pd.isna(curve.accuracy_full) and curve.rows["accuracy keep"].isna().all()


def test_what_is_refused(model, sets):
    factors, other = sets[KNOWN], swd_zero_data(toy_model(), KNOWN)
    scores = attribute(model, factors, TRAIN)
    different = {KNOWN: replace_factors(factors[KNOWN])}
    assert different[KNOWN].n_units == other[KNOWN].n_units
    theirs = attribute(model, different, TRAIN)
    evaluate(model, other, TEST, scores)  # made again from the same weights: the same units
    for call in (evaluate, lambda m, f, t, s: evaluate_circuits(m, f, t, Circuit.of(factors, s, [(KNOWN, 0)]))):
        with pytest.raises(ValueError, match=r"with other factors of blocks\.1\.mlp_out \(same number of units"):
            call(model, different, TEST, scores)
        with pytest.raises(ValueError, match=r"\(site: units\); attribute these factors first"):
            call(model, sets["blocks.0.mlp_out"], TEST, scores)
    pair = {"a": Circuit.of(factors, scores, []), "b": Circuit.of(different, theirs, [])}
    with pytest.raises(ValueError, match="found with different scores"):
        evaluate_circuits(model, factors, TEST, pair)
    # Same settings, but other training prompts, so other means.
    moved = attribute(model, factors, random_split(seed=8))
    assert moved.settings == scores.settings
    with pytest.raises(ValueError, match="found with different scores"):
        evaluate_circuits(model, factors, TEST, {"a": pair["a"], "b": Circuit.of(factors, moved, [])})
    with pytest.raises(ValueError, match="nothing to judge"):
        evaluate_circuits(model, factors, TEST, {})
    for bad in ([-1], [scores.n_units + 1]):
        with pytest.raises(ValueError, match="prefix length must be a whole number from 0 to 16"):
            evaluate(model, factors, TEST, scores, grid=bad)
    with pytest.raises(ValueError, match="\"mib\", got 'all'"):
        evaluate(model, factors, TEST, scores, grid="all")
    with pytest.raises(ValueError, match=r"ablation must be one of .* got 'median'"):
        evaluate(model, factors, TEST, scores, ablation="median")
    with pytest.raises(TaskError, match="24 of 24 train prompts of 'by hand' have none, the first is 'prompt 0'"):
        evaluate(model, factors, TRAIN, scores, ablation="resample")
    assert not hasattr(model.blocks[1], "hook_mlp_out_unit")


def replace_factors(f):
    """The same matrices with units in another order."""
    order = torch.arange(f.n_units).flip(0)
    return type(f)(f.read[:, order], f.write[order], weight=f.read @ f.write)


def test_of_a_task_prefixes_are_chosen_on_validation_prompts_and_measured_on_test_prompts(model, sets):
    factors = sets["all"]
    scores = attribute(model, factors, TRAIN)
    validation = carried_by(model, factors, scores, random_split(16, seed=11, name="validation"))
    test = carried_by(model, factors, scores, random_split(16, seed=12, name="test"))
    curve = evaluate(model, factors, Task("t", TRAIN, validation, test, "", False), scores, random_sets=9, seed=4)
    assert curve.carries and curve.chosen_on == "validation"
    assert curve.settings["n_validation"] == 16 and curve.settings["test_split"] == "test"
    alone = {split.name: evaluate(model, factors, split, scores) for split in (validation, test)}
    # Both splits' prompts run together, and batches of another size round otherwise.
    near = {"rtol": 1e-5, "atol": 1e-6}
    pd.testing.assert_frame_equal(curve.rows, alone["test"].rows, **near)
    shared = [name for name in curve.validation if name not in ("random drop", "random sets")]
    pd.testing.assert_frame_equal(curve.validation[shared], alone["validation"].rows[shared], **near)
    assert curve.cost_at() == alone["validation"].cost_at()
    # Random sets: of the prefixes up to the smallest admissible one, and each with at most the prefix's edges.
    best = curve.smallest_admissible()
    drawn = curve.validation["random drop"].notna()
    assert drawn.tolist() == [0 < n <= best["units"] for n in curve.validation["units"]]
    again = evaluate(model, factors, Task("t", TRAIN, validation, test, "", False), scores, random_sets=9, seed=4)
    pd.testing.assert_frame_equal(again.validation, curve.validation)
    none = evaluate(model, factors, Task("t", TRAIN, validation, test, "", False), scores, random_sets=0)
    assert "random drop" not in none.validation


def test_random_sets_are_run_no_further_than_until_they_decide(model, sets, monkeypatch):
    factors = sets["all"]
    scores = attribute(model, factors, TRAIN)
    # The three worst units first: random sets of their edges do more.
    ranks, n = scores.ranks(), scores.n_units
    scores = replace(scores, scores={site: (ranks_of > n - 3) * 2.0 * n - ranks_of for site, ranks_of in ranks.items()})
    split = carried_by(model, factors, scores, random_split(16, seed=11, name="validation"))
    task = Task("t", TRAIN, split, split, "", False)
    few = evaluate(model, factors, task, scores, random_sets=40)
    monkeypatch.setattr(sys.modules["swd_lens.circuits.evaluate"], "_FIRST_ROUND", 40)
    every = evaluate(model, factors, task, scores, random_sets=40)
    assert few.smallest_admissible() == every.smallest_admissible()
    sure, run = few.validation["random drop"], few.validation["random sets"]
    assert run.max() == 40 and ((run > 0) & (run < 40)).any() and set(every.validation["random sets"]) == {0, 40}
    all_run = run == 40
    assert sure[all_run].tolist() == pytest.approx(every.validation["random drop"][all_run].tolist(), abs=1e-5)
    short = (run > 0) & (run < 40)
    assert (sure[short] <= every.validation["random drop"][short] + 1e-5).all()
    assert (sure[short] >= few.validation["drop"][short]).all()


def test_beside_units_that_do_not_carry_the_task_no_random_set_is_run(model, sets):
    factors = sets[KNOWN]
    scores = attribute(model, factors, TRAIN)
    split = carried_by(model, factors, scores, random_split(16, seed=11, name="validation"))
    # On the test prompts the answers are the other way about.
    against = replace(split, name="test", answer_ids=split.distractor_ids, distractor_ids=split.answer_ids)
    with pytest.warns(UndefinedSufficiencyWarning):
        curve = evaluate(model, factors, Task("t", TRAIN, split, against, "", False), scores)
    assert not curve.carries and curve.validation["random drop"].isna().all() and not curve.validation["random sets"].any()


def test_the_drop_of_random_sets_is_that_of_judged_circuits(model, sets):
    factors = sets[KNOWN]
    scores = attribute(model, factors, TRAIN)
    split = carried_by(model, factors, scores, random_split(16, seed=11, name="validation"))
    curve = evaluate(model, factors, Task("t", TRAIN, split, split, "", False), scores, grid=[3], random_sets=6)
    ranking, generator = scores.ranking(), torch.Generator().manual_seed(0)
    edges = torch.tensor([int(curve.edges[site][unit]) for site, unit in ranking])
    members = [random_set(edges, int(edges[:3].sum()), generator) for _ in range(6)]
    assert all(int(edges[m].sum()) <= int(edges[:3].sum()) and not bool((edges[m] == 0).any()) for m in members)
    named = {str(i): Circuit.of(factors, scores, [ranking[j] for j in m.nonzero()[:, 0]]) for i, m in enumerate(members)}
    drops = evaluate_circuits(model, factors, split, named)["drop"]
    assert curve.validation["random drop"][1] == pytest.approx(np.quantile(drops, 0.95), abs=1e-5)


def test_grids():
    assert prefix_grid(20) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert prefix_grid(1) == [0, 1]
    assert 48 in prefix_grid(3072)  # method.md §0.5
    assert prefix_grid(768)[-4:] == [384, 512, 640, 768]  # 640 is of the paper's code


def test_prompts_of_one_length_run_together_whichever_split_they_are_of(model, sets, monkeypatch):
    scores = attribute(model, sets["all"], TRAIN)
    validation = carried_by(model, sets["all"], scores, random_split(16, seed=11, name="validation"))
    test = carried_by(model, sets["all"], scores, random_split(16, seed=12, name="test"))
    task = Task("t", TRAIN, validation, test, "", False)
    lengths: list[int] = []
    shared = Runner.share

    def counted(self, tokens):
        lengths.append(tokens.shape[1])
        return shared(self, tokens)

    dense = DenseCache()
    evaluate(model, sets["all"], task, scores, random_sets=0, dense=dense)  # finds the shortcuts
    monkeypatch.setattr(Runner, "share", counted)
    evaluate(model, sets["all"], task, scores, random_sets=0, dense=dense)
    assert sorted(lengths) == sorted({len(tokens) for split in (task.test, task.validation) for tokens in split.tokens})
