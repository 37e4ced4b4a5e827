"""Plants forty bugs, one at a time, and says which the tests catch: `python -m tests.planted [--quick | --all] [--check]`.

1. The tree (what git knows of it) is copied to a folder of its own; one line is changed there.
2. The tests most likely to fail run first, then all of that bug's room, then, with --quick, the suite without `slow`, or with
   --all the whole suite; the first failure ends it.
3. Results go to planted.json after each bug; a second call goes on from there. --check says which lines are gone, and runs
   nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.planted.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "planted.json"
LIMIT = 1200  # seconds for a room's tests; a run that takes longer counts as a failure to end, so as caught


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="survivors of their room run the suite without `slow`")
    parser.add_argument("--all", action="store_true", help="survivors of their room run the whole suite")
    parser.add_argument("--check", action="store_true", help="say which lines are gone")
    asked = parser.parse_args()
    gone = [bug for bug in BUGS if (ROOT / "swd_lens" / bug.file).read_text(encoding="utf-8").count(bug.old) != 1]
    for bug in gone:
        print(f"not there, or there twice: {bug.file}: {bug.old}")
    if asked.check:
        sys.exit(bool(gone))
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for bug in BUGS:
        name = f"{bug.file}: {bug.old} -> {bug.new}"
        if bug not in gone and results.get(name, {}).get("caught_by") is None:
            tried = results.get(name, {}).get("tried", [])
            results[name] = planted(bug, tried, asked.quick, asked.all)
            RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
            print(f"{results[name]['caught_by'] or 'SURVIVED'}: {name}", flush=True)
    caught = sum(entry["caught_by"] is not None for entry in results.values())
    print(f"{caught} of {len(results)} caught, {len(gone)} lines gone")


def planted(bug: Bug, tried: list[str], quick: bool, everything: bool) -> dict:
    """What caught the bug (a test, or "time"), or None, and which steps were tried."""
    steps = {"first": bug.first.split(), "room": [bug.file.split("/")[0]]}
    steps |= {"quick": ["."]} if quick else {}
    steps |= {"all": ["."]} if everything else {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n"):
            if name and (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        file = tree / "swd_lens" / bug.file
        file.write_text(file.read_text(encoding="utf-8").replace(bug.old, bug.new), encoding="utf-8")
        for step, paths in steps.items():
            if step not in tried:
                tests = [str(tree / "tests" / path) for path in paths if (tree / "tests" / path).exists()]
                if caught := failure(tree, tests, step):
                    return {"caught_by": caught, "step": step, "tried": [*tried, step]}
                tried = [*tried, step]
    return {"caught_by": None, "tried": tried}


def failure(tree: Path, tests: list[str], step: str) -> str | None:
    """The first test that fails, "time" where none ends, None where all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *([] if step == "all" else ["-m", "not slow"]),
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT * (4 if step in ("quick", "all") else 1),
        )
    except subprocess.TimeoutExpired:
        return "time"
    if done.returncode in (0, 5):
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    main()
