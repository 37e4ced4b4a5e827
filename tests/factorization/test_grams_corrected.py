"""Corrected calibration: each matrix is fitted to what the dense host writes where it stands."""

import pytest
import torch

import swd_lens as swd
import swd_lens.factorization.grams
from swd_lens.factorization.grams import RIDGE, corrected
from swd_lens.hosts import find_sites, host_of
from tests.factorization.test_factorize import QUICK, bits
from tests.micro import random_tokens, toy_model

TOKENS = random_tokens(40, 9)
NAMED = {**QUICK, "tokens": TOKENS, "calibration": "corrected"}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """All matrices, in one call."""
    return swd.factorize(model, "all", **NAMED, out=tmp_path_factory.mktemp("whole"))


def test_the_target_is_the_least_squares_answer():
    """Rows of h and g; sqrt(ridge) more rows of each keep W where h says nothing."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    g = h + 0.3 * torch.randn(50, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 4, generator=generator)
    gram, cross = h.T @ h / 50, h.T @ g / 50
    ridge = (RIDGE * gram.diagonal().mean()).sqrt() * torch.eye(6, dtype=torch.float64)
    left, right = torch.cat([h / 50**0.5, ridge]), torch.cat([g / 50**0.5, ridge]) @ weight.double()
    expected = torch.linalg.lstsq(left, right).solution
    assert torch.allclose(corrected(weight, gram, cross).double(), expected, atol=1e-6)
    # The same inputs: nothing to correct.
    assert torch.allclose(corrected(weight, gram, gram), weight, atol=1e-6)


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_every_matrix_gets_its_least_squares_target(kind):
    """Recomputed from whole forwards of the dense and of the replaced host. All in float64: a sum in another order moves
    float32's supports, on some processors by more than a bound could allow."""
    model = swd.load_default_model(kind=kind, dtype=torch.float64) if kind == "bridge" else toy_model().double()
    tokens = TOKENS if kind == "hooked" else swd.text_tokens(512, split="train")
    sites = find_sites(model, ["blocks.0.attn_o", "blocks.0.mlp_in", "blocks.1.mlp_out"])
    named = {**NAMED, "tokens": tokens, "gram_dtype": "float64", "precision": "float64"}
    made = swd.factorize(model, [site.name for site in sites], **named)
    before: dict = {}
    for site in sites:
        dense = inputs(model, site, tokens)
        if before:
            with swd.attach(model, dict(before)):
                replaced = inputs(model, site, tokens)
            n = len(dense)
            gram, cross = replaced.T @ replaced / n, replaced.T @ dense / n
            target = corrected(host_of(model).weight(site), gram, cross)
            precise = {"preset": "paper", "outer_iterations": 4, "precision": "float64"}
            again = swd.solve(target, gram, 0.5, tokens=n, **precise)
            assert torch.equal(again.read != 0, made[site.name].read != 0)
            assert torch.equal(again.write != 0, made[site.name].write != 0)
            # Targets and factors are kept in float32.
            assert float((again.product() - made[site.name].product()).norm() / target.norm()) < 1e-5
            assert made[site.name].provenance["relmse"] == pytest.approx(again.relmse(gram, target), rel=1e-4)
        before[site.name] = made[site.name]


def inputs(model, site, tokens) -> torch.Tensor:
    host, found = host_of(model), []
    with torch.no_grad(), host.inputs([site], lambda _, h: found.append(h.reshape(-1, site.d_in).double())):
        host.run_blocks(tokens, site.layer + 1)
    return torch.cat(found)


def test_corrected_is_nearer_to_the_dense_model_than_sequential(model, whole):
    heldout = random_tokens(40, 9, seed=1)
    sequential = swd.factorize(model, "all", **{**NAMED, "calibration": "sequential"})
    assert swd.fidelity(model, whole, heldout).kl < swd.fidelity(model, sequential, heldout).kl
    for f in whole.values():  # relmse is the solver's, of the target; relative_frobenius that of the factors against W
        assert f.provenance["relative_frobenius"] == pytest.approx(f.relative_frobenius(), rel=1e-6)


def test_one_site_has_nothing_to_correct(model):
    for name in ("blocks.0.attn_qkv", "blocks.1.mlp_out"):
        alone = swd.factorize(model, name, **NAMED)
        plain = swd.factorize(model, name, **{**NAMED, "calibration": "sequential"})
        assert bits(alone[name]) == bits(plain[name])


def test_bypassed_units_leave_the_dense_host(model):
    f = swd.factorize(model, "all", **QUICK)
    dense = model(TOKENS)
    with swd.attach(model, f) as attached:
        replaced = model(TOKENS)
        assert not torch.equal(replaced, dense)
        with attached.dense():
            with attached.dense():
                assert torch.equal(model(TOKENS), dense)
            assert torch.equal(model(TOKENS), dense)
            _, cache = model.run_with_cache(TOKENS)
            assert "blocks.0.hook_mlp_out_unit" not in cache.cache_dict  # no z was computed
        assert torch.equal(model(TOKENS), replaced)
        with pytest.raises(RuntimeError), attached.dense():
            raise RuntimeError
        assert torch.equal(model(TOKENS), replaced)


def test_a_site_that_is_read_twice_has_no_target(model):
    def again(module, args, output):
        if module.training:
            return None
        module.training = True  # once only
        try:
            return module(*args)
        finally:
            module.training = False

    handle = model.blocks[1].mlp.register_forward_hook(again)
    try:
        with pytest.raises(swd.UnsupportedHostError, match=r"blocks\.1\.mlp_in read \d+ vectors on \d+ tokens"):
            swd.factorize(model, ["blocks.0.mlp_out", "blocks.1.mlp_in"], **NAMED)
    finally:
        handle.remove()


def test_products_in_double_precision(model, whole):
    """gram_dtype="float64" says the same of them as in the other kinds of calibration."""
    named = {**NAMED, "gram_dtype": "float64"}
    double = swd.factorize(model, "all", **named)
    assert bits(whole["blocks.1.mlp_out"]) != bits(double["blocks.1.mlp_out"])
    seen: list = []
    with pytest.MonkeyPatch.context() as patch:
        inner = swd_lens.factorization.grams._inputs
        patch.setattr(swd_lens.factorization.grams, "_inputs", lambda *given: seen.append(inner(*given)) or seen[-1])
        swd.factorize(model, ["blocks.0.mlp_out", "blocks.1.mlp_in"], **named)
    assert seen and all(h.dtype == torch.float64 for found in seen for h in found.values())
