"""Sealed files: every changed byte is refused with the documented error, files of earlier versions are read with a warning."""

import errno
import json
import os
import random
import resource
import warnings

import pytest
import torch
from safetensors.torch import save_file

from swd_lens.base.errors import EditError, UnsealedFileWarning
from swd_lens.base.files import write_text
from swd_lens.base.sealed import (
    hashes_of,
    read_sealed,
    read_tensors,
    require_hashes,
    seal,
    tensor_digest,
    unseal,
    write_sealed,
    write_tensors,
)

VALUES = {"units": [["a", 1], ["b", 2]], "share": 0.1, "none": float("nan"), "text": "naïve 😀 \ud83d \u2028", "large": 2**70}
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3, dtype=torch.int64), "c": torch.ones(2).bfloat16()}


def test_values_come_back_as_json_has_them_and_tensors_to_the_bit(tmp_path):
    """safetensors writes its metadata in an order drawn anew each time: of three names one in six would be the same."""
    metadata, before = {"b": "naïve \u2028 \n", "a": "1", "c": "{}"}, os.umask(0o027)
    try:
        write_sealed(tmp_path / "x.json", VALUES)
        for number in range(5):
            write_tensors(tmp_path / str(number), TENSORS, metadata)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    assert read_sealed(tmp_path / "x.json", "a thing") == {**VALUES, "units": [["a", 1], ["b", 2]], "none": None}
    tensors, found = read_tensors(tmp_path / "0", "a thing")
    assert found == metadata and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in TENSORS.items())
    assert len({(tmp_path / str(number)).read_bytes() for number in range(5)}) == 1  # equal tensors, equal files


def test_a_whole_file_or_part_in_place_of_another_is_refused(tmp_path):
    write_tensors(tmp_path / "x", TENSORS, {})
    read_tensors(tmp_path / "x", "a thing", expected=tensor_digest(TENSORS))
    write_tensors(tmp_path / "x", {**TENSORS, "c": torch.zeros(2)}, {})
    for unsealed in (False, True):
        if unsealed:
            save_file({**TENSORS, "c": torch.zeros(2)}, tmp_path / "x")
        with pytest.raises(ValueError, match=r"x: not what was written there as a thing"):
            read_tensors(tmp_path / "x", "a thing", expected=tensor_digest(TENSORS))
    part = json.loads(json.dumps(seal({"a": 1})))
    assert unseal(part, "x", "a thing") == {"a": 1}
    with pytest.raises(EditError, match=r"x: not what was written there as a thing"):
        unseal({**part, "a": 2}, "x", "a thing", EditError)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    """No file may become larger than 100 bytes: writing fails in the same way, with another number."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"x\.json was not written \(File too large\)") as json_error:
            write_sealed(tmp_path / "x.json", VALUES)
        with pytest.raises(OSError, match=r"x\.safetensors was not written \(.*File too large"):
            write_tensors(tmp_path / "x.safetensors", TENSORS, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json_error.value.errno == errno.EFBIG and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_no_changed_byte_is_read_as_other_values(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    write, read = (write_sealed, read_sealed) if kind == "json" else (write_tensors, read_tensors)
    write(path, *((VALUES,) if kind == "json" else (TENSORS, {"format": "thing"})))
    whole, original = path.read_bytes(), repr(read(path, "a thing", EditError))
    dice, refused = random.Random(0), 0
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(dice.choice([1, 1, 2, 8])):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        path.write_bytes(bytes(changed[: dice.choice([len(changed)] * 3 + [dice.randrange(len(changed))])]))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                same = repr(read(path, "a thing", EditError)) == original
        except (EditError, UnsealedFileWarning) as refusal:
            refused += 1
            assert str(path) in str(refusal)
        else:
            assert same
    assert refused > 200


def test_a_file_without_hash_is_read_with_a_warning_and_one_with_a_damaged_name_of_it_is_refused(tmp_path):
    write_text(tmp_path / "x.json", json.dumps({"a": 1}))
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    for read, name in ((read_sealed, "x.json"), (read_tensors, "x.safetensors")):
        with pytest.warns(UnsealedFileWarning, match=name):
            read(tmp_path / name, "a thing")
    path = tmp_path / "x"
    for write, read in (
        (lambda: write_sealed(path, VALUES), read_sealed),
        (lambda: write_tensors(path, TENSORS, {}), read_tensors),
    ):
        write()
        path.write_bytes(path.read_bytes().replace(b"sha256", b"sha257"))
        with pytest.raises(ValueError, match=r"x: not what was written there"):
            read(path, "a thing")


def test_damage_of_every_sort_is_the_error_of_its_kind(tmp_path):
    path = tmp_path / "x.json"
    for content in (b"", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"nul"):
        path.write_bytes(content)
        with pytest.raises(EditError, match=r"x\.json is not a thing, or damaged"):
            read_sealed(path, "a thing", EditError)
    with pytest.raises(FileNotFoundError):
        read_sealed(tmp_path / "y.json", "a thing", EditError)


def test_a_finished_folder_knows_its_files(tmp_path):
    write_text(tmp_path / "out" / "a.txt", "a")
    write_text(tmp_path / "out" / "sub" / "b.txt", "b")
    hashes = hashes_of(tmp_path / "out", ["a.txt", "sub"])
    assert list(hashes) == ["a.txt", "sub/b.txt"]
    require_hashes(tmp_path / "out", hashes, "a run")
    write_text(tmp_path / "linked" / "a.txt", "a")
    (tmp_path / "linked" / "sub").symlink_to(tmp_path / "out" / "sub")  # moved to another disk
    require_hashes(tmp_path / "linked", hashes, "a run")
    (tmp_path / "out" / "sub" / "b.txt").write_text("c")
    with pytest.raises(EditError, match=r"b\.txt: not what was written"):
        require_hashes(tmp_path / "out", hashes, "a run", EditError)
    (tmp_path / "out" / "sub" / "b.txt").unlink()
    for elsewhere in ("../x", "sub/../../x", str(tmp_path / "out" / "a.txt")):
        with pytest.raises(EditError, match=r"out is not a run, or damaged \(it names a file outside of the folder"):
            require_hashes(tmp_path / "out", {elsewhere: "0"}, "a run", EditError)
    with pytest.raises(EditError, match=r"b\.txt is missing"):
        require_hashes(tmp_path / "out", hashes, "a run", EditError)
