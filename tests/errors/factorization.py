"""Triggers of the section "Whole models" of swd_lens/ERRORS.md.

The host is a small bridge, which every transformer_lens has.
"""

import sys
from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import torch

import swd_lens as swd
from swd_lens.base.errors import WorkerLostError
from swd_lens.factorization import gradients
from swd_lens.factorization.residuals import Residuals
from swd_lens.factorization.workers import SolveTask, open_workers
from swd_lens.hosts import Start, find_sites, host_of
from tests import families
from tests.errors.triggers import trigger

SITE, OTHER = "blocks.0.mlp_out", "blocks.1.mlp_out"
BOTH = [SITE, OTHER]
QUICK = {"preset": "paper", "outer_iterations": 4, "progress": False}


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
def no_rows_per_forward(*_):
    factorized(tokens=tokens(), batch_size=0)


@trigger
def loss_without_next_tokens(*_):
    swd.factorize(families.bridge("bert"), SITE, **QUICK, tokens=tokens(), weigh_outputs=True)


@trigger
def loss_of_single_tokens(*_):
    factorized(tokens=tokens()[:, :1], weigh_outputs=True)


@trigger
def gradients_not_finite(_, patcher):
    patcher.setattr(gradients, "_cross_entropy", lambda targets, logits: logits.sum() * float("nan"))
    factorized(tokens=tokens(), weigh_outputs=True)


@trigger
def basis_without_tokens(*_):
    swd.choose_basis(model(), SITE)


@trigger
def goal_not_positive(*_):
    factorized(tokens=tokens(), kl=0.0)


@trigger
def goal_beside(*_):
    factorized(tokens=tokens(), kl=1e-3, sparsity=0.5)


@trigger
def goal_without_tokens(*_):
    factorized(kl=1e-3)


@trigger
def goal_without_heldout_text(*_):
    factorized(tokens=tokens()[:1], kl=1e-3)


@trigger
def heldout_text_without_a_goal(*_):
    factorized(tokens=tokens(), heldout_tokens=tokens())


@trigger
def goal_not_reached(*_):
    factorized(tokens=tokens(), kl=1e-12)


@trigger
def goal_asked_otherwise(folder, *_):
    factorized(tokens=tokens(), out=folder)
    factorized(tokens=tokens(), kl=1e-3, out=folder)


@trigger
def site_with_two_bases(*_):
    factorized(tokens=tokens(), basis={"mlp_out": "input", SITE: "output"})


@trigger
def unusable_device(*_):
    factorized(device="moon")


@trigger
def few_tokens(*_):
    factorized(tokens=tokens())


@trigger
def few_routed_tokens(*_):
    model = families.loaded("Mixtral")
    swd.factorize(
        model, "blocks.0.mlp_in.*", tokens=families.some_tokens(1, 20), sparsity=0.5, outer_iterations=4, progress=False
    )


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
    monkeypatch.setattr("swd_lens.factorization.factorize.available_bytes", lambda device: 1)
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
    monkeypatch.setattr("swd_lens.factorization.workers.pool.BOOTSTRAP", "raise SystemExit(3)")
    solved(retries=0)


@trigger
def worker_replaced(_, monkeypatch):
    monkeypatch.setattr("swd_lens.factorization.workers.pool.BOOTSTRAP", "raise SystemExit(3)")
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
def residuals_changed(folder, _):
    with advanced(folder) as residuals:
        (file,) = folder.rglob("layer-1")
        file.write_bytes(file.read_bytes()[:-1])
        list(residuals.batches())


@trigger
def disk_too_small(folder, monkeypatch):
    monkeypatch.setattr("swd_lens.factorization.residuals.shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with Residuals(model(), tokens(), folder=folder) as residuals:
        residuals.advance(1)


@trigger
def run_ends_before_its_start(*_):
    host = host_of(model())
    host.residual(tokens(), 0, start=Start(1, torch.zeros(4, 8, 16)))


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
