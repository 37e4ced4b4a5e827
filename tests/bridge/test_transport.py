"""Factors of a bridge as it was loaded, moved to the same bridge in compatibility mode, where weights are folded and centred."""

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import AttachError
from swd_lens.hosts import host_of
from tests import families

pytestmark = pytest.mark.filterwarnings("ignore:.* calibration tokens for")  # few, to be quick

TOKENS = families.some_tokens(2, 9)
FEW = {"outer_iterations": 2, "refine_rounds": 0, "basis": "paper", "progress": False}
FOLDABLE = ("gpt2", "pythia", "llama", "qwen2", "qwen3", "gemma2")


def seen(model, factors):
    """Log-probabilities and every z."""
    with torch.no_grad(), swd.attach(model, factors):
        logits, cache = model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("_unit"))
    return logits.log_softmax(-1), {name: z for name, z in cache.items() if name.endswith("_unit")}


def assert_same(one, other):
    (a, z_a), (b, z_b) = one, other
    assert float((a - b).abs().max() / a.abs().max()) < 1e-5
    assert set(z_a) == set(z_b)
    for name in z_a:
        assert float((z_a[name] - z_b[name]).abs().max() / z_a[name].abs().max()) < 1e-5, name


@pytest.fixture(scope="module", params=FOLDABLE)
def hosts(request):
    """A bridge as it was loaded, one in compatibility mode, and inexact factors of the first."""
    raw, processed = families.bridge(request.param), families.bridge(request.param)
    processed.enable_compatibility_mode()
    return raw, processed, swd.factorize(raw, "all", sparsity=0.4, tokens=TOKENS, **FEW)


@pytest.mark.quick_cases(2)
def test_transport_there_and_back(hosts):
    raw, processed, factors = hosts
    moved = factors.transport(processed)
    assert_same(seen(raw, factors), seen(processed, moved))
    assert_same(seen(raw, factors), seen(raw, moved.transport(raw)))


@pytest.mark.quick_cases(2)
def test_factors_of_the_processed_bridge_move_to_the_raw_one(hosts):
    raw, processed, _ = hosts
    factors = swd.factorize(processed, "all", sparsity=0.4, **FEW)
    assert_same(seen(processed, factors), seen(raw, factors.transport(raw)))


@pytest.mark.quick_cases(2)
def test_without_transport_it_is_refused(hosts):
    _, processed, factors = hosts
    assert host_of(processed).processing()["compatibility_mode"]
    with pytest.raises(AttachError, match=r"made with fold_ln=False.*this host has fold_ln=True.*factors\.transport"):
        swd.attach(processed, factors)


def test_compatibility_mode_without_processing_changes_nothing():
    raw, named = families.bridge("gpt2"), families.bridge("gpt2")
    named.enable_compatibility_mode(no_processing=True)
    factors = swd.factorize(raw, "all", sparsity=0.4, **FEW)
    assert_same(seen(raw, factors), seen(named, factors))
