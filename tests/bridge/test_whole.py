"""Whole models on bridges: every matrix of an architecture replaced, calibrated in every way, fine-tuned; also on 4.x."""

import pytest
import torch

import swd_lens as swd
from swd_lens.factorization.grams import collect_grams, corrected
from swd_lens.factorization.workers import SolveTask, solve_task
from swd_lens.hosts import find_sites, host_of
from swd_lens.units.factors import FactorSet
from tests import families

QUICK = {"preset": "quick", "outer_iterations": 2, "refine_rounds": 1, "sparsity": 0.3, "progress": False}
# One each of: packed q, k, v; q, k, v and gate, in apart; parallel blocks; norms behind the matrices; linear attention.
FAMILIES = ("gpt2", "qwen2", "pythia", "gemma2", "qwen3_5")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("calibration", ["corrected", "per_block"])
def test_every_matrix_of_every_family(family, calibration, tmp_path):
    model, tokens = families.bridge(family), families.some_tokens(6, 12)
    logits, hooks = model(tokens), list(model.hook_dict)
    made = swd.factorize(model, "all", tokens=tokens, calibration=calibration, batch_size=2, out=tmp_path, **QUICK)
    assert list(made) == [site.name for site in find_sites(model)]
    assert torch.equal(model(tokens), logits) and list(model.hook_dict) == hooks
    swd.attach(model, FactorSet.load(tmp_path)).detach()  # with the probes of all sites
    # The last matrix of all, from whole forwards behind what stood before it.
    last = find_sites(model)[-1]
    before = {n: f for n, f in made.items() if n != last.name and (calibration == "corrected" or f"blocks.{last.layer}" not in n)}
    weight, dense = host_of(model).weight(last), inputs(model, last, tokens)
    with swd.attach(model, before):
        gram, replaced = (
            collect_grams(model, [last], tokens, batch_size=2, dtype="float64")[last.name],
            inputs(model, last, tokens),
        )
    if calibration == "per_block":
        options = {"outer_iterations": 2, "refine_rounds": 1, "basis": made[last.name].settings["basis"]}
        how = {"preset": "quick", "tokens": tokens.numel(), "options": options}
        again = solve_task(SolveTask(last.name, weight, gram, 0.3, **how))
        assert torch.equal(again.read, made[last.name].read) and torch.equal(again.write, made[last.name].write)
    else:  # nearer to the dense host's output than the same sparse product is to the weight's own output there
        written = replaced @ made[last.name].product().double()
        target = corrected(weight, replaced.T @ replaced, replaced.T @ dense).double()
        assert float((written - replaced @ target).norm()) < float((written - replaced @ weight.double()).norm())


def inputs(model, site, tokens) -> torch.Tensor:
    host, found = host_of(model), []
    with torch.no_grad(), host.inputs([site], lambda _, h: found.append(h.reshape(-1, site.d_in).double())):
        host.run_blocks(tokens, site.layer + 1)
    return torch.cat(found)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3_5", "opt"])
def test_bypassed_units_leave_the_dense_bridge(family):
    model, tokens = families.bridge(family), families.some_tokens()
    factors = swd.factorize(model, "all", **QUICK)
    dense = model(tokens).detach()
    with swd.attach(model, factors) as attached:
        replaced = model(tokens)
        with attached.dense():
            assert torch.equal(model(tokens), dense)
        assert torch.equal(model(tokens), replaced) and not torch.equal(replaced, dense)
    assert torch.equal(model(tokens), dense)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_replaced_and_fine_tuned(family, tmp_path):
    model, tokens, heldout = families.bridge(family), families.some_tokens(8, 12), families.some_tokens(8, 12, seed=1)
    logits = model(tokens)
    made = swd.replace_model(
        model, tokens=tokens, heldout=heldout, prompts=heldout[:1, :4], max_new_tokens=3, out=tmp_path,
        budgets="uniform", finetune_options={"loss": "kl", "passes": 4}, **QUICK,
    )  # fmt: skip
    assert torch.equal(model(tokens), logits)
    assert made.finetuned.edges == made.factors.edges
    for site, f in made.factors.items():
        assert torch.equal(f.read != 0, made.finetuned[site].read != 0)
    # What it was trained on came nearer to the dense host.
    assert swd.fidelity(model, made.finetuned, tokens).kl < swd.fidelity(model, made.factors, tokens).kl
    assert set(made.samples[0].by_host) == {"dense", "SWD", "SWD-FT"}
