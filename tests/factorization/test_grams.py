"""Grams and factorize: streamed second moments, execution order, and what happens to bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import swd_lens as swd
from swd_lens.factorization import grams as calibration
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import find_sites, host_of
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import attach
from tests import families
from tests.micro import random_tokens, toy_model


def test_grams_are_those_of_the_cached_inputs(model):
    tokens = random_tokens(10, 9)
    grams = collect_grams(model, find_sites(model), tokens, batch_size=3)
    _, cache = model.run_with_cache(tokens)
    block = model.blocks[1]
    inputs = {
        "blocks.1.mlp_out": cache["post", 1],
        "blocks.1.attn_o": cache["z", 1].flatten(-2),
        "blocks.1.attn_qkv": block.ln1(cache["resid_pre", 1]),
        "blocks.1.mlp_in": block.ln2(cache["resid_mid", 1]),
    }
    assert grams.n_tokens == 90
    for name, h in inputs.items():
        flat = h.detach().flatten(0, 1)
        torch.testing.assert_close(grams[name], flat.T @ flat / 90, rtol=1e-4, atol=1e-5)


def test_sequential_calibration_reads_behind_the_replaced_sites(model):
    tokens = random_tokens(12, 9)
    how = {"sparsity": 0.6, "tokens": tokens, "basis": "paper", "outer_iterations": 4, "progress": False}
    sequential, dense = (swd.factorize(model, "mlp_out", calibration=kind, **how) for kind in ("sequential", "dense"))
    first, second = "blocks.0.mlp_out", "blocks.1.mlp_out"
    assert torch.equal(sequential[first].read, dense[first].read)
    assert not torch.equal(sequential[second].read, dense[second].read)
    # The second site's own fit, by hand: its Gram with the first one attached.
    with attach(model, sequential[first]):
        gram = collect_grams(model, find_sites(model, second), tokens, dtype="float64")[second]
    by_hand = swd.solve(model.blocks[1].mlp.W_out.detach(), gram, 0.6, tokens=tokens.numel(), outer_iterations=4)
    assert torch.equal(by_hand.read, sequential[second].read) and torch.equal(by_hand.write, sequential[second].write)


def test_a_site_that_no_forward_reads_or_that_is_read_twice_is_an_error(model, monkeypatch):
    run_blocks = type(host_of(model)).run_blocks
    tokens, sites = random_tokens(4, 6), find_sites(model, ["blocks.0.mlp_in", "blocks.1.mlp_out", "blocks.1.attn_o"])
    monkeypatch.setattr(type(host_of(model)), "run_blocks", lambda self, rows, n: run_blocks(self, rows, n - 1))
    with pytest.raises(swd.UnsupportedHostError, match=r"the input of blocks\.1\.attn_o, blocks\.1\.mlp_out: it goes by"):
        collect_grams(model, sites, tokens)

    def twice(self, *how):
        run_blocks(self, *how)
        run_blocks(self, *how)

    monkeypatch.setattr(type(host_of(model)), "run_blocks", twice)
    with pytest.raises(swd.UnsupportedHostError, match=r"blocks\.0\.mlp_in read 48 vectors on 24 tokens"):
        collect_grams(model, sites, tokens)


def test_a_stream_gives_the_grams_of_the_same_rows_held(model):
    tokens, sites = random_tokens(10, 9), find_sites(model)
    held = collect_grams(model, sites, tokens, batch_size=3)
    streamed = collect_grams(model, sites, TokenStream(lambda: iter(tokens.tolist()), 10), batch_size=3)
    assert streamed.n_tokens == held.n_tokens == 90
    assert all(torch.equal(streamed[site.name], held[site.name]) for site in sites)
    with pytest.raises(swd.TokenError, match="which can be gone through only once"):
        collect_grams(model, sites, iter(tokens))


def inputs_of(model, sites, tokens, batch_size=16):
    """What each site reads, batch by batch."""
    seen = {site.name: [] for site in sites}
    with torch.no_grad(), host_of(model).inputs(sites, lambda site, h: seen[site.name].append(h.flatten(0, 1).clone())):
        for batch in tokens.split(batch_size):
            host_of(model).run_blocks(batch, len(model.blocks))
    return seen


def test_precision_of_products_sums_and_grams(model):
    tokens, sites = random_tokens(10, 9), find_sites(model)
    seen = inputs_of(model, sites, tokens, 3)
    single = collect_grams(model, sites, tokens, batch_size=3)
    double = collect_grams(model, sites, tokens, batch_size=3, dtype="float64")
    for name, batches in seen.items():
        assert single[name].dtype == torch.float32 and double[name].dtype == torch.float64
        assert torch.equal(single[name], (sum((h.T @ h).double() for h in batches) / 90).float())
        exact = sum(h.double().T @ h.double() for h in batches) / 90
        assert torch.equal(double[name], exact)
        # Products in float32 are what the two differ by.
        assert 0 < (single[name] - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_float64_host_and_a_bfloat16_host():
    tokens = random_tokens(6, 9)
    for dtype, products in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        host = toy_model().to(dtype)
        sites = find_sites(host)
        seen, grams = inputs_of(host, sites, tokens), collect_grams(host, sites, tokens)
        for name, (h,) in seen.items():
            product = h.to(products).T @ h.to(products)
            assert torch.equal(grams[name], (product.double() / 54).float()) and grams[name].dtype == torch.float32


def test_wide_grams_grow_tile_by_tile(model, monkeypatch):
    tokens, sites = random_tokens(10, 9), find_sites(model)
    whole = collect_grams(model, sites, tokens, batch_size=3, dtype="float64")
    monkeypatch.setattr(calibration, "_WHOLE_UP_TO", 8)
    monkeypatch.setattr(calibration, "_TILE", 5)  # divides neither 16 nor 32
    for dtype, tolerance in (("float64", 1e-14), ("float32", 1e-6)):
        tiled = collect_grams(model, sites, tokens, batch_size=3, dtype=dtype)
        for site in sites:
            gram, tile = tiled[site.name], torch.arange(site.d_in) // 5
            across = tile[:, None] != tile  # one of each pair is computed, the other is its mirror image
            assert across.any() and torch.equal(gram[across], gram.T[across])
            assert (tiled[site.name] - whole[site.name]).abs().max() <= tolerance * whole[site.name].abs().max()


def test_sums_large_beside_a_cards_free_memory_sit_on_the_cpu(monkeypatch):
    free = {"cuda": 8 * 5120**2 * 2, "cpu": 0}
    monkeypatch.setattr(calibration, "available_bytes", lambda device: free[device.type])
    cuda, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert calibration._home(5120, cuda) == cuda and calibration._home(5121, cuda) == cpu
    assert calibration._home(5121, cpu) == cpu
    free["cuda"] = None
    assert calibration._home(5121, cuda) == cuda


@pytest.fixture
def products(monkeypatch):
    """Widths of the products that were computed."""
    done, add = [], calibration._add_product
    monkeypatch.setattr(calibration, "_add_product", lambda total, flat: done.append(flat.shape[1]) or add(total, flat))
    return done


SHARERS = ["blocks.1.attn_q", "blocks.1.attn_k", "blocks.1.attn_v", "blocks.1.mlp_gate", "blocks.1.mlp_in"]


@pytest.mark.parametrize("kind", ["bridge", "hooked"])
def test_sites_that_read_the_same_vectors_share_a_product(kind, products):
    host = getattr(families, kind)("llama")
    tokens = families.some_tokens(4, 9)
    alone = {name: collect_grams(host, find_sites(host, name), tokens, batch_size=2)[name] for name in SHARERS}
    assert len(products) == 2 * 5
    products.clear()
    together = collect_grams(host, find_sites(host, SHARERS), tokens, batch_size=2)
    assert len(products) == 2 * 2
    assert all(torch.equal(together[name], alone[name]) for name in SHARERS)
    assert together["blocks.1.attn_q"] is together["blocks.1.attn_v"]


def halved(z, hook):
    return z * 0.5


def halved_in_place(z, hook):
    return z.mul_(0.5)


def halved_in_later_batches():
    calls = []

    def hook(z, hook):
        calls.append(1)
        return z * 0.5 if len(calls) % 2 == 0 else z

    return hook


@pytest.mark.parametrize(
    ("change", "n_products"),
    # q; k; v once more, since only what k reads is changed; in place v reads what k reads. A site whose vectors part from the
    # others' in a later batch costs a second pass in which nothing is shared: 1, 2 (q, then k finds out), then 2 times 3.
    [(lambda: halved, 2 * 3), (lambda: halved_in_place, 2 * 2), (halved_in_later_batches, 1 + 1 + 2 * 3)],
    ids=["changed", "changed in place", "changed in a later batch"],
)
def test_a_hook_that_changes_what_one_of_them_reads_is_seen(change, n_products, products):
    host, tokens = families.bridge("llama"), families.some_tokens(4, 9)
    names = SHARERS[:3]
    plain = collect_grams(host, find_sites(host, names), tokens, batch_size=2)
    with host.hooks(fwd_hooks=[("blocks.1.attn.k.hook_in", change())]):
        alone = {name: collect_grams(host, find_sites(host, name), tokens, batch_size=2)[name] for name in names}
    products.clear()
    with host.hooks(fwd_hooks=[("blocks.1.attn.k.hook_in", change())]):
        together = collect_grams(host, find_sites(host, names), tokens, batch_size=2)
    assert len(products) == n_products
    assert all(torch.equal(together[name], alone[name]) for name in names)
    assert not torch.equal(together[names[1]], plain[names[1]])
    assert torch.equal(together[names[0]], plain[names[0]])


MEMORY = """
import json, torch
from pathlib import Path
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import find_sites
from swd_lens.factorization.residuals import Residuals
from swd_lens.tasks.streams import TokenStream
from tests.micro import toy_model

torch.set_num_threads(1)
model = toy_model(d_model=64, d_head=32, d_mlp=64)

def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024

def rows():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(0, 20, (32,), generator=generator)

def calibrate(n_tokens):
    with Residuals(model, TokenStream(rows, n_tokens // 32), 16) as residuals:
        collect_grams(model, find_sites(model, "blocks.0.*"), None, residuals=residuals)
        residuals.advance(1)
        assert residuals.kept
        collect_grams(model, find_sites(model, "blocks.1.*"), None, residuals=residuals)

peaks = []
for n_tokens in (2_000, 200_000):
    calibrate(n_tokens)
    peaks.append(peak())
print(json.dumps(peaks))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak resident memory is read from /proc")
def test_memory_does_not_grow_with_the_number_of_tokens():
    """What is held of 200,000 tokens would show: residuals of 64 float32 take 49 MB, every activation more."""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # holes in the heap are not what is asked here
    how = {"cwd": root, "env": env, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", MEMORY], check=False, **how)
    assert done.returncode == 0, done.stderr
    few, many = json.loads(done.stdout.splitlines()[-1])
    assert many - few < 24, f"{few:.0f} MB for 2,000 tokens, {many:.0f} MB for 200,000"
