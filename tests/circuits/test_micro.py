"""Circuits of the micro model, against arithmetic done on paper (tests/micro.py gives the weights)."""

import pytest
import torch

from swd_lens.circuits import attribute, evaluate
from swd_lens.circuits.intervene import intervention_hooks, replaced_masks
from swd_lens.inject import attach
from tests.micro import identity_factors, micro_model, split_of

# Units are the two hidden activations z = relu(x W_in). Unit 0 writes (1, 2), unit 1 writes (3, 4); the margin is
# logit 1 - logit 0 = (x1 - x0) + z0 (2 - 1) + z1 (4 - 3), so both gradients are 1.
#   token 0: x = (1, 0), z = (1, 2), margin = -1 + 1 + 2 = 2
#   token 1: x = (0, 1), z = (3, 4), margin = +1 + 3 + 4 = 8
#   token 2: x = (1, 1), z = (4, 6), margin =  0 + 4 + 6 = 10
TRAIN = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
TEST = split_of([[2]], [[1]], [[0]], d_vocab=3, name="test")


@pytest.fixture
def model():
    return micro_model()


def test_scores_and_means(model):
    scores = attribute(model, identity_factors(), TRAIN)
    # z * gradient: token 0 -> (1, 2), token 1 -> (3, 4); mean over the two prompts (2, 3). Means of z: the same numbers.
    assert scores.scores["blocks.0.mlp_out"].tolist() == [2.0, 3.0]
    assert scores.means["blocks.0.mlp_out"].tolist() == [2.0, 3.0]
    assert scores.ranking() == [("blocks.0.mlp_out", 1), ("blocks.0.mlp_out", 0)]


def test_negative_contributions_are_clamped_per_example_before_the_mean(model):
    # The second prompt's answer and distractor change places, so its contributions are -(3, 4): clamped to 0.
    mixed = split_of([[0], [1]], [[1], [0]], [[0], [1]], d_vocab=3)
    scores = attribute(model, identity_factors(), mixed)
    # (1 + 0) / 2 and (2 + 0) / 2; clamping after the mean would give max(0, (1 - 3) / 2) = 0 for both.
    assert scores.scores["blocks.0.mlp_out"].tolist() == [0.5, 1.0]


def test_cost_curve(model):
    scores = attribute(model, identity_factors(), TRAIN)
    curve = evaluate(model, identity_factors(), TEST, scores)
    # Test prompt: token 2, z = (4, 6), means (2, 3), ranking unit 1 then unit 0. A = I: 1 read edge, 2 write edges a unit.
    #   k=0: keep nothing  2 + 3 = 5 -> 0.5;  ablate nothing 10 -> drop 0
    #   k=1: keep unit 1   2 + 6 = 8 -> 0.8;  ablate unit 1  4 + 3 = 7 -> drop 3
    #   k=2: keep both    4 + 6 = 10 -> 1.0;  ablate both    2 + 3 = 5 -> drop 5
    assert curve.task == "by hand"
    assert curve.q_dense == curve.q_unpruned == 10.0
    assert curve.rows["units"].tolist() == [0, 1, 2]
    assert curve.rows["edges"].tolist() == [0, 3, 6]
    assert curve.rows["sufficiency"].tolist() == pytest.approx([0.5, 0.8, 1.0])
    assert curve.rows["necessity_drop"].tolist() == pytest.approx([0.0, 3.0, 5.0])
    assert curve.rows["accuracy_keep"].tolist() == [1.0, 1.0, 1.0]


def test_cost_at_reads_the_curve(model):
    scores = attribute(model, identity_factors(), TRAIN)
    curve = evaluate(model, identity_factors(), TEST, scores)
    assert curve.cost_at(sufficiency=0.75) == 3
    assert curve.cost_at(sufficiency=0.9, cost="units") == 2
    assert curve.cost_at(sufficiency=0.5) == 0
    assert curve.cost_at(sufficiency=1.1) is None
    assert curve.cost_at(necessity=0.5, cost="units") == 1  # drop 3 >= half of 5
    with pytest.raises(ValueError, match="exactly one threshold"):
        curve.cost_at()
    with pytest.raises(ValueError, match="cost must be one of"):
        curve.cost_at(sufficiency=0.5, cost="tokens")


def test_zero_ablation_puts_zero_in(model):
    scores = attribute(model, identity_factors(), TRAIN)
    curve = evaluate(model, identity_factors(), TEST, scores, ablation="zero")
    # keep nothing: 0 + 0 = 0; keep unit 1: 0 + 6 = 6; keep both: 10.
    assert curve.rows["sufficiency"].tolist() == pytest.approx([0.0, 0.6, 1.0])


def test_hooks_for_run_with_hooks_do_the_same(model):
    scores = attribute(model, identity_factors(), TRAIN)
    hooks = intervention_hooks(scores, ["blocks.0.mlp_out/1"], "keep")
    with attach(model, identity_factors()), torch.no_grad():
        logits = model.run_with_hooks(torch.tensor([[2]]), fwd_hooks=hooks)[0, -1]
    assert float(logits[1] - logits[0]) == 8.0


def test_an_unknown_unit_or_mode_is_refused(model):
    scores = attribute(model, identity_factors(), TRAIN)
    with pytest.raises(
        ValueError, match=r"blocks.0.mlp_out/7 is not among the scored units: blocks.0.mlp_out \(0 to 1\)"
    ):
        replaced_masks(scores, ["blocks.0.mlp_out/7"], "keep")
    with pytest.raises(ValueError, match="mode must be one of"):
        replaced_masks(scores, [], "remove")


def test_ties_go_by_site_then_unit(model):
    scores = attribute(model, identity_factors(), TRAIN)
    tied = type(scores)({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([2.0, 1.0])}, {}, {})
    assert tied.ranking() == [("a", 1), ("b", 0), ("a", 0), ("b", 1)]
