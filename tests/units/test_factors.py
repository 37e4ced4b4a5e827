"""Factors and their files."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swd_lens.base.errors import AttachError, FactorFileError
from swd_lens.units.exact import svd_factors
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.integrity import Probe
from swd_lens.units.storage import StoredSite
from tests.remains import left_by_a_killed_process
from tests.units.made import small, sparse_factors


def test_counts_by_hand():
    f = small()
    assert f.edges_per_unit.tolist() == [3, 1]  # unit 0: 1 read + 2 write; unit 1: 0 + 1
    assert f.valid_units.tolist() == [True, False]
    assert f.edges == 4
    assert f.sparsity == 0.0  # 1 - 4 / (2 * 2)


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


def test_relmse_in_tiles_is_relmse(monkeypatch):
    f = sparse_factors(24, 12, 31, 0.5)
    weight, h = torch.randn(24, 31), torch.randn(50, 24)
    gram = h.T @ h / 50
    error = (weight - f.read @ f.write).double()
    by_hand = float((h.double() @ error).square().sum() / (h.double() @ weight.double()).square().sum())
    for tile in (1, 24 * 7, 2**21):  # one column at a time, seven, all
        monkeypatch.setattr("swd_lens.solver.metric._TILE", tile)
        assert f.relmse(gram, weight) == pytest.approx(by_hand, rel=1e-5)
        assert f.relative_frobenius(weight) == pytest.approx(float(error.norm() / weight.norm()), rel=1e-6)


def test_sparse_view():
    f = sparse_factors(40, 20, 30, 0.3)
    read, write = f.sparse()
    assert len(read.values()) + len(write.values()) == f.edges
    assert torch.equal(read.to_dense(), f.read) and torch.equal(write.to_dense(), f.write)
    # Edges of unit 7, as listed: the nonzeros of its read vector.
    inputs = read.indices()[0, read.indices()[1] == 7]
    assert torch.equal(inputs, f.read[:, 7].nonzero().flatten())
    h = torch.randn(5, 40)
    torch.testing.assert_close((read.T @ h.T).T, h @ f.read)
    csc, _ = f.sparse(torch.sparse_csc)
    assert csc.ccol_indices().diff().tolist() == (f.read != 0).sum(0).tolist()


def test_other_records_share_the_values_and_their_watch():
    f = small()
    probe = Probe.of(torch.tensor([1.0, 2.0]), f.read, f.write)
    other = f.with_records(probe=probe, weight=2 * f.weight, provenance={"site": "x", "relmse": 0.5})
    assert other.read is f.read and other.probe is probe and f.probe is None and other.provenance["relmse"] == 0.5
    assert other.relmse() != f.relmse() and f.provenance == small().provenance
    other.weight.data.mul_(2)
    with pytest.raises(ValueError, match=r"x: the dense weight .* was changed in place"):
        other.relmse()
    assert other.relmse(weight=f.weight) == f.relmse()
    f.read.data.mul_(2)  # which counts no version
    for each in (f, other):
        with pytest.raises(AttachError, match="were changed in place"):
            each.require_unedited()
    assert replace(other).probe is None and "relmse" not in replace(other).provenance


# Values that float32 holds exactly, the smallest and largest among them; zeros and -0 are no edges.
VALUES = st.one_of(st.just(0.0), st.floats(width=32, allow_nan=False, allow_infinity=False))


@st.composite
def pairs(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and write; beartype, which looks at random entries, must not see Factors made inside of a strategy."""
    d_in, units, d_out = (draw(st.integers(1, 7)) for _ in range(3))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = draw(st.lists(VALUES, min_size=rows * columns, max_size=rows * columns))
        return torch.tensor(values, dtype=torch.float32).view(rows, columns)

    return matrix(d_in, units), matrix(units, d_out)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(["blocks.0.mlp_in", "blocks.0.mlp_out", "a/b", "a_b", "é"]), pairs(), max_size=4))
def test_any_set_survives_its_files(drawn):
    factors = {site: Factors(*pair) for site, pair in drawn.items()}
    with TemporaryDirectory() as folder:
        FactorSet(factors).save(folder)
        loaded = FactorSet.load(folder)
        assert list(loaded) == list(factors)
        for site, f in factors.items():
            # Bits, not just values; + 0.0 turns -0 into 0, which is what an absent edge is.
            assert torch.equal(loaded[site].read.view(torch.int32), (f.read + 0.0).view(torch.int32))
            assert torch.equal(loaded[site].write.view(torch.int32), (f.write + 0.0).view(torch.int32))


@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_eight_bytes_an_edge(tmp_path, density):
    # GPT-2's proportions, a quarter of its width, index and all: the bound of 1.15 is on everything in the folder.
    many = {f"blocks.{layer}.mlp_out": sparse_factors(768, 192, 192, density, seed=layer) for layer in range(4)}
    factors = FactorSet(many, {"model": "toy"})
    factors.save(tmp_path)
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 8 * factors.edges <= on_disk <= 1.15 * 8 * factors.edges


def test_opening_makes_no_factors(tmp_path, monkeypatch):
    saved = FactorSet({"blocks.0.mlp_out": sparse_factors(40, 20, 30, 0.3), "blocks.1.mlp_out": small()})
    saved.save(tmp_path)
    made: list[str] = []
    parts = StoredSite.parts
    monkeypatch.setattr(StoredSite, "parts", lambda stored: made.append(stored.site) or parts(stored))
    loaded = FactorSet.load(tmp_path)
    assert loaded.edges == saved.edges and loaded.n_units == saved.n_units and loaded.sparsity == saved.sparsity
    assert "blocks.1.mlp_out" in loaded and "blocks.2.mlp_out" not in loaded
    assert repr(loaded).count("in its file") == 2 and not made
    assert loaded["blocks.1.mlp_out"] is loaded["blocks.1.mlp_out"]
    assert made == ["blocks.1.mlp_out"]
    both = loaded | FactorSet({"blocks.2.mlp_out": small()})
    assert len(both) == 3 and made == ["blocks.1.mlp_out"]


def test_dense_controls_count_alike_before_and_after_they_are_made(tmp_path):
    FactorSet({"blocks.0.mlp_out": svd_factors(torch.diag(torch.tensor([2.0, 1.0])))}).save(tmp_path)
    loaded = FactorSet.load(tmp_path)
    assert loaded.edges == 8  # not yet made
    assert loaded["blocks.0.mlp_out"].edges == loaded.edges == 8


def test_a_loaded_set_outlives_its_files(tmp_path):
    first, second = sparse_factors(40, 20, 30, 0.3, seed=1), sparse_factors(40, 20, 30, 0.3, seed=2)
    FactorSet({"blocks.0.mlp_out": first}).save(tmp_path)
    loaded = FactorSet.load(tmp_path)
    FactorSet({"blocks.0.mlp_out": second, "blocks.1.mlp_out": first}).save(tmp_path)
    assert torch.equal(loaded["blocks.0.mlp_out"].read, first.read)
    assert torch.equal(FactorSet.load(tmp_path)["blocks.0.mlp_out"].read, second.read)
    # Saved over: the first set's file is gone, and so is what a killed writer left.
    left_by_a_killed_process(tmp_path / "blocks.0.mlp_out.safetensors")
    loaded.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_one_matrix(tmp_path):
    f = sparse_factors(40, 20, 30, 0.3)
    f.save(tmp_path / "nameless")
    assert torch.equal(Factors.load(tmp_path / "nameless").read, f.read)
    small().save(tmp_path / "named")
    assert list(FactorSet.load(tmp_path / "named")) == ["blocks.0.mlp_out"]
    FactorSet({"blocks.0.mlp_out": small(), "blocks.1.mlp_out": small()}).save(tmp_path / "two")
    with pytest.raises(ValueError, match=r"holds 2 matrices \(blocks\.0\.mlp_out, blocks\.1\.mlp_out\)"):
        Factors.load(tmp_path / "two")


@pytest.mark.parametrize("where", ["base.sealed.save_file", "units.storage.sha256", "units.index.write_text"])
def test_an_interrupted_save_leaves_the_old_set(tmp_path, monkeypatch, where):
    old = {"blocks.0.mlp_out": small(), "blocks.1.mlp_out": sparse_factors(40, 20, 30, 0.3)}
    FactorSet(old).save(tmp_path)

    def interrupted(*arguments):
        if where == "base.sealed.save_file":
            Path(arguments[1]).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(f"swd_lens.{where}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        FactorSet({"blocks.0.mlp_out": sparse_factors(4, 2, 3, 0.9), "blocks.0.mlp_in": small()}).save(tmp_path)
    monkeypatch.undo()
    loaded = FactorSet.load(tmp_path)
    assert list(loaded) == list(old)
    assert all(torch.equal(loaded[site].read, old[site].read) for site in old)
    assert not list(tmp_path.glob(".*"))


def test_values_that_are_not_finite_are_not_saved(tmp_path):
    FactorSet({"blocks.0.mlp_out": small()}).save(tmp_path)
    bad = Factors(torch.eye(2), torch.tensor([[1.0, 0.0], [torch.nan, 1.0]]))
    with pytest.raises(FactorFileError, match=r"blocks\.1\.mlp_out: write\[1, 0\] is nan; nothing was saved"):
        FactorSet({"blocks.1.mlp_out": bad}).save(tmp_path)
    assert list(FactorSet.load(tmp_path)) == ["blocks.0.mlp_out"]


def test_sets():
    one, two = FactorSet({"blocks.0.mlp_out": small()}), FactorSet({"blocks.1.mlp_out": small()})
    both = one | two
    assert list(both) == ["blocks.0.mlp_out", "blocks.1.mlp_out"] and both.edges == 8 and both.n_units == 4
    with pytest.raises(ValueError, match=r"both sets hold factors for blocks\.0\.mlp_out"):
        one | one
    with pytest.raises(KeyError, match=r"no factors for site 'blocks\.7\.mlp_out'"):
        one["blocks.7.mlp_out"]
    assert "2 sites, 4 units, 8 edges" in repr(both)
    assert "relMSE" not in repr(both) and "relMSE" not in both.table()
    measured = small().with_records(provenance={"site": "blocks.0.mlp_out", "relmse": 0.0123456})
    both = FactorSet({"blocks.0.mlp_out": measured}) | two
    assert repr(both).count("relMSE 0.0123") == 1 and both.table()["relMSE"][0] == 0.0123456
    assert "swd.fidelity" in both._repr_html_() and "0.01235" in both._repr_html_()


def test_a_set_holds_factors_only():
    with pytest.raises(TypeError, match=r"blocks\.0\.mlp_out: a Linear is no Factors, .*LearnedUnits\.save"):
        FactorSet({"blocks.0.mlp_out": torch.nn.Linear(2, 2)})
