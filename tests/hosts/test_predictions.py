"""Predictions a part at a time: the numbers and gradients of whole logits, and no call that holds more logits than it may."""

import importlib
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.edit import edit_unit, side_effects
from swd_lens.base.divergence import cross_entropy, log_probabilities
from swd_lens.hosts import host_of
from swd_lens.hosts.predictions import Predictions
from tests import families

SITE, WRITES = "blocks.1.mlp_in", "blocks.1.mlp_out"
LIMIT = 2**17  # bytes, in place of CHUNK_BYTES: 23 predictions of the small vocabulary
HOLDERS = ("hosts.predictions", "base.divergence", "circuits.fidelity", "tasks.split", "study.generate", "analysis.edit.effects")


@pytest.fixture
def limited(monkeypatch):
    for holder in HOLDERS:
        # Not by its dotted name: that of circuits.fidelity is a function's, too.
        monkeypatch.setattr(importlib.import_module(f"swd_lens.{holder}"), "CHUNK_BYTES", LIMIT)


@cache
def model_of(kind):
    return families.bridge("llama") if kind == "bridge" else families.hooked("llama")


def measured(targets: Tensor, logits: Tensor) -> Tensor:
    return cross_entropy(log_probabilities(logits), targets).sum()


def total_and_gradient(model, rows):
    predictions = Predictions(host_of(model))
    weight = [p for p in model.blocks[0].parameters() if p.ndim > 1][-1]
    total = predictions.total(measured, rows, predictions.run(rows))
    return predictions, float(total.detach()), torch.autograd.grad(total, weight)[0]


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_where_runs_in_stages_fail_fidelity_says_of_what(kind, monkeypatch):
    model, rows = model_of(kind), families.some_tokens(3, 9)
    units = baselines.svd(model, WRITES)
    whole = swd.fidelity(model, units, rows).kl

    def failing(*_, **__):
        raise IndexError("position 3 of 1")

    monkeypatch.setattr(type(host_of(model)), "residual", failing)
    with pytest.warns(UserWarning, match="fails when it is shortened .runs in stages.: IndexError: position 3") as caught:
        assert swd.fidelity(model, units, rows).kl == pytest.approx(whole, rel=1e-4)
    assert not any("gives other logits" in str(one.message) for one in caught)


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_parts_give_the_numbers_and_gradients_of_whole_logits(kind, monkeypatch):
    model, rows = model_of(kind), families.some_tokens(3, 9)
    with torch.enable_grad():
        _, whole, gradient = total_and_gradient(model, rows)
        monkeypatch.setattr("swd_lens.hosts.predictions.CHUNK_BYTES", LIMIT)
        predictions, parts, gradient_of_parts = total_and_gradient(model, rows)
    assert predictions._apart and parts == pytest.approx(whole, rel=1e-6)
    torch.testing.assert_close(gradient_of_parts, gradient, rtol=1e-4, atol=1e-6)


def test_a_host_that_unembeds_otherwise_is_run_whole(monkeypatch, limited):
    model, rows = model_of("bridge"), families.some_tokens(3, 9)
    unembed = type(host_of(model)).unembed
    monkeypatch.setattr(type(host_of(model)), "unembed", lambda *given: 1.01 * unembed(*given))
    predictions = Predictions(host_of(model))
    run = predictions.run(rows)
    assert run.shape[-1] == families.D_VOCAB and torch.equal(run, host_of(model).run(rows))
    plain = measured(rows[:, 1:], run[:, :-1])
    assert float(predictions.total(measured, rows, run)) == pytest.approx(float(plain), rel=1e-6)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor whose last dimension is the vocabulary; parameters do not count."""

    def __init__(self, model):
        super().__init__()
        self.d_vocab, self.bytes = int(model.cfg.d_vocab), 0
        self.own = {tuple(p.shape) for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.ndim and t.shape[-1] == self.d_vocab and tuple(t.shape) not in self.own:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def whole_metric(logits, examples):
    return logits[:, 3] - logits[:, 4]


def calls():
    """name -> call(model, rows): every kind of call that needs predictions of whole rows, or of whole vocabularies."""

    def factors(model):
        return swd.factorize(model, WRITES, sparsity=0.5, outer_iterations=4, progress=False)

    def effects(model, rows):
        change = edit_unit(model, baselines.svd(model, WRITES), f"{WRITES}/1", rows[0].tolist(), 9, 10, 2)
        side_effects(model, change, [row.tolist() for row in rows], rows, batch_size=32)

    def skill(model, rows):
        examples = [swd.TaskExample(f"prompt {i}", ("a",), ("b",)) for i in range(len(rows))]
        answers = [(3,) for _ in rows], [(4,) for _ in rows]
        split = swd.tasks.TaskSplit(
            "test", tuple(examples), tuple(rows), *map(tuple, answers), families.D_VOCAB, metric=whole_metric
        )
        swd.skill(model, swd.tasks.Task("whole", split, split, split, "made", False))

    return {
        "fidelity": lambda model, rows: swd.fidelity(model, factors(model), rows, batch_size=32),
        "allocate": lambda model, rows: swd.allocate(model, WRITES, 0.5, rows, outer_iterations=4, batch_size=8, progress=False),
        "finetune": lambda model, rows: swd.finetune(
            model, factors(model), rows, heldout=rows, steps=1, batch_size=16, progress=False
        ),
        "side_effects": effects,
        "generate": lambda model, rows: swd.generate(model, factors(model), rows, max_new_tokens=2, temperature=1, batch_size=32),
        "skill": skill,
        "vpd": lambda model, rows: baselines.vpd_kl(
            model, SITE, rows, n_tokens=8 * 24, tokens_per_step=4 * 24, width=8, progress=False
        ),
    }


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_no_call_holds_more_logits_than_it_may(kind, name, limited):
    model, rows = model_of(kind), families.some_tokens(32, 24)  # whole: 4.2 MB
    with Largest(model) as largest:
        calls()[name](model, rows)
    # One prediction more than a chunk has, in float64; the check of the road takes a few whole ones.
    assert 0 < largest.bytes <= 2 * LIMIT + 8 * families.D_VOCAB
