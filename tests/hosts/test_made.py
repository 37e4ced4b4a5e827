"""Folders that are made of other files: once, whole or not at all, and again where what is kept was changed."""

import threading

import pytest

from swd_lens.hosts.made import SOURCE, cache_folder, made_folder, refused_as


@pytest.fixture
def makes(tmp_path, monkeypatch):
    """Grows by one with every folder that `folder_of` writes."""
    monkeypatch.setenv("SWD_LENS_CACHE", str(tmp_path))
    return []


def folder_of(makes):
    def make(folder):
        makes.append(folder)
        (folder / "weights").write_text("numbers")
        return "the model"

    return made_folder("kind/one", "a made folder", {"file": "there"}, make)


def test_a_folder_is_made_once_and_again_where_it_was_changed(makes, tmp_path):
    folder, label = folder_of(makes)
    assert (folder, label) == (tmp_path / "kind" / "one", "the model") == folder_of(makes) and len(makes) == 1
    (folder / "weights").write_text("numbexs")
    assert folder_of(makes)[1] == label and len(makes) == 2 and (folder / "weights").read_text() == "numbers"
    (folder / SOURCE).unlink()
    folder_of(makes)
    assert len(makes) == 3 and sorted(path.name for path in folder.iterdir()) == [SOURCE, "weights"]


def test_who_comes_second_waits_for_the_first(makes):
    threads = [threading.Thread(target=folder_of, args=(makes,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makes) == 1


def test_what_ends_half_way_leaves_nothing_that_looks_whole(makes):
    def interrupted(folder):
        (folder / "weights").write_text("num")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_folder("kind/one", "a made folder", {}, interrupted)
    assert not [path for path in (cache_folder() / "kind").iterdir() if path.is_dir()]
    folder_of(makes)
    assert len(makes) == 1


def test_what_a_library_cannot_use_is_a_value_error_and_a_lack_of_memory_is_not():
    with pytest.raises(ValueError, match="cannot read it: 'a'"), refused_as("cannot read it"):
        raise KeyError("a")
    with pytest.raises(MemoryError), refused_as("cannot read it"):
        raise MemoryError
