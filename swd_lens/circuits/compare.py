"""compare: several replacements of one host on several tasks, through the same code; comparison.py holds what that gives.

1. A method is a replacement, or several seeds of one (SVD is one, Random-B ten); each may be given as a callable that makes
   it when its turn comes, so that dense sets need not be in memory together.
2. For each replacement: fidelity on held-out tokens, then per task attribution on the train split and nested prefixes on
   the test split.
3. Several positions or ablations: the same replacements under each; scores are shared by the ablations of the same positions.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from itertools import product
from types import MappingProxyType
from typing import Any

from torch import nn

from swd_lens.base.checks import one_of
from swd_lens.base.errors import legible, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.attribution import attribute
from swd_lens.circuits.comparison import ROLES, TOLERANCE, Comparison, TaskComparison
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.evaluate import evaluate
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.circuits.protocol import Protocol, run_protocol
from swd_lens.solver import PRESETS
from swd_lens.tasks.task import Task
from swd_lens.units.factors import Factors


@with_torch_defaults
def compare(
    model: Any,
    methods: Any,
    tasks: Task | Sequence[Task],
    *,
    tokens: Any = None,
    reference: str | None = None,
    tolerance: float | int = TOLERANCE,
    roles: Mapping[str, str] | None = None,
    fidelities: Mapping[str, Any] | None = None,
    attribution: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    positions: str | Sequence[str] = "scoring",
    ablation: str | Sequence[str] = "mean",
    hosts: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Comparison:
    """Run the circuit protocol for several replacements (paper §3.2): same prompts, same scores, same prefixes.

    Args:
        model: the host, with these sites not attached.
        methods: name -> factors (see `swd_lens.attach`), or a callable without arguments that makes them, or a list of
            either: seeds of one method, drawn as mean and band. Every callable is called once.
        tasks: one or several, tokenized for this host.
        tokens: (rows, pos) held-out ids on which CE and KL of every replacement are measured; None: they are not matched, and
            the result says so.
        reference: the method whose CE and KL the others are matched to; None = the first.
        tolerance: nats of CE, and of KL, that a matched method may be worse by, beyond two standard errors (paper: 0.001 of CE).
        roles: method -> "swd", "control", "paper" or "trained", where factors do not say it themselves (`role_of`).
        fidelities: name of a curve ("SVD", "Random-B/0") -> its `Fidelity`, where it was measured already.
        attribution, evaluation: further options for `attribute` and `evaluate`, which draws no random sets unless told to.
        positions, ablation: see `attribute` and `evaluate`; several of either are combined: the first of both is the result,
            the rest are its `others`.
        hosts: method -> its host, where that is not `model`: a sparsely pretrained one beside a tuned replacement, say (paper
            §full-model). It must have the tasks' tokens; CE is compared as it is, differences from another dense model have no
            paired standard error.
        progress: show a bar over replacements.

    Raises:
        TypeError: methods that are no mapping, something among the tasks that is no Task, or an unknown option.
        ValueError: no method, no task, two tasks of one name, two curves of one name, an unknown reference, a fidelity of no
            curve, or no positions or ablation.
        AttachError: see `swd_lens.attach`.
    """
    tasks = check_tasks(tasks)
    check_options(attribution, evaluation)
    sources, _ = sources_of(methods)
    measured, given_roles = dict(fidelities or {}), dict(roles or {})
    if unknown := [name for name in measured if name not in sources]:
        unknown, names = (legible(", ".join(map(repr, of))) for of in (unknown, sources))
        raise ValueError(f"fidelities are of {unknown}, but the curves are called {names}")
    reference = next(iter(methods)) if reference is None else reference
    one_of("reference", reference, methods)
    for method, role in given_roles.items():
        one_of("methods of roles=", method, methods)
        one_of(f"roles= of {quoted(method)}", role, ROLES)
    protocol = Protocol(
        model,
        tasks,
        tokens,
        positions=several((attribution or {}).get("positions", positions), "positions"),
        ablations=several((evaluation or {}).get("ablation", ablation), "ablation"),
        attribution=attribution or {},
        evaluation=evaluation or {},
        progress=progress,
    )
    known = {method: role_of(given) for method, given in methods.items()} | given_roles
    how = {"reference": reference, "measured": measured, "tolerance": tolerance, "roles": known}
    return comparison_over_hosts(protocol, methods, hosts or {}, **how)


def comparison_over_hosts(protocol: Protocol, methods: Mapping[str, Any], hosts: Mapping[str, Any], **how: Any) -> Comparison:
    """`comparison_of` where some methods have hosts of their own; the protocol's comes first. Raises ValueError: a host of no
    method, or no method on the protocol's own host."""
    own = {name: source for name, source in methods.items() if name not in hosts}
    if not own or set(hosts) - set(methods):
        raise ValueError(
            f"hosts= names {legible(', '.join(hosts))}, methods are {legible(', '.join(methods))}: name methods, and leave "
            "one at least to the model itself"
        )
    measured, roles = how.pop("measured", {}), how.pop("roles", {})

    def on(run: Protocol, given: Mapping[str, Any]) -> Comparison:
        sources, groups = sources_of(given)
        known = {name: each for name, each in measured.items() if name in sources}
        return comparison_of(run, sources, groups, measured=known, roles={n: roles[n] for n in given if n in roles}, **how)

    compared = on(protocol, own)
    for name, host in hosts.items():
        compared = compared.beside(on(replace(protocol, model=host, dense=DenseCache()), {name: methods[name]}))
    return compared


def comparison_of(
    protocol: Protocol,
    sources: Mapping[str, Any],
    groups: Mapping[str, tuple[str, ...]],
    *,
    reference: str,
    measured: Mapping[str, Fidelity] = MappingProxyType({}),
    tolerance: float | int = TOLERANCE,
    roles: Mapping[str, str] = MappingProxyType({}),
) -> Comparison:
    """Run the protocol for these replacements, and make a comparison of it; see `compare`."""
    outcomes = run_protocol(protocol, sources, measured)
    tasks = [task.name for task in protocol.tasks]
    first, *others = (
        Comparison(
            {t: TaskComparison(t, outcomes.curves[t, where, kind], outcomes.scores[t, where]) for t in tasks},
            groups,
            outcomes.fidelities,
            reference,
            tolerance,
            dict(roles),
        )
        for where, kind in product(protocol.positions, protocol.ablations)
    )
    return replace(first, others=tuple(others))


def role_of(given: Any) -> str:
    """The role of a method, from what made its units: trained, pruned or exact controls, the paper's solver, or SWD. given:
    factors, seeds of them, or what makes them (which is not made for this: it counts as SWD)."""
    first = given[0] if isinstance(given, list | tuple) and given else given
    values = list(first.values()) if isinstance(first, Mapping) else [first]
    unit = values[0] if values else None
    if not isinstance(unit, Factors):
        channels = getattr(unit, "provenance", {}).get("method") == "channels"
        return "control" if channels else "trained" if hasattr(unit, "d_in") or isinstance(unit, nn.Module) else "swd"
    preset = str(unit.settings.get("preset"))
    return PRESETS[preset].role if preset in PRESETS else "control" if "method" in unit.settings else "swd"


def several(given: Any, name: str) -> tuple[str, ...]:
    """One name or several, each once. Raises ValueError where there is none."""
    names = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
    if not names:
        raise ValueError(f"{legible(name)}= names nothing: pass one name or several")
    return names


def check_tasks(tasks: Any) -> list[Task]:
    """One task or several as a list. Raises TypeError: something else than tasks; ValueError: none, or two of one name."""
    if isinstance(tasks, Mapping | str) or not isinstance(tasks, Iterable | Task):
        hint = "; pass list(tasks.values())" if isinstance(tasks, Mapping) else ""
        raise TypeError(f"tasks must be a Task or a list of them, got {legible(reprlib.repr(tasks))}{legible(hint)}")
    listed = [tasks] if isinstance(tasks, Task) else list(tasks)
    for task in listed:
        if not isinstance(task, Task):
            raise TypeError(
                f"every task must be a Task, got {legible(reprlib.repr(task))}; make one with swd_lens.load_task(name, "
                "model) or Task.from_prompts(...)"
            )
    names = [task.name for task in listed]
    if not names:
        raise ValueError("no task to compare on: pass a Task, or several")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two tasks are called {legible(', '.join(map(repr, twice)))}; results are kept by name: rename one")
    return listed


def check_options(attribution: Mapping[str, Any] | None, evaluation: Mapping[str, Any] | None) -> None:
    """A TypeError where `attribute` or `evaluate` has no such option; before any work, rather than after the first method."""
    for what, options, of in (("attribution", attribution, attribute), ("evaluation", evaluation, evaluate)):
        valid = [p.name for p in signature(of).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
        if unknown := [name for name in options or {} if name not in valid]:
            named = ", ".join(map(repr, unknown))
            raise TypeError(f"{legible(what)}= has no option {legible(named)}; {of.__name__} takes {', '.join(valid)}")


def sources_of(methods: Any) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Name of a curve -> factors or what makes them, and the methods that have seeds."""
    if not isinstance(methods, Mapping):
        raise TypeError(f'methods must be a mapping {{"name": factors, ...}}, got a {type(methods).__name__}')
    if not methods:
        raise ValueError('nothing to compare: pass {"name": factors, ...}')
    sources: dict[str, Any] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for method, given in methods.items():
        seeded = isinstance(given, list | tuple)
        named = {f"{method}/{seed}": source for seed, source in enumerate(given)} if seeded else {method: given}
        if not named:
            raise ValueError(f"{quoted(method)} has no seeds: pass its factors, or a list of at least one")
        if twice := sorted(set(named) & set(sources)):
            raise ValueError(f"two curves are called {legible(', '.join(map(repr, twice)))}: rename a method")
        sources |= named
        if seeded:
            groups[method] = tuple(named)
    return sources, groups
