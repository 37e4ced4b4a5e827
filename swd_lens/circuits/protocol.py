"""The circuit protocol for several replacements: what `compare` runs, with nothing run twice.

1. Replacements that a callable makes are made when their turn comes, as many at a time as a bound on their bytes allows.
2. The fidelities of those that are in memory together are measured together: the dense host runs once for all of them.
3. Per replacement, task and positions: attribution; per ablation besides: nested prefixes. What the dense host gives on the
   prompts is kept from one replacement to the next (dense_cache.py).
4. Each fidelity, score and curve is a part of the call (base/step_cache.py): what is finished is taken over, and a replacement of
   which everything is finished is not made.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from swd_lens.base.progress import tqdm
from swd_lens.base.step_cache import Key, StepCache
from swd_lens.circuits.attribution import attribute
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.dense_cache import DenseCache, kept_curve, kept_scores
from swd_lens.circuits.evaluate import evaluate
from swd_lens.circuits.fidelity import Fidelity, fidelities
from swd_lens.circuits.scores import UnitScores
from swd_lens.tasks.task import Task
from swd_lens.units.factors import Factors
from swd_lens.units.unit_set import UnitSet

# Of replacements that callables make, in memory together; one at least.
_MADE_BYTES = 2**29
# Random sets, for the smallest admissible prefix, take more runs than all prefixes: they are drawn where they are asked for.
_EVALUATION: Mapping[str, Any] = {"random_sets": 0}


@dataclass(frozen=True)
class Protocol:
    """The runs for every replacement.

    Attributes:
        tokens: held-out text for fidelity; None measures none.
        attribution, evaluation: options of `attribute` and `evaluate`, without positions and ablation.
        parts, key: what is finished, and the beginning of its keys there.
        on_step: called with a line of text before each step.
        dense: what the dense host gives on the prompts.
    """

    model: Any
    tasks: Sequence[Task]
    tokens: Any
    positions: Sequence[str]
    ablations: Sequence[str]
    attribution: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    progress: bool = False
    parts: StepCache = field(default_factory=lambda: StepCache(None))
    key: Key = ()
    on_step: Callable[[str], None] = lambda text: None
    dense: DenseCache = field(default_factory=DenseCache)

    def key_of(self, *what: str) -> Key:
        """Key of one of its parts."""
        return (*self.key, *what)


@dataclass
class Outcomes:
    """Results by name of a replacement; scores also by (task, positions), curves by ablation besides."""

    fidelities: dict[str, Fidelity]
    scores: dict[tuple[str, str], dict[str, UnitScores]] = field(default_factory=lambda: defaultdict(dict))
    curves: dict[tuple[str, str, str], dict[str, CostCurve]] = field(default_factory=lambda: defaultdict(dict))


def run_protocol(protocol: Protocol, sources: Mapping[str, Any], measured: Mapping[str, Fidelity]) -> Outcomes:
    """Run it for each replacement. sources: name -> replacement, or what makes it; measured: fidelities that are known."""
    outcomes, model, parts = Outcomes(dict(measured)), protocol.model, protocol.parts
    shared = {"progress": protocol.progress, "dense": protocol.dense}
    for group in _groups(protocol, sources, measured):
        # 1. The fidelities that are not known, in one pass over the text.
        names = [] if protocol.tokens is None else [name for name in group if name not in outcomes.fidelities]
        keys = {name: protocol.key_of("fidelity", name) for name in names}
        new: dict[str, Fidelity] = {}
        if missing := {name: group[name] for name in names if keys[name] not in parts}:
            protocol.on_step(f"fidelity of {', '.join(missing)}")
            new = fidelities(model, missing, protocol.tokens, progress=protocol.progress)
        for name in names:
            if parts.folder is None:
                outcomes.fidelities[name] = new[name]
            else:
                outcomes.fidelities[name] = parts.values(
                    keys[name], lambda of=new, name=name: of[name].as_dict(), Fidelity.from_dict
                )
        # 2. Scores and curves of each replacement.
        protocol.on_step(f"circuits of {', '.join(group)}")
        total = len(group) * len(protocol.tasks) * len(protocol.positions)
        with tqdm(total=total, desc="compare", unit="curve", disable=not protocol.progress, leave=False) as bar:
            for name, units in group.items():
                for task, where in product(protocol.tasks, protocol.positions):
                    how = {**shared, **protocol.attribution, "positions": where}
                    score = partial(attribute, model, units, task, **how)
                    ranked = kept_scores(parts, protocol.key_of("scores", name, task.name, where), score, units)
                    outcomes.scores[task.name, where][name] = ranked
                    for kind in protocol.ablations:
                        how = {**shared, **_EVALUATION, **protocol.evaluation, "ablation": kind}
                        measure, key = partial(evaluate, model, units, task, ranked, **how), (name, task.name, where, kind)
                        curve = kept_curve(parts, protocol.key_of("curve", *key), ranked, measure)
                        outcomes.curves[task.name, where, kind][name] = curve
                    bar.update()
    order = list(sources)
    outcomes.fidelities = dict(sorted(outcomes.fidelities.items(), key=lambda item: order.index(item[0])))
    return outcomes


def _groups(
    protocol: Protocol, sources: Mapping[str, Any], measured: Mapping[str, Fidelity]
) -> Iterator[dict[str, UnitSet | None]]:
    """Replacements that are in memory together, in order; None for one of which every part is finished."""
    group: dict[str, UnitSet | None] = {}
    n_bytes = 0
    for name, source in sources.items():
        # A module can be called, too, but a transcoder is a source itself.
        makes: Any = source if callable(source) and not isinstance(source, Mapping | nn.Module) else None
        if makes and all(key in protocol.parts for key in _keys(protocol, name, measured)):
            group[name] = None
            continue
        units = UnitSet.of(protocol.model, makes() if makes else source)
        group[name] = units
        if makes:
            n_bytes += sum(f.read.nbytes + f.write.nbytes for f in units.values() if isinstance(f, Factors))
        if n_bytes >= _MADE_BYTES:
            yield group
            group, n_bytes = {}, 0
    if group:
        yield group


def _keys(protocol: Protocol, name: str, measured: Mapping[str, Fidelity]) -> Iterator[Key]:
    """Keys of every part of one replacement."""
    if protocol.tokens is not None and name not in measured:
        yield protocol.key_of("fidelity", name)
    for task, where in product(protocol.tasks, protocol.positions):
        yield protocol.key_of("scores", name, task.name, where)
        for kind in protocol.ablations:
            yield protocol.key_of("curve", name, task.name, where, kind)
