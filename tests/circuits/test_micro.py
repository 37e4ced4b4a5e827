"""Circuits of the micro model, against arithmetic done on paper (tests/micro.py gives the weights)."""

from dataclasses import replace

import pytest
import torch

from swd_lens.circuits import attribute, evaluate
from swd_lens.circuits.ablation import intervention_hooks, replaced_masks
from swd_lens.units import attach
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


def test_hooks_for_run_with_hooks_do_the_same(model):
    scores = attribute(model, identity_factors(), TRAIN)
    hooks = intervention_hooks(scores, ["blocks.0.mlp_out/1"], "keep")
    with attach(model, identity_factors()), torch.no_grad():
        logits = model.run_with_hooks(torch.tensor([[2]]), fwd_hooks=hooks)[0, -1]
    assert float(logits[1] - logits[0]) == 8.0


def test_an_unknown_unit_or_mode_is_refused(model):
    scores = attribute(model, identity_factors(), TRAIN)
    with pytest.raises(ValueError, match=r"blocks.0.mlp_out/7 is not among the scored units: blocks.0.mlp_out \(0 to 1\)"):
        replaced_masks(scores, ["blocks.0.mlp_out/7"], "keep")
    with pytest.raises(ValueError, match="mode must be one of"):
        replaced_masks(scores, [], "remove")


# ---------------------------------------------------------------------------------------------- every score

# Of TRAIN, with mu = (2, 3); both gradients are 1 everywhere, because the model is linear in z.
#   first_order            z * 1:               token 0 (1, 2)    token 1 (3, 4)
#   integrated_gradients   (z - mu) * 1:        token 0 (-1, -1)  token 1 (1, 1)
#   ablation               margin - margin(unit at mu) = z - mu: the same numbers
#   direct_logit           z * (write . dg/dr), dg/dr = (-1, 1): write (1, 2) -> 1, write (3, 4) -> 1: as first_order
AWAY = {"positive": [0.5, 0.5], "signed": [0.0, 0.0], "absolute": [1.0, 1.0]}
FROM_ZERO = {"positive": [2.0, 3.0], "signed": [2.0, 3.0], "absolute": [2.0, 3.0]}


@pytest.mark.parametrize("sign", ["positive", "signed", "absolute"])
@pytest.mark.parametrize(
    ("score", "expected"),
    [("first_order", FROM_ZERO), ("integrated_gradients", AWAY), ("ablation", AWAY), ("direct_logit", FROM_ZERO)],
)
def test_every_score_and_sign(model, score, sign, expected):
    scores = attribute(model, identity_factors(), TRAIN, score=score, sign=sign, steps=3)
    assert scores.scores[SITE].tolist() == pytest.approx(expected[sign])
    assert scores.means[SITE].tolist() == [2.0, 3.0]


def test_signs_of_an_example_that_goes_the_other_way(model):
    mixed = split_of([[0], [1]], [[1], [0]], [[0], [1]], d_vocab=3)
    # First order: token 0 gives (1, 2), token 1 gives -(3, 4).
    for sign, expected in (("positive", [0.5, 1.0]), ("signed", [-1.0, -1.0]), ("absolute", [2.0, 3.0])):
        assert attribute(model, identity_factors(), mixed, sign=sign).scores[SITE].tolist() == expected


def test_several_answers_and_distractors_are_averaged(model):
    several = split_of([[2]], [[1, 2]], [[0]], d_vocab=3)
    # margin = (logit 1 + logit 2) / 2 - logit 0 = x1 / 2 - x0: dg/dr = (-1, 1/2), write (1, 2) -> 0, write (3, 4) -> -1.
    # z = (4, 6): (0, -6).
    for score in ("first_order", "direct_logit"):
        found = attribute(model, identity_factors(), several, score=score, sign="signed").scores[SITE]
        assert found.tolist() == [0.0, -6.0]


# Prompts of two lengths: z of the tokens 0, 1, 2 is (1, 2), (3, 4), (4, 6). Attention writes nothing, so position p has the
# z of its own token, and only the last one reaches the margin.
LONG = split_of([[0, 1], [2], [1, 0, 2]], [[1]] * 3, [[0]] * 3, d_vocab=3)
MEANS = {
    # Last tokens 1, 2, 2: (3 + 4 + 4, 4 + 6 + 6) / 3.
    "scoring": [11 / 3, 16 / 3],
    # Tokens 0, 1, 2, 1, 0, 2: (1 + 3 + 4 + 3 + 1 + 4, 2 + 4 + 6 + 4 + 2 + 6) / 6.
    "all_tokens": [16 / 6, 24 / 6],
    # From the end: third token 1; second 0 and 0; last 1, 2, 2.
    "per_position": [[3.0, 4.0], [1.0, 2.0], [11 / 3, 16 / 3]],
}


@pytest.mark.parametrize("mean_over", list(MEANS))
def test_means_over_prompts_of_different_lengths(model, mean_over):
    scores = attribute(model, identity_factors(), LONG, positions="all", mean_over=mean_over)
    torch.testing.assert_close(scores.means[SITE], torch.tensor(MEANS[mean_over]))
    # Contributions of positions before the last are zero: (3 + 4 + 4, 4 + 6 + 6) / 3 again.
    assert scores.scores[SITE].tolist() == pytest.approx([11 / 3, 16 / 3])


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


def test_kl_by_hand(model):
    scores = attribute(model, identity_factors(), TRAIN)
    curve = evaluate(model, identity_factors(), TEST, scores, kl=True)
    # Unpruned logits (23, 33, 0). Kept nothing: z = mu = (2, 3), x = (1 + 2 + 9, 1 + 4 + 12) = (12, 17): logits (12, 17, 0).
    p, q = (torch.tensor(logits, dtype=torch.float64).softmax(0) for logits in ([23.0, 33.0, 0.0], [12.0, 17.0, 0.0]))
    assert curve.rows["KL keep"][0] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert curve.rows["KL keep"].iloc[-1] == curve.rows["KL ablate"][0] == 0.0
    assert curve.rows["KL ablate"].iloc[-1] == curve.rows["KL keep"][0]
