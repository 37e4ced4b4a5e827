"""Local errors: those of Grams, by arithmetic on paper, and of encode/decode pairs."""

import json

import pytest
import torch

from swd_lens import baselines
from swd_lens.circuits import fidelity
from swd_lens.circuits.fidelity import Fidelity, fidelities
from swd_lens.hosts import host_of
from swd_lens.units.factors import Factors
from tests.contract import swd_zero_data
from tests.micro import micro_model, random_tokens


def gram_form(model, cache, site, f):
    """tr(E^T G E) / tr(W^T G W) in float64, G over the dense model's inputs."""
    read_from = {"mlp_out": cache["post", 1], "attn_o": cache["z", 1].flatten(-2)}[site.split(".")[-1]]
    h = read_from.flatten(0, 1).double()
    of_site = next(s for s in host_of(model).sites() if s.name == site)
    gram, weight = h.T @ h, host_of(model).weight(of_site).double()
    error = weight - f.read.double() @ f.write.double()
    return float((error.T @ gram @ error).trace() / (weight.T @ gram @ weight).trace())


def test_the_local_error_is_the_grams_and_no_upstream_site_changes_it(model):
    factors, tokens = swd_zero_data(model, "all"), random_tokens(9, 8)
    found = fidelity(model, factors, tokens, batch_size=4, local=True)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    for site in ("blocks.1.mlp_out", "blocks.1.attn_o"):
        assert found.local_relmse[site] == pytest.approx(gram_form(model, cache, site, factors[site]), rel=1e-4)
        alone = fidelity(model, {site: factors[site]}, tokens, batch_size=4, local=True)
        assert alone.local_relmse[site] == pytest.approx(found.local_relmse[site], rel=1e-6)
        # Alone in the model its input is the dense one: the same errors, over the norm with the bias in it.
        y = cache["mlp_out" if site.endswith("mlp_out") else "attn_out", 1].double()
        of_site = next(s for s in host_of(model).sites() if s.name == site)
        h = (cache["post", 1] if site.endswith("mlp_out") else cache["z", 1].flatten(-2)).double()
        product = h @ host_of(model).weight(of_site).double()
        norms = float(y.square().sum() / product.square().sum())
        assert alone.relmse[site] * norms == pytest.approx(alone.local_relmse[site], rel=1e-4)
        assert found.relmse[site] != pytest.approx(alone.relmse[site], rel=0.01)  # upstream drift
    assert list(found.local_relmse) == list(found.relmse)
    together = fidelities(model, {"all": factors, "exact": baselines.svd(model, "all")}, tokens, batch_size=4, local=True)
    assert together["all"] == found and max(together["exact"].local_relmse.values()) < 1e-9
    assert "local relMSE" in found.parts()[-1].columns


def test_a_local_error_computed_on_paper():
    """micro_model, mlp_out, tokens 0 and 1: h = relu((1, 2)) and relu((3, 4)).

    W = [[1, 2], [3, 4]]: h W = (7, 10) and (15, 22), squares 149 and 709. Without unit 1 (A = I, B = W): (1, 2) and (3, 6) are
    left, so (6, 8) and (12, 16) are lost: 100 + 400 of 858. A bias of (5, 5) changes neither.
    """
    model = micro_model()
    factors = Factors(torch.eye(2), torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    model.blocks[0].mlp.b_out.data.fill_(5.0)
    found = fidelity(model, {"blocks.0.mlp_out": factors}, [[0, 1]], local=True)
    assert found.local_relmse == {"blocks.0.mlp_out": pytest.approx(500 / 858)}
    # Bias included the squares are 12^2 + 15^2 + 20^2 + 27^2 = 1498.
    assert found.relmse == {"blocks.0.mlp_out": pytest.approx(500 / 1498)}
    assert Fidelity.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    unmeasured = fidelity(model, {"blocks.0.mlp_out": factors}, [[0, 1]])
    assert "local_relmse" not in unmeasured.as_dict() and Fidelity.from_dict(unmeasured.as_dict()).local_relmse == {}


@pytest.mark.parametrize(("reads", "writes"), [("input", "output"), ("output", "output"), ("input", "input")])
def test_a_coders_local_error_is_that_of_its_output(reads, writes):
    """The coder gives half of what it reads: y / 2, or the output of h / 2. h W = (7, 10), (15, 22), b_out = (5, 5).

    Of (12, 15) and (20, 27) half is lost: 1498 / 4. From h / 2 half of h W is lost: 858 / 4. Reading h, writing y: the coder
    gives h / 2 = (.5, 1) and (1.5, 2) for (12, 15) and (20, 27).
    """

    class Half:
        def encode(self, x):
            return x / 2

        def decode(self, z):
            return z

    model = micro_model()
    model.blocks[0].mlp.b_out.data.fill_(5.0)
    coder = Half()
    coder.reads, coder.writes = reads, writes
    found = fidelity(model, {"blocks.0.mlp_out": coder}, [[0, 1]], local=True)
    lost = {("output", "output"): 1498 / 4, ("input", "input"): 858 / 4, ("input", "output"): 11.5**2 + 14**2 + 18.5**2 + 25**2}[
        reads, writes
    ]
    assert found.local_relmse["blocks.0.mlp_out"] == pytest.approx(lost / 858)
