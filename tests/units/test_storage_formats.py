"""Files of every format that was ever written, kept in golden_files/, are read for ever; what travels with factors.

factors_v1 to factors_v3 were written by the code of their time (commits 49893cf, 4a37c21 and 8a457a1), factors_v4 by
`write_golden`. They are never written again: a format that changes gets a new number and a new folder.
"""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swd_lens.base.errors import FactorFileError
from swd_lens.base.files import sha256
from swd_lens.base.sealed import seal
from swd_lens.units.factors import Factors, FactorSet, write_factors
from swd_lens.units.index import FORMAT_VERSION, entries_in, open_folder
from swd_lens.units.integrity import Offsets, Origin, Probe, fingerprint, from_tensors, sketch
from swd_lens.units.storage import StoredPair

GOLDEN = Path(__file__).parents[1] / "golden_files"
SITES = ["blocks.0.mlp_in", "blocks.0.mlp_out"]

# All in binary fractions, which float32 holds exactly; (6, 4) and (4, 5).
READ = {
    "blocks.0.mlp_in": [
        [0.0, 0.0, 0.0, -1.5],
        [0.0, 0.0, -0.75, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.75, 0.0, 0.0, -0.75],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.75, 0.0, 0.0],
    ],
    "blocks.0.mlp_out": [
        [0.0, 0.0, -0.75, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.75, 0.0, 0.0, -0.75],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.75, 0.0, 0.0],
        [1.5, 0.0, 0.0, 0.0],
    ],
}
WRITE = {
    "blocks.0.mlp_in": [
        [0.0, 0.0, -0.25, 0.0, -0.5],
        [0.0, 0.25, 0.0, 0.0, 0.0],
        [0.75, 0.0, 0.5, 0.0, 0.25],
        [0.0, 1.0, 0.0, 0.75, 0.0],
    ],
    "blocks.0.mlp_out": [
        [0.0, -0.25, 0.0, -0.5, 0.0],
        [0.25, 0.0, 0.0, 0.0, -0.25],
        [0.0, 0.5, 0.0, 0.25, 0.0],
        [1.0, 0.0, 0.75, 0.0, 0.5],
    ],
}
ITERATIONS = {"blocks.0.mlp_in": 20, "blocks.0.mlp_out": 21}
PASSPORT = {  # from factors_v3 on
    "blocks.0.mlp_in": {
        "origin.scale": [1.0, 2.0, 0.5, 1.0, 1.0, 4.0],
        "origin.shift": [0.0, 0.25, 0.0, -0.25, 0.0, 0.0],
        "origin.shifted": [0.0, 0.5, 0.0, -0.5, 16.0],
        "origin.right": [0.5, -1.0, 1.5, -2.0, 2.5, -3.0],
        "origin.left": [3.0, 2.0, 1.0, 0.0, -1.0],
        "probe.input": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        # z = (0.75 * 4, 0.75 * 6, -0.75 * 2, -1.5 * 1 - 0.75 * 4) = (3, 4.5, -1.5, -4.5): unit 1 before unit 3, a tie.
        "probe.units": [1, 3, 0],
        "probe.z": [4.5, -4.5, 3.0],
    },
    "blocks.0.mlp_out": {
        "origin.right": [1.0, 0.0, 0.0, 0.0, 0.0, -1.0],
        "origin.left": [0.125, 0.25, 0.5, 1.0, 2.0],
        "offsets.unit": [0.5, 0.0, -1.0, 100.0],
        "offsets.out": [1.0, 0.0, -1.0, 0.0, 8.0],
        "probe.input": [0.0, 0.0, 4.0, 0.0, 1.0, -1.0],
        # z = (0.75 * 4 - 1.5 + 0.5, 0.75 * 1, -1, -0.75 * 4 + 100) = (2, 0.75, -1, 97)
        "probe.units": [3, 0],
        "probe.z": [97.0, 2.0],
    },
}


def passport_of(f: Factors) -> dict[str, list[float]]:
    """As in PASSPORT, read off the fields."""
    named = {}
    for part in ("origin", "offsets", "probe"):
        if (holder := getattr(f, part)) is not None:
            values = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
            named |= {f"{part}.{name}": value.tolist() for name, value in values.items() if value is not None}
    return named


def write_golden(folder: Path) -> None:
    """How golden_files/factors_v3 and factors_v4 were made, from factors_v2."""
    old = FactorSet.load(GOLDEN / "factors_v2")
    made = {}
    for site, f in old.items():
        named = {name: torch.tensor(values) for name, values in PASSPORT[site].items()}
        made[site] = dataclasses.replace(f, **from_tensors(named, 6, 4, 5), held=None)
    FactorSet(made, old.provenance).save(folder)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_golden_files(version):
    folder = GOLDEN / f"factors_v{version}"
    assert json.loads((folder / "factors.json").read_text())["format"] == version
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loaded = FactorSet.load(folder)
    # Formats without a hash are read with one warning.
    assert [str(each.message).split(" (")[0] for each in warned] == [f"{folder}/factors.json carries no hash"] * (
        version < 4
    )
    assert list(loaded) == SITES
    assert loaded.provenance == {"model": "toy", "swd_lens": "0.1.0", "tokens": 3}
    # Nonzeros of read and write, before any factors are made: (5 + 8) + (5 + 9).
    assert loaded.edges == 27 and loaded.n_units == 8 and repr(loaded).count("in its file") == 2
    for site, f in loaded.items():
        assert f.read.tolist() == READ[site] and f.write.tolist() == WRITE[site]
        assert f.read.dtype == f.write.dtype == torch.float32
        assert f.settings == {"preset": "paper", "sparsity": 0.5, "iterations": ITERATIONS[site], "seed": None}
        assert f.provenance == {
            "site": site,
            "weight_sha256": "abababab",
            "relmse": 0.25,
            "nested": {"é": [1, True, None]},
        }
        assert passport_of(f) == (PASSPORT[site] if version >= 3 else {})


def test_the_present_code_writes_the_golden_files(tmp_path):
    # To the byte: names (hashes of the contents) and index are those of the folder that is kept.
    write_golden(tmp_path)
    kept = GOLDEN / f"factors_v{FORMAT_VERSION}"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in kept.iterdir()
    }


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_saved_again_in_place(tmp_path, version):
    folder = tmp_path / "factors"
    shutil.copytree(GOLDEN / f"factors_v{version}", folder)
    old = FactorSet.load(folder)
    old.save(folder)
    assert json.loads((folder / "factors.json").read_text())["format"] == FORMAT_VERSION
    assert len(list(folder.iterdir())) == 3 and not (folder / "factors.safetensors").exists()
    again = FactorSet.load(folder)
    assert list(again) == SITES and again.provenance == old.provenance
    for site in SITES:
        assert torch.equal(again[site].read, old[site].read) and torch.equal(again[site].write, old[site].write)
        assert again[site].settings == old[site].settings and again[site].provenance == old[site].provenance
        assert passport_of(again[site]) == passport_of(old[site])


def test_format_1_is_hashed_once(monkeypatch):
    hashed: list[Path] = []
    monkeypatch.setattr("swd_lens.units.index.sha256", lambda path: hashed.append(path) or sha256(path))
    FactorSet.load(GOLDEN / "factors_v1")
    assert [path.name for path in hashed] == ["factors.safetensors"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 5}, "is of factor format 5, this swd_lens reads 1 to 4; update swd_lens"),
        ({"format": 0}, "is of factor format 0, this swd_lens reads 1 to 4; factorize again"),
        ({"format": True}, "is of factor format True, this swd_lens reads 1 to 4; factorize again"),
        ({"tensors_sha256": None}, "'sha256' of blocks.0.mlp_in is None"),
        ({"tensors_sha256": "0" * 64}, "factors.safetensors is not the file that factors.json was written with"),
        ({"sites": None}, "has no 'sites'"),
        ({"sites": {"blocks.0.mlp_in": 3}}, "'file' of blocks.0.mlp_in is None"),
        (
            {"sites": {"blocks.9.mlp_in": {"d_in": 6, "units": 4, "d_out": 5, "settings": {}, "provenance": {}}}},
            "factors.safetensors is not a file of factors, or damaged ('read.index')",
        ),
        ({"format": 4}, "factors.json: not what was written there as an index of factors"),
    ],
)
def test_other_formats_and_damaged_old_ones(tmp_path, changed, message):
    shutil.copytree(GOLDEN / "factors_v1", tmp_path, dirs_exist_ok=True)
    index = tmp_path / "factors.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **changed}))
    with pytest.raises(FactorFileError) as error:
        FactorSet.load(tmp_path)
    assert message in str(error.value)


# ---------------------------------------------------------------------------------------------- passport in a file


def travelling() -> Factors:
    """Factors with everything that can travel: W (3, 2), two units."""
    read = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    write = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    offsets = Offsets(torch.tensor([0.5, 0.0]), torch.tensor([0.0, -1.0]))
    return Factors(
        read,
        write,
        origin=Origin(torch.ones(3), None, None, *sketch(read @ write)),
        offsets=offsets,
        probe=Probe.of(torch.tensor([1.0, 2.0, 3.0]), read, write, offsets),
    )


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Exchange tensors of the one file (None removes one) and give the index the new hash: only the contents differ."""
    (path,) = folder.glob("*.safetensors")
    tensors = {**load_file(path), **{name.replace("__", "."): value for name, value in changed.items()}}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    described = json.loads((folder / "factors.json").read_text())
    described["sites"]["matrix"]["sha256"] = sha256(path)
    (folder / "factors.json").write_text(json.dumps(seal(described)))


def test_passport_survives(tmp_path):
    f = travelling()
    # z = (1 * 1 + 0.5, 2 * 2 + 0): unit 1 first.
    assert f.probe.units.tolist() == [1, 0] and f.probe.z.tolist() == [4.0, 1.5]
    # y = (1.5 * 1 + 0, 4 * 1 - 1).
    assert f.probe.outputs.tolist() == [1, 0] and f.probe.y.tolist() == [3.0, 1.5]
    f.save(tmp_path)
    g = Factors.load(tmp_path)
    assert passport_of(g) == passport_of(f) and set(passport_of(g)) == {
        "origin.scale",
        "origin.right",
        "origin.left",
        "offsets.unit",
        "offsets.out",
        "probe.input",
        "probe.units",
        "probe.z",
        "probe.outputs",
        "probe.y",
    }
    assert torch.equal(g.product(), f.read @ f.write)  # offsets are no part of it
    _, sites = open_folder(tmp_path)
    assert passport_of(Factors(**sites["matrix"].parts())) == passport_of(f)


def test_to_a_device_takes_the_offsets_along():
    f = travelling().to("meta")
    assert f.offsets.unit.device.type == f.offsets.out.device.type == f.read.device.type == "meta"
    assert f.origin.right.device.type == f.probe.input.device.type == "cpu"
    assert Factors(torch.eye(2), torch.eye(2)).to("meta").offsets is None


def test_a_changed_read_factor_is_noticed_when_it_is_read(tmp_path):
    travelling().save(tmp_path)
    rewrite(tmp_path)
    assert FactorSet.load(tmp_path)["matrix"].read[1, 1] == 2.0  # rewritten as it was: the change is what matters
    rewrite(tmp_path, read__value=torch.tensor([1.0, 2.25]))
    loaded = FactorSet.load(tmp_path)  # hash and index agree
    with pytest.raises(FactorFileError) as error:
        loaded["matrix"]
    message = str(error.value)
    assert message.startswith("matrix: the factors load, but do not compute what they computed when they were saved")
    assert "unit 1 expected 4, found 4.5" in message and "unit 0 expected 1.5, found 1.5" in message
    assert "copy " in message and "again, or factorize again" in message
    # A change of the offsets is a change of z as well; one in the seventh digit is not.
    travelling().save(tmp_path)
    rewrite(tmp_path, offsets__unit=torch.tensor([0.75, 0.0]))
    with pytest.raises(FactorFileError, match=r"unit 0 expected 1\.5, found 1\.75"):
        FactorSet.load(tmp_path)["matrix"]
    rewrite(tmp_path, offsets__unit=torch.tensor([0.5 + 1e-6, 0.0]))
    FactorSet.load(tmp_path)["matrix"]


def test_a_changed_write_factor_is_noticed_when_it_is_read(tmp_path):
    travelling().save(tmp_path)
    rewrite(tmp_path, write__value=torch.tensor([1.0, 1.5]))
    with pytest.raises(FactorFileError, match=r"output 1 expected 3, found 5, output 0 expected 1\.5, found 1\.5"):
        FactorSet.load(tmp_path)["matrix"]
    travelling().save(tmp_path)
    rewrite(tmp_path, offsets__out=torch.tensor([0.0, -0.5]))
    with pytest.raises(FactorFileError, match=r"output 1 expected 3, found 3\.5, output 0 expected 1\.5, found 1\.5"):
        FactorSet.load(tmp_path)["matrix"]


def test_a_probe_of_an_older_file_looks_at_read_alone(tmp_path):
    travelling().save(tmp_path)
    rewrite(tmp_path, probe__outputs=None, probe__y=None)
    loaded = FactorSet.load(tmp_path)["matrix"]
    assert loaded.probe.outputs is None and loaded.probe.z.tolist() == [4.0, 1.5]
    loaded.save(tmp_path / "again")
    assert passport_of(Factors.load(tmp_path / "again")) == passport_of(loaded)
    rewrite(tmp_path, write__value=torch.tensor([1.0, 1.5]))
    FactorSet.load(tmp_path)["matrix"]  # nothing in such a file says what write was


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"origin__right": torch.ones(2)}, "origin.right has 2 values, the factors' d_in is 3"),
        ({"origin__left": torch.ones(2).double()}, "origin.left is torch.float64 of shape (2,)"),
        ({"origin__left": torch.ones(1, 2)}, "origin.left is torch.float32 of shape (1, 2)"),
        ({"origin__scale": torch.tensor([1.0, torch.nan, 1.0])}, "origin.scale[1] is nan"),
        ({"offsets__unit": None}, "offsets.unit is missing"),
        ({"origin__spin": torch.ones(2)}, "origin.spin is nothing that this swd_lens knows"),
        ({"probe__units": torch.tensor([1, 2])}, "probe.units names number 2; the factors have 2"),
        ({"probe__units": torch.tensor([1, -1])}, "probe.units names number -1; the factors have 2"),
        ({"probe__z": torch.ones(3)}, "probe.units has 2 indices for 3 values of probe.z"),
        ({"probe__outputs": torch.tensor([0, 2])}, "probe.outputs names number 2; the factors have 2"),
        ({"probe__y": torch.ones(3)}, "probe.outputs has 2 indices for 3 values of probe.y"),
        ({"probe__y": None}, "probe.y is missing"),
        ({"probe__outputs": None}, "probe.outputs is missing"),
        ({"probe__units": torch.tensor([1.0, 0.0])}, "probe.units is torch.float32"),
    ],
)
def test_a_passport_that_does_not_fit(tmp_path, changed, message):
    travelling().save(tmp_path)
    rewrite(tmp_path, **changed)
    with pytest.raises(FactorFileError) as error:
        FactorSet.load(tmp_path)["matrix"]
    assert message in str(error.value)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    f = travelling()
    for changed, message in (
        ({"read": f.read * 2, "held": None}, "the probe is of other factors"),
        ({"offsets": None, "held": None}, r"unit 0 expected 1\.5, found 1, "),
        ({"origin": Origin(None, None, None, torch.ones(2), torch.ones(2))}, r"origin\.right has 2 values"),
        ({"offsets": Offsets(torch.tensor([torch.inf, 0.0]), torch.zeros(2))}, r"offsets\.unit\[0\] is inf"),
    ):
        with pytest.raises(FactorFileError, match=message):
            write_factors(tmp_path, "matrix", dataclasses.replace(f, **changed))
    assert not list(tmp_path.iterdir())
    dataclasses.replace(f, read=f.read * 2).save(tmp_path)  # other values: without the probe
    assert Factors.load(tmp_path).read[1, 1] == 4.0 and Factors.load(tmp_path).probe is None


def test_files_without_a_passport_hold_no_extras(tmp_path):
    Factors(torch.eye(2), torch.eye(2)).save(tmp_path)
    assert StoredPair(tmp_path, entries_in(tmp_path)["matrix"]).extras() == {}
    assert StoredPair(GOLDEN / "factors_v1", entries_in(GOLDEN / "factors_v1")[SITES[0]]).extras() == {}


# ---------------------------------------------------------------------------------------------- passport itself


# torch's CPU generator, seed 0, float64: the last of three standard normal numbers, then the last of two more.
R2, L1 = -2.1787893820745574, -1.084522342424021


def test_sketch_is_linear_and_fixed(monkeypatch):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    right, left = sketch(weight)
    scale_in, scale_out = torch.rand(7) + 0.5, torch.rand(5) + 0.5
    torch.testing.assert_close(sketch(scale_in[:, None] * weight)[0], scale_in * right)
    torch.testing.assert_close(sketch(weight * scale_out)[1], left * scale_out)
    # One nonzero entry, W[1, 2] = 2, shows the draws themselves: right[1] = 2 r[2], left[2] = 2 l[1].
    single = torch.zeros(2, 3)
    single[1, 2] = 2.0
    right, left = sketch(single)
    assert right.tolist() == pytest.approx([0.0, 2 * R2]) and left.tolist() == pytest.approx([0.0, 0.0, 2 * L1])
    assert right.dtype == left.dtype == torch.float32
    whole = sketch(weight)
    monkeypatch.setattr("swd_lens.units.integrity._TILE", 10)  # two rows at a time
    tiled = sketch(weight)
    torch.testing.assert_close(tiled[0], whole[0])
    torch.testing.assert_close(tiled[1], whole[1])


def test_probe_by_hand(monkeypatch):
    read = torch.tensor([[1.0, 0.0, -3.0, 0.5], [0.0, 1.0, 0.0, 0.5]])
    write = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    h = torch.tensor([1.0, 2.0])
    probe = Probe.of(h, read, write, k=2)  # z = (1, 2, -3, 1.5), y = (1 - 6, 2 + 3)
    assert probe.units.tolist() == [2, 1] and probe.z.tolist() == [-3.0, 2.0]
    assert probe.outputs.tolist() == [0, 1] and probe.y.tolist() == [-5.0, 5.0]
    assert probe.error(read, write) == 0.0
    changed = read.clone()
    changed[1, 1] = 1.25  # unit 1: 2.5 instead of 2; relative to the largest, 3. y_1: 5.5 instead of 5
    assert probe.error(changed, write) == pytest.approx(0.5 / 3)
    assert probe.error(read, write, Offsets(torch.tensor([9.0, 0.0, 0.3, 9.0]), -probe.y)) > 1
    changed = write.clone()
    changed[3, 1] = 3.0  # y_1: 6.5 instead of 5, by a unit that the probe does not look at
    assert probe.error(read, changed) == pytest.approx(1.5 / 5)
    whole = Probe.of(h, read, write, k=9)
    assert whole.units.tolist() == [2, 1, 3, 0] and whole.outputs.tolist() == [0, 1]
    monkeypatch.setattr("swd_lens.units.integrity._TILE", 2)  # one row at a time
    tiled = Probe.of(h, read, write, k=9)
    assert tiled.z.tolist() == [-3.0, 2.0, 1.5, 1.0] and tiled.y.tolist() == [-5.0, 5.0]
    # Zeros that are expected and computed, and zeros that are not; equal |z| in the order of the units.
    nothing = Probe.of(torch.zeros(2), read, write, k=2)
    assert nothing.units.tolist() == [0, 1] and nothing.error(read, write) == 0.0
    shifted = Offsets(torch.ones(4), torch.zeros(2))
    assert nothing.error(read, write, shifted) == float("inf")
    assert not probe.error(read * float("nan"), write) <= 1e-4
    assert not probe.error(read, write * float("nan")) <= 1e-4
    with pytest.raises(ValueError, match="looks at k=0 units"):
        Probe.of(h, read, write, k=0)
    with pytest.raises(ValueError, match="z of unit 0 is not finite"):
        Probe.of(torch.tensor([torch.inf, 0.0]), read, write)
    with pytest.raises(ValueError, match="y of output 1 is not finite"):
        Probe.of(h, read, torch.tensor([[1.0, torch.nan]] * 4))


def test_a_host_s_z_against_the_probe_by_hand():
    read, write = torch.eye(2), torch.tensor([[1.0, 3.0], [-1.0, 4.0]])
    probe = Probe.of(torch.tensor([1.0, 1.0]), read, write, k=2)  # z = (1, 1), y = (0, 7): output 1 first
    assert probe.misfit(torch.tensor([1.0, 1.0]), write) == ("z", 0.0)
    # Unit 1 is off by .1: z by a tenth of 1; y_1 by .4 and y_0 by .1, of 7.
    assert probe.misfit(torch.tensor([1.0, 1.1]), write) == ("z", pytest.approx(0.1))
    assert probe.misfit(torch.tensor([1.0, 1.0]), write * 2) == ("y", pytest.approx(7 / 10))  # terms 6 and 8: 10
    assert probe.misfit(torch.tensor([1.0, torch.nan]), write)[1] == float("inf")


def test_a_probe_does_not_change_with_its_input():
    h = torch.tensor([1.0, 2.0])
    probe = Probe.of(h, torch.eye(2), torch.eye(2))
    h.zero_()
    assert probe.input.tolist() == [1.0, 2.0] and probe.error(torch.eye(2), torch.eye(2)) == 0.0


def test_fingerprint_is_one_of_float32_values():
    weight = torch.arange(6.0).view(2, 3)
    assert fingerprint(weight) == fingerprint(weight.double()) != fingerprint(weight[:, :2])
