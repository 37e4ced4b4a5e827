"""SVD and Random-B: exact, ordered or Haar, reproducible (method.md §4.1). Neurons: W's own coordinates."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.hosts import host_of
from swd_lens.solver import svd_prune
from swd_lens.units import attach
from swd_lens.units.exact import neuron_factors, random_b_factors, svd_factors
from swd_lens.units.factors import FactorSet
from tests.forwards import block_runs
from tests.micro import random_tokens, toy_model

SHAPES = [(24, 10), (10, 24), (16, 16)]


def weight_of(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [svd_factors, lambda weight: random_b_factors(weight, 3)], ids=["svd", "random_b"])
def test_exact_and_dense(shape, make):
    weight = weight_of(shape)
    factors = make(weight)
    assert factors.n_units == min(shape)
    torch.testing.assert_close(factors.product(), weight, rtol=1e-5, atol=1e-5)
    assert factors.relative_frobenius() < 1e-6
    assert factors.edges_per_unit.tolist() == [sum(shape)] * min(shape)
    assert factors.settings["edges"] == "dense"
    assert factors.read.dtype == factors.write.dtype == torch.float32


def test_svd_by_hand():
    # [[0, -3], [2, 0]] = 3 * e1 (0, -1)^T + 2 * e2 (1, 0)^T; the sign moves to the read vector.
    factors = svd_factors(torch.tensor([[0.0, -3.0], [2.0, 0.0]]))
    torch.testing.assert_close(factors.read, torch.tensor([[-3.0, 0.0], [0.0, 2.0]]))
    torch.testing.assert_close(factors.write, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_is_ordered_orthogonal_and_sign_fixed(shape):
    weight = weight_of(shape)
    factors = svd_factors(weight)
    torch.testing.assert_close(factors.read.norm(dim=0), torch.linalg.svdvals(weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(factors.write @ factors.write.T, torch.eye(min(shape)), rtol=1e-5, atol=1e-5)
    largest = factors.write.gather(1, factors.write.abs().argmax(1, keepdim=True))
    assert bool((largest > 0).all())
    negated = svd_factors(-weight)
    torch.testing.assert_close(negated.write, factors.write, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(negated.read, -factors.read, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_b_is_orthogonal_and_seeded(shape):
    weight = weight_of(shape)
    one, again, other = (random_b_factors(weight, seed) for seed in (0, 0, 1))
    assert torch.equal(one.write, again.write) and torch.equal(one.read, again.read)
    assert not torch.allclose(one.write, other.write)
    random = one.write if shape[0] >= shape[1] else one.read
    torch.testing.assert_close(random.T @ random, torch.eye(min(shape)), rtol=1e-5, atol=1e-5)


def test_random_b_does_not_depend_on_the_weight():
    assert torch.equal(random_b_factors(torch.ones(9, 5), 2).write, random_b_factors(weight_of((7, 5)), 2).write)


def test_random_b_is_haar():
    # QR without the sign fix has a fixed sign on the first entry of every column (Householder makes R's diagonal
    # negative); for a Haar matrix it is a coin flip. 100 flips: 50 +- 5, so 20..80 is six deviations.
    signs = sum(int((random_b_factors(torch.ones(4, 4), seed).write[0, 0] > 0).item()) for seed in range(100))
    assert 20 <= signs <= 80


@pytest.mark.parametrize("shape", SHAPES)
def test_neurons_are_inputs_with_what_they_write_or_outputs_with_what_they_read(shape):
    weight = weight_of(shape)
    weight[3] = 0.0  # an input that writes nothing
    inputs, outputs = neuron_factors(weight), neuron_factors(weight, "output")
    assert torch.equal(inputs.product(), weight) and torch.equal(outputs.product(), weight)
    assert torch.equal(inputs.read, torch.eye(shape[0])) and torch.equal(outputs.write, torch.eye(shape[1]))
    edges = [1 + shape[1]] * shape[0]
    edges[3] = 1
    assert inputs.edges_per_unit.tolist() == edges and not inputs.valid_units[3]
    assert outputs.edges_per_unit.tolist() == [shape[0] - 1 + 1] * shape[1]
    with pytest.raises(ValueError, match="side must be one of 'input', 'output', got 'both'"):
        neuron_factors(weight, "both")


@pytest.mark.parametrize(
    "make",
    [svd_factors, lambda weight: random_b_factors(weight, 0), neuron_factors],
    ids=["svd", "random_b", "neurons"],
)
def test_non_finite_weight(make):
    weight = weight_of((5, 6))
    weight[2, 4] = float("inf")
    with pytest.raises(ValueError, match=r"weight\[2, 4\] is inf: every entry must be finite"):
        make(weight)


def test_pruned_neurons_of_a_host_are_attached_and_keep_the_budget():
    model = toy_model()
    tokens = random_tokens(8, 9)
    sparse = baselines.pruned(model, "mlp_out", sparsity=0.5, tokens=tokens, progress=False)
    for site, f in sparse.items():
        assert f.n_units == f.d_in and f.settings["preset"] == "pruned", site
        assert 0 <= f.d_in * f.d_out // 2 - f.edges <= 1
    dense, replaced = model(tokens), None
    with attach(model, sparse):
        replaced = model(tokens)
    with attach(model, baselines.neurons(model, "mlp_out")):
        torch.testing.assert_close(model(tokens), dense, rtol=1e-5, atol=1e-5)
    assert float((replaced - dense).abs().max()) > 1e-3


def test_neurons_stand_on_the_side_where_the_mlp_has_them():
    model = toy_model()
    outputs = baselines.neurons(model, "blocks.0.mlp_in")["blocks.0.mlp_in"]
    assert outputs.n_units == model.cfg.d_mlp and torch.equal(outputs.write, torch.eye(model.cfg.d_mlp))
    behind = baselines.neurons(model, "blocks.0.mlp_out")["blocks.0.mlp_out"]
    assert behind.n_units == model.cfg.d_mlp and torch.equal(behind.read, torch.eye(model.cfg.d_mlp))
    inputs = baselines.neurons(model, "blocks.0.mlp_in", side="input")["blocks.0.mlp_in"]
    assert inputs.n_units == model.cfg.d_model
    heads = baselines.neurons(model, "blocks.0.attn_o")["blocks.0.attn_o"]
    assert torch.equal(heads.read, torch.eye(heads.d_in))


def test_pruned_neurons_stand_on_their_side_too():
    model, how = toy_model(), {"sparsity": 0.5, "tokens": random_tokens(8, 9), "progress": False}
    sparse = baselines.pruned(model, ["blocks.0.attn_o", "blocks.0.mlp_in", "blocks.0.mlp_out"], **how)
    sides = {site.split(".")[-1]: f.settings["basis"] for site, f in sparse.items()}
    assert sides == {"attn_o": "input", "mlp_in": "output", "mlp_out": "input"}
    other = baselines.pruned(model, "blocks.0.mlp_in", **how, basis="input")
    assert other["blocks.0.mlp_in"].settings["basis"] == "input"


def test_pruned_svd_of_a_host_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    model, tokens = toy_model(), random_tokens(8, 9)
    how = {"sparsity": 0.5, "tokens": tokens, "progress": False}
    whole = baselines.svd_pruned(model, "mlp_out", **how)
    for site, f in whole.items():
        assert f.edges == f.d_in * f.d_out // 2 and f.settings["preset"] == "svd_pruned", site
        assert f.n_units == min(f.d_in, f.d_out)
    solved: list[str] = []
    solve = svd_prune.factorize

    def second_is_interrupted(*arguments):
        if len(solved) == 1:
            raise KeyboardInterrupt
        solved.append("one")
        return solve(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(svd_prune, "factorize", second_is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            baselines.svd_pruned(model, "mlp_out", **how, out=tmp_path / "factors")
    assert list(FactorSet.load(tmp_path / "factors")) == ["blocks.0.mlp_out"]
    resumed = baselines.svd_pruned(model, "mlp_out", **how, out=tmp_path / "factors")
    for site, f in whole.items():
        assert torch.equal(resumed[site].read, f.read) and torch.equal(resumed[site].write, f.write)


# ---------------------------------------------------------------------------------------------- whitened


def gram_of(size: int, rank: int, seed: int = 1) -> torch.Tensor:
    """E[h^T h] of `rank` vectors whose entries differ in scale."""
    h = torch.randn(rank, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (h * torch.logspace(0, -2, size, dtype=torch.float64)).T @ h.mul(torch.logspace(0, -2, size)) / rank


def lost_by(factors, weight, k, gram, output_gram) -> float:
    """tr((W - A_k B_k)^T G (W - A_k B_k) H)."""
    left_out = weight.double() - factors.read[:, :k].double() @ factors.write[:k].double()
    return float((left_out * (gram @ left_out @ output_gram)).sum())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["whitened", "causal"])
def test_whitened_svd_is_exact_and_its_first_units_are_the_best_ones(shape, causal):
    weight, gram = weight_of(shape), gram_of(shape[0], 60)
    h = gram_of(shape[1], 60, seed=2)
    # What the outputs' Gram is with its least share of the identity.
    output_gram = (1 - 1e-4) * h / h.diagonal().mean() + 1e-4 * torch.eye(shape[1]) if causal else torch.eye(shape[1])
    output_gram = output_gram.double()
    factors = svd_factors(weight, gram, h if causal else None)
    assert factors.n_units == min(shape) and factors.settings["method"] == ("svd_causal" if causal else "svd_whitened")
    torch.testing.assert_close(factors.product(), weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(factors.write.norm(dim=1), torch.ones(min(shape)), rtol=1e-5, atol=1e-5)
    # Eckart and Young: the squares of the singular values of C W D that are left out.
    roots = [torch.linalg.cholesky(each) for each in (gram, output_gram)]
    squares = torch.linalg.svdvals(roots[0].T @ weight.double() @ roots[1]).square()
    for k in range(min(shape) + 1):
        expected = float(squares[k:].sum())
        assert lost_by(factors, weight, k, gram, output_gram) == pytest.approx(
            expected, rel=1e-4, abs=1e-9 * float(squares.sum())
        )
    plain = svd_factors(weight)
    ours, others = (lost_by(f, weight, 4, gram, output_gram) for f in (factors, plain))
    assert ours < 0.99 * others


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_metric_it_is_the_svd(shape):
    weight, plain = weight_of(shape), svd_factors(weight_of(shape))
    identities = torch.eye(shape[0]), torch.eye(shape[1])
    for factors in (svd_factors(weight, 3 * identities[0]), svd_factors(weight, *identities)):
        torch.testing.assert_close(factors.read, plain.read, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(factors.write, plain.write, rtol=1e-4, atol=1e-4)
    assert svd_factors(weight, None, identities[1]).settings["method"] == "svd_outputs"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["whitened", "causal"])
def test_grams_of_low_rank_leave_it_exact(shape, causal):
    weight, gram = weight_of(shape), gram_of(shape[0], 3)
    gram[2] = gram[:, 2] = 0.0  # an input that is never on
    factors = svd_factors(weight, gram, gram_of(shape[1], 2, seed=2) if causal else None)
    assert factors.relative_frobenius() < (2e-6 if not causal else 2e-5)
    assert factors.read.isfinite().all() and factors.write.isfinite().all()
    if not causal:  # three directions are all that the inputs have
        assert lost_by(factors, weight, 3, gram, torch.eye(shape[1]).double()) < 1e-9 * float(gram.trace())


def test_few_tokens_shrink_the_metric():
    weight, gram = weight_of((24, 10)), gram_of(24, 60)
    shrunk, plain = svd_factors(weight, gram, tokens=60), svd_factors(weight, gram)
    many = svd_factors(weight, gram, tokens=10**9)
    assert not torch.allclose(shrunk.write, plain.write, atol=1e-3)
    torch.testing.assert_close(many.write, plain.write, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gram", [torch.eye(7), -torch.eye(5), torch.full((5, 5), torch.nan)])
def test_a_gram_that_is_none_of_this_matrix_is_refused(gram):
    with pytest.raises(swd.errors.GramError):
        svd_factors(weight_of((5, 6)), gram)
    with pytest.raises(swd.errors.GramError):
        svd_factors(weight_of((6, 5)), None, gram)


def test_calibration_text_is_run_once_for_all_metrics_and_factorizations():
    model, site = toy_model(), "blocks.0.attn_o"
    text = CalibrationText(random_tokens(8, 9), model)
    first = baselines.svd(model, site, whitened=True, tokens=text)
    with block_runs(model) as runs:
        by_head = baselines.svd(model, site, whitened=True, by_head=True, tokens=text)
        swd.factorize(model, site, tokens=text, preset="svd_pruned", gram_dtype="float32")
    assert runs.rows <= 1  # no pass over the text: a look at one row is all
    plain = baselines.svd(model, site, whitened=True, tokens=random_tokens(8, 9))
    assert torch.equal(first[site].read, plain[site].read) and by_head[site].n_units == first[site].n_units


@pytest.mark.parametrize("how", [{"whitened": True}, {"weigh_outputs": True}])
def test_whitened_svd_of_a_host(how):
    model, tokens = toy_model(), random_tokens(8, 9)
    sites = ["blocks.0.attn_o", "blocks.1.mlp_in", "blocks.1.mlp_out"]
    made = baselines.svd(model, sites, tokens=tokens, **how)
    assert list(made) == sites and made.provenance["method"] == ("svd_whitened" if "whitened" in how else "svd_causal")
    dense = model(tokens)
    with attach(model, made):
        torch.testing.assert_close(model(tokens), dense, rtol=1e-4, atol=1e-4)
    found = swd.find_sites(model, sites)
    grams = swd.collect_grams(model, found, tokens)
    plain = baselines.svd(model, sites)
    if "whitened" in how:
        for site in sites:
            weight, size = plain[site].weight, plain[site].d_out
            lost = [
                lost_by(each[site], weight, 5, grams[site].double(), torch.eye(size).double()) for each in (made, plain)
            ]
            assert lost[0] < lost[1], site
    expected = svd_factors(plain[sites[2]].weight, grams[sites[2]], tokens=72)
    if "whitened" in how:
        torch.testing.assert_close(made[sites[2]].write, expected.write, rtol=1e-4, atol=1e-4)


def test_a_metric_needs_text_and_text_a_metric():
    model = toy_model()
    with pytest.raises(
        ValueError, match=r"svd\(whitened=True\): whitened and weigh_outputs take their metric from text"
    ):
        baselines.svd(model, "mlp_out", whitened=True)
    with pytest.raises(ValueError, match=r"svd\(whitened=False\)"):
        baselines.svd(model, "mlp_out", tokens=random_tokens(2, 4))
    with (
        attach(model, baselines.neurons(model, "blocks.0.mlp_out")),
        pytest.raises(swd.errors.AttachError, match=r"baselines\.svd"),
    ):
        baselines.svd(model, "mlp_out", whitened=True, tokens=random_tokens(2, 4))


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("kind", ["attn_o", "attn_q", "attn_qkv"])
def test_singular_vectors_of_each_head(kind, whitened):
    model, site = swd.load_default_model(), f"blocks.1.{kind}"
    text = {"whitened": True, "tokens": swd.text_tokens(1_024, split="train")} if whitened else {}
    f = baselines.svd(model, site, by_head=True, **text)[site]
    torch.testing.assert_close(f.product(), host_of(model).weight(swd.find_sites(model, site)[0]), atol=1e-5, rtol=0)
    d_head = model.cfg.d_head
    parts = f.read.T if kind == "attn_o" else f.write
    heads = (parts != 0).unflatten(1, (-1, d_head)).any(2)
    assert bool((heads.sum(1) == 1).all()) and int(f.edges_per_unit.max()) <= d_head + max(f.d_in, f.d_out)
    of_head = f.read[:d_head, :d_head] if kind == "attn_o" else f.read[:, :d_head]
    if not whitened:
        expected = torch.linalg.svdvals(f.product()[:d_head] if kind == "attn_o" else f.product()[:, :d_head])
        torch.testing.assert_close(of_head.norm(dim=0), expected, atol=1e-4, rtol=1e-4)


def test_singular_vectors_of_heads_are_refused_elsewhere():
    model = swd.load_default_model()
    for sites, how in (
        ("mlp_in", {}),
        ("attn_o", {"weigh_outputs": True, "tokens": swd.text_tokens(256, split="train")}),
    ):
        with pytest.raises(ValueError, match="by_head=True"):
            baselines.svd(model, sites, by_head=True, **how)
