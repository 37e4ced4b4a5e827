"""Forecasts of a study's memory, against what torch's profiler counts."""

import pytest
import torch

import swd_lens as swd
from swd_lens.study.memory import memory_of


@pytest.mark.slow
def test_the_memory_of_a_study_is_bounded_by_its_estimate(default_model):
    """Tensors of each part, as torch's profiler counts them."""
    task = swd.load_task("ioi", default_model, n_train=64, n_test=64)
    sites, heldout = {"last two": "blocks.[23].mlp_out"}, swd.text_tokens(4096, split="test")
    needed = memory_of(default_model, sites, [task], sparsities=(0.5,), heldout_length=heldout.shape[1])
    assert list(needed) == ["factorize", "fidelity", "attribution of ioi", "curves of ioi"]
    factors = swd.factorize(default_model, sites["last two"], sparsity=0.5, preset="quick", outer_iterations=4, progress=False)
    scores = swd.attribute(default_model, factors, task)
    calls = {
        "fidelity": lambda: swd.fidelity(default_model, factors, heldout),
        "attribution of ioi": lambda: swd.attribute(default_model, factors, task),
        "curves of ioi": lambda: swd.evaluate(default_model, factors, task, scores),
    }
    for part, call in calls.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        held = most = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        assert 0 < most <= needed[part], part
    larger = memory_of(default_model, sites, [task], sparsities=(0.5, 0.6, 0.7), heldout_length=128)
    assert all(larger[part] > needed[part] - needed["fidelity"] for part in needed)

    def bytes_of(n_sparsities: int, *controls: str) -> int:
        how = {"sparsities": (0.5, 0.6)[:n_sparsities], "controls": controls}
        return memory_of(default_model, sites, [task], **how)["attribution of ioi"]

    # Every solved control is one more set of factors per sparsity; units of "pruned" are inputs, as those of neurons.
    d_in, d_out = 512, 128
    pairs = {units: 2 * 4 * (units * (d_in + d_out) + d_in * d_out) for units in (d_in, d_out)}  # two layers
    for n in (1, 2):
        plain = bytes_of(n, "neurons", "svd")
        assert bytes_of(n, "neurons", "svd", "svd_pruned") - plain == n * pairs[d_out]
        assert bytes_of(n, "neurons", "svd", "paper") - plain == n * pairs[d_out]
        assert bytes_of(n, "neurons", "svd", "pruned") - plain == n * pairs[d_in]
