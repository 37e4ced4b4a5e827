"""concentration: against runs and gradients by hand, and what it says of units that are one or many."""

import math

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits.concentration import text_predictions
from swd_lens.hosts import host_of
from swd_lens.units import attach
from tests.contract import swd_zero_data
from tests.micro import random_tokens

SITE = "blocks.1.mlp_out"
TEXT = random_tokens(12, 8)


@pytest.fixture(scope="module")
def factors(model):
    return swd_zero_data(model, [SITE, "blocks.0.mlp_out"])


def by_hand(model, factors, prompt, answer, share):
    """Edges and units of one prediction, one unit at a time."""
    with torch.no_grad():
        logits = model(prompt[None])[0, -1]
    other = max((t for t in range(len(logits)) if t != answer), key=lambda t: float(logits[t]))
    kept, sites = {}, swd.find_sites(model, list(factors))
    with attach(model, factors):

        def keep(z, hook):
            kept[hook.name] = z.requires_grad_(True)
            return z

        with model.hooks(fwd_hooks=[(site.hook_name, keep) for site in sites]):
            run = model(prompt[None])[0, -1]
        gradients = torch.autograd.grad(run[answer] - run[other], list(kept.values()))
    found = []
    for (hook, z), g in zip(kept.items(), gradients, strict=True):
        edges = next(factors[site.name].edges_per_unit.tolist() for site in sites if site.hook_name == hook)
        contributions = (z[0, -1] * g[0, -1]).tolist()
        found += [(c, e) for c, e in zip(contributions, edges, strict=True) if c > 0]
    found.sort(key=lambda pair: -pair[0])
    total, so_far, n_edges = sum(c for c, _ in found), 0.0, 0
    for n, (c, e) in enumerate(found, 1):
        so_far, n_edges = so_far + c, n_edges + e
        if so_far >= share * total:
            return n_edges, n
    return 0, 0


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_it_is_the_geometric_mean_of_what_single_predictions_need(model, factors, share):
    split, _ = text_predictions(model, TEXT, 6, 5, 0)
    assert len(split) == 6
    needed = [
        by_hand(model, factors, bucket.tokens[0], int(bucket.token_ids[bucket.answers[0].argmax()]), share)
        for bucket in split.buckets(1)
    ]
    found = swd.concentration(model, factors, TEXT, share=share, n_predictions=6, context=5)
    edges, units = (math.exp(sum(math.log(case[of]) for case in needed) / len(needed)) for of in (0, 1))
    assert found.edges == pytest.approx(edges, rel=1e-4) and found.units == pytest.approx(units, rel=1e-4)
    assert found.n_predictions == 6 and f"have {share:.0%} of the effect" in found._repr_html_()


def test_answers_are_the_next_tokens_and_distractors_the_likeliest_others(model):
    split, _ = text_predictions(model, TEXT, 50, 3, 1)
    rows = {tuple(row[i : i + 3].tolist()): int(row[i + 3]) for row in TEXT for i in (0, 4)}
    for bucket in split.buckets(1):
        answer, other = (int(bucket.token_ids[side[0].argmax()]) for side in (bucket.answers, bucket.distractors))
        assert rows[tuple(bucket.tokens[0].tolist())] == answer != other
        logits = host_of(model).last_logits(bucket.tokens)[0]
        logits[answer] = -torch.inf
        assert int(logits.argmax()) == other


def test_mixing_an_exact_basis_spreads_the_effect(model):
    """Neurons of the same matrix, and the same turned at random: alike in every prediction, dearer in edges."""
    neurons, turned = baselines.neurons(model, SITE), baselines.random_b(model, SITE)
    few, many = (swd.concentration(model, each, TEXT, context=4) for each in (neurons, turned))
    assert few.n_predictions == many.n_predictions
    assert few.units > 1 and few.edges == pytest.approx(few.units * (1 + neurons[SITE].d_out), rel=0.2)
    wider = swd.concentration(model, neurons, TEXT, context=4, share=0.9)
    assert wider.edges > few.edges
    again = swd.concentration(model, neurons, TEXT, context=4)
    assert again.as_dict() == few.as_dict()


def test_what_cannot_be_measured_is_said(model, factors):
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\), such as 0.5, got 1"):
        swd.concentration(model, factors, TEXT, share=1)
    with pytest.raises(ValueError, match="context of 8 tokens and the token after it do not fit into rows of 8"):
        swd.concentration(model, factors, TEXT, context=8)
    with pytest.raises(ValueError, match="1 different contexts, and a mean needs two"):
        swd.concentration(model, factors, TEXT[:1], context=7)
    nothing = swd.Factors(torch.zeros(32, 1), torch.zeros(1, 16))
    with pytest.raises(ValueError, match="at most one of 12 next tokens"):
        swd.concentration(model, {SITE: nothing}, TEXT, context=7)
