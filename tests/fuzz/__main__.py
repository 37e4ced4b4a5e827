"""The runner: `python -m tests.fuzz --help`; what it does stands in the package's docstring."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before torch is imported: children are forked, which needs one thread; and nothing may be asked of the network.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.forks import Child, Died, Hang, Raised
from tests.fuzz.cases import FAULTS, OUTCOMES, Fixtures, Outcome, prepare
from tests.fuzz.disks import Disks
from tests.fuzz.kills import Kills
from tests.fuzz.kinds import KINDS
from tests.fuzz.writers import Rounds

# Section -> how many are tried in one child.
BATCHES = {"case": 50, "kill": 5, "round": 5, "disk": 10}
_SECONDS = 600  # of a batch


class State:
    """What is done, in a JSON file.

    Attributes:
        counts: class -> outcome -> how often.
        done: section -> numbers below which all are done, and those done above.
        faults: every fault, with its number.
    """

    def __init__(self, path: Path | None, seed: int, fresh: bool):
        self.path, self.seed = path, seed
        self.counts: dict[str, Counter[str]] = {}
        self.done: dict[str, set[int]] = {section: set() for section in BATCHES}
        self.faults: list[dict[str, Any]] = []
        if path is not None and path.is_file() and not fresh:
            held = json.loads(path.read_text())
            if held["seed"] != seed:
                raise SystemExit(f"{path} is of seed {held['seed']}: give --fresh, or another --state")
            self.counts = {name: Counter(counted) for name, counted in held["counts"].items()}
            self.done |= {section: set(numbers) for section, numbers in held["done"].items()}
            self.faults = held["faults"]

    def add(self, section: str, outcomes: Sequence[Outcome]) -> None:
        """Count them, say what failed, and write the file."""
        for outcome in outcomes:
            self.counts.setdefault(f"{section}: {outcome.kind}", Counter())[outcome.outcome] += 1
            self.done[section].add(outcome.number)
            if outcome.outcome in FAULTS:
                fault = {"replay": f"{section}/{outcome.number}", **asdict(outcome)}
                self.faults.append(fault)
                print(one_line(self.seed, section, outcome), flush=True)
        if self.path is not None:
            held = {"seed": self.seed, "faults": self.faults, "counts": self.counts}
            held["done"] = {section: sorted(numbers) for section, numbers in self.done.items()}
            temporary = self.path.with_suffix(".new")
            temporary.write_text(json.dumps(held, indent=1))
            temporary.replace(self.path)

    def table(self) -> str:
        """One row per class, and the sums."""
        rows: list[tuple[str, ...]] = [("class", "tried", *OUTCOMES)]
        sums: Counter[str] = Counter()
        for name, counted in sorted(self.counts.items()):
            rows.append((name, str(counted.total()), *(str(counted[each]) for each in OUTCOMES)))
            sums += counted
        rows.append(("all", str(sums.total()), *(str(sums[each]) for each in OUTCOMES)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:-1], "-" * len(lines[0]), lines[-1]])


def one_line(seed: int, section: str, outcome: Outcome) -> str:
    text = outcome.text.replace("\n", " / ")
    return f"seed {seed} {section}/{outcome.number} | {outcome.kind} | {outcome.damage} | {outcome.outcome} | {text}"


def run_section(section: str, tried: Callable[[int], Outcome], state: State, n: int, jobs: int, end: float | None = None) -> None:
    """Try all numbers below n that are not done, `jobs` children at a time.

    Args:
        tried: gives the outcome of one number, in a child.
        end: of the monotonic clock; nothing is begun after it.
    """
    missing = [number for number in range(n) if number not in state.done[section]]
    size = BATCHES[section]
    batches = [missing[i : i + size] for i in range(0, len(missing), size)]
    at_work: list[tuple[Child, list[int]]] = []
    while batches or at_work:
        while batches and len(at_work) < jobs and (end is None or time.monotonic() < end):
            numbers = batches.pop(0)
            at_work.append((Child(lambda numbers=numbers: [tried(number) for number in numbers]), numbers))
        if not at_work:
            return
        child, numbers = at_work.pop(0)
        try:
            outcomes = child.wait(_SECONDS)
        except (Hang, Died, Raised):
            outcomes = [_alone(tried, number) for number in numbers]
        state.add(section, outcomes)


def _alone(tried: Callable[[int], Outcome], number: int) -> Outcome:
    """A number whose batch hung or died, in a child of its own."""
    try:
        return Child(lambda: tried(number)).wait(300)
    except Hang as end:
        return Outcome(number, "(unknown)", "", "hang", str(end))
    except Died as end:
        return Outcome(number, "(unknown)", "", "other exception", f"the process died: {end}")
    except Raised as raised:
        return Outcome(number, "(unknown)", "", "other exception", f"{raised.text} {raised.trace[-600:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Damage, kills, writers and disks.")
    parser.add_argument("--cases", type=int, default=0, help="damaged things to read")
    parser.add_argument("--kills", type=int, default=0, help="calls to kill")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of 2, 3 or 5 processes at one folder")
    parser.add_argument("--disks", type=int, default=0, help="full, read-only and impossible places")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--kinds", nargs="*", default=None, help="only these kinds of cases")
    parser.add_argument("--state", type=Path, default=None, help="JSON file of what is done; default: none")
    parser.add_argument("--fresh", action="store_true", help="begin again, whatever the state says")
    parser.add_argument("--seconds", type=float, default=None, help="begin nothing after so many seconds")
    parser.add_argument("--replay", nargs="*", default=None, metavar="SECTION/NUMBER", help="try these alone: case/17 kill/3")
    parser.add_argument("--keep", type=Path, default=None, help="with --replay: keep the damaged things of cases here")
    asked = parser.parse_args(arguments)
    kinds = asked.kinds or list(KINDS)
    prepare()
    with ExitStack() as stack:
        ready: dict[str, Callable[[int], Outcome]] = {}

        def section(name: str) -> Callable[[int], Outcome]:
            if name == "case":
                fixtures = stack.enter_context(Fixtures(kinds, asked.keep))
                return lambda number: fixtures.try_case(asked.seed, number)
            if name == "kill":
                kills = stack.enter_context(Kills())
                return lambda number: kills.try_kill(asked.seed, number)
            if name == "round":
                rounds = stack.enter_context(Rounds())
                return lambda number: rounds.try_round(asked.seed, number)
            disks = stack.enter_context(Disks())
            return lambda number: disks.try_disk(asked.seed, number)

        if asked.replay is not None:
            faults = 0
            for each in asked.replay:
                name, number = each.split("/")
                ready.setdefault(name, ready.get(name) or section(name))
                outcome = _alone(ready[name], int(number))
                print(one_line(asked.seed, name, outcome), flush=True)
                faults += outcome.outcome in FAULTS
            return int(faults > 0)
        state = State(asked.state, asked.seed, asked.fresh)
        end = None if asked.seconds is None else time.monotonic() + asked.seconds
        numbers = {"case": asked.cases, "kill": asked.kills, "round": asked.rounds, "disk": asked.disks}
        for name, n in numbers.items():
            if n:
                with suppress(KeyboardInterrupt):
                    run_section(name, section(name), state, n, asked.jobs, end)
        print(state.table())
        return int(bool(state.faults))


if __name__ == "__main__":
    sys.exit(main())
