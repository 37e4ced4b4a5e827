"""The floor of half precision, against exact factors run by hand; in float32 there is none."""

import json

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits import floor as fidelity_floor
from swd_lens.circuits.fidelity import fidelities
from swd_lens.hosts import host_of

TOKENS = swd.text_tokens(4 * 128, "test")[:, :64]


def truncated(model, sites, n):
    """The n largest singular values of each matrix."""
    return {site: swd.Factors(f.read[:, :n], f.write[:n]) for site, f in baselines.svd(model, sites).items()}


@pytest.fixture(scope="module")
def rounded():
    return swd.load_default_model(dtype=torch.bfloat16)


def test_a_host_in_float32_has_no_floor_and_its_record_does_not_speak_of_one():
    model = swd.load_default_model()
    found = swd.fidelity(model, truncated(model, "blocks.1.mlp_out", 8), TOKENS)
    assert found.floor is None and found.below_floor == () and "floor" not in found.as_dict()
    assert not [name for name in found.table() if "floor" in name]


def test_the_floor_is_that_of_exact_factors_run_by_hand(rounded):
    site = next(each for each in host_of(rounded).sites() if each.name == "blocks.1.mlp_out")
    found = swd.fidelity(rounded, truncated(rounded, site.name, 8), TOKENS)
    q, r = torch.linalg.qr(host_of(rounded).weight(site))
    with torch.no_grad():
        dense = rounded(TOKENS)[:, :-1].double().log_softmax(-1)
        with swd.attach(rounded, {site.name: swd.Factors(q, r)}):
            exact = rounded(TOKENS)[:, :-1].double().log_softmax(-1)
    kl = float((dense.exp() * (dense - exact)).sum(-1).mean())
    targets = TOKENS[:, 1:, None]
    ce_delta = float((dense - exact).gather(-1, targets).mean())
    assert found.floor is not None and kl > 1e-6
    assert found.floor.kl == pytest.approx(kl, rel=0.02)
    assert found.floor.ce_delta == pytest.approx(ce_delta, abs=0.02 * abs(ce_delta) + 1e-6)
    # Eight units of 64 are far above what rounding makes.
    assert found.kl > 10 * found.floor.kl and found.below_floor == () and "rounds off" not in found.title()
    assert found.table()["KL floor"][0] == found.floor.kl and found.table()["below floor"][0] == ""


def test_a_lossless_replacement_lies_below_the_floor_and_is_marked(rounded):
    exact = fidelity_floor.lossless(host_of(rounded), swd.find_sites(rounded, "mlp_out"))
    found = swd.fidelity(rounded, exact, TOKENS)
    assert found.floor is not None and found.kl == pytest.approx(found.floor.kl, rel=1e-6)
    assert found.below_floor == ("CE delta", "KL") and found.table()["below floor"][0] == "CE delta, KL"
    assert "CE delta and KL: not above what the host's dtype rounds off" in found.title()
    assert swd.Fidelity.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_a_floor_is_measured_once_for_each_set_of_sites_and_tokens(rounded, monkeypatch):
    made, lossless = [], fidelity_floor.lossless
    monkeypatch.setattr(fidelity_floor, "lossless", lambda host, sites: made.append(len(sites)) or lossless(host, sites))
    tokens = TOKENS.flip(0)
    both = {n: truncated(rounded, "blocks.2.mlp_*", n) for n in (8, 16)}
    one = fidelities(rounded, {"a": both[8], "b": both[16], "c": truncated(rounded, "blocks.2.mlp_out", 8)}, tokens)
    assert made == [2, 1] and one["a"].floor == one["b"].floor != one["c"].floor
    again = swd.fidelity(rounded, both[16], tokens, local=True)
    assert made == [2, 1] and again.floor == one["a"].floor and again.kl == pytest.approx(one["b"].kl, rel=1e-6)
    swd.fidelity(rounded, both[16], tokens[:1])
    assert made == [2, 1, 2]
    with torch.no_grad():
        rounded.ln_final.w.mul_(1.0)  # written to: another host
    swd.fidelity(rounded, both[16], tokens)
    assert made == [2, 1, 2, 2]
    monkeypatch.setattr(fidelity_floor, "FLOOR_BYTES", 1000)
    assert swd.fidelity(rounded, both[8], TOKENS[:2]).floor is None
