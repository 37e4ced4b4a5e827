"""Shards and workers of factorize: the same bits, whoever solves what."""

import pytest

import swd_lens as swd
from swd_lens.base.errors import ShardError
from swd_lens.factorization.checkpoint import Shard
from swd_lens.hosts.sites import Site
from swd_lens.units.factors import FactorSet
from tests.factorization.test_factorize import ALL, QUICK, assert_same, count_solves
from tests.micro import random_tokens

TOKENS = random_tokens(12, 9)
DENSE = {**QUICK, "tokens": TOKENS, "calibration": "dense"}


def test_shards_by_hand_and_what_is_none():
    sites = [Site(layer, "mlp_out", 10, 10) for layer in range(5)]
    flops = {site.name: float(cost) for site, cost in zip(sites, (1, 5, 4, 2, 2), strict=True)}
    # Costliest first: 5 -> 1, 4 -> 2, 2 -> 2, 2 -> 1, 1 -> 2.
    shards = [[site.layer for site in Shard(number, 2).of(sites, flops)] for number in (1, 2)]
    assert shards == [[1, 4], [0, 2, 3]]
    assert str(Shard.parse("2/8")) == "2/8" and Shard.parse((2, 8)) == Shard(2, 8)
    for given in ("2", "0/2", "3/2", "a/b", "1/2/3", 2, None, "1/0"):
        with pytest.raises(ShardError, match=r"shard=.*(as in '2/8'|between 1 and)"):
            Shard.parse(given)


@pytest.mark.parametrize("named", [DENSE, QUICK], ids=["dense", "zero-data"])
def test_shards_put_together_are_the_whole_to_the_bit(model, tmp_path, monkeypatch, named):
    whole = swd.factorize(model, "all", **named, out=tmp_path / "whole")
    out = tmp_path / "out"
    parts = [swd.factorize(model, "all", **named, out=out, shard=f"{number}/3") for number in (3, 1)]
    held = [site for part in parts for site in part]
    assert len(held) == len(set(held)) < len(ALL)
    assert list(FactorSet.load(out / "shards" / "1-of-3")) == list(parts[1])
    assert parts[1].provenance["shard"] == "1/3" and "probe_tokens" not in parts[1].provenance
    # The third shard is missing: whoever puts them together makes its matrices.
    calls = count_solves(monkeypatch)
    together = swd.factorize(model, "all", **named, out=out)
    assert len(calls) == len(ALL) - len(held)
    assert_same(together, whole)
    assert_same(FactorSet.load(out), whole)
    swd.attach(model, FactorSet.load(out)).detach()  # with its probes
    assert_same(swd.factorize(model, "all", **named, out=out), whole)
    assert len(calls) == len(ALL) - len(held)


def test_shards_that_cannot_be(model, tmp_path):
    with pytest.raises(ShardError, match=r"shard 1/2 with sequential calibration: each matrix waits"):
        swd.factorize(model, "all", **QUICK, tokens=TOKENS, out=tmp_path, shard="1/2")
    with pytest.raises(ShardError, match="shard 1/2 needs out="):
        swd.factorize(model, "all", **QUICK, shard="1/2")
    with pytest.raises(ShardError, match="shard 3/3 has nothing to do: there are 2 matrices"):
        swd.factorize(model, "mlp_out", **QUICK, out=tmp_path, shard="3/3")
    assert not list(tmp_path.iterdir())


def test_shards_made_otherwise_are_refused(model, tmp_path):
    swd.factorize(model, "mlp_out", **QUICK, out=tmp_path, shard="1/2")
    with pytest.raises(swd.ResumeError, match=r"of shard 1-of-2, made otherwise: sparsity 0\.5 then, 0\.25 now"):
        swd.factorize(model, "mlp_out", **{**QUICK, "sparsity": 0.25}, out=tmp_path)
    (file,) = (tmp_path / "shards" / "1-of-2").glob("*.safetensors")
    file.write_bytes(b"damaged")
    with pytest.raises(swd.ResumeError, match="remove that shard's folder"):
        swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)


@pytest.mark.slow
def test_workers_change_no_bit(model, tmp_path):
    named = {**QUICK, "tokens": TOKENS, "weigh_outputs": True, "threads": 1}
    here = swd.factorize(model, "all", **named, out=tmp_path / "here")
    there = swd.factorize(model, "all", **named, out=tmp_path / "there", workers=2)
    assert_same(here, there)
    assert_same(FactorSet.load(tmp_path / "there"), here)
    assert there[ALL[0]].relmse() == here[ALL[0]].relmse()


def test_shards_cut_in_two_ways(model, tmp_path):
    """Only those that this call would make are taken over; those made otherwise do not stand in the way."""
    swd.factorize(model, "mlp_out", **{**QUICK, "sparsity": 0.25}, out=tmp_path, shard="1/1")
    for number in (1, 2):
        swd.factorize(model, "mlp_out", **QUICK, out=tmp_path, shard=f"{number}/2")
    swd.factorize(model, "mlp_out", **{**QUICK, "sparsity": 0.25}, out=tmp_path, shard="1/3")
    with pytest.MonkeyPatch.context() as patch:
        calls = count_solves(patch)
        together = swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)
    assert calls == [] and together.sparsity > 0.49
    out = tmp_path / "complete"  # complete factors ask no shards, which here were made otherwise
    for sparsity, more in ((0.5, {}), (0.25, {"shard": "1/1"})):
        swd.factorize(model, "mlp_out", **{**QUICK, "sparsity": sparsity}, out=out, **more)
    assert_same(swd.factorize(model, "mlp_out", **QUICK, out=out), together)


def test_starting_again_leaves_no_shards_behind(model, tmp_path):
    """What an interrupted overwriting call has begun must be gone on with."""
    swd.factorize(model, "all", **{**DENSE, "sparsity": 0.25}, out=tmp_path, shard="1/2")
    with pytest.raises(swd.ResumeError, match="made otherwise"):
        swd.factorize(model, "all", **DENSE, out=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        count_solves(patch, stop_at=1)
        with pytest.raises(KeyboardInterrupt):
            swd.factorize(model, "all", **DENSE, out=tmp_path, overwrite=True)
    assert not (tmp_path / "shards").exists()
    assert_same(swd.factorize(model, "all", **DENSE, out=tmp_path), swd.factorize(model, "all", **DENSE, out=tmp_path))
