"""InterventionRunner: bounded runs, and nothing replaced is the replacement itself, to the bit."""

from dataclasses import replace

import pytest
import torch

from swd_lens.circuits import attribute, evaluate
from swd_lens.circuits.measure import Threshold
from swd_lens.hosts import host_of
from tests.circuits.slow import able_split
from tests.micro import random_split

TRAIN, TEST = random_split(), able_split()


def test_the_number_of_interventions_does_not_change_the_size_of_a_run(model, every, monkeypatch):
    factors, kind, rows = every, type(host_of(model)), []
    plain = kind.last_logits

    def counted(self, tokens, *arguments, **options):
        rows.append(tokens.numel())
        return plain(self, tokens, *arguments, **options)

    monkeypatch.setattr(kind, "last_logits", counted)
    scores = attribute(model, factors, TRAIN, positions="all")
    largest, calls = [], []
    for grid in ([0], list(range(50))):
        rows.clear()
        evaluate(model, factors, TEST, scores, grid=grid, tokens_per_forward=64, batch_size=2)
        largest.append(max(rows))
        calls.append(len(rows))
    assert largest[0] <= largest[1] <= 64 and calls[1] > 3 * calls[0]


def test_prompts_of_several_lengths_run_together_and_keep_their_order(model, every, monkeypatch):
    """Joined or one length after the other: the same margins at the same places, and the runs are as bounded."""
    factors, kind, rows = {"blocks.1.attn_o": every["blocks.1.attn_o"]}, type(host_of(model)), []
    plain, scores = kind.last_logits, attribute(model, factors, TRAIN)
    assert len({len(tokens) for tokens in TEST.tokens}) > 2

    def counted(self, tokens, *arguments, **options):
        rows.append(len(tokens))
        return plain(self, tokens, *arguments, **options)

    monkeypatch.setattr(kind, "last_logits", counted)
    joined = evaluate(model, factors, TEST, scores, random_sets=5)
    together, largest = len(rows), max(rows)
    rows.clear()
    bounded = evaluate(model, factors, TEST, scores, random_sets=5, tokens_per_forward=len(TEST) + 1)
    assert max(rows) <= len(TEST) + 1 < largest
    rows.clear()
    monkeypatch.setattr("swd_lens.circuits.interventions._JOINED_BYTES", 0)
    alone = evaluate(model, factors, TEST, scores, random_sets=5)
    if kind.__name__ == "HookedTransformerHost":
        assert together < len(rows)
    for other in (bounded, alone):
        for name, margins in joined.margins.items():
            torch.testing.assert_close(other.margins[name], margins, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_keeping_all_and_ablating_none_are_the_replacement_with_all_units_to_the_bit(model, every, positions):
    factors = every
    scores = attribute(model, factors, TRAIN, positions=positions)
    curve = evaluate(model, factors, TEST, scores)
    assert torch.equal(curve.margins["keep"][-1], curve.margins["full"])
    assert torch.equal(curve.margins["ablate"][0], curve.margins["full"])
    assert curve.rows["sufficiency"].iloc[-1] == 1.0 and curve.rows["drop"].iloc[0] == 0.0
    assert Threshold("sufficiency", 1.0).reached(curve.rows).iloc[-1]


def test_prompts_with_bos_do_not_fit_scores_of_prompts_without(model, every):
    scores = attribute(model, every, replace(TRAIN, prepend_bos=False))
    with pytest.raises(ValueError, match="the scores are of prompts without BOS, the test prompts of 'by hand' are with BOS"):
        evaluate(model, every, replace(TEST, prepend_bos=True), scores)
