"""Whether two runs of the demo found the same: `python -m tests.bridge.compare_runs A/run.json B/run.json`.

1. Every number of fidelity, circuits and units is paired with its counterpart, by path; wall-clock seconds are left out, the
   provenance of factors, which names the kind of host, and the hashes of factors: two hosts' float64 Grams differ in their last
   bits, and so may the last bit of a float32 value.
   In the hashes' place the factors themselves are compared, where both runs have a folder of them: the supports must be the same
   entry by entry, the values agree within TOLERANCE of the largest.
2. Two numbers agree within TOLERANCE, absolute below 1 and relative above it: logits of a margin reach 12. Anything else
   (names of units, tokens, lengths of lists, counts of edges) must be the same.
3. The largest difference of each kind of number is printed, where there is one. Exit code 1 if any is too large, or anything
   else differs.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swd_lens import FactorSet

TOLERANCE = 1e-4
PARTS = ("fidelity", "circuits", "units")
LEFT_OUT = ("seconds", "provenance", "factors")
# What the two runs must have been made of; versions, kind of host and threads may differ.
SAME_SETTINGS = ("model", "weights", "surfaces", "sparsities", "tasks", "solver settings", "calibration dtype")


def pairs(a: Any, b: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """Leaves of two JSON values side by side; where their shapes differ, the values themselves."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            if key not in LEFT_OUT:
                yield from pairs(a[key], b[key], (*path, key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from pairs(one, other, (*path, index))
    else:
        yield path, a, b


def distance(a: Any, b: Any) -> float:
    """0 where equal, inf where not both are fractions: a count or a name cannot be nearly the same."""
    if a == b:
        return 0.0
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) / max(1.0, abs(a), abs(b))
    return float("inf")


def kind_of(path: tuple[str | int, ...]) -> str:
    """fidelity.relmse, circuits.q_keep, units.z: the part and the field, wherever it stands."""
    part, *names = [name for name in path if isinstance(name, str)]
    return ".".join([part, *(names[:1] if part == "fidelity" else names[-1:])])


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Kind of number -> largest distance, and where it is: "path: a, b"."""
    worst: dict[str, tuple[float, str]] = {}
    for part in PARTS:
        for path, one, other in pairs(a[part], b[part], (part,)):
            far, kind = distance(one, other), kind_of(path)
            if kind not in worst or far > worst[kind][0]:
                worst[kind] = far, f"{'.'.join(map(str, path))}: {one!r:.60}, {other!r:.60}"
    for name in SAME_SETTINGS:
        if a["settings"][name] != b["settings"][name]:
            worst[f"settings.{name}"] = float("inf"), f"{a['settings'][name]!r:.60}, {b['settings'][name]!r:.60}"
    return worst


def compare_factors(a: Path, b: Path) -> dict[str, tuple[float, str]]:
    """Folder and site -> largest distance of a value, over the largest value; inf where a support or a site differs."""
    names = sorted(folder.name for folder in a.iterdir())
    if names != sorted(folder.name for folder in b.iterdir()):
        return {"factors": (float("inf"), f"{a} and {b} hold factors of other names")}
    worst: dict[str, tuple[float, str]] = {}
    for name in names:
        first, second = FactorSet.load(a / name), FactorSet.load(b / name)
        if list(first) != list(second):
            worst[f"factors.{name}"] = float("inf"), f"{list(first)!r:.60}, {list(second)!r:.60}"
            continue
        for site in first:
            for factor in ("read", "write"):
                left, right = getattr(first[site], factor), getattr(second[site], factor)
                same = left.shape == right.shape and bool(((left != 0) == (right != 0)).all())
                far = float((left - right).abs().max() / left.abs().max()) if same else float("inf")
                worst[f"factors.{name}.{site}.{factor}"] = far, "values" if same else "the supports differ"
    return worst


def main(files: list[str]) -> int:
    if len(files) != 2:
        print(__doc__)
        return 2
    worst = compare(*(json.loads(Path(file).read_text()) for file in files))
    folders = [Path(file).parent / "factors" for file in files]
    if all(folder.is_dir() for folder in folders):
        worst |= compare_factors(*folders)
    for kind, (far, where) in sorted(worst.items(), key=lambda item: -item[1][0]):
        if far:
            print(f"{far:9.2e}  {kind:<28} {where}")
    largest = max(far for far, _ in worst.values())
    print(f"largest difference {largest:.2e}, allowed {TOLERANCE:.0e}")
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
