"""Damages of files: what disks, copying, editors, other tools and ill will do to them, drawn from a random generator.

1. Bytes: bits flipped, ends cut, bytes appended, blocks zeroed, swapped or doubled; a file emptied, removed, or replaced by
   another of its folder, by its namesake of another set, or by a folder.
2. JSON values (of a .json file, of each line of a .jsonl file, of the header and the metadata of a safetensors file): a value
   changed, a key dropped, renamed or doubled, another type, deep nesting, huge numbers, NaN, hostile names.
3. Tensors of a safetensors file: a value, a shape, a dtype, a name.
4. Half of 2. and 3. are rehashed with the package's own hash, and so is every file that names the changed one by its hash:
   whoever does this may write other numbers, but the reader may not fall over.
"""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.mutations import Damage, is_safetensors, json_damage, tensor_damage


def damage(rng: random.Random, folder: Path, others: Path, files: list[str], sealed: bool = True) -> Damage:
    """Do one thing to one of the files.

    Args:
        folder: of the case, a copy that may be destroyed.
        others: the same kind of thing with other numbers; its files have the same names, or other hashes in them.
        files: names, relative to the folder, that may be damaged.
        sealed: whether the kind carries hashes at all; files that users write do not.
    """
    name = rng.choice(files)
    path = folder / name
    kinds: list[tuple[int, Callable[..., Damage | None]]] = [(8, _bytes), (4, _whole_file), (3, _swapped), (2, _half_copied)]
    if path.suffix in (".json", ".jsonl"):
        kinds.append((12, json_damage))
    elif is_safetensors(path):
        kinds.append((12, tensor_damage))
    for _ in range(200):
        weights = [weight for weight, _ in kinds]
        done = rng.choices([kind for _, kind in kinds], weights)[0](rng, folder, others, name, sealed)
        if done is not None:
            return done
    raise AssertionError(f"no damage of {name}")


# ---------------------------------------------------------------------------------------------- bytes


def _bytes(rng: random.Random, folder: Path, others: Path, name: str, sealed: bool) -> Damage | None:
    path = folder / name
    data = bytearray(path.read_bytes())
    if not data:
        return None
    n, how = len(data), rng.randrange(8)
    at, size = rng.randrange(n), rng.randint(1, max(1, n // 4))
    if how == 0:
        data[at] ^= 1 << rng.randrange(8)
        text = f"bit flipped in byte {at}"
    elif how == 1:
        count = rng.randint(2, 20)
        for _ in range(count):
            data[rng.randrange(n)] = rng.randrange(256)
        text = f"{count} random bytes"
    elif how == 2:
        del data[at:]
        text = f"cut to {at} bytes"
    elif how == 3:
        data += rng.randbytes(rng.randint(1, 64)) if rng.random() < 0.7 else rng.choice((b"\n", b" ", b"}", b"\0"))
        text = f"{len(data) - n} bytes appended"
    elif how == 4:
        data[at : at + size] = bytes(len(data[at : at + size]))
        text = f"{size} zeros from {at}"
    elif how == 5:
        data[at:at] = data[at : at + size]
        text = f"{size} bytes from {at} doubled"
    elif how == 6:
        del data[at : at + size]
        text = f"{size} bytes from {at} taken out"
    else:
        data[at : at + 1] = rng.choice((b'"', b"0", b"9", b"-", b"}", b"\xff", b"e", b","))
        text = f"byte {at} is now {bytes(data[at : at + 1])!r}"
    path.write_bytes(data)
    return Damage(f"{name}: {text}")


# ---------------------------------------------------------------------------------------------- whole files


def _whole_file(rng: random.Random, folder: Path, others: Path, name: str, sealed: bool) -> Damage | None:
    path, how = folder / name, rng.randrange(5)
    path_is_gone = Damage(f"{name}: removed", removed=True)
    if how == 0:
        path.write_bytes(b"")
        return Damage(f"{name}: emptied")
    path.unlink()
    if how == 1:
        path.mkdir()
        return Damage(f"{name}: a folder in its place", removed=True)
    if how == 2:
        path.symlink_to(path.parent / "nowhere")
        return Damage(f"{name}: a dangling link in its place", removed=True)
    if how == 3:
        path.write_bytes(rng.choice((b"{}", b"[]", b"null", b"\n", b"\xef\xbb\xbf{}", b"PK\x03\x04", b'"x"', b"\0" * 64)))
        return Damage(f"{name}: holds {path.read_bytes()!r}")
    return path_is_gone


def _swapped(rng: random.Random, folder: Path, others: Path, name: str, sealed: bool) -> Damage | None:
    """Another file of the folder, or the file of the same place in the other set."""
    path = folder / name
    if rng.random() < 0.3:
        mates = [each for each in folder.rglob("*") if each.is_file() and each != path and each.suffix == path.suffix]
        if not mates:
            return None
        mate = rng.choice(mates)
        shutil.copyfile(mate, path)
        return Damage(f"{name}: is now {mate.relative_to(folder)}")
    mates = sorted(each for each in others.rglob("*") if each.is_file() and _place(each, others) == _place(path, folder))
    n_files = sum(1 for each in folder.rglob("*") if each.is_file())
    # Of a single file the other set's is a thing of its own.
    if not mates or n_files == 1 or mates[0].read_bytes() == path.read_bytes():
        return None
    shutil.copyfile(mates[0], path)
    return Damage(f"{name}: is now that of another set")


def _half_copied(rng: random.Random, folder: Path, others: Path, name: str, sealed: bool) -> Damage | None:
    """Some of the other set's files lie among or over these, as where copying stopped; or one whole folder of it."""
    files = sorted(each.relative_to(others) for each in others.rglob("*") if each.is_file())
    folders = sorted({each.parent for each in files} - {Path(".")})
    if len(files) < 2 or others == folder:
        return None
    if folders and rng.random() < 0.5:
        chosen = rng.choice(folders)
        shutil.rmtree(folder / chosen, ignore_errors=True)
        shutil.copytree(others / chosen, folder / chosen)
        return Damage(f"{chosen}: is now that of another set")
    copied = rng.sample(files, rng.randint(1, len(files) - 1))
    for each in copied:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(others / each, folder / each)
    return Damage(f"{', '.join(map(str, copied))[:200]}: copied from another set")


def _place(path: Path, folder: Path) -> str:
    """The relative name without the hash in it."""
    return re.sub(r"\.[0-9a-f]{12}\.", ".", path.relative_to(folder).as_posix())
