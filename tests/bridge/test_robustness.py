"""attack, dense_transfer, disagreement and multiverse on a TransformerBridge: what must hold on every host."""

import pytest
import torch

import swd_lens as swd
from swd_lens.circuits import Circuit, attribute, evaluate_circuits
from swd_lens.tasks.task import Task
from tests import families
from tests.bridge.test_circuits import split_for
from tests.contract import swd_zero_data


@pytest.fixture(scope="module", params=("gpt2", "gemma2"))
def made(request):
    model = families.bridge(request.param)
    factors = swd_zero_data(model, "blocks.*.mlp_out")
    splits = [split_for(model, 6, seed, name) for seed, name in ((1, "train"), (2, "validation"), (6, "test"))]
    return model, factors, Task("by hand", *splits, "random", False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_an_attack_is_the_circuit_without_a_budget_and_never_above(made, positions):
    model, factors, task = made
    scores = attribute(model, factors, task, positions=positions)
    circuit = Circuit.of(factors, scores, scores.ranking()[:6])
    found = swd.attack(model, factors, task.test, circuit, budget=[0, 0.3], n=1, steps=6, starts=2)
    q = found.rows.set_index("run")["q keep"]
    assert q["circuit"] == pytest.approx(evaluate_circuits(model, factors, task, circuit)["q keep"][0], abs=1e-5)
    assert q["adversary"].iloc[0] == pytest.approx(q["circuit"], abs=1e-5) and q["adversary"].iloc[1] < q["circuit"]


@pytest.mark.quick_cases(1)
def test_with_exact_factors_a_dense_transfer_has_no_gap(made):
    model, factors, task = made
    for units, exact in ((factors, False), (swd.baselines.neurons(model, "blocks.*.mlp_out"), True)):
        scores = attribute(model, units, task)
        found = swd.dense_transfer(model, units, task, Circuit.of(units, scores, scores.ranking()[:6]), n=9)
        keep = [torch.tensor(found.prompts[f"keep ({way})"]) for way in ("replacement", "error kept")]
        assert torch.allclose(*keep, atol=1e-4) == exact
        with torch.no_grad():
            logits = torch.stack([model(tokens[None])[0, -1] for tokens in task.test.tokens])
        dense = [
            of[list(right)].mean() - of[list(wrong)].mean()
            for of, right, wrong in zip(logits, task.test.answer_ids, task.test.distractor_ids, strict=True)
        ]
        assert torch.allclose(torch.tensor(found.prompts["full (error kept)"]).float(), torch.stack(dense), atol=1e-4)


@pytest.mark.quick_cases(1)
def test_disagreement_has_fidelitys_mean_and_errors(made):
    model, factors, _ = made
    tokens = families.some_tokens(4, 9)
    found, beside = swd.disagreement(model, factors, tokens, n=2), swd.fidelity(model, factors, tokens, local=True)
    assert found.relmse == pytest.approx(dict(beside.local_relmse), rel=1e-4)
    assert found.value("p50") <= beside.kl * 32 and found.value("max") >= beside.kl


@pytest.mark.quick_cases(1)
def test_multiverse_runs(made):
    model, factors, task = made
    methods = {"SWD": factors, "neurons": swd.baselines.neurons(model, "blocks.*.mlp_out")}
    found = swd.multiverse(methods, model, task, scores="first_order", ablations="mean", n=9)
    assert len(found.rows) == 4 and found.method == "SWD"
