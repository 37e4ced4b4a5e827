"""Two to four threads on one or two hosts: right numbers or a HostInUseError. `python -m tests.fuzz.threads --help`.

In a round every thread does a few things, one after the other, each on a host that the round has: plain forwards, attachments
with forwards in them (with hooks and a cache as well), and calls. What comes back must be what one thread alone gets, to the
bit; of errors only HostInUseError may come. Afterwards every host is what it was. (Outside of attachments no thread hangs hooks
into a host: any other thread's forward runs them, with or without swd_lens.)
"""

import argparse
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are tiny
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import swd_lens as swd
from swd_lens.base import holding
from tests.hosts.test_interrupts import everything
from tests.test_surroundings import CALLS, HOSTS, Kit, plain

SWITCH = 1e-5  # seconds a thread runs before another one may: many more meetings than at Python's own 5 ms


SHORT = 0.1  # seconds that a forward waits for a call, for more rounds


def _attached(kit: Kit) -> tuple[torch.Tensor, torch.Tensor]:
    with swd.attach(kit.model, kit.factors) as attachment:
        inside = kit.model(kit.tokens)
        with attachment.dense():
            return inside, kit.model(kit.tokens)


def _looked_into(kit: Kit) -> tuple[torch.Tensor, torch.Tensor]:
    point = "blocks.1.hook_mlp_out_unit"
    with swd.attach(kit.model, kit.factors):
        cache = kit.model.run_with_cache(kit.tokens)[1]
        return cache[point], kit.model.run_with_hooks(kit.tokens, fwd_hooks=[(point, lambda z, hook: z * 1.5)])


THINGS: dict[str, Callable[[Kit], Any]] = {
    "forward": lambda kit: kit.model(kit.tokens),
    "forwards": lambda kit: [kit.model(kit.tokens) for _ in range(4)],  # of one shape: a bridge keeps its last one's
    "attach": _attached,
    "attach, with hooks": _looked_into,
    "sites": lambda kit: [site.name for site in swd.find_sites(kit.model)],
    "attribute": CALLS["attribute"],
    "fidelity": CALLS["fidelity"],
    "audit": CALLS["audit"],
}
# Forwards most: they asked nobody before.
WEIGHTS = (6, 4, 4, 3, 2, 2, 2, 1)


class Hosts:
    """Two hosts of every kind with what each thing gives on them in one thread."""

    def __init__(self) -> None:
        self.kits = {kind: (Kit(kind), Kit(kind)) for kind in HOSTS}
        with torch.no_grad():
            for kits in self.kits.values():
                for kit in kits:
                    kit.model(kit.tokens)
            self.wanted = {
                (kind, i, name): plain(thing(kit))
                for kind, kits in self.kits.items()
                for i, kit in enumerate(kits)
                for name, thing in THINGS.items()
            }

    def round(self, rng: random.Random, things: int = 4) -> Counter[str]:
        """What came of one round: "right", "refused", "wrong: ...", "error: ...", "changed: ..."."""
        kind, n_hosts, n_threads = rng.choice(HOSTS), rng.randint(1, 2), rng.randint(2, 4)
        kits, counts, go = self.kits[kind], Counter[str](), threading.Barrier(n_threads)
        before = [everything(kit.model) for kit in kits]
        plans = [
            [(rng.randrange(n_hosts), name) for name in rng.choices(list(THINGS), WEIGHTS, k=things)] for _ in range(n_threads)
        ]

        def run(plan: list[tuple[int, str]]) -> None:
            go.wait()
            for i, name in plan:
                counts[self._outcome(kind, i, name)] += 1

        threads = [threading.Thread(target=run, args=(plan,)) for plan in plans]
        former = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(former)
        for kit, was in zip(kits, before, strict=True):
            if everything(kit.model) != was or kit.model in holding._holders:
                counts[f"changed: {kind}"] += 1
        return counts

    def _outcome(self, kind: str, i: int, name: str) -> str:
        try:
            with torch.no_grad():
                got = plain(THINGS[name](self.kits[kind][i]))
        except swd.errors.HostInUseError:
            return "refused"
        except Exception as error:
            return f"error: {kind} {name} {type(error).__name__}: {error}"
        return "right" if got == self.wanted[kind, i, name] else f"wrong: {kind} {name}"


def main() -> None:
    """Run what the command line says, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rng, until, counts, done = random.Random(given.seed), time.monotonic() + given.seconds, Counter[str](), 0
    hosts, holding.WAIT_FOR_CALL = Hosts(), SHORT
    while done < given.rounds and time.monotonic() < until:
        counts += hosts.round(rng)
        done += 1
    print(f"{done} rounds", dict(counts), flush=True)
    sys.exit(bool(set(counts) - {"right", "refused"}))


if __name__ == "__main__":
    main()
