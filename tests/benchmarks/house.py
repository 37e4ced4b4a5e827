"""The structure of the package in numbers: how much there is, how it is cut up, and what a reader stumbles over.

    python -m tests.benchmarks.house           the table: at commit 7aeceaf, now, the bar, and whether it is kept
    python -m tests.benchmarks.house --trace   also what one matrix goes through, on the embedded model
    python -m tests.benchmarks.house --list circles --under swd_lens/study     a measure's places, in one folder

1. Size: lines of Python and TOML below swd_lens/, and of Python below tests/, without the folders of NO_TESTS.
2. Functions: the body runs from the first statement after the docstring to the end, a whole function from `def` to the end.
   A private function (of a module or a class) is named once if its name stands twice in the package's Python, docstrings and
   comments included. This is how house3.md counted; a name that two files define is missed. `once-by-file` counts expressions,
   in the file that defines the function and in those that define no such name.
3. Circles: sets of files that import each other, directly or through others. Imports in functions and under TYPE_CHECKING count.
   An import of `swd_lens.a.b` leads to that file, and to a/__init__.py only where a name is taken from it.
4. Words: docstrings that begin as in RIDDLES, and identifiers of OLD_NAMES in the Python of swd_lens, tests and notebooks.
5. Tests: a module with a function of more than one line, or a class with methods, has a file of its name in its room's tests.
6. `--trace` factorizes one matrix, attaches it and runs one forward. It counts the `Factors` that are made (not those of
   zeros), the hashes (of hashlib) that W's values go into, as they are or rounded, and the files whose functions `attach` calls.

The figures at 7aeceaf are this program's for that commit. `--under` counts one folder now, without the bars.
"""

import argparse
import ast
import hashlib
import json
import re
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NO_TESTS = ("benchmarks", "fuzz", "planted", "embedded")  # folders of tests/
SMALL, LONG = 6, 80  # lines
RIDDLES = ("What ", "Of ", "The same")
# Common words count where a file defines or imports them, or takes them from a module; the others wherever they stand.
COMMON = ("lasting", "frontier", "judge")
OLD_NAMES = (
    *("in_plain_surroundings", "passport", "main_road", "Parts", "Mark", "Bench", "DenseRuns", "born_again"),
    *("_go_on_behind", "_taken_over", "Standing", "Place", "shortcuts", *COMMON),
)
LAYER, SITE, SPARSITY, N_TOKENS = 1, "blocks.1.mlp_out", 0.5, 4096  # of --trace
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """One place that counts for a measure, with its lines (of circles: which one it is)."""

    path: str
    line: int
    name: str
    amount: int = 1


@cache
def files(*folders: str) -> dict[str, ast.Module]:
    """Path from the root -> the parsed file, for all Python below some folders."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "docs" not in path.parts)
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def lines(folder: str, ending: str, without: tuple[str, ...] = ()) -> Iterator[Found]:
    """Every file with this ending below a folder, with its number of lines."""
    for path in sorted((ROOT / folder).rglob(f"*{ending}")):
        parts = path.relative_to(ROOT).parts
        if parts[1] not in without:
            n_lines = path.read_text(encoding="utf-8").count("\n")
            yield Found("/".join(parts), 1, f"{n_lines} lines", n_lines)


def body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the end; 0 where there is only a docstring."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def sized(longer_than: int | None = None) -> Iterator[Found]:
    """All functions with the lines of their bodies; or those with more lines from `def` on, and how many these are."""
    for path, tree in files("swd_lens").items():
        for node in (node for node in ast.walk(tree) if isinstance(node, Function)):
            n_lines = body_lines(node) if longer_than is None else (node.end_lineno or 0) - node.lineno + 1
            if longer_than is None or n_lines > longer_than:
                yield Found(path, node.lineno, f"{node.name}, {n_lines} lines", n_lines)


def named_once(at_most: int, by_file: bool = False) -> Iterator[Found]:
    """Private functions with bodies of `at_most` lines that are named once; see the module's docstring."""
    owners: list[tuple[str, ast.Module | ast.ClassDef]] = [*files("swd_lens").items()]
    owners += [(path, node) for path, tree in owners for node in tree.body if isinstance(node, ast.ClassDef)]
    own = ((path, node) for path, owner in owners for node in owner.body if isinstance(node, Function))
    private = [(path, node) for path, node in own if re.match("_[^_]", node.name)]
    defined = Counter((path, node.name) for path, node in private)
    words = Counter(word for path in files("swd_lens") for word in re.findall(r"\w+", (ROOT / path).read_text("utf-8")))
    uses = {path: Counter(name for _, name in identifiers(tree, False)) for path, tree in files("swd_lens").items()}
    for path, node in private:
        name, n_lines = node.name, body_lines(node)
        seen = sum(uses[file][name] for file in uses if file == path or not defined[file, name])
        once = seen == defined[path, name] == 1 if by_file else words[name] == 2
        if once and n_lines <= at_most:
            yield Found(path, node.lineno, f"{name}, {n_lines} lines", n_lines)


def imports(path: str) -> Iterator[tuple[str, int]]:
    """File and line of each import of another file of the package."""
    for node in ast.walk(files("swd_lens")[path]):
        modules: list[list[str]] = []  # per name, what it may be, the likeliest first
        if isinstance(node, ast.Import):
            modules = [[alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join([*path.split("/")[: -node.level], *filter(None, [node.module])])
            modules = [[f"{module}.{alias.name}", module] for alias in node.names]
        for candidates in modules:
            stems = [candidate.replace(".", "/") for candidate in candidates]
            known = [f for stem in stems for f in (f"{stem}.py", f"{stem}/__init__.py") if f in files("swd_lens")]
            yield from ((file, getattr(node, "lineno", 1)) for file in known[:1] if file != path)


def circles() -> Iterator[Found]:
    """The imports within each circle."""
    direct = {path: set(imports(path)) for path in files("swd_lens")}
    reached = {path: {target for target, _ in found} for path, found in direct.items()}
    for middle in reached:  # Warshall's transitive closure
        for path in reached:
            reached[path] |= reached[middle] if middle in reached[path] else set()
    for path in reached:
        circle = [target for target in reached if target in reached[path] and path in reached[target]]
        for target, line in sorted(direct[path]):
            if target in circle:
                name = f"imports {target} (circle of {circle[0]}, {len(circle)} files)"
                yield Found(path, line, name, [*reached].index(circle[0]))


def riddles() -> Iterator[Found]:
    """Docstrings that begin as in RIDDLES."""
    for path, tree in files("swd_lens").items():
        for node in ast.walk(tree):
            about = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | Function) else None
            if about and about.startswith(RIDDLES):
                yield Found(path, getattr(node, "lineno", 1), f"{getattr(node, 'name', '')}: {about.splitlines()[0]}")


def identifiers(tree: ast.AST, definitions: bool = True) -> Iterator[tuple[ast.AST, str]]:
    """Each identifier and where it stands; without `definitions` only those of expressions."""
    fields = ("id", "attr", "name", "arg", "asname", "module") if definitions else ("id", "attr")
    for node in ast.walk(tree):
        parts = (getattr(node, field, None) for field in fields)
        yield from ((node, name) for part in parts if isinstance(part, str) for name in part.split("."))


def old_names() -> Iterator[Found]:
    """Identifiers, and names of files, that are in OLD_NAMES; in a notebook the line is the cell's number."""
    sources = [(path, 0, tree) for path, tree in files("swd_lens", "tests").items()]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell, content in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"], 1):
            if content["cell_type"] == "code":  # a magic is no Python
                code = re.sub(r"(?m)^(\s*)[%!]+\w.*", r"\1pass", "".join(content["source"]))
                sources.append((path.relative_to(ROOT).as_posix(), cell, ast.parse(code)))
    for path, cell, tree in sources:
        bound = {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)}
        statements = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        bound |= {name for node in statements for _, name in identifiers(node)}
        if Path(path).stem in OLD_NAMES:
            yield Found(path, 1, f"{Path(path).stem} (the file)")
        for node, name in identifiers(tree):
            of_module = isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in bound
            if name in OLD_NAMES and (name not in COMMON or name in bound or of_module):
                yield Found(path, cell or getattr(node, "lineno", 1), name)


def untested() -> Iterator[Found]:
    """Modules with behaviour, a/b/c.py, without tests/a/test_c.py, tests/a/test_b_c.py or tests/a/b/test_c.py."""
    for path, tree in files("swd_lens").items():
        _, *folders, file = path.split("/")
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        behaves = any(isinstance(node, Function) for owner in owners for node in owner.body)
        behaves |= any(isinstance(node, Function) and body_lines(node) > 1 for node in ast.walk(tree))
        splits = [(i, j) for i in range(1, len(folders) + 1) for j in range(i, len(folders) + 1)]
        places = [ROOT.joinpath("tests", *folders[:i], "_".join(("test", *folders[j:], file))) for i, j in splits]
        if folders and file != "__init__.py" and behaves and not any(place.is_file() for place in places):
            yield Found(path, 1, file)


@cache
def traced() -> dict[str, list[Found]]:
    """Factorize, attach and run one matrix: the places that make `Factors` and that hash W, and the files of `attach`."""
    found: dict[str, list[Found]] = {"factors": [], "hashes": [], "attach": []}
    forms: set[bytes] = set()  # W's bytes, in several dtypes and both orders

    def note(measure: str) -> None:
        stack = [entry for entry in traceback.extract_stack() if entry.filename.startswith(f"{ROOT}/swd_lens/")]
        path = Path(stack[-1].filename).relative_to(ROOT).as_posix()
        found[measure].append(Found(path, stack[-1].lineno or 1, " < ".join(entry.name for entry in reversed(stack))))

    class Watched:
        def __init__(self, make: Any, data: Any = b"", **options: Any):
            self._hash = make(**options)
            self.update(data)

        def update(self, data: Any) -> None:
            if bytes(data) in forms:
                note("hashes")
            self._hash.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._hash, name)

    for algorithm in ("sha256", "sha1", "md5", "blake2b"):
        setattr(hashlib, algorithm, partial(Watched, getattr(hashlib, algorithm)))
    import torch  # after hashlib is watched; and the table without --trace needs neither

    import swd_lens as swd

    model: Any = swd.load_default_model()
    tokens = swd.text_tokens(N_TOKENS, split="train")
    weight = model.blocks[LAYER].mlp.W_out.detach()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rounded in (weight.to(dtype), weight.to(dtype).float()):
            forms |= {m.contiguous().view(torch.uint8).numpy().tobytes() for m in (rounded, rounded.T)}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code, given = frame.f_code, frame.f_locals
        makes = event == "call" and code.co_name == "__init__" and type(given.get("self")) is swd.Factors
        if makes and given["read"].any():  # zeros stand at all sites where the dense host is recorded
            note("factors")
        if event == "call" and attaching and code.co_filename.startswith(f"{ROOT}/swd_lens/"):
            imported = any("importlib" in above.f_code.co_filename for above, _ in traceback.walk_stack(frame))
            path = Path(code.co_filename).relative_to(ROOT).as_posix()
            if not imported and path not in {each.path for each in found["attach"]}:
                found["attach"].append(Found(path, code.co_firstlineno, code.co_name))

    attach, attaching = swd.attach, False  # the package's own __getattr__ is no part of the call
    sys.setprofile(profile)
    factors = swd.factorize(model, SITE, sparsity=SPARSITY, tokens=tokens, progress=False)
    attaching = True
    attachment = attach(model, factors)
    attaching = False
    model(tokens[:1])
    sys.setprofile(None)
    attachment.detach()
    return found


# Measure -> title, the figure at 7aeceaf, the bar, and what finds its places.
MEASURES: dict[str, tuple[str, float, str, Callable[[], Iterable[Found]]]] = {
    "python": ("Python lines, 60,445 at f33dd7c", 53_028, "<= 55,445", partial(lines, "swd_lens", ".py")),
    "toml": ("TOML lines", 4_797, "<= 700", partial(lines, "swd_lens", ".toml")),
    "tests": ("lines of tests, 51,394 at f33dd7c", 44_270, "<= 43,394", partial(lines, "tests", ".py", NO_TESTS)),
    "once-small": (f"private functions named once, to {SMALL} lines", 191, "<= 60", partial(named_once, SMALL)),
    "once": ("private functions named once", 405, "", partial(named_once, sys.maxsize)),
    "once-by-file": (f"counted by file, to {SMALL} lines", 273, "", partial(named_once, SMALL, by_file=True)),
    "long": (f"functions of over {LONG} lines", 18, "<= 5", partial(sized, LONG)),
    "mean": ("mean lines of a function's body", 6.8, ">= 9", sized),
    "median": ("median lines of a function's body", 4, "", sized),
    "circles": ("import circles", 5, "<= 0", circles),
    "riddles": ("docstrings that begin with What, Of, The same", 280, "<= 20", riddles),
    "names": ("identifiers with an old name", 438, "<= 0", old_names),
    "untested": ("modules with behaviour but no test file of their name", 128, "<= 0", untested),
    "factors": ("`Factors` made for one matrix", 8, "<= 2", lambda: traced()["factors"]),
    "hashes": ("hashes of its W", 3, "<= 1", lambda: traced()["hashes"]),
    "attach": ("files that `attach` walks through", 20, "<= 8", lambda: traced()["attach"]),
}


def value(measure: str, amounts: list[int]) -> float:
    if measure in ("mean", "median"):
        return round(getattr(statistics, measure)(amounts or [0]), 1)
    counted = set(amounts) if measure == "circles" else amounts
    return sum(amounts) if measure in ("python", "toml", "tests") else len(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", choices=MEASURES, metavar="MEASURE", help=f"show its places: {', '.join(MEASURES)}")
    parser.add_argument("--under", metavar="PATH", default="", help="count one folder only, as swd_lens/study")
    parser.add_argument("--trace", action="store_true", help="with the measures that need the embedded model")
    args = parser.parse_args()
    under = args.under and args.under.strip("/") + "/"
    if not args.list:
        print("| measure | | at 7aeceaf | now | bar | kept |\n|---|---|---:|---:|---:|---|")
    for measure, (title, former, bar, find) in MEASURES.items():
        if args.list != measure if args.list else measure in ("factors", "hashes", "attach") and not args.trace:
            continue
        found = [place for place in find() if f"{place.path}/".startswith(under)]
        if args.list:
            found.sort(key=lambda place: -place.amount)
            return print(*(f"{place.path}:{place.line} {place.name}" for place in found), sep="\n")
        bar = "" if under else bar
        now, bound = value(measure, [place.amount for place in found]), float(bar[3:].replace(",", "") or "nan")
        kept = "yes" if (now <= bound if "<" in bar else now >= bound) else "NO" if bar else ""
        print(f"| {measure} | {title} | {former:,} | {now:,} | {bar} | {kept} |", flush=True)


if __name__ == "__main__":
    main()
