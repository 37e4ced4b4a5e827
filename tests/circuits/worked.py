"""Curves and tasks of the toy model that several tests of comparisons share."""

import pandas as pd
import torch

from swd_lens.circuits import CostCurve, UnitScores
from swd_lens.tasks.task import Task
from tests.micro import random_split


def by_hand(units, edges, recovered, drop, task="toy", q=2.0, **more):
    """A curve of these numbers; its units carry all of the margin, give or take a tenth of a logit."""
    shares = {"recovered": recovered, "recovered of dense": recovered, "sufficiency": recovered}
    rows = pd.DataFrame({"units": units, "edges": edges} | shares | {"drop": drop})
    return CostCurve(rows, task, q, q, 0.0, 0.1, 1.0, 1.0, {}, **more)


def task_named(name, seed):
    validation, test = random_split(seed=seed + 50, name="validation"), random_split(seed=seed, name="test")
    return Task(name, random_split(6, seed=0, length=5), validation, test, "random", False)


TOY, OTHER = task_named("toy", 6), task_named("other", 8)  # test prompts on which the toy model's margin is positive


FEW = {"grid": [0, 4, 16], "random_sets": 0}  # where curves are compared, not looked at


# Not monotone: 2 units reach more than 3 do. Unit 3 of the ranking has no edges.
#   k  edges  sufficiency  recovered  drop
#   0      0          0.1       0      0.0
#   1     10          0.5       4/9    1.0
#   2     14          0.9       8/9    1.5
#   3     14          0.8       7/9    3.0
#   4     30          1.0       1      2.0
ROWS = pd.DataFrame(
    {
        "units": [0, 1, 2, 3, 4],
        "edges": [0, 10, 14, 14, 30],
        "recovered": [0.0, 4 / 9, 8 / 9, 7 / 9, 1.0],
        "sufficiency": [0.1, 0.5, 0.9, 0.8, 1.0],
        "drop": [0.0, 1.0, 1.5, 3.0, 2.0],
        "q keep": [1.0, 5.0, 9.0, 8.0, 10.0],
    }
)
SCORES = UnitScores({"s": torch.tensor([1.0, 4.0, 2.0, 3.0])}, {"s": torch.zeros(4)}, {"task": "t", "units": {"s": 4}})
EDGES = {"s": torch.tensor([16, 10, 0, 4])}  # ranking: units 1, 3, 2, 0


def curve(rows=ROWS, settings=None, **more):
    about = {"units": {"s": 4}, **(settings or {})}
    how = {"carried_se": 0.5, "settings": about, "scores": SCORES, "edges": EDGES, **more}
    return CostCurve(rows=rows, task="t", q_dense=11.0, q_full=10.0, q_empty=1.0, accuracy_dense=1.0, accuracy_full=1.0, **how)


def kept(found, folder):
    """A result as its file gives it back: it shows the same."""
    found.save(folder / "result.json")
    again = type(found).load(folder / "result.json")
    pd.testing.assert_frame_equal(again.table(), found.table())
    assert repr(again) == repr(found) and "<table" in found._repr_html_() and found.plot().axes
    return again
