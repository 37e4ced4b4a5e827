"""estimate: what a factorization will need, and the refusal when there is not as much."""

import json
import os
import subprocess
import sys

import pytest
import torch

import swd_lens as swd
import swd_lens.factorization.factorize
import swd_lens.factorization.stages
import swd_lens.solver
from swd_lens.factorization.estimate import Estimate, SiteEstimate
from swd_lens.solver import cost
from tests import families
from tests.micro import random_tokens, toy_model

TOKENS = random_tokens(12, 9)  # 108


def test_rows_by_hand(model):
    # toy model: d_model 16, d_mlp 32, 2 heads of 8; attn_qkv 16 x 48, attn_o 16 x 16, mlp_in 16 x 32, mlp_out 32 x 16.
    made = swd.estimate(model, "mlp_out", tokens=TOKENS, preset="paper")
    first, second = made.rows
    assert (first.site, first.d_in, first.d_out, first.units) == ("blocks.0.mlp_out", 32, 16, 16)
    solving = cost(32, 16, sparsity=0.5, preset="paper", calibrated=True)
    assert first.flops == second.flops == solving.flops
    # Forward, per token and block: 2 per weight; scores and mix, 2 x 2 x 9 positions x 16; 400 for each of the entries
    # 10 x 16 + 3 x 32 + 3 x 2 heads x 9 positions. Then h^T h.
    block = 2 * (16 * 48 + 16 * 16 + 16 * 32 + 32 * 16) + 4 * 9 * 16 + 400 * (160 + 96 + 54)
    assert first.calibration_flops == 108 * (block + 2 * 32 * 32)
    assert second.calibration_flops == 108 * (2 * block + 2 * 32 * 32)
    # Held behind the first: its factors 32 x 16 and 16 x 16, and its weight 32 x 16, in float32.
    assert (first.held_bytes, second.held_bytes) == (0, 4 * (32 * 16 + 16 * 16 + 32 * 16))
    assert first.peak_bytes >= solving.peak_bytes + 4 * (32 * 16 + 32 * 32)
    assert made.peak_bytes == second.held_bytes + second.peak_bytes
    assert made.flops == 2 * solving.flops + first.calibration_flops + second.calibration_flops
    assert made.seconds == pytest.approx(made.flops / made.flops_per_second)


def test_dense_calibration_holds_every_gram(model):
    sequential = swd.estimate(model, "mlp_*", tokens=TOKENS)
    dense = swd.estimate(model, "mlp_*", tokens=TOKENS, calibration="dense")
    # First site of four: the Grams of the other three, 32 x 32, 16 x 16, 32 x 32, in float64 as small matrices are solved.
    assert dense.rows[0].held_bytes == 8 * (32 * 32 + 16 * 16 + 32 * 32) and sequential.rows[0].held_bytes == 0
    assert sum(row.calibration_flops for row in dense.rows) < sum(row.calibration_flops for row in sequential.rows)
    assert dense.calibration == "dense" and sequential.calibration == "sequential"
    single = swd.estimate(model, "mlp_*", tokens=TOKENS, calibration="dense", gram_dtype="float32")
    assert dense.rows[0].held_bytes == 2 * single.rows[0].held_bytes
    assert dense.rows[3].peak_bytes == single.rows[3].peak_bytes + 8 * 32 * 32


def test_what_is_held_where_grams_have_no_room_and_of_a_half_precision_host():
    # 40,000 inputs: a Gram of 6.4 GB, above what one pass collects. Each matrix is then a stage of its own.
    made = swd.estimate({"a": (40_000, 8), "b": (40_000, 8)}, tokens=64, calibration="dense", preset="paper")
    factors = 4 * (40_000 * 8 + 8 * 8 + 40_000 * 8)
    assert [row.held_bytes for row in made.rows] == [0, factors]
    half = toy_model().to(torch.bfloat16)
    first, second = swd.estimate(half, "mlp_out", preset="paper").rows
    # Two factors, 32 x 16 and 16 x 16, in float32 and, attached, in bfloat16.
    assert (first.held_bytes, second.held_bytes) == (0, (4 + 2) * (32 * 16 + 16 * 16))


def test_a_pass_per_block_holds_the_grams_of_the_block(model):
    how = {"calibration": "per_block", "gram_dtype": "float32", "basis": "paper"}
    rows = swd.estimate(model, "mlp_*", tokens=TOKENS, **how).rows
    block = rows[0].calibration_flops - 108 * 2 * 16 * 16  # mlp_in bears the pass
    assert rows[1].calibration_flops == 108 * 2 * 32 * 32
    # What enters block 1 is made by running block 0 once more, with its units.
    assert rows[2].calibration_flops == 2 * block + 108 * 2 * 16 * 16
    kept = [4 * (units + 16 * 32) for units in (16 * 16 + 16 * 32, 32 * 16 + 16 * 16)]  # factors and W: mlp_in, mlp_out
    assert [row.held_bytes for row in rows] == [4 * 32 * 32, kept[0], sum(kept) + 4 * 32 * 32, 2 * kept[0] + kept[1]]


def test_corrected_calibration_runs_both_hosts(model):
    plain = swd.estimate(model, "mlp_out", tokens=TOKENS).rows
    both = swd.estimate(model, "mlp_out", tokens=TOKENS, calibration="corrected")
    # The forward twice; h^T h and h^T g; and the target: a Cholesky factor of 32 x 32, and 2 x 2 x 32 x (32 x 16).
    forward = plain[0].calibration_flops - 108 * 2 * 32 * 32
    assert both.rows[0].calibration_flops == 2 * forward + 108 * 4 * 32 * 32 + 32**3 / 3 + 4 * 32 * 32 * 16
    assert both.rows[0].peak_bytes >= 8 * 5 * 32 * 32 and both.disk_bytes == 2 * 108 * 16 * 4
    assert swd.estimate(model, "blocks.0.mlp_out", tokens=TOKENS, calibration="corrected").flops == (
        swd.estimate(model, "blocks.0.mlp_out", tokens=TOKENS).flops
    )


def test_a_stage_is_calibrated_in_one_pass(model):
    """q, k and v read one input: one forward, one product, one Gram."""
    apart = {f"blocks.1.attn_{part}": (16, 16) for part in "qkv"}
    shapes = swd.estimate(apart, tokens=TOKENS).rows
    assert [row.calibration_flops for row in shapes] == [108 * 2 * 16 * 16, 0, 0]
    rows = swd.estimate(model, ["blocks.1.attn_q", "blocks.1.attn_k", "blocks.1.attn_v"], tokens=TOKENS).rows
    alone = swd.estimate(model, "blocks.1.attn_q", tokens=TOKENS).rows[0]
    assert [row.calibration_flops for row in rows] == [alone.calibration_flops, 0, 0]
    assert rows[0].peak_bytes == alone.peak_bytes and rows[0].held_bytes == 0


def test_each_block_is_run_for_its_stages_and_once_to_go_on():
    """What enters a block is kept, so that later stages do not run the earlier blocks again."""
    model = toy_model(n_layers=6)
    rows = swd.estimate(model, "mlp_out", tokens=TOKENS).rows
    gram = 108 * 2 * 32 * 32
    block = rows[0].calibration_flops - gram
    assert [row.calibration_flops for row in rows] == [block + gram] + [2 * block + gram] * 5
    last = swd.estimate(model, "blocks.5.mlp_out", tokens=TOKENS)
    assert last.rows[0].calibration_flops == 6 * block + gram
    # On disk: 108 residuals of 16 float32, twice while one file is made of the other.
    made = swd.estimate(model, "mlp_out", tokens=TOKENS)
    assert made.disk_bytes == 2 * 108 * 16 * 4 and last.disk_bytes == 0
    assert "disk: 13.8 kB in the temporary folder" in repr(made)


def test_blocks_that_differ_are_each_counted_as_they_are():
    # Qwen3.5: linear attention in layers 0 to 2, full attention in layer 3, which has other matrices.
    model = families.bridge("qwen3_5")
    of = [row.calibration_flops for row in swd.estimate(model, "mlp_out", tokens=64).rows]
    numel = [sum(site.numel for site in swd.find_sites(model) if site.layer == layer) for layer in range(4)]
    assert numel[0] == numel[1] == numel[2] != numel[3]
    # Each row bears its own block and the one before it.
    assert of[1] == of[2]
    assert of[3] - of[2] == pytest.approx(64 * 2 * (numel[3] - numel[1]))


def test_shapes_of_a_model_that_is_not_loaded(model):
    shapes = {site.name: (site.d_in, site.d_out) for site in swd.find_sites(model)}
    assert swd.estimate(shapes).rows == swd.estimate(model, "all").rows
    loaded, known = swd.estimate(model, "all", tokens=TOKENS), swd.estimate(shapes, tokens=TOKENS)
    assert [row.flops for row in known.rows] == [row.flops for row in loaded.rows]
    assert [row.held_bytes for row in known.rows] == [row.held_bytes for row in loaded.rows]
    assert [row.calibration_flops for row in known.rows] == [108 * 2.0 * d_in**2 for d_in, _ in shapes.values()]
    assert "not counted: the forwards" in repr(known) and "not counted" not in repr(loaded)
    assert "not counted" not in repr(swd.estimate(shapes))


def test_labels_of_any_kind(model):
    (one,) = swd.estimate((32, 16), preset="paper").rows
    assert (one.site, one.d_in, one.d_out, one.units) == ("matrix", 32, 16, 16)
    assert one.flops == cost(32, 16, preset="paper", calibrated=False).flops
    each = swd.estimate({"up": (16, 32), "down": (32, 16)}, sparsity={"up": 0.5, "d*": 0.75}, tokens=64)
    assert [row.site for row in each.rows] == ["up", "down"]
    with pytest.raises(swd.UnknownSiteError, match="no matrix matches 'left'; there are up, down"):
        swd.estimate({"up": (16, 32), "down": (32, 16)}, sparsity={"left": 0.5})
    for shapes, complaint in (
        ({}, "there are no shapes"),
        ((3,), r"matrix: \(3,\) is no shape"),
        ({"up": (3, 0)}, r"up: \(3, 0\) is no shape"),
        ({"up": "34"}, "up: '34' is no shape"),
    ):
        with pytest.raises(ValueError, match=complaint):
            swd.estimate(shapes)
    with pytest.raises(ValueError, match="sites='mlp_out': every shape given is estimated"):
        swd.estimate({"up": (16, 32)}, "mlp_out")
    with pytest.raises(ValueError, match=r"up \(16, 32\): .*sparsity=2"):
        swd.estimate({"up": (16, 32)}, sparsity=2)


def test_tokens_as_a_number_or_none(model):
    by_number, by_rows = (swd.estimate(model, "all", tokens=32 * 4), swd.estimate(model, "all", tokens=random_tokens(4, 32)))
    assert by_number.rows == by_rows.rows
    nothing = swd.estimate(model, "all")
    assert nothing.calibration == "zero-data" and swd.estimate(model, "all", tokens=0).rows == nothing.rows
    assert all(row.calibration_flops == 0 for row in nothing.rows)
    assert nothing.peak_bytes < by_rows.peak_bytes
    with pytest.raises(swd.TokenError, match="tokens=-1"):
        swd.estimate(model, "all", tokens=-1)


def test_bad_arguments(model):
    for changed, message in (
        ({"sites": "nonsense"}, "nonsense"),
        ({"sites": "blocks.0.mlp"}, "is a whole MLP, not one matrix"),
        ({"sparsity": 1}, r"blocks\.0\.mlp_out .*sparsity=1"),
        ({"units": "many"}, r"blocks\.0\.mlp_out .*units='many'"),
        ({"calibration": "both"}, "calibration must be"),
        ({"batch_size": 0}, "batch_size must be .*, got 0"),
        ({"gram_dtype": "float16"}, "gram_dtype must be one of .*'float16'"),
    ):
        with pytest.raises((ValueError, swd.UnknownSiteError), match=message):
            swd.estimate(model, **{"sites": "mlp_out", **changed})


ROWS = (
    SiteEstimate("blocks.0.mlp_in", 768, 3072, 768, 1e12, 2e11, 120_000_000, 0),
    SiteEstimate("blocks.0.mlp_out", 3072, 768, 1536, 2e12, 3e11, 400_000_000, 30_000_000),
)


def test_the_printed_table():
    made = Estimate(ROWS, 23_500_000_000, 1e11, "dense")
    assert repr(made) == "\n".join(
        [
            "Estimate: 2 matrices, calibration dense",
            "  site               d_in  d_out  units   solver  calibration  memory",
            "  blocks.0.mlp_in     768  3,072    768  1 TFLOP    200 GFLOP  120 MB",
            "  blocks.0.mlp_out  3,072    768  1,536  2 TFLOP    300 GFLOP  430 MB",
            "memory: 430 MB at the worst moment, 23.5 GB available",
            "time: 3.5 TFLOP, about 35 s at the measured 100 GFLOP per second",
        ]
    )
    assert "430 MB at the worst moment, 100 MB available - does not fit" in repr(Estimate(ROWS, 10**8, None, "dense"))
    assert "available" in repr(Estimate((), None, None, "zero-data"))
    assert Estimate.from_dict(json.loads(json.dumps(made.as_dict()))) == made and "<table" in made._repr_html_()
    shapes = {f"blocks.{layer}.{kind}": (8, 12) for layer in range(6) for kind in ("mlp_in", "mlp_gate", "mlp_out")}
    lines = repr(swd.estimate(shapes)).splitlines()  # many matrices share lines
    kinds = ("mlp_in", "mlp_gate", "mlp_out")
    assert [line.split("   ")[0].strip() for line in lines[2:5]] == [f"6 x blocks.*.{kind}" for kind in kinds]
    assert "20 x this shape" in repr(swd.estimate({str(i): (8, 12) for i in range(20)}))


def test_the_refusal_gives_the_numbers():
    Estimate(ROWS, 430_000_000, None, "dense").require_fit()
    Estimate(ROWS, None, None, "dense").require_fit()
    with pytest.raises(swd.DoesNotFitError) as refusal:
        Estimate(ROWS, 429_000_000, None, "dense").require_fit()
    assert isinstance(refusal.value, MemoryError) and isinstance(refusal.value, ValueError)
    for part in (
        "factorizing 2 matrices needs 430 MB of memory, 429 MB available",
        "blocks.0.mlp_out (3072, 768) with 1536 units, 400 MB, while 30 MB are held",
        'calibration="sequential"',
        "fewer sites at once",
        "fewer units",
    ):
        assert part in str(refusal.value)
    with pytest.raises(swd.DoesNotFitError, match=r"1 matrix needs .*What helps: a machine with more memory\.$"):
        Estimate((ROWS[0],), 1000, None, "zero-data").require_fit()
    with pytest.raises(swd.DoesNotFitError, match='calibration="sequential"'):
        Estimate(ROWS, 1, None, "corrected").require_fit()


def test_factorize_refuses_before_the_host_is_touched(model, tmp_path, monkeypatch):
    def never(*arguments, **named):
        raise AssertionError("the host was touched")

    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    made = swd.estimate(model, "mlp_out", tokens=TOKENS)
    assert torch.equal(torch.get_rng_state(), state) and all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    monkeypatch.setattr(swd_lens.factorization.factorize, "available_bytes", lambda device: made.peak_bytes - 1)
    places = {"collect_grams": swd_lens.factorization.stages, "attach": swd_lens.factorization.stages, "solve": swd_lens.solver}
    for work, place in places.items():
        monkeypatch.setattr(place, work, never)
    with pytest.raises(swd.DoesNotFitError, match="factorizing 2 matrices needs"):
        swd.factorize(model, "mlp_out", tokens=TOKENS, progress=False, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_factorize_starts_with_just_enough(model, tmp_path, monkeypatch):
    named = {"preset": "paper", "outer_iterations": 4, "tokens": TOKENS}
    made = swd.estimate(model, "mlp_out", **named)
    monkeypatch.setattr(swd_lens.factorization.factorize, "available_bytes", lambda device: made.peak_bytes)
    swd.factorize(model, "mlp_out", **named, progress=False, out=tmp_path)
    # With everything finished, nothing more is needed.
    monkeypatch.setattr(swd_lens.factorization.factorize, "available_bytes", lambda device: 0)
    swd.factorize(model, "mlp_out", **named, progress=False, out=tmp_path)


MEASURE = """
import json, sys, torch
from pathlib import Path
import swd_lens as swd
from tests.micro import toy_model, random_tokens
torch.set_num_threads(1)
model = toy_model(d_model=256, d_mlp=1024, n_heads=4, d_head=64)
sites = ["blocks.0.mlp_out", "blocks.1.mlp_out"]
def kilobytes(word):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(word))
def measured(preset, calibration):
    quick = dict(outer_iterations=4, preset=preset, tokens=random_tokens(16, 32), calibration=calibration)
    swd.factorize(model, "attn_o", progress=False, **quick)  # libraries loaded, thread pools made
    expected = swd.estimate(model, sites, **quick).peak_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    before = kilobytes("VmRSS")
    swd.factorize(model, sites, progress=False, **quick)
    return (kilobytes("VmHWM") - before) * 1024, expected
print(json.dumps([measured(*case) for case in json.load(sys.stdin)]))
"""
PEAKS = [("paper", "sequential"), ("best", "sequential"), ("best", "dense"), ("paper", "corrected")]


@pytest.fixture(scope="module")
def peaks() -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes used and estimated, in a process of its own, whose freed memory goes back to the system: resident means in use."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE],
        input=json.dumps(PEAKS),
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak")
    assert done.returncode == 0, done.stderr
    return dict(zip(PEAKS, json.loads(done.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("case", PEAKS, ids=str)
def test_the_peak_is_what_is_really_used(peaks: dict[tuple[str, str], tuple[int, int]], case: tuple[str, str]):
    used, expected = peaks[case]
    assert used <= 1.15 * expected and expected <= 2.5 * used
