"""Files of factors: the format that is kept in golden_files/, what travels with factors, and damaged contents."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swd_lens.base.errors import FactorFileError
from swd_lens.units.factors import Factors, FactorSet, write_factors
from swd_lens.units.index import FORMAT_VERSION, read_index
from swd_lens.units.integrity import Offsets, Origin, Probe, from_tensors, sketch
from swd_lens.units.storage import StoredSite
from tests.units.made import rewrite, small

GOLDEN = Path(__file__).parents[1] / "golden_files" / "factors_v1"
SITES = ["blocks.0.mlp_in", "blocks.0.mlp_out"]

# All in binary fractions, which float32 holds exactly; (6, 4) and (4, 5).
READ = {
    "blocks.0.mlp_in": [[0, 0, 0, -1.5], [0, 0, -0.75, 0], [0] * 4, [0.75, 0, 0, -0.75], [0] * 4, [0, 0.75, 0, 0]],
    "blocks.0.mlp_out": [[0, 0, -0.75, 0], [0] * 4, [0.75, 0, 0, -0.75], [0] * 4, [0, 0.75, 0, 0], [1.5, 0, 0, 0]],
}
WRITE = {
    "blocks.0.mlp_in": [[0, 0, -0.25, 0, -0.5], [0, 0.25, 0, 0, 0], [0.75, 0, 0.5, 0, 0.25], [0, 1, 0, 0.75, 0]],
    "blocks.0.mlp_out": [[0, -0.25, 0, -0.5, 0], [0.25, 0, 0, 0, -0.25], [0, 0.5, 0, 0.25, 0], [1, 0, 0.75, 0, 0.5]],
}
ITERATIONS = {"blocks.0.mlp_in": 20, "blocks.0.mlp_out": 21}
RECORDS = {
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
        # y = 3 (0, 0, -.25, 0, -.5) + 4.5 (0, .25, 0, 0, 0) - 1.5 (.75, 0, .5, 0, .25) - 4.5 (0, 1, 0, .75, 0)
        "probe.outputs": [1, 3],
        "probe.y": [-3.375, -3.375],
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
        # y = 2 (0, -.25, 0, -.5, 0) + .75 (.25, 0, 0, 0, -.25) - (0, .5, 0, .25, 0) + 97 (1, 0, .75, 0, .5) + out
        "probe.outputs": [0, 2],
        "probe.y": [98.1875, 71.75],
    },
}


def records_of(f: Factors) -> dict[str, list[float]]:
    """As in RECORDS, read off the fields."""
    named = {}
    for part in ("origin", "offsets", "probe"):
        if (holder := getattr(f, part)) is not None:
            values = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)}
            named |= {f"{part}.{name}": value.tolist() for name, value in values.items() if value is not None}
    return named


def made() -> FactorSet:
    """The set that golden_files/factors_v1 holds."""
    factors = {}
    for site in SITES:
        settings = {"preset": "paper", "sparsity": 0.5, "iterations": ITERATIONS[site], "seed": None}
        provenance = {"site": site, "weight_sha256": "abababab", "relmse": 0.25, "nested": {"é": [1, True, None]}}
        named = {name: torch.tensor(values) for name, values in RECORDS[site].items()}
        pair = torch.tensor(READ[site]), torch.tensor(WRITE[site])
        factors[site] = Factors(*pair, settings, provenance, **from_tensors(named, 6, 4, 5))
    return FactorSet(factors, {"model": "toy", "swd_lens": "0.1.0", "tokens": 3})


def test_golden_files_are_read():
    assert json.loads((GOLDEN / "factors.json").read_text())["format"] == FORMAT_VERSION == 1
    loaded, wanted = FactorSet.load(GOLDEN), made()
    assert list(loaded) == SITES and loaded.provenance == wanted.provenance
    # Nonzeros of read and write, before any factors are made: (5 + 8) + (5 + 9).
    assert loaded.edges == 27 and loaded.n_units == 8 and repr(loaded).count("in its file") == 2
    for site, f in loaded.items():
        assert f.read.tolist() == READ[site] and f.write.tolist() == WRITE[site]
        assert f.read.dtype == f.write.dtype == torch.float32 and torch.equal(f.product(), f.read @ f.write)  # no offsets
        assert (f.settings, f.provenance) == (wanted[site].settings, wanted[site].provenance)
        assert records_of(f) == RECORDS[site]


@pytest.mark.parametrize("again", [made, lambda: FactorSet.load(GOLDEN)], ids=["made", "loaded"])
def test_the_present_code_writes_the_golden_files(tmp_path, again):
    # To the byte: names (hashes of the contents) and index are those of the folder that is kept.
    again().save(tmp_path)
    written, kept = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path, GOLDEN))
    assert written == kept


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


def test_to_a_device_takes_weight_and_offsets_along_and_makes_nothing_anew_that_is_there():
    there = dataclasses.replace(travelling(), weight=torch.ones(3, 2))
    f = there.to("meta")
    assert there.to("cpu") is there and f.weight.is_meta
    assert f.offsets.unit.is_meta and f.offsets.out.is_meta and f.read.is_meta
    assert not f.origin.right.is_meta and not f.probe.input.is_meta
    assert Factors(torch.eye(2), torch.eye(2)).to("meta").offsets is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"read__value": torch.tensor([1.0, 2.25])}, r"unit 1 expected 4, found 4\.5, unit 0 expected 1\.5, found 1\.5"),
        ({"offsets__unit": torch.tensor([0.75, 0.0])}, r"unit 0 expected 1\.5, found 1\.75"),
        ({"write__value": torch.tensor([1.0, 1.5])}, r"output 1 expected 3, found 5, output 0 expected 1\.5, found 1\.5"),
        ({"offsets__out": torch.tensor([0.0, -0.5])}, r"output 1 expected 3, found 3\.5, output 0 expected 1\.5"),
        ({"offsets__unit": torch.tensor([0.5 + 1e-6, 0.0])}, None),  # in the seventh digit
        ({}, None),  # rewritten as it was: the change is what matters
    ],
)
def test_changed_factors_are_noticed_by_their_probe(tmp_path, changed, message):
    travelling().save(tmp_path)
    rewrite(tmp_path, **changed)
    loaded = FactorSet.load(tmp_path)  # hash and index agree
    if message is None:
        assert loaded["matrix"].read[1, 1] == 2.0
    else:
        with pytest.raises(FactorFileError, match=f"matrix: the factors load, but do not compute what .*{message}"):
            loaded["matrix"]


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
def test_records_that_does_not_fit(tmp_path, changed, message):
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


def test_files_without_records_hold_no_extras(tmp_path):
    Factors(torch.eye(2), torch.eye(2)).save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    assert set(load_file(path)) == {"read.index", "read.value", "write.index", "write.value"}
    assert Factors.load(tmp_path).origin is None


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # small(): read (2, 2) has its entry 0, write (2, 2) its entries 0, 1 and 3.
        ({"read__index": ints(4)}, r"read has index 4, outside its 2 x 2 entries"),
        ({"read__index": ints(-1)}, r"read has index -1, outside its 2 x 2 entries"),
        ({"write__index": ints(0, 3, 1)}, r"the indices of write are not ascending"),
        ({"write__index": ints(0, 1, 1)}, r"the indices of write are not ascending"),
        ({"write__value": torch.tensor([2.0, 1.0, torch.nan])}, r"write\[1, 1\] is nan"),
        ({"write__value": torch.tensor([2.0, -torch.inf, 3.0])}, r"write\[0, 1\] is -inf"),
        ({"write__value": torch.tensor([2.0])}, r"write has 3 indices for 1 values"),
        ({"read__index": None}, r"is not a file of factors, or damaged"),
    ],
)
def test_wrong_contents(tmp_path, changed, message):
    FactorSet({"blocks.0.mlp_out": small()}).save(tmp_path)
    rewrite(tmp_path)
    assert torch.equal(FactorSet.load(tmp_path)["blocks.0.mlp_out"].write, small().write)  # the change is what matters
    rewrite(tmp_path, **changed)
    with pytest.raises(FactorFileError, match=message):
        FactorSet.load(tmp_path)["blocks.0.mlp_out"]


def test_damaged_files(tmp_path):
    FactorSet({"blocks.0.mlp_out": small()}).save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    whole, entry = path.read_bytes(), read_index(tmp_path)["sites"]["blocks.0.mlp_out"]
    for damaged in (whole[:-1], whole[:10], b"", bytes([*whole[:-1], whole[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(FactorFileError, match=r"is not the file that factors\.json was written with"):
            FactorSet.load(tmp_path)
    for damaged in (b"", whole[:10], whole[:-1]):  # cut short before it was hashed
        path.write_bytes(damaged)
        with pytest.raises(FactorFileError, match="is not a file of factors, or damaged"):
            StoredSite(tmp_path, "matrix", {**entry, "file": path.name})
    path.unlink()
    with pytest.raises(FactorFileError, match=r"the factors of blocks\.0\.mlp_out, is missing"):
        FactorSet.load(tmp_path)
