"""What is put in a unit's place: means, zeros, activations on the corrupt prompt; by position, in the shape of a bucket."""

from dataclasses import replace

import pytest
import torch

from swd_lens.base.errors import TaskError
from swd_lens.circuits import UnitScores, attribute, evaluate, intervention_hooks
from swd_lens.circuits.ablation import Reference, ablation_values, aligned
from swd_lens.hosts import host_of
from swd_lens.units import attach
from tests.circuits.slow import able_split, activations, rows_for
from tests.contract import swd_zero_data
from tests.micro import toy_model

TRAIN, SITE = able_split(12, seed=3, name="train"), "blocks.1.mlp_out"


@pytest.fixture(scope="module")
def toy():
    model = toy_model()
    return model, swd_zero_data(model, "*.mlp_out")


def test_values_of_mean_and_zero_and_rows_of_a_mean_per_position():
    means = torch.tensor([[1.0], [2.0], [3.0]])
    assert aligned(means, 1).tolist() == [[3.0]]
    assert aligned(means, 3).tolist() == [[1.0], [2.0], [3.0]]
    assert aligned(means, 5).tolist() == [[1.0], [1.0], [1.0], [2.0], [3.0]]
    for length in range(1, 6):
        assert torch.equal(aligned(means, length), rows_for(means, length))
    scores = UnitScores({"s": torch.ones(2)}, {"s": torch.tensor([3.0, 4.0])}, {})
    assert ablation_values(scores, "mean")["s"].tolist() == [3.0, 4.0]
    assert ablation_values(scores, "zero")["s"].tolist() == [0.0, 0.0]
    for ablation in ("resample", "median"):
        with pytest.raises(ValueError, match=f"'mean' or 'zero' here, got '{ablation}'"):
            ablation_values(scores, ablation)


@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_resampled_values_are_those_of_each_prompts_own_corrupt_prompt(toy, positions):
    """Also where corrupt prompts of one bucket have several lengths (at the scoring position only)."""
    model, factors = toy
    split = able_split(12, seed=3, same_lengths=positions == "all")
    scores, rows = attribute(model, factors, TRAIN, positions=positions), 0
    with attach(model, factors) as attachment:
        reference = Reference(host_of(model), attachment.sites, scores, "resample", split)
        for bucket in split.buckets():
            found = reference(bucket)
            rows += len(bucket.index)
            for row, i in enumerate(bucket.index.tolist()):
                z = activations(model, factors, split.corrupt[i])
                for site in factors:
                    expected = z[site][-1:] if positions == "scoring" else z[site]
                    torch.testing.assert_close(found[site][row], expected, rtol=1e-5, atol=1e-6)
    assert rows == len(split)
    if positions == "scoring":
        assert any(len({len(c) for c in bucket.corrupt}) > 1 for bucket in split.buckets())


def test_corrupt_prompts_that_lack_or_do_not_fit_are_named(toy):
    model, factors = toy
    split = able_split(same_lengths=False)
    scoring, everywhere = (attribute(model, factors, TRAIN, positions=p) for p in ("scoring", "all"))
    evaluate(model, factors, split, scoring, ablation="resample")
    with pytest.raises(TaskError, match=r"same length; \d of 7 test prompts of 'by hand' differ, the first has \d tokens"):
        evaluate(model, factors, split, everywhere, ablation="resample")
    holes = replace(split, corrupt=(split.corrupt[0], None, *split.corrupt[2:]))
    with pytest.raises(TaskError, match="1 of 7 test prompts of 'by hand' have none, the first is 'prompt 1'"):
        evaluate(model, factors, holes, scoring, ablation="resample")


@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_hooks_put_in_what_they_say_and_touch_nothing_else(toy, positions):
    model, factors = toy
    scores = attribute(model, factors, TRAIN, positions=positions, mean_over="per_position")
    prompt, unit = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]), (SITE, 3)  # longer than any in training
    with attach(model, factors), torch.no_grad():
        before = activations(model, factors, prompt[0])[SITE]
        seen = {}
        hooks = intervention_hooks(scores, [unit], "ablate")
        model.run_with_hooks(prompt, fwd_hooks=[*hooks, (hooks[0][0], lambda z, hook: seen.update(z=z[0]))])
    expected = before.clone()
    chosen = slice(None) if positions == "all" else slice(-1, None)
    expected[chosen, 3] = rows_for(scores.means[SITE], 10)[chosen, 3]
    assert len(hooks) == 1  # the other site has no unit to replace
    torch.testing.assert_close(seen["z"], expected, rtol=1e-5, atol=1e-6)
