"""Residuals on disk: the same Grams to the bit with fewer runs of early blocks, and nothing left behind."""

import resource
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import TokenError
from swd_lens.factorization.grams import collect_grams
from swd_lens.factorization.residuals import Residuals
from swd_lens.hosts import find_sites, host_of
from swd_lens.tasks.streams import TokenStream
from tests.micro import random_tokens, toy_model
from tests.remains import left_by_a_killed_process

TOKENS = random_tokens(7, 9)
ROWS = 3  # per batch: two whole ones and a rest


@pytest.fixture(scope="module")
def model():
    return toy_model(n_layers=4)


@pytest.fixture(scope="module")
def factors(model):
    return baselines.svd(model, "all")


def sites_of(model, layer):
    return [site for site in find_sites(model) if site.layer == layer]


def runs_of_blocks(model, stack):
    """How often each block runs."""
    runs = Counter()
    for layer, block in enumerate(model.blocks):
        handle = block.register_forward_pre_hook(lambda _, args, layer=layer: runs.update([layer]))
        stack.callback(handle.remove)
    return runs


def test_grams_stage_by_stage_are_those_of_whole_runs(model, factors, tmp_path):
    whole, kept = {}, {}
    with ExitStack() as stack, Residuals(model, TOKENS, ROWS, tmp_path) as residuals:
        assert residuals.layer == 0 and residuals.kept
        for layer in range(4):
            residuals.advance(layer)
            sites = sites_of(model, layer)
            whole |= collect_grams(model, sites, TOKENS, batch_size=ROWS).by_site
            kept |= collect_grams(model, sites, None, residuals=residuals).by_site
            assert residuals.kept and residuals.layer == layer
            # One file, of what enters this block.
            files = [path for path in tmp_path.rglob("made/*") if path.is_file()]
            assert [path.name for path in files] == ([f"layer-{layer}"] if layer else [])
            assert all(path.stat().st_size == TOKENS.numel() * 16 * 4 for path in files)
            # The next stage reads behind this block's units.
            stack.enter_context(swd.attach(model, {site.name: factors[site.name] for site in sites}))
    assert whole.keys() == kept.keys() and len(whole) == 16
    assert all(torch.equal(whole[name], kept[name]) for name in whole)
    assert list(tmp_path.iterdir()) == []


def test_blocks_before_are_not_run_again(model):
    with Residuals(model, TOKENS, ROWS) as residuals, ExitStack() as stack:
        residuals.advance(2)
        runs = runs_of_blocks(model, stack)
        collect_grams(model, sites_of(model, 2), None, residuals=residuals)
        collect_grams(model, sites_of(model, 3), None, residuals=residuals)
        assert runs == {2: 6, 3: 3}
        runs.clear()
        residuals.advance(3)
        # Block 2 once per batch and for the first row, which is run once more from its tokens, and through block 3 both ways.
        assert runs == {0: 1, 1: 1, 2: 3 + 1 + 1, 3: 1 + 1}


def test_behind_the_last_wanted_matrix_nothing_is_run(model):
    """As sequential calibration asks, stage by stage."""
    in_order = sites_of(model, 2)
    with Residuals(model, TOKENS, ROWS) as residuals:
        residuals.advance(2)
        for number, site in enumerate(in_order):
            shown, ends = [], []
            whole = collect_grams(model, [site], TOKENS, batch_size=ROWS)
            with ExitStack() as stack:
                stack.enter_context(
                    host_of(model).inputs(in_order[number + 1 :], lambda site, h, shown=shown: shown.append(site))
                )
                stack.callback(model.blocks[2].register_forward_hook(lambda *_, ends=ends: ends.append(1)).remove)
                kept = collect_grams(model, [site], None, residuals=residuals)
            assert shown == [] and ends == [] and torch.equal(whole[site.name], kept[site.name])


def test_stages_may_be_left_out_and_repeated_but_do_not_go_back(model):
    with Residuals(model, TokenStream(lambda: TOKENS, 7), ROWS) as residuals:
        for layer in (0, 1, 1, 3):
            residuals.advance(layer)
            assert [start and start.layer for _, start in residuals.batches()] == [layer or None] * 3
            assert torch.equal(torch.cat([tokens for tokens, _ in residuals.batches()]), TOKENS)
        for layer in (2, 4, -1):
            with pytest.raises(ValueError, match=f"block 3 is kept, and residuals go forward only, .* got layer={layer}"):
                residuals.advance(layer)
        with pytest.raises(ValueError, match=r"blocks\.2\.mlp_in, blocks\.2\.mlp_out lie before block 3, where"):
            collect_grams(model, find_sites(model, ["blocks.2.mlp_*", "blocks.3.mlp_in"]), None, residuals=residuals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_hosts_own_dtype(dtype, tmp_path):
    model = toy_model().to(dtype)
    with Residuals(model, TOKENS, ROWS, tmp_path) as residuals:
        residuals.advance(1)
        file = next(path for path in tmp_path.rglob("layer-1"))
        assert file.stat().st_size == TOKENS.numel() * 16 * torch.empty((), dtype=dtype).element_size()
        _, start = next(residuals.batches())
        assert residuals.kept and start.residual.dtype == dtype
        sites = sites_of(model, 1)
        got = collect_grams(model, sites, None, residuals=residuals)
        whole = collect_grams(model, sites, TOKENS, batch_size=ROWS)
    assert all(torch.equal(got[site.name], whole[site.name]) for site in sites)


def test_a_host_whose_runs_differ_from_a_start_is_run_whole(model, tmp_path, monkeypatch):
    kind = type(host_of(model))
    run_blocks, sites = kind.run_blocks, sites_of(model, 1)
    whole = collect_grams(model, sites, TOKENS, batch_size=ROWS)

    def a_bit_off(self, tokens, n_blocks, start=None):
        if start is not None:
            start.residual[0, 0, 0] *= 1 + 1e-5  # enough to outlast the rounding of any processor's LayerNorm
        run_blocks(self, tokens, n_blocks, start)

    monkeypatch.setattr(kind, "run_blocks", a_bit_off)
    with Residuals(model, TOKENS, ROWS, tmp_path) as residuals:
        residuals.advance(1)
        assert not residuals.kept and residuals.layer == 0 and "to the bit" in residuals.why_not
        assert list(tmp_path.iterdir()) == []
        got = collect_grams(model, sites, None, residuals=residuals)
        residuals.advance(2)
        assert residuals.layer == 0
    assert all(torch.equal(got[site.name], whole[site.name]) for site in sites)


def test_units_that_change_behind_the_residuals_back_end_them(model, factors):
    with Residuals(model, TOKENS, ROWS) as residuals:
        residuals.advance(1)
        half = swd.baselines.random_b(model, "blocks.0.mlp_out", seed=0)
        with swd.attach(model, half):  # too late for what is kept, and found at the next stage
            residuals.advance(2)
            assert not residuals.kept and residuals.layer == 0


def that_is_small(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))


def that_fills_up(monkeypatch):
    """No file may become larger than 2,000 bytes: of 4,032 the first batch is written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("disk", [that_is_small, that_fills_up])
def test_too_small_a_disk_means_whole_runs_and_a_warning(model, tmp_path, monkeypatch, disk):
    with Residuals(model, TOKENS, ROWS, tmp_path) as residuals:
        undo = disk(monkeypatch)
        try:
            with pytest.warns(UserWarning, match=r"residuals of 63 tokens need .*TMPDIR"):
                residuals.advance(1)
        finally:
            if undo:
                undo()
        assert not residuals.kept and residuals.layer == 0 and list(tmp_path.iterdir()) == []
        assert all(start is None for _, start in residuals.batches())


def test_an_interrupted_stage_leaves_the_one_before(model, tmp_path, monkeypatch):
    host, sites = type(host_of(model)), sites_of(model, 1)
    residual, calls = host.residual, []

    def fails(self, *args, **how):
        calls.append(1)
        if len(calls) == 3:  # the third batch
            raise KeyboardInterrupt
        return residual(self, *args, **how)

    with pytest.raises(KeyboardInterrupt), Residuals(model, TOKENS, ROWS, tmp_path) as residuals:
        residuals.advance(1)
        before = collect_grams(model, sites, None, residuals=residuals)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(host, "residual", fails)
            residuals.advance(2)
        assert residuals.layer == 1 and residuals.kept
        assert [path.name for path in tmp_path.rglob("layer-*")] == ["layer-1"]
        again = collect_grams(model, sites, None, residuals=residuals)
        assert all(torch.equal(before[site.name], again[site.name]) for site in sites)
        raise KeyboardInterrupt  # and now past the with block
    assert list(tmp_path.iterdir()) == []


def test_a_stream_of_other_rows_is_found_in_the_stage_that_reads_them(model, tmp_path):
    rows = [TOKENS, TOKENS.flip(1)]
    stream = TokenStream(lambda: rows.pop(0), 7)
    with Residuals(model, stream, ROWS, tmp_path) as residuals:
        residuals.advance(1)
        with pytest.raises(TokenError, match="gave other rows than in the pass before"):
            residuals.advance(2)
        assert residuals.layer == 1


@pytest.mark.parametrize("damage", ["cut", "a bit", "gone", "cut, and the memory holds the true values"])
def test_a_changed_file_is_an_error_not_a_wrong_gram(model, tmp_path, monkeypatch, damage):
    with Residuals(model, TOKENS, ROWS, tmp_path) as residuals:
        residuals.advance(1)
        true = iter([start.residual.clone() for _, start in residuals.batches()])
        file = next(tmp_path.rglob("layer-1"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= damage == "a bit"
        file.write_bytes(data if damage == "a bit" else data[:-4])
        if damage == "gone":
            file.unlink()
        if "memory" in damage:
            monkeypatch.setattr("swd_lens.factorization.residuals.torch.empty", lambda *_, **__: next(true))
        with pytest.raises(OSError, match="layer-1 was changed, cut or removed while it was in use"):
            list(residuals.batches())


def test_a_second_call_leaves_the_residuals_of_the_first_and_removes_those_of_a_dead_one(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = left_by_a_killed_process(tmp_path / "swd-lens-residuals")
    with Residuals(model, TOKENS, ROWS) as first, Residuals(model, TOKENS, ROWS) as second:
        first.advance(1)
        assert not left.exists()
        before = [start.residual for _, start in first.batches()]
        second.advance(1)
        assert all(torch.equal(start.residual, h) for (_, start), h in zip(first.batches(), before, strict=True))
        assert len(list(tmp_path.rglob("layer-1"))) == 2
    assert not list(tmp_path.iterdir())
