"""Circuits on a TransformerBridge: against whole prompts run one by one with plain hooks."""

import numpy as np
import pytest
import torch

from swd_lens.circuits import attribute, evaluate
from swd_lens.tasks.split import TaskExample
from swd_lens.tasks.task import TaskSplit
from swd_lens.units import attach
from tests import families
from tests.circuits.slow import activations, last_logits, margin_of, replacing, rows_for, slow_contributions
from tests.contract import swd_zero_data

# Behind Gemma 2's MLPs comes a norm, so that their output is not what the stream gains; OPT's see flat rows.
FAMILIES = ("gpt2", "gemma2", "opt")


def split_for(model, n, seed, name):
    """Prompts of 1 to 8 tokens; right is what the host says of this prompt more than of others."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (n,), generator=generator).tolist()
    prompts = tuple(torch.randint(0, 20, (length,), generator=generator) for length in lengths)
    with torch.no_grad():
        logits = torch.stack([last_logits(model, prompt) for prompt in prompts])
    order = (logits - logits.mean(0)).argsort(1, descending=True).tolist()
    examples = tuple(TaskExample(f"prompt {i}", ("right",), ("wrong",)) for i in range(n))
    right, wrong = tuple((o[0],) for o in order), tuple((o[1], o[-1]) for o in order)
    corrupt = tuple((prompt + 7) % 20 for prompt in prompts)
    return TaskSplit(name, examples, prompts, right, wrong, families.D_VOCAB, task="by hand", corrupt=corrupt)


@pytest.fixture(scope="module", params=FAMILIES)
def made(request):
    model = families.bridge(request.param).double()  # in float32 rounding differs between processors by more than is allowed
    return model, swd_zero_data(model, "all"), split_for(model, 6, 1, "train"), split_for(model, 4, 6, "test")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("score", "positions"), [("first_order", "scoring"), ("integrated_gradients", "all")])
def test_scores_are_those_of_whole_prompts_one_by_one(made, score, positions):
    model, factors, train, _ = made
    fast = attribute(model, factors, train, score=score, positions=positions, steps=2, sign="signed")
    with attach(model, factors):
        slow = [slow_contributions(model, factors, train, i, score, positions, fast.means, 2) for i in range(len(train))]
    for site in factors:
        expected = torch.stack([one[site].double() for one in slow]).mean(0).float()
        torch.testing.assert_close(fast.scores[site], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(  # every pair of values
    ("ablation", "positions", "sites"),
    [
        ("mean", "scoring", "all"),
        ("mean", "all", "blocks.1.mlp_out"),
        ("resample", "scoring", "blocks.1.mlp_out"),
        ("resample", "all", "all"),
    ],
)
def test_curves_are_those_of_whole_prompts_one_by_one(made, ablation, positions, sites):
    model, factors, train, test = made
    factors = factors if sites == "all" else {sites: factors[sites]}
    scores = attribute(model, factors, train, positions=positions)
    k = [0, 5, scores.n_units]
    curve = evaluate(model, factors, test, scores, grid=k, ablation=ablation, kl=True, tokens_per_forward=64)
    ranks = scores.ranks()
    with attach(model, factors), torch.no_grad():
        # What no circuit changes is run once.
        plain = [last_logits(model, prompt) for prompt in test.tokens]
        resampled = [activations(model, factors, corrupt) for corrupt in test.corrupt] if ablation == "resample" else []
        for row, n in enumerate(k):
            for mode in ("keep", "ablate"):
                margins, kl = [], []
                for i, prompt in enumerate(test.tokens):
                    z = resampled[i] if ablation == "resample" else scores.means
                    hooks = [
                        replacing(site, (rank <= n) == (mode == "ablate"), rows_for(z[site], len(prompt)), positions)
                        for site, rank in ranks.items()
                    ]
                    changed = last_logits(model, prompt, hooks)
                    margins.append(float(margin_of(changed, test, i)))
                    p, q = plain[i].softmax(-1), changed.softmax(-1)
                    kl.append(float((p * (p / q).log()).sum()))
                scale = float(plain[-1].abs().max())
                np.testing.assert_allclose(curve.margins[mode][row], margins, atol=1e-5 * scale)
                np.testing.assert_allclose(curve.rows[f"KL {mode}"][row], np.mean(kl), rtol=1e-4, atol=1e-5)
