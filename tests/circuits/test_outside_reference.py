"""attribute and evaluate beside a reference in plain torch that imports nothing of ours (reference_measure.py).

It gets token ids as plain lists and the factors as files; it ranks, measures and chooses by itself, in float64. On the embedded
model, at an MLP, at an attention site, and at both as one surface. tests/real/test_outside_measure.py does it on SmolLM2.
"""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import NotCarriedWarning
from swd_lens.circuits.ablation import ABLATIONS
from swd_lens.hosts.embedded import WEIGHTS
from tests.circuits import reference_measure as reference

# Of the largest margin. A unit whose score is this near to another's may stand before or behind it.
ROUNDING = 1e-5
MLP, ATTENTION = "blocks.2.mlp_out", "blocks.2.attn_o"
SURFACES = {"mlp": (MLP,), "attention": (ATTENTION,), "both": (ATTENTION, MLP)}


def prompts_of(split: Any) -> reference.Prompts:
    """A split as what a text file can hold."""
    corrupt = [] if not split.corrupt else [tokens.tolist() for tokens in split.corrupt]
    lists = [[tokens.tolist() for tokens in split.tokens], split.answer_ids, split.distractor_ids, corrupt]
    return reference.Prompts(*json.loads(json.dumps(lists)))


@dataclass
class Beside:
    """Ours and the reference's numbers on one task, of one replacement.

    Attributes:
        outside: the reference's forward of the same model; bias: site -> the dense projection's.
        lengths: of prefixes; None = the usual grid.
    """

    model: Any
    task: Any
    factors: Any
    outside: reference.Model
    bias: Callable[[str], Any]
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.factors.save(folder)
            self.pairs = reference.read_factors(Path(folder), self.bias)
        self.train, self.validation, self.test = (prompts_of(split) for split in self.task.splits)
        self.attributed = cache(self._attributed)

    def _attributed(self, positions: str) -> tuple[Any, reference.Scores]:
        ours = swd.attribute(self.model, self.factors, self.task, positions=positions)
        return ours, reference.attribute(self.outside, self.pairs, self.train, positions)

    def differences(self, positions: str, ablation: str) -> tuple[dict[str, float], Any]:
        """The largest difference of each kind of number, as a share of what rounding is measured by; and the curve.

        Numbers in logits are measured by the largest margin, shares of some margin by the largest over that one. Counts, the
        order of units, and what is chosen must be equal, and are checked here.
        """
        ours, theirs = self.attributed(positions)
        how = {"ablation": ablation, "grid": self.lengths, "random_sets": 0}
        curve = swd.evaluate(self.model, self.factors, self.task, ours, **how)
        lengths = reference.prefix_grid(ours.n_units)
        lengths = lengths if self.lengths is None else [0, *self.lengths, ours.n_units]
        ranking = _agreed_ranking(ours, theirs)
        measure = [ranking, theirs.means, lengths, ablation, positions]
        test = reference.measure(self.outside, self.pairs, self.test, *measure)
        validation = reference.measure(self.outside, self.pairs, self.validation, *measure)

        size = test.largest
        found = {f"score {site}": float((ours.scores[site] - score).abs().max()) / size
                 for site, score in theirs.scores.items()}  # fmt: skip
        found |= {f"mean {site}": float((ours.means[site] - mean).abs().max() / mean.abs().max())
                  for site, mean in theirs.means.items()}  # fmt: skip
        for name in ("q_dense", "q_full", "q_empty", "carried_se"):
            found[name] = abs(getattr(curve, name) - getattr(test, name)) / size
        found["carried"] = abs(curve.carried.logits - test.carried) / size
        assert curve.carried.se == curve.carried_se and curve.carries == test.carries
        # On validation prompts shares are given wherever all units do better than none.
        for table, those, defined in ((curve.rows, test, test.carries), (curve.validation, validation, validation.carried > 0)):
            for name, difference in _of_rows(table, those, defined).items():
                found[name] = max(found.get(name, 0.0), difference)
        for cost in ("edges", "units"):
            with nullcontext() if test.carries else pytest.warns(NotCarriedWarning):
                chosen = curve.cost_at(recovered=0.9, cost=cost)
            assert chosen == reference.cost_at(validation, test, cost)
        return found, curve


def _agreed_ranking(ours: Any, theirs: reference.Scores) -> list[reference.Unit]:
    """The reference's ranking; where scores differ by rounding alone, in the order that ours took."""
    score = {(site, unit): float(s) for site, of_site in theirs.scores.items() for unit, s in enumerate(of_site)}
    ranking = ours.ranking()
    in_our_order, in_theirs = ([score[unit] for unit in each] for each in (ranking, reference.ranked(theirs.scores)))
    assert sorted(score) == sorted(ranking)
    assert in_our_order == pytest.approx(in_theirs, abs=ROUNDING * in_theirs[0])
    return ranking


def _of_rows(table: Any, measured: reference.Measured, defined: bool) -> dict[str, float]:
    """Column -> its largest difference, as a share of what rounding is measured by."""
    rows = measured.rows
    for count in ("units", "edges"):
        assert table[count].tolist() == [row[count] for row in rows]
    whole = {
        "recovered": measured.carried,
        "sufficiency": measured.q_full,
        "recovered of dense": measured.q_dense - measured.q_empty,
    }
    found = {}
    for name in ("q keep", "q ablate", "drop", *whole):
        if (not defined and name == "recovered") or not whole.get(name, 1.0) > 0:
            assert table[name].isna().all()
            continue
        by = measured.largest / whole.get(name, 1.0)
        found[name] = max(abs(value - row[name]) / by for value, row in zip(table[name], rows, strict=True))
        assert not math.isnan(found[name])
    return found


@pytest.fixture(scope="module")
def beside(default_model):
    """(task, sites) -> both sides' numbers, each made once."""
    outside = reference.embedded(WEIGHTS / "model.safetensors")

    def bias(site: str) -> torch.Tensor:
        block = default_model.blocks[int(site.split(".")[1])]
        return (block.mlp.b_out if site.endswith("mlp_out") else block.attn.b_O).detach().double()

    @cache
    def make(task: str, sites: tuple[str, ...], lengths: tuple[int, ...] | None = None) -> Beside:
        prompts = swd.load_task(task, default_model, n_train=16, n_validation=16, n_test=16)
        factors = swd.factorize(default_model, list(sites), sparsity=0.4, outer_iterations=4, progress=False)
        return Beside(default_model, prompts, factors, outside, bias, lengths)

    return make


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("surface", "positions", "ablation"),  # every pair of values
    [(s, ("scoring", "all")[(i + j) % 2], a) for i, s in enumerate(SURFACES) for j, a in enumerate(ABLATIONS)],
)
def test_every_number_is_that_of_plain_torch(beside, surface, positions, ablation):
    found, curve = beside("gendered_pronoun", SURFACES[surface]).differences(positions, ablation)
    print(surface, positions, ablation, *(f"{name} {value:.0e}" for name, value in found.items()))
    assert curve.carries and curve.cost_at(recovered=0.9) is not None
    assert max(found.values()) < ROUNDING, found


def test_where_nothing_is_carried_plain_torch_has_no_cost_either(beside):
    found, curve = beside("ioi", ("blocks.2.mlp_out",), (3, 30)).differences("scoring", "mean")
    assert not curve.carries and curve.rows["recovered"].isna().all()
    assert max(found.values()) < ROUNDING, found
