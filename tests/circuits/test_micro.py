"""Circuits of the micro model, against arithmetic done on paper (tests/micro.py gives the weights)."""

from dataclasses import replace

import pytest
import torch

from swd_lens.circuits import attribute, evaluate
from swd_lens.circuits.ablation import replaced_masks
from swd_lens.units.factors import Factors
from tests.micro import identity_factors, micro_model, split_of

# Units are the two hidden activations z = relu(x W_in). Unit 0 writes (1, 2), unit 1 writes (3, 4); the margin is
# logit 1 - logit 0 = (x1 - x0) + z0 (2 - 1) + z1 (4 - 3), so both gradients are 1.
#   token 0: x = (1, 0), z = (1, 2), margin = -1 + 1 + 2 = 2
#   token 1: x = (0, 1), z = (3, 4), margin = +1 + 3 + 4 = 8
#   token 2: x = (1, 1), z = (4, 6), margin =  0 + 4 + 6 = 10
SITE = "blocks.0.mlp_out"
TRAIN = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
TEST = replace(split_of([[2]], [[1]], [[0]], d_vocab=3, name="test"), corrupt=(torch.tensor([1, 0, 1]),))


@pytest.fixture
def model():
    return micro_model()


@pytest.mark.parametrize(
    ("ablation", "keep", "ablate"),
    [
        # Test prompt: token 2, z = (4, 6), means (2, 3), ranking unit 1 then unit 0.
        #   k=0: keep nothing 2 + 3;  k=1: keep unit 1 2 + 6, ablate it 4 + 3;  k=2: keep both 4 + 6, ablate both 2 + 3
        ("mean", [5.0, 8.0, 10.0], [10.0, 7.0, 5.0]),
        ("zero", [0.0, 6.0, 10.0], [10.0, 4.0, 0.0]),
        # The corrupt prompt's z at its last position, token 1, is (3, 4).
        ("resample", [7.0, 9.0, 10.0], [10.0, 8.0, 7.0]),
    ],
)
def test_cost_curve(model, ablation, keep, ablate):
    scores = attribute(model, identity_factors(), TRAIN)
    assert scores.ranking() == [(SITE, 1), (SITE, 0)]
    curve = evaluate(model, identity_factors(), TEST, scores, ablation=ablation)
    assert (curve.task, curve.settings["ablation"]) == ("by hand", ablation)
    assert (curve.q_dense, curve.q_full, curve.q_empty) == (10.0, 10.0, keep[0])
    # A = I: 1 read edge, 2 write edges a unit.
    assert curve.rows["units"].tolist() == [0, 1, 2] and curve.rows["edges"].tolist() == [0, 3, 6]
    assert curve.rows["q keep"].tolist() == keep and curve.rows["q ablate"].tolist() == ablate
    assert curve.rows["sufficiency"].tolist() == pytest.approx([q / 10 for q in keep])
    assert curve.rows["drop"].tolist() == pytest.approx([10 - q for q in ablate])
    assert curve.rows["recovered"].tolist() == pytest.approx([(q - keep[0]) / (10 - keep[0]) for q in keep])
    assert curve.rows["accuracy keep"].tolist()[1:] == [1.0, 1.0]


def test_an_unknown_unit_or_mode_is_refused(model):
    scores = attribute(model, identity_factors(), TRAIN)
    with pytest.raises(ValueError, match=r"blocks.0.mlp_out/7 is not among the scored units: blocks.0.mlp_out \(0 to 1\)"):
        replaced_masks(scores, ["blocks.0.mlp_out/7"], "keep")
    with pytest.raises(ValueError, match="mode must be one of"):
        replaced_masks(scores, [], "remove")


# Of TRAIN, with mu = (2, 3); both gradients are 1 everywhere, because the model is linear in z.
#   first_order            z * 1:               token 0 (1, 2)    token 1 (3, 4)
#   integrated_gradients   (z - mu) * 1:        token 0 (-1, -1)  token 1 (1, 1)
#   ablation               margin - margin(unit at mu) = z - mu: the same numbers
#   direct_logit           z * (write . dg/dr), dg/dr = (-1, 1): write (1, 2) -> 1, write (3, 4) -> 1: as first_order
AWAY = {"positive": [0.5, 0.5], "signed": [0.0, 0.0], "absolute": [1.0, 1.0]}
FROM_ZERO = {"positive": [2.0, 3.0], "signed": [2.0, 3.0], "absolute": [2.0, 3.0]}


@pytest.mark.parametrize(
    ("score", "expected"),
    [("first_order", FROM_ZERO), ("integrated_gradients", AWAY), ("ablation", AWAY), ("direct_logit", FROM_ZERO)],
)
def test_every_score_and_sign(model, score, expected):
    for sign, values in expected.items():
        scores = attribute(model, identity_factors(), TRAIN, score=score, sign=sign, steps=3)
        assert scores.scores[SITE].tolist() == pytest.approx(values)
        assert scores.means[SITE].tolist() == [2.0, 3.0]


def test_examples_that_go_the_other_way_and_several_answers(model):
    mixed = split_of([[0], [1]], [[1], [0]], [[0], [1]], d_vocab=3)
    # First order: token 0 gives (1, 2), token 1 gives -(3, 4).
    for sign, expected in (("positive", [0.5, 1.0]), ("signed", [-1.0, -1.0]), ("absolute", [2.0, 3.0])):
        assert attribute(model, identity_factors(), mixed, sign=sign).scores[SITE].tolist() == expected
    several = split_of([[2]], [[1, 2]], [[0]], d_vocab=3)
    # margin = (logit 1 + logit 2) / 2 - logit 0 = x1 / 2 - x0: dg/dr = (-1, 1/2), write (1, 2) -> 0, write (3, 4) -> -1.
    # z = (4, 6): (0, -6).
    for score in ("first_order", "direct_logit"):
        found = attribute(model, identity_factors(), several, score=score, sign="signed").scores[SITE]
        assert found.tolist() == [0.0, -6.0]


def test_edges_count_valid_units_only(model):
    # Unit 0 reads both inputs and writes one output; unit 1 reads one and writes nothing: no edges, but a unit.
    factors = {SITE: Factors(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))}
    scores = attribute(model, factors, TRAIN)
    # token 0: h = (1, 2), z = (3, 1); margin = -1 + 3 * 2 = 5. token 1: h = (3, 4), z = (7, 3); margin = 1 + 14 = 15.
    assert scores.scores[SITE].tolist() == [10.0, 0.0]
    curve = evaluate(model, factors, TEST, scores)
    assert curve.rows["units"].tolist() == [0, 1, 2]
    assert curve.rows["edges"].tolist() == [0, 3, 3]
    # Test: h = (4, 6), z = (10, 4), margin 0 + 20; mean of z0 is 5: keep nothing 10.
    assert curve.rows["q keep"].tolist() == [10.0, 20.0, 20.0]
