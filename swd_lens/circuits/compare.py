"""compare: several replacements of one host on several tasks, through the same code.

1. A method is a replacement, or several seeds of one (SVD is one, Random-B ten); each may be given as a callable that makes
   it when its turn comes, so that dense sets need not be in memory together.
2. For each replacement: fidelity on held-out tokens, then per task attribution on the train split and nested prefixes on
   the test split.
3. The result (comparison.py) says which replacements behave alike enough for their circuits to be compared.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from swd_lens.circuits.attribution import attribute
from swd_lens.circuits.comparison import TOLERANCE, Comparison, TaskComparison
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.fidelity import fidelity
from swd_lens.circuits.frontier import evaluate
from swd_lens.circuits.scores import UnitScores
from swd_lens.tasks.task import Task

__all__ = ["TOLERANCE", "Comparison", "TaskComparison", "check_tasks", "compare"]


def compare(
    methods: Mapping[str, Any],
    model: Any,
    tasks: Task | Sequence[Task],
    *,
    tokens: Any = None,
    reference: str | None = None,
    tolerance: float | int = TOLERANCE,
    fidelities: Mapping[str, Any] | None = None,
    attribution: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    positions: str = "scoring",
    ablation: str = "mean",
    progress: bool = False,
) -> Comparison:
    """Run the circuit protocol for several replacements (paper §3.2): same prompts, same scores, same prefixes.

    Args:
        methods: name -> factors (see `swd_lens.attach`), or a callable without arguments that makes them, or a list of
            either: seeds of one method, drawn as mean and band. Every callable is called once.
        model: the host, with these sites not attached.
        tasks: one or several, tokenized for this host.
        tokens: (rows, pos) held-out ids on which the CE of every replacement is measured; None: CE is not matched, and the
            result says so.
        reference: the method whose CE the others are matched to; None = the first.
        tolerance: nats of CE within which replacements count as matched (paper: 0.001).
        fidelities: name of a curve ("SVD", "Random-B/0") -> its `Fidelity`, where it was measured already.
        attribution, evaluation: further options for `attribute` and `evaluate`.
        positions, ablation: see `attribute` and `evaluate`.
        progress: show a bar over replacements.

    Raises:
        TypeError: methods that are no mapping, something among the tasks that is no Task, or an unknown option.
        ValueError: no method, no task, two tasks of one name, two curves of one name, an unknown reference, or a fidelity of
            no curve.
        AttachError: see `swd_lens.attach`.
    """
    chosen = check_tasks(tasks)
    check_options(attribution, evaluation)
    sources, groups = _sources(methods)
    measured = dict(fidelities or {})
    if unknown := [name for name in measured if name not in sources]:
        names = ", ".join(map(repr, sources))
        raise ValueError(f"fidelities are of {', '.join(map(repr, unknown))}, but the curves are called {names}")
    reference = next(iter(methods)) if reference is None else reference
    if reference not in methods:
        raise ValueError(f"reference {reference!r} is not among the methods: {', '.join(map(repr, methods))}")
    scores: dict[str, dict[str, UnitScores]] = {task.name: {} for task in chosen}
    curves: dict[str, dict[str, CostCurve]] = {task.name: {} for task in chosen}
    for name, source in tqdm(sources.items(), desc="compare", unit="replacement", disable=not progress, leave=False):
        factors = source() if _makes(source) else source
        if tokens is not None and name not in measured:
            measured[name] = fidelity(model, factors, tokens)
        for task in chosen:
            found = attribute(model, factors, task, **{"positions": positions, **(attribution or {})})
            scores[task.name][name] = found
            curves[task.name][name] = evaluate(
                model, factors, task, found, **{"ablation": ablation, **(evaluation or {})}
            )
    by_task = {task: TaskComparison(task, curves[task], scores[task]) for task in curves}
    return Comparison(by_task, groups, measured, reference, tolerance)


def check_tasks(tasks: Any) -> list[Task]:
    """One task or several as a list.

    Raises:
        TypeError: something else than tasks.
        ValueError: none, or two of one name.
    """
    if isinstance(tasks, Mapping | str) or not isinstance(tasks, Iterable | Task):
        hint = "; pass list(tasks.values())" if isinstance(tasks, Mapping) else ""
        raise TypeError(f"tasks must be a Task or a list of them, got {reprlib.repr(tasks)}{hint}")
    chosen = [tasks] if isinstance(tasks, Task) else list(tasks)
    for task in chosen:
        if not isinstance(task, Task):
            made = "swd_lens.load_task(name, model) or Task.from_prompts(...)"
            raise TypeError(f"every task must be a Task, got {reprlib.repr(task)}; make one with {made}")
    names = [task.name for task in chosen]
    if not names:
        raise ValueError("no task to compare on: pass a Task, or several")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two tasks are called {', '.join(map(repr, twice))}; results are kept by name: rename one")
    return chosen


def check_options(attribution: Mapping[str, Any] | None, evaluation: Mapping[str, Any] | None) -> None:
    """A TypeError where `attribute` or `evaluate` has no such option; before any work, rather than after the first method."""
    for what, options, of in (("attribution", attribution, attribute), ("evaluation", evaluation, evaluate)):
        valid = [name for name, its in signature(of).parameters.items() if its.kind is Parameter.KEYWORD_ONLY]
        if unknown := [name for name in options or {} if name not in valid]:
            named = ", ".join(map(repr, unknown))
            raise TypeError(f"{what}= has no option {named}; {of.__name__} takes {', '.join(valid)}")


def _sources(methods: Any) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
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
            raise ValueError(f"{method!r} has no seeds: pass its factors, or a list of at least one")
        if twice := sorted(set(named) & set(sources)):
            raise ValueError(f"two curves are called {', '.join(map(repr, twice))}: rename a method")
        sources |= named
        if seeded:
            groups[method] = tuple(named)
    return sources, groups


def _makes(source: Any) -> bool:
    """A function that makes factors; a transcoder, being a module, can be called as well but is a source itself."""
    return callable(source) and not isinstance(source, Mapping | nn.Module)
