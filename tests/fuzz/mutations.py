"""Values of a file changed where they stand: JSON, headers and tensors; half of the time all hashes are made again."""

import json
import random
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from swd_lens.base.files import sha256
from swd_lens.base.sealed import _MARK, SEAL, _digest, tensor_digest

HOSTILE = (
    "../../outside", "/etc/passwd", "a/../b", "", ".", "\x00", "\x1b[31m", "\u202eabc", "\ud800", "a" * 5000, "</script>",
    "blocks.-1.mlp_out", "blocks.1.mlp_out/99999", "blocks.99.mlp_out", "CON", "*", "%s{x}", "nan", "sha256", "__class__",
)  # fmt: skip
# Literals that Python's json reads, and others do not.
_LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1" * 5000,
    "-0",
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 5000 + "1" + "}" * 5000,
)
_FLOATS = ("NaN", "Infinity", "-Infinity", "1e999")
_NUMBERS = (0, -1, 1, 2, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.5, 1e308, 1e-300, True)
_TYPES = (None, [], {}, "x", 0, True, 1.5, [[]], {"a": None}, [None])


@dataclass(frozen=True)
class Damage:
    """What was done.

    Attributes:
        text: in words, with the file.
        removed: whether a file is no longer there (then "no such file" is a documented answer).
        rehashed: whether the hashes were made again, so that other numbers are no fault.
    """

    text: str
    removed: bool = False
    rehashed: bool = False


# ---------------------------------------------------------------------------------------------- JSON


def json_damage(rng: random.Random, folder: Path, others: Path, name: str, sealed: bool) -> Damage | None:
    path = folder / name
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n") if path.suffix == ".jsonl" else [text]
    written = [i for i, line in enumerate(lines) if line.strip()]
    if not written:
        return None
    i, rehash = rng.choice(written), sealed and rng.random() < 0.5
    try:
        changed, what = _mutated_text(rng, lines[i], rehash)
    except ValueError:
        return None
    if path.suffix == ".jsonl" and len(written) > 1 and rng.random() < 0.2:
        changed, what = rng.choice(((None, "dropped"), (lines[i] + "\n" + lines[i], "twice"), (lines[i - 1], "another")))
    former = sha256(path)
    lines[i : i + 1] = [] if changed is None else [changed]
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    if rehash:
        _propagate(folder, {former: sha256(path)}, {path})
    where = f" line {i + 1}" if len(lines) > 1 else ""
    return Damage(f"{name}{where}: {what}{', rehashed' if rehash else ''}", rehashed=rehash)


def _mutated_text(rng: random.Random, text: str, rehash: bool) -> tuple[str, str]:
    """JSON text with one value changed, and the change in words. Raises ValueError where it is no JSON."""
    values = json.loads(text)
    seals = list(_sealed_places(values, ())) if rehash else []
    spots = list(_spots(values, ()))
    # Where hashes are made again, other things than the hash itself are changed.
    spots = [spot for spot in spots if not (rehash and spot[-1:] == (SEAL,))] or [()]
    # Whole numbers and names decide more than the many floats of a table.
    spot = min((rng.choice(spots) for _ in range(rng.randint(1, 3))), key=len)
    values, what, literal = _mutate(rng, values, spot)
    for place in sorted(seals, key=len, reverse=True):  # the innermost first
        with suppress(KeyError, IndexError, TypeError, ValueError, AttributeError):  # the mapping may be gone
            held = _at(values, place)
            held[SEAL] = _seal_of(held)
    try:
        written = json.dumps(values, indent=1 if "\n" in text.strip() else None)
    except RecursionError:
        raise ValueError from None
    if literal is not None:
        written = written.replace('"@literal@"', literal)
    return written, f"{'.'.join(map(str, spot)) or 'all'} {what}"


def _mutate(rng: random.Random, values: Any, spot: tuple[Any, ...]) -> tuple[Any, str, str | None]:
    """Change the value at a spot; returns all values, words, and what stands for "@literal@"."""
    if not spot:
        new = rng.choice((*_TYPES, [values]))
        return new, f"became {type(new).__name__}", None
    holder, key = _at(values, spot[:-1]), spot[-1]
    held, how = holder[key], rng.randrange(8)
    if how == 0:
        del holder[key]
        return values, "dropped", None
    if how == 1 and isinstance(holder, dict):
        name = rng.choice((f"{key}x", str(key).upper(), *HOSTILE[:8]))
        holder[name] = holder.pop(key)
        return values, f"renamed to {name[:20]!r}", None
    if how == 2:
        literal = rng.choice(_LITERALS)
        if literal in _FLOATS:  # the hash that is made again is of the value
            holder[key] = float(literal)
            return values, f"became {literal}", None
        holder[key] = "@literal@"
        return values, f"became {literal[:12]}", literal
    if how == 3:
        holder[key] = rng.choice(_TYPES)
        return values, f"became {holder[key]!r}", None
    if how == 4:
        holder[key] = rng.choice(HOSTILE)
        return values, f"became {holder[key][:20]!r}", None
    if isinstance(held, bool) or held is None or isinstance(held, str):
        other = {True: False, False: True, None: 1}.get(held) if not isinstance(held, str) else _other_text(rng, held)
        holder[key] = other
        return values, f"became {str(other)[:20]!r}", None
    if isinstance(held, int | float):
        holder[key] = rng.choice((held + 1, held - 1, -held, held * 2, held * (1 + 1e-6), *_NUMBERS))
        return values, f"became {holder[key]!r}", None
    if isinstance(held, list) and held:
        n = len(held)
        holder[key] = rng.choice((held[:-1], [*held, held[0]], held[::-1], held[: n // 2], held * 2))
        return values, f"list of {n} became one of {len(holder[key])}", None
    holder[key] = [held]
    return values, "put into a list", None


def _other_text(rng: random.Random, text: str) -> str:
    if len(text) == 64 and re.fullmatch("[0-9a-f]+", text):
        return "0" * 64
    return rng.choice((f"{text}x", text[:-1], text.upper(), "other", text.replace("1", "0"), text.replace("mlp", "attn")))


def _spots(values: Any, path: tuple[Any, ...]) -> Any:
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from _spots(value, (*path, key))


def _sealed_places(values: Any, path: tuple[Any, ...]) -> Any:
    """Places of mappings that hold their own hash."""
    if isinstance(values, dict):
        with suppress(ValueError):
            if SEAL in values and values[SEAL] == _seal_of(values):
                yield path
    for spot in _spots(values, ()):
        held = _at(values, spot)
        if isinstance(held, dict) and isinstance(held.get(SEAL), str):
            with suppress(ValueError):
                if held[SEAL] == _seal_of(held):
                    yield (*path, *spot)


def _seal_of(held: dict[str, Any]) -> str:
    return _MARK + _digest({key: value for key, value in held.items() if key != SEAL})


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


# ---------------------------------------------------------------------------------------------- safetensors


def is_safetensors(path: Path) -> bool:
    with suppress(OSError, struct.error), open(path, "rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        return n < 10_000_000 and file.read(1) == b"{"
    return False


def tensor_damage(rng: random.Random, folder: Path, others: Path, name: str, sealed: bool) -> Damage | None:
    path, former = folder / name, sha256(folder / name)
    rehash = rng.random() < 0.5
    if not rehash:
        what = _header(rng, path)
        return None if what is None else Damage(f"{name}: header {what}")
    with safe_open(str(path), "pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - no mapping
    before = metadata.get(SEAL, "").removeprefix(_MARK)
    texts = [key for key in metadata if key != SEAL and metadata[key][:1] in ("{", "[")]
    if texts and rng.random() < 0.5:
        key = rng.choice(texts)
        try:
            metadata[key], what = _mutated_text(rng, metadata[key], True)
            metadata[key].encode()
        except ValueError:
            return None
        what = f"metadata {key} {what}"
    else:
        what = _other_tensor(rng, tensors, metadata)
    metadata.pop(SEAL, None)
    try:
        after = tensor_digest(tensors, metadata)
        save_file(tensors, str(path), {**metadata, **({SEAL: _MARK + after} if before else {})})
    except Exception:  # what safetensors cannot write is no damage
        return None
    _propagate(folder, {former: sha256(path), **({before: after} if before else {})}, {path})
    return Damage(f"{name}: {what}, rehashed", rehashed=True)


def _other_tensor(rng: random.Random, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    if not tensors or (metadata and rng.random() < 0.15):
        key = rng.choice(sorted(metadata) or ["format"])
        metadata[key] = rng.choice((*HOSTILE[:7], "9" * 30, "1.5"))
        return f"metadata {key} became {metadata[key][:20]!r}"
    key = rng.choice(sorted(tensors))
    tensor, how = tensors[key], rng.randrange(8)
    if how == 0:
        del tensors[key]
        return f"{key} dropped"
    if how == 1:
        name = rng.choice((f"{key}x", "../x", "blocks.9.mlp_out", ""))
        tensors[name] = tensors.pop(key)
        return f"{key} renamed to {name!r}"
    if how == 2:
        dtype = rng.choice((torch.float64, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8, torch.complex64))
        tensors[key] = tensor.to(dtype)
        return f"{key} became {dtype}"
    if how == 3:
        tensors[key] = rng.choice((tensor.flatten(), tensor[None], tensor.flatten()[:0], torch.zeros(()), tensor.T.contiguous()))
        return f"{key} became {tuple(tensors[key].shape)}"
    if how == 4:
        tensors[key] = tensor.flatten()[: rng.randint(0, tensor.numel())].clone()
        return f"{key} cut to {tensors[key].numel()}"
    if tensor.numel() == 0:
        tensors[key] = torch.zeros(3, dtype=tensor.dtype)
        return f"{key} filled"
    at = rng.randrange(tensor.numel())
    value = rng.choice((0, -1, 1, 10, 2**31 - 1, float("nan"), float("inf"), 1e30))
    if not tensor.is_floating_point():
        value = int(value) if value == value and abs(value) < 2**31 else -5
    with suppress(RuntimeError):
        tensor.view(-1)[at] = value
    return f"{key}[{at}] became {value}"


def _header(rng: random.Random, path: Path) -> str | None:
    """Mutate the header's JSON; the tensors' bytes stay."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + n].decode()
    values = json.loads(text)
    metadata = values.get("__metadata__", {})
    inner = [key for key in metadata if metadata[key][:1] in ("{", "[")]
    try:
        if inner and rng.random() < 0.5:
            key = rng.choice(inner)
            metadata[key], what = _mutated_text(rng, metadata[key], False)
            changed, what = json.dumps(values), f"{key}: {what}"
        else:
            changed, what = _mutated_text(rng, text, False)
    except ValueError:
        return None
    header = changed.encode("utf-8", "replace")
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + n :])
    return what


# ---------------------------------------------------------------------------------------------- hashes made again


def _propagate(folder: Path, hashes: dict[str, str], done: set[Path]) -> None:
    """Every other file of the folder that names a hash gets the new one, and its own seals again; and so on."""
    while hashes:
        following: dict[str, str] = {}
        for path in sorted(each for each in folder.rglob("*") if each.is_file() and each not in done):
            text = path.read_bytes().decode("utf-8", "ignore") if path.suffix in (".json", ".jsonl") else ""
            named = [former for former in hashes if former in text]
            if not named:
                continue
            former = sha256(path)
            lines = text.split("\n") if path.suffix == ".jsonl" else [text]
            for i, line in enumerate(lines):
                if not any(each in line for each in named):
                    continue
                values = json.loads(line)
                places = list(_sealed_places(values, ()))
                for each in named:
                    line = line.replace(each, hashes[each])
                values = json.loads(line)
                for place in sorted(places, key=len, reverse=True):
                    held = _at(values, place)
                    held[SEAL] = _seal_of(held)
                lines[i] = json.dumps(values, indent=1 if path.suffix == ".json" else None)
            path.write_text("\n".join(lines), encoding="utf-8")
            done.add(path)
            following[former] = sha256(path)
        hashes = following
