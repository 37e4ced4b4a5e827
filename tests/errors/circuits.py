"""Triggers of the section "Circuits" of swd_lens/ERRORS.md."""

import dataclasses
import json
from functools import cache

import pandas as pd
import torch
from safetensors.torch import save_file

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.sealed import read_tensors, write_tensors
from swd_lens.circuits.scores import require_finite
from swd_lens.hosts import Start, host_of
from swd_lens.tasks.task import Task
from tests import families
from tests.errors.triggers import TRIGGERS, on_hooked, trigger

SITE, OTHER = "blocks.0.mlp_out", "blocks.1.mlp_out"


@cache
def setting():
    """A toy host, SVD factors of two sites, a task whose margin is positive, and scores at one site."""
    from tests.micro import random_split, toy_model  # needs HookedTransformer

    model = toy_model()
    with torch.no_grad():  # the answers of prompt i are token i: a bias makes the margin positive
        model.unembed.b_U.copy_(torch.linspace(20.0, 0.0, model.cfg.d_vocab))
    others = [random_split(12, seed=seed, name=name) for name, seed in (("validation", 6), ("test", 5))]
    task = Task("toy", random_split(12), *others, "random", False)
    factors = {site: baselines.svd(model, site) for site in (SITE, OTHER)}
    return model, factors, task, swd.attribute(model, factors[SITE], task)


def other_factors(model):
    return baselines.random_b(model, SITE, seed=1)


def overflowing(name):
    from tests.hosts.test_overflow import CALLS, identity_factors, overflowing  # needs HookedTransformer

    return CALLS[name](overflowing(), identity_factors())


@on_hooked
def margin_not_finite(*_):
    overflowing("skill")


@on_hooked
def score_not_finite(*_):
    require_finite("the score", {SITE: torch.tensor([0.0, torch.nan])})


@on_hooked
def predictions_not_finite(*_):
    overflowing("fidelity")


@on_hooked
def edit_margin_not_finite(*_):
    overflowing("edit_unit")


@on_hooked
def ranking_of_other_sites(folder, patch):
    model, factors, task, scores = setting()
    swd.evaluate(model, factors[OTHER], task, scores)


@on_hooked
def ranking_of_other_factors(folder, patch):
    model, _, task, scores = setting()
    swd.evaluate(model, other_factors(model), task, scores)


@on_hooked
def circuit_of_other_factors(folder, patch):
    model, factors, _, scores = setting()
    with swd.Circuit.of(factors[SITE], scores, [f"{SITE}/0"]).attach(model, other_factors(model)):
        pass


@on_hooked
def overlap_of_other_factors(folder, patch):
    model, factors, task, scores = setting()
    other = other_factors(model)
    ours = swd.Circuit.of(factors[SITE], scores, [f"{SITE}/0"])
    ours.overlap(swd.Circuit.of(other, swd.attribute(model, other, task), [f"{SITE}/0"]))


@on_hooked
def unit_not_scored(folder, patch):
    _, factors, _, scores = setting()
    swd.Circuit.of(factors[SITE], scores, [f"{SITE}/999"])


def reversed_task():
    model, factors, task, scores = setting()
    swapped = {"answer_ids": task.test.distractor_ids, "distractor_ids": task.test.answer_ids}
    return model, factors[SITE], dataclasses.replace(task.test, **swapped), scores


@on_hooked
def undefined_sufficiency(folder, patch):
    model, factors, split, scores = reversed_task()
    swd.evaluate(model, factors, split, scores, grid=[0])


@on_hooked
def nothing_to_refine(folder, patch):
    model, factors, split, scores = reversed_task()
    swd.refine(model, factors, split, scores, sufficiency=0.9)


def curve_of(q_full):
    """A curve whose surface carries q_full - 1 logits of the dense model's 3, give or take a tenth."""
    rows = {"units": [0, 1], "edges": [0, 4], "recovered": [0.0, 1.0], "sufficiency": [0.5, 1.0], "drop": [0.0, 1.0]}
    about = {"task": "t", "q_dense": 3.0, "q_full": q_full, "q_empty": 1.0, "carried_se": 0.1}
    return swd.CostCurve(
        pd.DataFrame(rows), **about, accuracy_dense=1.0, accuracy_full=1.0, settings={"units": {SITE: 1}}
    )


@trigger
def prefix_never_reaches(folder, patch):
    curve_of(2.0).circuit_at(sufficiency=9.0)


@trigger
def surface_carries_nothing(folder, patch):
    curve_of(1.1).cost_at(recovered=0.9)


@trigger
def circuit_of_nothing_carried(folder, patch):
    curve_of(1.1).circuit_at(recovered=0.9)


@on_hooked
def mib_without_its_prefixes(folder, patch):
    model, factors, task, scores = setting()
    swd.evaluate(model, factors[SITE], task, scores).mib()


@on_hooked
def resample_without_corrupt(folder, patch):
    model, factors, task, scores = setting()
    swd.evaluate(model, factors[SITE], task, scores, ablation="resample")


@on_hooked
def resample_other_length(folder, patch):
    model, factors, task, _ = setting()
    longer = tuple(torch.cat([tokens, tokens[-1:]]) for tokens in task.test.tokens)
    scores = swd.attribute(model, factors[SITE], task, positions="all")
    swd.evaluate(model, factors[SITE], dataclasses.replace(task.test, corrupt=longer), scores, ablation="resample")


@on_hooked
def direct_logit_elsewhere(folder, patch):
    model, _, task, _ = setting()
    swd.attribute(model, baselines.svd(model, "blocks.0.mlp_in"), task, score="direct_logit")


@on_hooked
def prompts_of_another_host(folder, patch):
    model, factors, task, _ = setting()
    swd.attribute(model, factors[SITE], dataclasses.replace(task.train, d_vocab=999))


@on_hooked
def prompts_of_another_tokenizer(folder, patch):
    model, factors, task, _ = setting()
    model.tokenizer = swd.load_default_model().tokenizer
    swd.attribute(model, factors[SITE], dataclasses.replace(task.train, vocabulary="another"))


@on_hooked
def scores_with_another_beginning(folder, patch):
    model, factors, task, _ = setting()
    scores = swd.attribute(model, factors[SITE], dataclasses.replace(task.train, prepend_bos=True))
    swd.evaluate(model, factors[SITE], dataclasses.replace(task.test, prepend_bos=False), scores)


@on_hooked
def metric_without_gradient(folder, patch):
    model, factors, task, _ = setting()

    def right(logits, examples):
        return (logits.argmax(-1) == 0).float()

    swd.attribute(model, factors[SITE], dataclasses.replace(task.train, metric=right))


@on_hooked
def not_a_circuit_file(folder, patch):
    save_file({"x": torch.zeros(1)}, folder / "x.safetensors")
    swd.Circuit.load(folder / "x.safetensors")


@on_hooked
def circuit_file_of_the_future(folder, patch):
    _, factors, _, scores = setting()
    path = folder / "circuit.safetensors"
    swd.Circuit.of(factors[SITE], scores, [f"{SITE}/0"]).save(path)
    tensors, header = read_tensors(path, "a circuit file")
    write_tensors(path, tensors, {**header, "about": json.dumps({**json.loads(header["about"]), "version": 99})})
    swd.Circuit.load(path)


@on_hooked
def prefix_of_later_layers(folder, patch):
    model, *_ = setting()
    host, tokens = host_of(model), torch.tensor([[1, 2, 3]])
    prefix = host.repeat_prefix(host.freeze_prefix(tokens), 1, from_layer=1)
    host.last_logits(tokens, prefix, start=Start(0, host.residual(tokens, 0)))


def run_within_a_run(folder, patch):
    model = families.bridge("gpt2")
    host, tokens = host_of(model), torch.tensor([[1, 2, 3]])
    start = Start(1, host.residual(tokens, 1))
    with model.hooks(fwd_hooks=[("blocks.1.hook_out", lambda x, hook: host.last_logits(tokens, start=start) and x)]):
        host.last_logits(tokens, start=start)


TRIGGERS["run-within-a-run"] = run_within_a_run


@on_hooked
def dense_host_attached(folder, patch):
    model, factors, task, _ = setting()
    with swd.attach(model, factors[SITE]):
        swd.screen(model, task)


@on_hooked
def comparison_hosts_of_other_methods(folder, patch):
    model, factors, task, _ = setting()
    swd.compare(model, {"SVD": factors[SITE]}, task, hosts={"SVD": model})


@on_hooked
def comparisons_of_other_tasks(folder, patch):
    model, factors, task, _ = setting()
    other = Task("another", *task.splits, "random", False)
    ours, theirs = (swd.compare(model, {name: factors[SITE]}, of) for name, of in (("a", task), ("b", other)))
    ours.beside(theirs)
