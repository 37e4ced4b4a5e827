"""Ctrl-C, one, two or three times, anywhere in a call: `python -m tests.fuzz.interruptions --help`.

1. `--lines`: Ctrl-C before a random line of swd_lens that a random call runs, as tests/interrupts.py gives it.
2. `--times`: SIGINT from another process at a random moment of a random call, and one or two more 20 us to 3 ms later.
3. After each the host, torch's settings, the holders and the handler of SIGINT must be what they were before.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are tiny
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import swd_lens as swd
from swd_lens.base import holding, surroundings
from tests.base.test_surroundings import state
from tests.hosts.test_interrupts import everything
from tests.interrupts import run_to_line
from tests.test_surroundings import CALLS, HOSTS, Kit, kit_of

WHOLE, EVENTS = ("swd_lens/",), ("line", "call")
# Sends SIGINT to a process at the moments that it is told: delays in seconds, one line per attempt.
_SENDER = """
import os, signal, sys, time
pid = int(sys.argv[1])
for line in sys.stdin:
    due = time.perf_counter()
    for delay in map(float, line.split()):
        due += delay
        while time.perf_counter() < due:
            time.sleep(max(0, due - time.perf_counter() - 2e-3)) if due - time.perf_counter() > 4e-3 else None
        os.kill(pid, signal.SIGINT)
    print("sent", flush=True)
"""


def _attach(kit: Kit) -> None:
    with swd.attach(kit.model, kit.factors), torch.no_grad():
        kit.model(kit.tokens)


def _detach(kit: Kit) -> None:
    swd.attach(kit.model, kit.factors).detach()


def _detach_by_name(kit: Kit) -> None:
    swd.attach(kit.model, kit.factors)
    swd.detach(kit.model)


def _edit(kit: Kit) -> None:
    with edit_of(kit):
        pass


def _factorize(kit: Kit, calibration: str) -> None:
    how = {"tokens": kit.tokens, "calibration": calibration, "outer_iterations": 2, "progress": False}
    swd.factorize(kit.model, "blocks.*.mlp_out", sparsity=0.5, **how)


def _finetune(kit: Kit, autocast: str | None) -> None:
    how = {"steps": 1, "batch_size": 2, "learning_rate": 1e-3, "autocast": autocast, "progress": False}
    swd.finetune(kit.model, kit.factors, kit.tokens[:2], heldout=kit.tokens[:1], **how)


_edits: dict[int, Any] = {}


def edit_of(kit: Kit) -> Any:
    if id(kit) not in _edits:
        _edits[id(kit)] = swd.edit_unit(kit.model, kit.factors, "blocks.1.mlp_out/1", kit.tokens[0], 9, 11, 1.5)
    return _edits[id(kit)]


NAMED: dict[str, Callable[[Kit], Any]] = {
    "attach": _attach,
    "detach": _detach,
    "detach(model)": _detach_by_name,
    "edit": _edit,
    "attribute": Kit.attribute,
    "evaluate": lambda kit: swd.evaluate(kit.model, kit.factors, kit.task, kit.scores, random_sets=0),
    "fidelity": CALLS["fidelity"],
    "factorize": lambda kit: _factorize(kit, "sequential"),
    "factorize corrected": lambda kit: _factorize(kit, "corrected"),
    "refine": lambda kit: swd.refine(kit.model, kit.factors, kit.task.train, kit.scores, rounds=0),
    "audit": CALLS["audit"],
    "finetune": lambda kit: _finetune(kit, None),
    "finetune under its own autocast": lambda kit: _finetune(kit, "bfloat16"),
}


def surrounding(model: Any) -> tuple[Any, ...]:
    """Everything that a call changes and must give back."""
    calls = surroundings._thread.call is None, len(surroundings._calls), len(surroundings._settings)
    modes = [parameter.requires_grad for parameter in model.parameters()], [m.training for m in model.modules()]
    hooks = [(name, len(point.fwd_hooks), len(point.bwd_hooks)) for name, point in model.hook_dict.items()]
    settings = state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT), model.context_level
    return everything(model), modes, hooks, settings, calls, model in holding._holders


def differences(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[str]:
    """Which parts differ."""
    names = ("host", "modes", "hooks", "settings", "calls", "holder")
    return [name for name, one, other in zip(names, before, after, strict=True) if one != other]


class Sender:
    """Another process that sends SIGINTs to this one, for a with block; outside of `during` they do nothing."""

    def __enter__(self) -> "Sender":
        command = [sys.executable, "-S", "-c", _SENDER, str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.armed, self.former = False, signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        signal.signal(signal.SIGINT, self.former)

    def _receive(self, number: int, frame: Any) -> None:
        if self.armed:
            raise KeyboardInterrupt

    def during(self, call: Callable[[], Any], delays: list[float]) -> bool:
        """Run a call with SIGINTs after these delays, each from the one before; whether one of them ended it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        ended = False
        try:
            try:
                self.armed = True
                self.process.stdin.write(" ".join(map(str, delays)) + "\n")
                self.process.stdin.flush()
                call()
            finally:
                self.armed = False
        except KeyboardInterrupt:
            ended = True
        self.armed = False
        self.process.stdout.readline()
        return ended


def drawn(rng: random.Random, calls: list[str], lengths: Mapping[tuple[str, str], Any]) -> tuple[str, str, int]:
    """A host, a call and a line of it."""
    kind, name = rng.choice(HOSTS), rng.choice(calls)
    return kind, name, rng.randint(1, lengths[kind, name][0])


def at_a_line(name: str, kit: Kit, at: int) -> list[str]:
    """What Ctrl-C before this line of a call leaves changed."""
    before = surrounding(kit.model)
    with suppress(KeyboardInterrupt):
        run_to_line(lambda: NAMED[name](kit), at, WHOLE, EVENTS)
    return differences(before, surrounding(kit.model))


def at_moments(name: str, kit: Kit, sender: Sender, delays: list[float]) -> tuple[list[str], bool]:
    """What SIGINTs after these delays leave changed, and whether one ended the call."""
    before = surrounding(kit.model)
    ended = sender.during(lambda: NAMED[name](kit), delays)
    return differences(before, surrounding(kit.model)), ended


def main() -> None:
    """Run what the command line says, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=200, help="injections at random lines")
    parser.add_argument("--every", action="store_true", help="every line of the calls, in place of random ones")
    parser.add_argument("--times", type=int, default=200, help="attempts with one to three real signals")
    parser.add_argument("--calls", nargs="+", default=list(NAMED))
    parser.add_argument("--seconds", type=float, default=600.0, help="of both together")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rng, until = random.Random(given.seed), time.monotonic() + given.seconds
    lengths: dict[tuple[str, str], tuple[int, float]] = {}
    for kind in HOSTS:
        for name in given.calls:
            NAMED[name](kit_of(kind))
            start = time.perf_counter()
            NAMED[name](kit_of(kind))
            seconds = time.perf_counter() - start
            lengths[kind, name] = run_to_line(lambda n=name, k=kind: NAMED[n](kit_of(k)), None, WHOLE, EVENTS), seconds
    print({" ".join(key): lines for key, (lines, _) in lengths.items()}, flush=True)
    counts, failed = Counter[str](), 0
    places = (
        ((kind, name, at) for (kind, name), (n_lines, _) in lengths.items() for at in range(1, n_lines + 1))
        if given.every
        else (drawn(rng, given.calls, lengths) for _ in range(given.lines))
    )
    for number, (kind, name, at) in enumerate(places):
        if time.monotonic() > until - 0.2 * given.seconds * (given.times > 0):
            break
        if left := at_a_line(name, kit_of(kind), at):
            failed += 1
            print(f"line {number}: {kind} {name} before line {at}: {left}", flush=True)
            renew(kind)
        counts[f"{kind} line"] += 1
    with Sender() as sender:
        for number in range(given.times):
            kind, name = rng.choice(HOSTS), rng.choice(given.calls)
            first = rng.uniform(0, 1.1 * lengths[kind, name][1])
            more = [rng.uniform(2e-5, 3e-3) for _ in range(rng.randint(0, 2))]
            if time.monotonic() > until:
                break
            left, ended = at_moments(name, kit_of(kind), sender, [first, *more])
            if left:
                failed += 1
                print(f"time {number}: {kind} {name} after {first:.4f} s and {more}: {left}", flush=True)
                renew(kind)
            counts[f"{kind} {1 + len(more)} signals"] += 1
            counts["ended"] += ended
    print(dict(counts), f"{failed} left something changed", f"{threading.active_count()} threads", flush=True)
    sys.exit(failed > 0)


def renew(kind: str) -> None:
    """Another host, after one was left changed."""
    kit_of.cache_clear()
    _edits.clear()
    for backend_setting in (lambda: torch.set_default_dtype(torch.float32), lambda: torch.set_grad_enabled(True)):
        backend_setting()


if __name__ == "__main__":
    assert metadata.version("transformer_lens")
    main()
