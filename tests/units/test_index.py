"""Folders of factors: changes are noticed, one call writes at a time, readers see one set, nothing foreign is deleted."""

import copy
import json
import pickle
import re
import shutil

import pytest
import torch

import swd_lens.units.index as index
from swd_lens.base.errors import FactorFileError, FolderInUseError
from swd_lens.base.writer import writing
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.index import INDEX
from tests.base.test_surroundings import in_a_thread
from tests.units.made import edit_index, same, sparse_factors

SITES = [f"blocks.{layer}.{kind}" for layer in (0, 1) for kind in ("mlp_in", "mlp_out")]


def sparse(seed: int) -> Factors:
    return sparse_factors(12, 9, 11, 0.4, seed)


def some(seed: int = 0) -> FactorSet:
    return FactorSet({site: sparse(seed + i) for i, site in enumerate(SITES)}, {"seed": seed})


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["sites"][SITES[0]].update(units=10),  # without a probe it scrambled the matrix
        lambda d: d["sites"][SITES[0]].update(d_out=12),
        lambda d: d["sites"].pop(SITES[2]),
        lambda d: d["sites"].update({"blocks.7.mlp_in": d["sites"].pop(SITES[2])}),
        lambda d: d["sites"].update({SITES[0]: d["sites"][SITES[1]], SITES[1]: d["sites"][SITES[0]]}),
        lambda d: d["sites"][SITES[0]]["settings"].update(edges="dense"),
        lambda d: d["provenance"].update(seed=1),
        lambda d: d.pop("sha256"),
        lambda d: d.update(sha256=None),
    ],
)
def test_an_edited_index_is_refused(tmp_path, edit):
    some().save(tmp_path)
    edit_index(tmp_path, edit)
    with pytest.raises(FactorFileError, match=r"factors\.json: not what was written there as an index of factors"):
        FactorSet.load(tmp_path)


# Indices that carry the right hash: written by a program that knows how, and wrong.
WRONG = {
    "a site that is a list": (lambda d: d["sites"].update({SITES[0]: [1]}), "'file' of blocks.0.mlp_in is None"),
    "a size of 0": (lambda d: d["sites"][SITES[0]].update(d_in=0), "'d_in' of blocks.0.mlp_in is 0"),
    "a truth value": (lambda d: d["sites"][SITES[0]].update(units=True), "'units' of blocks.0.mlp_in is True"),
    "a size as text": (lambda d: d["sites"][SITES[0]].update(units="2"), "'units' of blocks.0.mlp_in is '2'"),
    "no hash": (lambda d: d["sites"][SITES[0]].update(sha256=None), "'sha256' of blocks.0.mlp_in is None"),
    "another folder": (lambda d: d["sites"][SITES[0]].update(file="../x.safetensors"), "is not in this folder"),
    "a number for a name": (lambda d: d["sites"][SITES[0]].update(file=3), "'file' of blocks.0.mlp_in is 3"),
    "provenance that is a text": (lambda d: d.update(provenance="x"), "has no 'provenance'"),
    "no sites": (lambda d: d.pop("sites"), "has no 'sites'"),
    "settings that are a list": (lambda d: d["sites"][SITES[0]].update(settings=[]), "'settings' of blocks.0.mlp_in is"),
    "another format": (lambda d: d.update(format=99), "of factor format 99, this swd_lens reads 1; update swd_lens"),
    "format 0": (lambda d: d.update(format=0), "of factor format 0, this swd_lens reads 1; factorize again"),
    "format True": (lambda d: d.update(format=True), "of factor format True, this swd_lens reads 1; factorize again"),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_wrong_entries_are_the_documented_error(tmp_path, edit, message):
    some().save(tmp_path)
    edit_index(tmp_path, edit, sealed=True)
    with pytest.raises(FactorFileError, match=message and re.escape(message)):
        FactorSet.load(tmp_path)[SITES[0]]


@pytest.mark.parametrize("content", [b"", b'{"format": "1"}', b'{"format": 1, "sites": {"\\ud800": 1}, "provenance": {}}'])
def test_what_is_no_index_may_be_saved_over(tmp_path, content):
    some().save(tmp_path)
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(FactorFileError, match=r"factors\.json|is of factor format"):
        FactorSet.load(tmp_path)
    some(5).save(tmp_path)
    assert same(FactorSet.load(tmp_path), some(5))


@pytest.mark.parametrize("surroundings", ["float64", "bfloat16", "meta"])
def test_defaults_change_nothing(tmp_path, surroundings):
    before = torch.get_default_dtype()
    device = torch.device("meta" if surroundings == "meta" else "cpu")
    dtype = torch.float32 if surroundings == "meta" else getattr(torch, surroundings)
    some().save(tmp_path / "a")
    try:
        torch.set_default_dtype(dtype)
        with device:
            for f in FactorSet.load(tmp_path / "a").values():
                assert f.read.dtype == torch.float32 and f.read.device.type == "cpu"
            FactorSet.load(tmp_path / "a").save(tmp_path / "b")
    finally:
        torch.set_default_dtype(before)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }


def test_saving_over_deletes_nothing_that_it_did_not_write(tmp_path):
    """An index that another program wrote may name anything in the folder."""
    FactorSet({"blocks.0.mlp_in": sparse(0)}).save(tmp_path)
    own, *_ = (entry["file"] for entry in json.loads((tmp_path / INDEX).read_text())["sites"].values())
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "thesis.tex").touch()
    foreign = ["thesis.tex", "model.safetensors", "blocks.0.mlp_in.safetensors", "x.0123456789ab.safetensors"]
    for name in foreign:
        (tmp_path / name).write_text(name)

    def name_them(described: dict) -> None:
        entry = described["sites"]["blocks.0.mlp_in"]
        for name in ("sub", *foreign):
            described["sites"][name] = {**entry, "file": name}

    edit_index(tmp_path, name_them, sealed=True)
    FactorSet({"blocks.0.mlp_in": sparse(1), "blocks.1.mlp_in": sparse(2)}).save(tmp_path)
    assert list(FactorSet.load(tmp_path)) == ["blocks.0.mlp_in", "blocks.1.mlp_in"]
    assert not (tmp_path / own).exists()  # what the index really wrote
    assert (tmp_path / "sub" / "thesis.tex").is_file()
    assert {name: (tmp_path / name).read_text() for name in foreign} == {name: name for name in foreign}


def test_a_file_of_a_set_that_was_changed_since_stays(tmp_path):
    some().save(tmp_path)
    changed = next(tmp_path.glob("*.safetensors"))
    changed.write_text("something else now")
    some(5).save(tmp_path)
    assert same(FactorSet.load(tmp_path), some(5)) and changed.read_text() == "something else now"


def test_a_folder_in_place_of_a_file_is_refused_before_the_index_is_replaced(tmp_path):
    some().save(tmp_path)
    some(5).save(tmp_path / "other")
    (tmp_path / next((tmp_path / "other").glob("*.safetensors")).name).mkdir()
    before = (tmp_path / INDEX).read_bytes()
    with pytest.raises(OSError, match="directory"):
        some(5).save(tmp_path)
    assert (tmp_path / INDEX).read_bytes() == before and same(FactorSet.load(tmp_path), some())
    (tmp_path / "third" / INDEX).mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"factors\.json is a folder"):
        some().save(tmp_path / "third")
    assert [path.name for path in (tmp_path / "third").iterdir()] == [INDEX]


def test_a_second_writer_is_refused_and_nothing_is_lost(tmp_path):
    some().save(tmp_path)
    with writing(tmp_path, "factorize"):
        refusal = in_a_thread(lambda: some(5).save(tmp_path))
        assert same(FactorSet.load(tmp_path), some())  # readers are not
    assert isinstance(refusal, FolderInUseError) and "is written by factorize (process" in str(refusal)
    assert same(FactorSet.load(tmp_path), some())
    assert not isinstance(in_a_thread(lambda: some(5).save(tmp_path)), Exception)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with pytest.raises(OSError, match=r"0\.00 GB are free"):
        some().save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("moment", ["_opened", "StoredSite"])
@pytest.mark.parametrize("times", [1, 2, 9])
def test_a_reader_beside_a_writer_sees_one_of_the_sets(tmp_path, monkeypatch, moment, times):
    """Between the index and its files, and between a file's check and its opening, another set is saved; the same one every
    second time."""
    some(0).save(tmp_path)
    true, calls = getattr(index, moment), []

    def in_between(*arguments):
        calls.append(0)
        if len(calls) <= times:
            some(10 * (len(calls) % 2)).save(tmp_path)
        return true(*arguments)

    monkeypatch.setattr(index, moment, in_between)
    assert same(FactorSet.load(tmp_path), some(10 * (times % 2)))


def test_a_damaged_folder_is_read_twice_and_no_more(tmp_path, monkeypatch):
    some().save(tmp_path)
    next(tmp_path.glob("*.safetensors")).write_bytes(b"")
    true, calls = index._opened, []
    monkeypatch.setattr(index, "_opened", lambda *arguments: calls.append(0) or true(*arguments))
    with pytest.raises(FactorFileError, match="is not the file that"):
        FactorSet.load(tmp_path)
    assert len(calls) == 2


def test_a_loaded_set_is_pickled_and_copied(tmp_path):
    some().save(tmp_path / "a")
    whole, loaded = FactorSet.load(tmp_path / "a"), FactorSet.load(tmp_path / "a")
    _ = loaded[SITES[0]]  # one site is made, the others are in their files
    sent = pickle.dumps(loaded)
    copied = [copy.deepcopy(loaded), copy.copy(loaded)]
    shutil.rmtree(tmp_path / "a")
    again = pickle.loads(sent)
    assert "in its file" in repr(again) and pickle.loads(pickle.dumps(again)).edges == whole.edges
    for other in (again, *copied):
        assert type(other) is FactorSet and same(other, whole)
    copied[0].provenance["seed"] = "changed"
    copied[0][SITES[0]].read.zero_()
    assert same(loaded, whole)


def test_a_pickle_is_eight_bytes_an_edge(tmp_path):
    FactorSet({site: sparse_factors(200, 150, 200, 0.4) for site in ("a", "b")}).save(tmp_path)
    loaded = FactorSet.load(tmp_path)
    assert len(pickle.dumps(loaded)) < 8 * loaded.edges + 5000
