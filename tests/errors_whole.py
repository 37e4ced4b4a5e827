"""Triggers of the section "Whole models" of swd_lens/ERRORS.md; tests/test_errors.py runs them.

The host is a small bridge, which every transformer_lens has.
"""

import json
import sys
from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factors import Factors
from swd_lens.hosts import Start, find_sites, host_of
from swd_lens.residuals import Residuals
from swd_lens.study.spend import LossCurve, spend
from swd_lens.workers import SolveTask, WorkerLostError, open_workers
from tests import families
from tests.inject.test_sources import Coder

SITE, OTHER = "blocks.0.mlp_out", "blocks.1.mlp_out"
BOTH = [SITE, OTHER]
QUICK = {"preset": "paper", "outer_iterations": 4, "progress": False}
TRIGGERS = {}
NEEDS_HOOKED: set[str] = set()


def trigger(function):
    TRIGGERS[function.__name__.replace("_", "-")] = function
    return function


@cache
def model():
    return families.bridge("gpt2")


def tokens():
    return families.some_tokens(4, 8)


def factorized(sites: str | list[str] = SITE, **settings):
    return swd.factorize(model(), sites, **{**QUICK, **settings})


# ---------------------------------------------------------------------------------------------- token streams


def gone_through(source, n_rows=2, times=1, **settings):
    stream = swd.TokenStream(source, n_rows, **settings).bound_to(model())
    for _ in range(times):
        list(stream.batches(1))


@trigger
def stream_without_function(*_):
    swd.TokenStream(tokens(), 4)


@trigger
def stream_of_no_rows(*_):
    swd.TokenStream(tokens, 0)


@trigger
def tokens_only_once(*_):
    factorized(tokens=iter(tokens()))


@trigger
def stream_too_short(*_):
    gone_through(tokens, n_rows=9)


@trigger
def stream_used_up(*_):
    rows = iter(tokens())
    gone_through(lambda: rows, n_rows=4, times=2)


@trigger
def stream_of_other_rows(*_):
    passes = iter([families.some_tokens(2, 8, seed=0), families.some_tokens(2, 8, seed=1)])
    gone_through(lambda: next(passes), times=2)


@trigger
def stream_row_of_another_length(*_):
    gone_through(lambda: [[8, 9, 10], [8, 9]])


@trigger
def stream_row_of_another_shape(*_):
    gone_through(lambda: [[[8, 9], [10, 11]]])


@trigger
def stream_row_without_integers(*_):
    gone_through(lambda: ["Once upon a time"])


@trigger
def stream_of_another_vocabulary(*_):
    gone_through(lambda: [[8, 9], [8, families.D_VOCAB]])


@trigger
def unknown_gram_dtype(*_):
    factorized(gram_dtype="bfloat16")


@trigger
def few_tokens(*_):
    factorized(tokens=tokens())


# ---------------------------------------------------------------------------------------------- sparsities and estimates


@trigger
def unknown_calibration(*_):
    factorized(calibration="per_layer")


@trigger
def site_without_sparsity(*_):
    factorized("mlp_out", sparsity={SITE: 0.5})


@trigger
def site_with_two_sparsities(*_):
    factorized("mlp_out", sparsity={"mlp_out": 0.5, SITE: 0.6})


@trigger
def sparsity_for_no_matrix(*_):
    swd.estimate({"up": (8, 16)}, sparsity={"down": 0.5})


@trigger
def no_shapes(*_):
    swd.estimate({})


@trigger
def no_shape(*_):
    swd.estimate({"up": (8, 16, 2)})


@trigger
def sites_beside_shapes(*_):
    swd.estimate({"up": (8, 16)}, "mlp_out")


@trigger
def does_not_fit(_, monkeypatch):
    monkeypatch.setattr("swd_lens.plan.available_bytes", lambda device: 1)
    factorized()


# ---------------------------------------------------------------------------------------------- shards


@trigger
def no_shard(folder, _):
    factorized(shard="second", out=folder)


@trigger
def shard_outside(folder, _):
    factorized(shard="3/2", out=folder)


@trigger
def shard_without_matrices(folder, _):
    factorized(BOTH, shard="3/3", out=folder)


@trigger
def shard_of_a_chain(folder, _):
    factorized(BOTH, shard="1/2", out=folder, tokens=tokens())


@trigger
def shard_without_folder(*_):
    factorized(BOTH, shard="1/2")


@trigger
def shard_made_otherwise(folder, _):
    factorized(BOTH, shard="1/2", out=folder)
    factorized(BOTH, sparsity=0.25, out=folder)


@trigger
def shard_damaged(folder, _):
    (folder / "shards" / "1-of-2").mkdir(parents=True)
    (folder / "shards" / "1-of-2" / "factors.json").write_text("{")
    factorized(BOTH, out=folder)


# ---------------------------------------------------------------------------------------------- workers


def solved(retries):
    """By a pool whose processes end at once."""
    task = SolveTask(SITE, torch.eye(4))
    with open_workers(2, threads=1, retries=retries) as workers:
        list(workers.solve([task]))


@trigger
def no_workers(*_):
    factorized(workers=0)


@trigger
def no_threads(*_):
    factorized(threads=0)


@trigger
def negative_retries(*_):
    with open_workers(retries=-1):
        pass


@trigger
def ray_missing(_, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # import then fails as if it were not installed
    factorized(workers="ray")


@trigger
def worker_lost(_, monkeypatch):
    monkeypatch.setattr("swd_lens.workers.pool.BOOTSTRAP", "raise SystemExit(3)")
    solved(retries=0)


@trigger
def worker_replaced(_, monkeypatch):
    monkeypatch.setattr("swd_lens.workers.pool.BOOTSTRAP", "raise SystemExit(3)")
    with suppress(WorkerLostError):
        solved(retries=1)


# ---------------------------------------------------------------------------------------------- residuals and starts


def advanced(folder):
    residuals = Residuals(model(), tokens(), folder=folder)
    residuals.advance(1)
    assert residuals.kept
    return residuals


@trigger
def residuals_go_forward(folder, _):
    with advanced(folder) as residuals:
        residuals.advance(0)


@trigger
def site_before_the_residuals(folder, _):
    with advanced(folder) as residuals:
        swd.collect_grams(model(), find_sites(model(), SITE), tokens(), residuals=residuals)


@trigger
def residuals_cut_short(folder, _):
    with advanced(folder) as residuals:
        (file,) = folder.glob("*/layer-1")
        file.write_bytes(file.read_bytes()[:-1])
        list(residuals.batches())


@trigger
def disk_too_small(folder, monkeypatch):
    monkeypatch.setattr("swd_lens.residuals.shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with Residuals(model(), tokens(), folder=folder) as residuals:
        residuals.advance(1)


@trigger
def run_ends_before_its_start(*_):
    host = host_of(model())
    host.residual(tokens(), 0, start=Start(1, torch.zeros(4, 8, 16)))


@trigger
def start_beside_a_prefix(*_):
    host = host_of(model())
    host.residual(tokens(), 1, prefix=host.freeze_prefix(tokens()[:1]), start=Start(0, torch.zeros(4, 8, 16)))


# ---------------------------------------------------------------------------------------------- loading large hosts


@trigger
def unknown_dtype(*_):
    swd.load_host("gpt2", dtype="int8")


@trigger
def device_map_of_a_hooked_transformer(*_):
    swd.load_host("gpt2", kind="hooked", device_map="auto")


@trigger
def device_map_and_device(*_):
    swd.load_host("gpt2", device="cpu", device_map="auto")


# ---------------------------------------------------------------------------------------------- budgets


@trigger
def unknown_loss_of_budgets(*_):
    swd.allocate(model(), by="ce")


@trigger
def grid_without_the_uniform_budget(*_):
    swd.allocate(model(), grid=[1.5, 2])


@trigger
def kl_without_tokens(*_):
    swd.allocate(model(), SITE)


@trigger
def kl_on_single_tokens(*_):
    swd.allocate(model(), SITE, judge=tokens()[:, :1])


@trigger
def not_an_allocation(folder, _):
    (folder / "budgets.json").write_text(json.dumps({"sparsity": 0.5}))
    swd.Allocation.load(folder / "budgets.json")


@trigger
def allocation_without_json(folder, _):
    (folder / "budgets.json").write_text("s = 0.5")
    swd.Allocation.load(folder / "budgets.json")


@trigger
def edges_beyond_the_curves(*_):
    spend({SITE: LossCurve((100, 200, 400), (3.0, 2.0, 1.0))}, 401)


# ---------------------------------------------------------------------------------------------- replace_model


@trigger
def unknown_budgets(*_):
    swd.replace_model(model(), SITE, heldout=tokens(), budgets="equal")


@trigger
def budgets_of_a_mapping(*_):
    swd.replace_model(model(), SITE, heldout=tokens(), tokens=tokens(), sparsity={SITE: 0.5}, budgets="kl")


@trigger
def finetuning_without_tokens(*_):
    swd.replace_model(model(), SITE, heldout=tokens())


# ---------------------------------------------------------------------------------------------- samples


@cache
def factors():
    return baselines.svd(model(), SITE)


@trigger
def samples_of_an_encoder(*_):
    swd.generate(families.bridge("bert"), {}, [[8, 9]])


@trigger
def samples_called_dense(*_):
    swd.generate(model(), {"dense": factors()}, [[8, 9]])


@trigger
def samples_of_no_length(*_):
    swd.generate(model(), factors(), [[8, 9]], max_new_tokens=0)


@trigger
def samples_at_negative_temperature(*_):
    swd.generate(model(), factors(), [[8, 9]], temperature=-1)


@trigger
def samples_without_prompts(*_):
    swd.generate(model(), factors(), [])


@trigger
def samples_of_an_empty_prompt(*_):
    swd.generate(model(), factors(), [""], prepend_bos=False)


@trigger
def samples_without_tokenizer(_, monkeypatch):
    monkeypatch.setattr(model(), "tokenizer", None)
    swd.generate(model(), factors(), ["Once upon a time"])


@trigger
def samples_not_finite(_, monkeypatch):
    bias = model().unembed.b_U
    before = bias.detach().clone()
    with torch.no_grad():
        bias[0] = torch.nan
        try:
            swd.generate(model(), factors(), [[8, 9]])
        finally:
            bias.copy_(before)


# ---------------------------------------------------------------------------------------------- fine-tuning


def finetuned(given=None, text=None, **settings):
    settings = {"steps": 1, "progress": False, **settings}
    swd.finetune(model(), factors() if given is None else given, tokens() if text is None else text, **settings)


@trigger
def finetune_setting_out_of_range(*_):
    finetuned(learning_rate=0)


@trigger
def finetune_count_out_of_range(*_):
    finetuned(batch_size=0)


@trigger
def finetune_unknown_choice(*_):
    finetuned(loss="mse")


@trigger
def finetune_unknown_preset(*_):
    finetuned(preset="papers")


@trigger
def finetune_unknown_setting(*_):
    finetuned(leaning_rate=1e-3)


@trigger
def finetune_steps_between(*_):
    finetuned(eval_every=0)


@trigger
def finetune_best_of_nothing(*_):
    finetuned(keep="best")


@trigger
def finetune_on_single_tokens(*_):
    finetuned(text=tokens()[:, :1])


@trigger
def finetune_text_too_short(*_):
    finetuned(batch_size=5)


@trigger
def finetune_encode_decode_pair(*_):
    finetuned({SITE: Coder(torch.randn(64, 3), torch.randn(3, 16))})


@trigger
def finetune_nothing_to_train(*_):
    finetuned({SITE: Factors(torch.zeros(64, 2), torch.zeros(2, 16))})


@trigger
def finetune_not_finite(*_):
    finetuned({SITE: Factors(torch.full((64, 2), 1e30), torch.full((2, 16), 1e30))})


@trigger
def finetune_more_processes_than_rows(_, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(
        "accelerate.PartialState", lambda: SimpleNamespace(num_processes=3, process_index=0, device="cpu")
    )
    finetuned(batch_size=2)


@trigger
def finetune_into_another_folder(folder, _):
    factorized(out=folder)
    finetuned(out=folder)


@trigger
def finetune_damaged_folder(folder, _):
    finetuned(out=folder)
    (folder / "run.json").write_text("{")
    finetuned(out=folder)


@trigger
def finetune_damaged_checkpoint(folder, _):
    finetuned(out=folder)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "finished": False}))
    (folder / "checkpoint.safetensors").write_bytes(b"")
    finetuned(out=folder)


@trigger
def finetune_another_run(folder, _):
    finetuned(out=folder)
    finetuned(out=folder, learning_rate=1e-5)
