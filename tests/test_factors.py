"""Factors and their files."""

import json

import pytest
import torch

from swd_lens.baselines import svd_factors
from swd_lens.factors import Factors, FactorSet, fingerprint


def small() -> Factors:
    # W = [[2, 0], [0, 3]]; read = I without its second entry, so unit 1 reads nothing and is not valid.
    return Factors(
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[2.0, 1.0], [0.0, 3.0]]),
        {"preset": "paper"},
        {"site": "blocks.0.mlp_out"},
        torch.tensor([[2.0, 0.0], [0.0, 3.0]]),
    )


def test_counts_by_hand():
    f = small()
    assert f.edges_per_unit.tolist() == [3, 1]  # unit 0: 1 read + 2 write; unit 1: 0 + 1
    assert f.valid_units.tolist() == [True, False]
    assert f.edges == 4
    assert f.sparsity == 0.0  # 1 - 4 / (2 * 2)


def test_exact_controls_count_dense_edges():
    # SVD of a diagonal matrix holds exact zeros; the control still counts d_in + d_out per unit.
    factors = svd_factors(torch.diag(torch.tensor([2.0, 1.0])))
    assert (factors.read == 0).any()
    assert factors.edges_per_unit.tolist() == [4, 4] and factors.edges == 8


def test_errors_by_hand():
    f = small()
    # read @ write = [[2, 1], [0, 0]], so W - AB = [[0, -1], [0, 3]]: squared norm 10, ||W||^2 = 13.
    assert f.relmse() == pytest.approx(10 / 13)
    assert f.relative_frobenius() == pytest.approx((10 / 13) ** 0.5)
    # Gram diag(4, 1): 4 * 1 + 1 * 9 = 13 over 4 * 4 + 1 * 9 = 25.
    assert f.relmse(torch.diag(torch.tensor([4.0, 1.0]))) == pytest.approx(13 / 25)


def test_loaded_factors_ask_for_the_weight():
    f = Factors(torch.eye(2), torch.eye(2))
    with pytest.raises(ValueError, match="do not remember their dense weight"):
        f.relmse()
    assert f.relmse(weight=torch.eye(2)) == 0.0


def test_save_and_load(tmp_path):
    generator = torch.Generator().manual_seed(0)
    read = torch.randn(40, 20, generator=generator) * (torch.rand(40, 20, generator=generator) < 0.3)
    write = torch.randn(20, 30, generator=generator) * (torch.rand(20, 30, generator=generator) < 0.3)
    saved = FactorSet(
        {
            "blocks.0.mlp_out": Factors(read, write, {"preset": "paper", "sparsity": 0.5}, {"tokens": 3}),
            "blocks.1.mlp_out": small(),
        },
        {"model": "toy"},
    )
    saved.save(tmp_path / "factors")
    loaded = FactorSet.load(tmp_path / "factors")
    assert list(loaded) == list(saved)
    assert loaded.provenance == {"model": "toy"}
    for site in saved:
        assert torch.equal(loaded[site].read, saved[site].read)
        assert torch.equal(loaded[site].write, saved[site].write)
        assert loaded[site].settings == saved[site].settings
        assert loaded[site].provenance == saved[site].provenance
    assert sorted(path.name for path in (tmp_path / "factors").iterdir()) == ["factors.json", "factors.safetensors"]


def test_an_interrupted_save_leaves_the_old_files(tmp_path, monkeypatch):
    FactorSet({"blocks.0.mlp_out": small()}).save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(tensors, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("swd_lens.factors.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        FactorSet({"blocks.0.mlp_in": small()}).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no factors\.json"):
        FactorSet.load(tmp_path)
    FactorSet({"blocks.0.mlp_out": small()}).save(tmp_path)
    described = json.loads((tmp_path / "factors.json").read_text())
    (tmp_path / "factors.json").write_text(json.dumps({**described, "format": 99}))
    with pytest.raises(ValueError, match="format 99, this swd_lens reads 1"):
        FactorSet.load(tmp_path)
    (tmp_path / "factors.json").write_text(json.dumps({**described, "tensors_sha256": "0"}))
    with pytest.raises(ValueError, match=r"is not the file that factors\.json was written with"):
        FactorSet.load(tmp_path)


def test_sets():
    one, two = FactorSet({"blocks.0.mlp_out": small()}), FactorSet({"blocks.1.mlp_out": small()})
    both = one | two
    assert list(both) == ["blocks.0.mlp_out", "blocks.1.mlp_out"] and both.edges == 8 and both.n_units == 4
    with pytest.raises(ValueError, match=r"both sets hold factors for blocks\.0\.mlp_out"):
        one | one
    with pytest.raises(KeyError, match=r"no factors for site 'blocks\.7\.mlp_out'"):
        one["blocks.7.mlp_out"]
    assert "2 sites, 4 units, 8 edges" in repr(both)


def test_fingerprint_sees_values_and_shape():
    weight = torch.arange(6.0).view(2, 3)
    assert fingerprint(weight) == fingerprint(weight.clone())
    assert fingerprint(weight) != fingerprint(weight.view(3, 2))
    assert fingerprint(weight) != fingerprint(weight + 1e-6)
    assert fingerprint(weight) == fingerprint(weight.T.contiguous().T)  # memory order does not matter
