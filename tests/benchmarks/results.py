"""Measured figures as data, and the documents that show them.

    python -m tests.benchmarks.results            writes RESULTS.md and the tables of README.md
    python -m tests.benchmarks.results --check    writes nothing; names what is stale, and then exits with 1
    python -m tests.benchmarks.results --record memory python -m tests.benchmarks.memory --threads 2
                                                  runs a benchmark and takes the tables that it prints into memory.json

1. Every file of tests/benchmarks/results/ holds one benchmark's figures as a `Result`: its tables, how they were measured, and on
   which commit, machine and date, with how many threads and by which command. Cells are text, because the digits that are shown
   are part of a measurement.
2. `read_results` reads all of them and refuses a file whose fields are missing, unknown or of another type.
3. `results_page` renders RESULTS.md from all files, in the order of SECTIONS, and within a section by `order`.
4. `fill` renders a document again whose tables stand between `<!-- results: NAME/TABLE -->` and `<!-- end results -->`; TABLE
   counts from 1. Text outside the markers is not touched.
5. `stale_documents` renders both and compares them with the files on disk; .ci/run fails where they differ.
6. `record` is what a benchmark calls to leave its tables. It fills in commit, machine, threads, date and command, and keeps the
   sentences of the file that it replaces: figures in those are of the earlier run, so read them again.
7. `record_command` does the same for a benchmark that only prints: its Markdown tables are read by `printed_tables`.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "results"
README = ROOT / "README.md"
RESULTS_PAGE = FOLDER.parent / "RESULTS.md"

SECTIONS = (
    "Demo",
    "The paper on a real model",
    "Solver",
    "Whole models",
    "Circuits",
    "Trained baselines",
    "Looking inside",
    "Hosts",
)
ALIGNMENTS = {"left": "---", "right": "---:", "center": ":---:"}
COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")
MARKED = re.compile(r"<!-- results: (?P<name>[\w-]+)/(?P<table>\d+) -->\n.*?<!-- end results -->", re.DOTALL)

HEAD = """# Measurements

Written by `python -m tests.benchmarks.results` from the files in [results](results); change those, not this page. Under every
heading stand the commit that the figures are of (the one that wrote them down, or the one that the benchmark ran on), the
machine, the number of threads, the date and the command. Figures of the embedded model from before small matrices were solved in
float64 (commit a36b20f), and those of larger matrices, hold for the machine and the number of threads that are named; what
that means is under [Other machines](#other-machines). Preset "thorough" makes 200 alternations since commit 75b777d, 160
before; "best" makes 72 on matrices that are solved in float32 since commit 1c354ae, 56 before, as still in float64. Since commit
4ec4538 the penalty of all presets but "paper" ends lower below s = .75; since commit f1469b9 their factors' budgets grow
(`held_back`; since 8fcee93 not where units start as the long side's coordinates), and matrices without a Gram take 90
alternations in float32, 108 before. Since 54c3652 matrices that are solved in float32 see the full Gram from .7 of the
alternations on, half of it at once (`gram_from`, `gram_at_first`), in "best" after 64 alternations, without a Gram after 84.
Until commit 017e7bb SWD without further words starts from the short side; since then `factorize` chooses it (`basis="auto"`).
"""

Record = TypeVar("Record", "Table", "Result")


class ResultsError(Exception):
    """A file of results, or a marker in a document, that cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Table:
    """One table as it is shown: text in every cell, each row as long as `columns`."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    align: list[str] = field(default_factory=list)  # per column, of ALIGNMENTS; empty: all left

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ResultsError(f"table {self.title!r}: a row has {len(row)} cells for {len(self.columns)} columns: {row}")
            if any("|" in cell for cell in row):
                raise ResultsError(f"table {self.title!r}: a cell holds '|', which ends a cell in Markdown: {row}")
        if self.align and len(self.align) != len(self.columns):
            raise ResultsError(f"table {self.title!r}: align names {len(self.align)} of {len(self.columns)} columns")
        for name in self.align:
            if name not in ALIGNMENTS:
                raise ResultsError(f"table {self.title!r}: align has {name!r}; choose of {', '.join(ALIGNMENTS)}")

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        rules = [ALIGNMENTS[name] for name in self.align or ["left"] * len(self.columns)]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.columns, rules, *self.rows))


@dataclass(frozen=True)
class Result:
    """What one benchmark measured."""

    name: str  # of the file, without .json
    title: str
    section: str  # of SECTIONS
    order: int  # within the section
    about: list[str]  # paragraphs: how it was measured, caveats, how to read it
    command: str
    commit: str
    machine: str
    threads: list[int]  # every number of threads that was run with; empty: not recorded
    date: str  # ISO
    tables: list[Table]
    notes: list[str] = field(default_factory=list)  # further figures, in sentences

    def __post_init__(self) -> None:
        if self.section not in SECTIONS:
            raise ResultsError(f"{self.name}: section {self.section!r}; choose of {', '.join(SECTIONS)}")
        if not COMMIT.fullmatch(self.commit):
            raise ResultsError(f"{self.name}: commit {self.commit!r} is no hash of at least seven digits")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise ResultsError(f"{self.name}: date {self.date!r} is not of the form 2026-11-22") from None

    def table(self, number: int) -> Table:
        """The table of this number, counted from 1."""
        if not 1 <= number <= len(self.tables):
            raise ResultsError(f"{self.name} has {len(self.tables)} tables, counted from 1; there is no table {number}")
        return self.tables[number - 1]

    def facts(self) -> str:
        """Commit, machine, threads, date and command, in one paragraph."""
        threads = " and ".join(map(str, self.threads)) or "not recorded"
        return (
            f"Commit {self.commit} · {self.machine} · threads: {threads} · {self.date}  \n"  # two blanks: a line break
            f"`{self.command}`"
        )

    def markdown(self) -> str:
        parts = [f"### {self.title}", self.facts(), *self.about]
        for table in self.tables:
            parts += [f"**{table.title}**", table.markdown()]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------------- reading


def read_results(folder: Path = FOLDER) -> dict[str, Result]:
    """Every file of the folder by its name, in the order of the page. Raises ResultsError."""
    results = [read_result(path) for path in sorted(folder.glob("*.json"))]
    results.sort(key=lambda result: (SECTIONS.index(result.section), result.order, result.name))
    return {result.name: result for result in results}


def read_result(path: Path) -> Result:
    """One file. Raises ResultsError, with the file's name in front, where it is no JSON or no Result."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        checked = _checked_fields(value, Result, path.stem)
        tables = [
            Table(**_checked_fields(table, Table, f"table {number}")) for number, table in enumerate(checked.pop("tables"), 1)
        ]
        result = Result(**checked, tables=tables)
    except (json.JSONDecodeError, ResultsError) as error:
        raise ResultsError(f"{path.name}: {error}") from error
    if result.name != path.stem:
        raise ResultsError(f"{path.name}: its name is {result.name!r}; file and name must be the same")
    return result


def _checked_fields(value: Any, kind: type[Record], where: str) -> dict[str, Any]:
    """`value` as arguments of the dataclass `kind`: no field missing, none unknown, each of the declared type."""
    if not isinstance(value, dict):
        raise ResultsError(f"{where}: a {kind.__name__} is a JSON object, not {type(value).__name__}")
    declared = {item.name: item for item in fields(kind)}
    required = {name for name, item in declared.items() if item.default_factory is MISSING}
    for problem, names in (("unknown", set(value) - set(declared)), ("missing", required - set(value))):
        if names:
            raise ResultsError(f"{where}: {problem} fields: {', '.join(sorted(names))}")
    for name, item in value.items():
        if not _fits(item, declared[name].type):
            raise ResultsError(f"{where}: {name} is not of type {declared[name].type}: {item!r:.80}")
    return dict(value)


def _fits(value: Any, declared: Any) -> bool:
    if get_origin(declared) is list:
        return isinstance(value, list) and all(_fits(item, get_args(declared)[0]) for item in value)
    if declared is Table:  # its own fields are checked when it is made
        return isinstance(value, dict)
    return isinstance(value, declared) and not isinstance(value, bool)


# ---------------------------------------------------------------------------------------------- documents


def results_page(results: Mapping[str, Result]) -> str:
    """The whole of RESULTS.md."""
    parts = [HEAD.rstrip()]
    for section in SECTIONS:
        members = [result for result in results.values() if result.section == section]
        if members:
            parts += [f"## {section}", *(result.markdown() for result in members)]
    return "\n\n".join(parts) + "\n"


def fill(document: str, results: Mapping[str, Result]) -> str:
    """The document with every marked table rendered again. Raises ResultsError where a marker names what is not there."""

    def rendered(marked: re.Match[str]) -> str:
        name, number = marked["name"], int(marked["table"])
        if name not in results:
            raise ResultsError(f"the marker {name}/{number} names no file of results; there are {', '.join(results)}")
        return f"<!-- results: {name}/{number} -->\n\n{results[name].table(number).markdown()}\n\n<!-- end results -->"

    return MARKED.sub(rendered, document)


def rendered_documents(folder: Path = FOLDER) -> dict[Path, str]:
    """What each document has to be."""
    results = read_results(folder)
    return {RESULTS_PAGE: results_page(results), README: fill(README.read_text(encoding="utf-8"), results)}


def stale_documents() -> list[str]:
    """The documents that differ from what the files of results make of them."""
    return [
        str(path.relative_to(ROOT))
        for path, text in rendered_documents().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


# ---------------------------------------------------------------------------------------------- recording


def record(
    name: str,
    tables: Iterable[Table],
    *,
    command: str | None = None,
    threads: Sequence[int] | None = None,
    machine: str | None = None,
    commit: str | None = None,
    notes: Sequence[str] | None = None,
    title: str | None = None,
    section: str | None = None,
    order: int | None = None,
    about: Sequence[str] | None = None,
    folder: Path = FOLDER,
) -> Path:
    """Write a benchmark's tables to its file; returns the file.

    `command`, `threads`, `machine` and `commit` are by default those of this process. Sentences (`title`, `section`, `order`,
    `about`, `notes`) that are not given stay as the present file has them; a new file needs all but the notes.
    """
    path = folder / f"{name}.json"
    sentences = {
        "title": title,
        "section": section,
        "order": order,
        "about": None if about is None else list(about),
        "notes": None if notes is None else list(notes),
    }
    given = {key: value for key, value in sentences.items() if value is not None}
    measured: dict[str, Any] = {
        "tables": list(tables),
        "command": command or this_command(),
        "threads": list(threads) if threads is not None else [_torch_threads()],
        "machine": machine or this_machine(),
        "commit": commit or this_commit(),
        "date": date.today().isoformat(),
    }
    if path.is_file():
        earlier = read_result(path)
        result = replace(earlier, **given, **measured)
        if result.about or result.notes:
            print(f"{path.name}: sentences written at commit {earlier.commit} are kept; read them beside the new tables")
    else:
        missing = sorted({"title", "section", "order", "about"} - set(given))
        if missing:
            raise ResultsError(f"{path.name} does not exist yet; a first record needs {', '.join(missing)}")
        result = Result(name=name, **given, **measured)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def record_command(name: str, command: Sequence[str], folder: Path = FOLDER) -> Path:
    """Run a benchmark, show its output as it comes, and record the tables in it. Raises ResultsError if it fails."""
    lines: list[str] = []
    python = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
    with subprocess.Popen(python, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise ResultsError(f"{' '.join(command)} ended with {process.returncode}; nothing is recorded")
    tables = list(printed_tables(lines))
    if not tables:
        raise ResultsError(f"{' '.join(command)} printed no Markdown table; nothing is recorded")
    threads = [int(command[command.index("--threads") + 1])] if "--threads" in command else None
    return record(name, tables, command=" ".join(command), threads=threads, folder=folder)


def printed_tables(lines: Iterable[str]) -> Iterator[Table]:
    """The Markdown tables in a program's output, each under the last line of text before it."""
    title, block = "", []
    for line in [*(line.strip() for line in lines), ""]:
        if line.startswith("|"):
            block.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if len(block) > 2:
            align = [next(name for name in ("center", "right", "left") if _ruled(rule, name)) for rule in block[1]]
            yield Table(title or ", ".join(block[0]), block[0], block[2:], align)
        title, block = line or (title if not block else ""), []


def _ruled(rule: str, alignment: str) -> bool:
    """Whether the rule below a heading (---, ---:, :---:) says this alignment."""
    ends = {"center": rule.startswith(":") and rule.endswith(":"), "right": rule.endswith(":")}
    return ends.get(alignment, True)


def this_command() -> str:
    """How this process was started, as one types it: `python -m PACKAGE.MODULE ARGUMENTS`."""
    main = sys.modules["__main__"]
    module = getattr(getattr(main, "__spec__", None), "name", None)
    return " ".join(["python", *(["-m", module] if module else [Path(sys.argv[0]).name]), *sys.argv[1:]])


def this_commit() -> str:
    """The short hash of HEAD, with "-dirty" behind it where the package or the benchmarks differ from it."""
    changed = _git("status", "--porcelain", "--", "swd_lens", "tests/benchmarks/*.py")
    return _git("rev-parse", "--short=7", "HEAD") + ("-dirty" if changed else "")


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and the number of cores that the system has."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if not names:
        return platform.processor() or platform.machine()
    return f"{names[0]}, {len(names)} cores"


def _torch_threads() -> int:
    import torch  # here, so that --check starts at once

    return torch.get_num_threads()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ResultsError(f"git cannot say which commit this is; pass commit= ({error})") from error
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write RESULTS.md and README.md's tables from the files of results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a document is stale")
    parser.add_argument("--record", metavar="NAME", help="run the command that follows; its tables go to results/NAME.json")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="of --record")
    args = parser.parse_args()
    if bool(args.command) != bool(args.record):
        parser.error("--record NAME and a command go together")
    try:
        if args.record:
            record_command(args.record, args.command)
        stale = stale_documents()
        if args.check:
            if stale:
                sys.exit(f"stale: {', '.join(stale)}; run python -m tests.benchmarks.results")
            return
        for path, text in rendered_documents().items():
            path.write_text(text, encoding="utf-8")
    except ResultsError as error:
        sys.exit(str(error))
    print("written: " + ", ".join(stale) if stale else "all documents are fresh")


if __name__ == "__main__":
    main()
