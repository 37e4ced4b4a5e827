"""CalibrationText: the same factors to the bit, and the host is run once for what several factorizations share."""

import pytest
import torch

import swd_lens as swd
from swd_lens.base.fingerprints import host_fingerprint
from swd_lens.factorization.calibration_text import CalibrationText, shared_sites
from swd_lens.factorization.stages import stages_of
from swd_lens.hosts import find_sites
from tests.factorization.test_factorize import QUICK, assert_same
from tests.forwards import block_runs
from tests.micro import random_tokens, toy_model

TOKENS = random_tokens(12, 9)
OPTIONS = {key: value for key, value in QUICK.items() if key != "sparsity"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("calibration", ["sequential", "corrected", "per_block", "dense"])
def test_the_same_factors_and_fewer_runs(model, calibration):
    text = CalibrationText(TOKENS, model)
    runs = []
    for s in (0.4, 0.6, 0.7):
        how = {"sparsity": s, "calibration": calibration, **OPTIONS}
        with block_runs(model) as count:
            alone = swd.factorize(model, "all", tokens=TOKENS, **how)
        with block_runs(model) as shared:
            assert_same(alone, swd.factorize(model, "all", tokens=text, **how))
        runs.append((count.rows, shared.rows))
    # Nothing is run again that does not depend on the factors: dense calibration not at all.
    assert runs[0][0] == runs[1][0] and runs[1][1] == runs[2][1] < runs[1][0]
    if calibration == "dense":
        with block_runs(model) as count:
            swd.factorize(model, "all", **OPTIONS)  # zero-data: the probes
        assert runs[1][1] == count.rows
        bounded = CalibrationText(TOKENS, model, n_bytes=8)  # beyond the bound Grams are not kept
        for _ in range(2):
            assert_same(alone, swd.factorize(model, "all", tokens=bounded, **how))
        assert not bounded._kept


def test_widths_and_presets_share_dtypes_and_batches_do_not(model):
    text = CalibrationText(TOKENS, model)
    site = "blocks.1.mlp_out"
    # Beside them the row of the probe.
    for how, rows in (
        ({"gram_dtype": "float32"}, 12),
        ({"gram_dtype": "float32", "preset": "quick", "units": 20}, 0),
        ({"gram_dtype": "float64"}, 12),
        ({"gram_dtype": "float64", "preset": "quick", "basis": "paper"}, 0),
        ({"gram_dtype": "float64", "batch_size": 5}, 12),
    ):
        with block_runs(model, 0) as count:
            swd.factorize(model, site, tokens=text, **{**OPTIONS, **how})
        assert count.rows == rows + 1, how


@pytest.mark.parametrize("folder", [False, True])
def test_a_call_hashes_its_host_once(monkeypatch, tmp_path, folder):
    model, hashed = toy_model(), []

    def counting(host):
        hashed.append(host)
        return host_fingerprint(host)

    for module in ("calibration_text", "job"):
        monkeypatch.setattr(f"swd_lens.factorization.{module}.host_fingerprint", counting)
    text = CalibrationText(TOKENS, model)
    how = {"tokens": text, "outer_iterations": 2, "out": tmp_path / "out" if folder else None, "progress": False}
    swd.factorize(model, "blocks.1.mlp_out", **how)
    assert hashed == [model]
    with torch.no_grad():  # another host by now
        next(model.parameters()).mul_(1.5)
    collected = len(text._kept)
    swd.factorize(model, "blocks.1.mlp_out", **{**how, "out": None})
    assert len(hashed) == 2 and len(text._kept) == 2 * collected > 0


def test_expected_sites_are_collected_in_one_pass(model):
    text = CalibrationText(TOKENS, model)
    text.expect(find_sites(model, "all"))
    with block_runs(model, 0) as count:  # each factorization runs the row of its probe
        for site in ("blocks.1.mlp_out", "blocks.0.mlp_in", "blocks.0.attn_o"):
            made = swd.factorize(model, site, tokens=text, **OPTIONS)
            assert_same(made, swd.factorize(model, site, tokens=TOKENS, **OPTIONS))
    assert count.rows == 12 + 3 * 12 + 6
    sites = find_sites(model, "all")
    for kind, shared in (("sequential", sites[:1]), ("dense", sites), ("zero-data", [])):
        assert shared_sites(stages_of(sites, kind), kind) == shared


def test_allocation_hands_its_grams_on(model):
    text = CalibrationText(TOKENS, model)
    how = {"by": "error", "grid": (0.5, 1, 2), "progress": False, "outer_iterations": 4, "basis": "paper"}
    alone = swd.allocate(model, "mlp_out", 0.5, TOKENS, **how)
    with block_runs(model, 0) as count:
        shared = swd.allocate(model, "mlp_out", 0.5, text, **how)
        assert shared.as_dict() == alone.as_dict()
        swd.allocate(model, "mlp_out", 0.6, text, **how)
    assert count.rows == 12


def test_a_changed_host_is_another_host():
    model = toy_model()
    text = CalibrationText(TOKENS, model)
    swd.factorize(model, "blocks.1.mlp_out", tokens=text, **OPTIONS)
    with torch.no_grad():
        model.blocks[0].mlp.W_out.mul_(1.5)
    changed = swd.factorize(model, "blocks.1.mlp_out", tokens=text, **OPTIONS)
    assert_same(changed, swd.factorize(model, "blocks.1.mlp_out", tokens=TOKENS, **OPTIONS))
