"""Edit localization: by hand, on units that two tasks do not share, and its p-values where there is nothing to find."""

import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.edit.localization import EditLocalization, localize
from swd_lens.tasks.task import Task
from tests.contract import swd_zero_data
from tests.micro import random_split, split_of, toy_model
from tests.refusals import refuses


def by_hand(random=((0.0, 0.0), (0.3, 0.0), (0.1, 0.1))) -> EditLocalization:
    """Task a's edit takes .8 of a and .1 of b, task b's .2 of a and .3 of b."""
    shares = {"a": (0.8, 0.1), "b": (0.2, 0.3)} | {f"random {i}": values for i, values in enumerate(random)}
    rows = [
        {"edit": edit, "task": task, "drop": 2 * share, "share": share}
        for edit, of_edit in shares.items()
        for task, share in zip("ab", of_edit, strict=True)
    ]
    return EditLocalization({"a": ["s/1"], "b": ["s/2"]}, {"a": 2.0, "b": 2.0}, pd.DataFrame(rows), {})


def test_selectivity_and_p_by_hand(tmp_path):
    found = by_hand()
    assert found.selectivities == pytest.approx({"a": 0.7, "b": 0.1})
    # Of random units on a: 0, .3, 0; on b: 0, -.3, 0. None is as selective.
    assert found.p == pytest.approx({"a": 1 / 4, "b": 1 / 4})
    assert by_hand(random=((0.9, 0.1), (0.0, 0.5))).p == pytest.approx({"a": 2 / 3, "b": 2 / 3})
    table = found.table().set_index("task")
    of_a = table.loc["a", ["drop", "share", "share of others", "random selectivity"]]
    assert of_a.tolist() == pytest.approx([1.6, 0.8, 0.1, 0.1])
    found.save(tmp_path / "edits.json")
    again = EditLocalization.load(tmp_path / "edits.json")
    pd.testing.assert_frame_equal(again.table(), found.table())
    assert "selectivity a +0.70 (p = 0.25)" in repr(found) and len(found.plot().axes) == 2


def carried_tasks(model) -> list[Task]:
    """Two tasks that the toy host does: the answer is its likeliest token of two fixed ones, on other prompts of each task."""
    tasks = []
    for name, (one, other), seed in (("first", (3, 7), 1), ("second", (5, 11), 2)):
        splits = []
        for part, n in (("train", 16), ("validation", 8), ("test", 12)):
            prompts = [tokens.tolist() for tokens in random_split(n, seed=seed * 10 + n).tokens]
            with torch.no_grad():
                logits = [model(torch.tensor([prompt]))[0, -1] for prompt in prompts]
            right = [one if of[one] > of[other] else other for of in logits]
            splits.append(split_of(prompts, [[r] for r in right], [[one + other - r] for r in right], 20, part))
        tasks.append(Task(name, *splits, "made here", False))
    return tasks


@pytest.fixture(scope="module")
def carried():
    """The toy host, factors of its mlp_out, and the tasks."""
    model = toy_model()
    return model, swd_zero_data(model, "mlp_out"), carried_tasks(model)


def test_drops_are_those_of_evaluate_circuits_and_the_host_is_left_alone(carried):
    model, factors, tasks = carried
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = localize(model, factors, tasks, units=2, random=5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert len(found.effects) == 2 * (2 + 5) and found.p.keys() == {"first", "second"}
    scores = swd.attribute(model, factors, tasks[1])
    circuit = swd.Circuit.of(factors, scores, found.units["first"])
    row = swd.evaluate_circuits(model, factors, tasks[1].test, circuit).iloc[0]
    effect = found.effects.set_index(["edit", "task"]).loc[("first", "second")]
    assert effect["drop"] == pytest.approx(row["drop"], abs=1e-6)
    assert effect["share"] == pytest.approx(row["drop"] / found.margins["second"], abs=1e-6)
    assert found.units["second"] == [f"{site}/{unit}" for site, unit in scores.ranking()[:2]]


@pytest.mark.slow
def test_random_units_of_ones_own_have_uniform_p(carried):
    """Units drawn as the random ones are: over draws p is at most .2 in about a fifth of cases, at most .5 in half."""
    model, factors, tasks = carried
    generator = torch.Generator().manual_seed(0)
    p = []
    for seed in range(16):
        drawn = torch.randint(0, factors["blocks.0.mlp_out"].n_units, (2,), generator=generator).tolist()
        chosen = {task.name: f"blocks.{i}.mlp_out/{unit}" for i, (task, unit) in enumerate(zip(tasks, drawn, strict=True))}
        p += localize(model, factors, tasks, units=chosen, random=9, seed=seed).p.values()
    assert 0.05 < sum(value <= 0.2 for value in p) / len(p) < 0.4 and 0.3 < sum(value <= 0.5 for value in p) / len(p) < 0.7


def test_what_it_refuses(carried):
    model, factors, tasks = carried
    refuses(ValueError, "two tasks or more, got 1", localize, model, factors, tasks[:1])
    refuses(ValueError, "units= names other", localize, model, factors, tasks, units={"other": "blocks.0.mlp_out/0"})
    done = tasks[0].test
    wrong = split_of([done.tokens[0].tolist()], [[done.distractor_ids[0][0]]], [[done.answer_ids[0][0]]], 20, "test")
    undone = Task("undone", tasks[0].train, tasks[0].validation, wrong, "x", False)
    refuses(ValueError, "does not do the task", localize, model, factors, [tasks[0], undone], random=3)
