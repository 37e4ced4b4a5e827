"""run_truth: every method on every matrix whose units are known, in one table.

1. `cases` lists what there is: planted matrices, the attn_o matrices of compiled hosts, matrices of trained toys.
2. Each case and method is a step: the method's answer, its distance from the true units, and on compiled hosts how well the
   answer's unit scores tell each program's circuit from the rest. With a folder finished steps are read, not made again.
3. `TruthTable` has the rows, says in words what they show, and is saved as JSON.

Methods are told the number of true units and of their entries, unless the case says otherwise.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import one_of
from swd_lens.base.errors import SolveInputError
from swd_lens.base.interrupted import reached, says_when_interrupted
from swd_lens.base.progress import tqdm
from swd_lens.base.record import SavedRecord
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits.attribution import attribute
from swd_lens.truth.compiled import PROGRAMS, SITES, Compiled, compiled
from swd_lens.truth.methods import DENSE, METHODS, Answer, Problem, answer
from swd_lens.truth.planted import Plant, planted
from swd_lens.truth.scores import TrueUnits, circuit_aurocs, column_mmcs, mmcs, relative_error, support_f1, trimmed
from swd_lens.truth.toys import PUBLISHED, Toy, residual_mlp, superposition
from swd_lens.units.factors import Factors

PARTS = ("planted", "compiled", "toys")
_ABOUT = ("part", "case", "method")
_NUMBERS = ("units", "edges", "F1", "MMCS", "error", "unit AUROC", "edge AUROC", "row MMCS", "ML2R", "seconds")
COLUMNS = (*_ABOUT, *_NUMBERS)
FILE = "truth.json"
# Methods of many seconds a matrix -> the planted and compiled cases in which they take part; at toys they do in all.
COSTLY = {
    "SWD deep": ("plain", "noise .1", "outputs rotated", "axes", "rotated", "rotated, in answers' coordinates"),
    "dictionary learning": ("plain", "noise .1", "outputs rotated", "axes", "rotated"),
    "transcoder": ("plain",),
    "VPD": ("plain",),
}
_BASE = Plant(64, 32, 32, 6, 6)
# Case -> the matrix, and what methods are told: edges and units, as multiples of the true ones.
_PLANTS: dict[str, tuple[Plant, float, float]] = {
    "plain": (_BASE, 1, 1),
    "4 + 4 entries": (replace(_BASE, reads=4, writes=4), 1, 1),
    "10 + 10 entries": (replace(_BASE, reads=10, writes=10), 1, 1),
    "16 units": (replace(_BASE, units=16), 1, 1),
    "64 units": (replace(_BASE, units=64), 1, 1),
    "noise .02": (replace(_BASE, noise=0.02), 1, 1),
    "noise .1": (replace(_BASE, noise=0.1), 1, 1),
    "noise .3": (replace(_BASE, noise=0.3), 1, 1),
    "noise .02, K x 0.5": (replace(_BASE, noise=0.02), 0.5, 1),
    "noise .02, K x 2": (replace(_BASE, noise=0.02), 2, 1),
    "noise .02, units x 0.5": (replace(_BASE, noise=0.02), 1, 0.5),
    "noise .02, units x 1.5": (replace(_BASE, noise=0.02), 1, 1.5),
    "outputs rotated": (replace(_BASE, rotation="outputs"), 1, 1),
    "both sides rotated": (replace(_BASE, rotation="both"), 1, 1),
}
# Case -> how the host is compiled, and whether W is taken apart in the coordinates of the unembedding.
_HOSTS: dict[str, tuple[dict[str, Any], bool]] = {
    "axes": ({"noise": 0.01}, False),
    "axes, noise .1": ({"noise": 0.1}, False),
    "rotated": ({"noise": 0.01, "rotated": True}, False),
    "rotated, in answers' coordinates": ({"noise": 0.01, "rotated": True}, True),
}
_TOYS: dict[str, Callable[[int], Toy]] = {
    "TMS 5-2": lambda seed: superposition(5, 2, seed=seed),
    "TMS 40-10": lambda seed: superposition(40, 10, seed=seed),
    "residual MLP": lambda seed: residual_mlp(seed=seed),
}
_SAMPLES = 8192


@dataclass(frozen=True, repr=False)
class TruthTable(SavedRecord):
    """Each method's findings on matrices whose units are known.

    Attributes:
        rows: part, case, method; units and edges of the answer; F1 of supports, MMCS of rank-one pieces, relative error of W; on
            compiled hosts unit and edge AUROC, the means over four programs; on toys the MMCS and ML2R of the decomposition
            papers; seconds. Means over matrices and seeds. NaN where a number has no meaning, or a method refused.
        toys: name -> loss, reference, and the published MMCS and ML2R (NaN where none is).
        settings: seeds, methods; plain values.
    """

    WHAT: ClassVar[str] = "a table of known units"
    rows: pd.DataFrame
    toys: Mapping[str, Mapping[str, float]]
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        rows = self.rows.astype(dict.fromkeys(_NUMBERS, float))  # a column without any number comes from JSON as None
        object.__setattr__(self, "rows", rows)

    def table(self, part: str | None = None) -> pd.DataFrame:
        """The rows of a part, or all; columns that mean nothing there are left out.

        Raises:
            ValueError: an unknown part.
        """
        if part is None:
            return self.rows.copy()
        one_of("part", part, PARTS)
        of_part: Any = self.rows[self.rows["part"] == part].drop(columns="part")
        return of_part.dropna(axis="columns", how="all").reset_index(drop=True)

    def in_words(self) -> str:
        """Say what the table shows: where SWD's units are the true ones, and where they are not."""
        said = []
        for part, case, what in (
            ("planted", "plain", "planted, no noise"),
            ("planted", "noise .1", "planted, noise .1"),
            ("planted", "outputs rotated", "planted, outputs rotated"),
            ("compiled", "axes", "compiled on the axes"),
            ("compiled", "rotated", "compiled, rotated"),
        ):
            rows: Any = self.rows[(self.rows["part"] == part) & (self.rows["case"] == case)]
            of = rows.dropna(subset=["F1"]).set_index("method")
            others = of.drop(index=[name for name in of.index if name.startswith("SWD")])
            if "SWD" in of.index and len(others):
                rival = others["F1"].idxmax()
                numbers = f"F1 {of['F1']['SWD']:.2f}, MMCS {of['MMCS']['SWD']:.2f}"
                said.append(f"{what}: SWD {numbers}; best of the others: {rival}, {others['F1'][rival]:.2f}.")
        return " ".join(said)

    def title(self) -> str:
        return f"Known units: {self.rows['case'].nunique()} cases, {self.rows['method'].nunique()} methods"

    def __repr__(self) -> str:
        return f"{self.title()}\n{self.in_words()}"


@dataclass(frozen=True)
class _Case:
    """A row's worth of matrices: site or "" -> problem and truth; lift takes found write vectors back to W's coordinates."""

    problems: Mapping[str, Problem]
    truths: Mapping[str, TrueUnits]
    host: Compiled | None = None
    lift: Tensor | None = None
    toy: Toy | None = None


@says_when_interrupted
@with_torch_defaults
def run_truth(
    parts: Sequence[str] = PARTS,
    *,
    methods: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    seeds: int = 2,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> TruthTable:
    """Take apart matrices whose units are known, by every method, and say how near each comes.

        table = swd.truth.run_truth(["planted"], methods=["SWD", "SVD", "neurons"])
        print(table.table("planted"))

    Args:
        parts: of PARTS: "planted", "compiled", "toys".
        methods: of METHODS; None: all.
        cases: names of cases; None: all of the parts.
        seeds: matrices per planted case. Compiled hosts and toys are made once; costly methods have one
            matrix of each of their cases (COSTLY).
        out: a folder for finished steps and truth.json; the same call goes on there after an interruption. Methods, cases and
            parts may be added.
        overwrite: start again. progress: show a bar.

    Raises:
        ValueError: an unknown part, method or case.
        ImportError: dictionary learning without scikit-learn.
        ResumeError: `out` holds steps of another version or seeds.
        OSError: (FolderInUseError) another call writes `out`; or it cannot be written.

    Source: ours (evidence.md §5).
    """
    names = {"planted": _PLANTS, "compiled": _HOSTS, "toys": _TOYS}
    for part in parts:
        one_of("part", part, PARTS)
    for case in cases or ():
        one_of("case", case, [name for part in parts for name in names[part]])
    for method in methods or ():
        one_of("method", method, METHODS)
    steps = []
    for part in parts:
        chosen = [case for case in names[part] if cases is None or case in cases]
        for case, method in product(chosen, methods or METHODS):
            # A costly method takes part in some planted and compiled cases, with one matrix each.
            costly = method in COSTLY and part != "toys"
            n = int(case in COSTLY[method]) if costly else seeds if part == "planted" else 1
            steps += [(part, case, method, seed) for seed in range(n)]
    folder = None if out is None else Path(out)
    rows: list[dict[str, Any]] = []
    toys: dict[str, dict[str, float]] = {}
    with nullcontext() if folder is None else writing(folder, "truth"):
        cache = StepCache(folder, {"swd_lens": __version__}, overwrite=overwrite)
        made = lru_cache(2)(lambda part, case, seed: _case(part, case, seed, cache))
        for done, (part, case, method, seed) in enumerate(tqdm(steps, desc="truth", unit="answer", disable=not progress)):
            about = {"part": part, "case": case, "method": method, "seed": seed}
            key, measure = (part, case, method, str(seed)), partial(_measured, partial(made, part, case, seed), method, cache)
            rows.append({**about, **cache.values(key, measure, dict)})
            reached(f", {done + 1} of {len(steps)} answers finished")
            if part == "toys" and case not in toys:
                toys[case] = cache.values((part, case, "loss"), lambda c=case, s=seed: _losses(made("toys", c, s)), dict)
        # One row per case and method, in the order in which they were made.
        numbers = pd.DataFrame(rows).reindex(columns=list(COLUMNS)).astype(dict.fromkeys(_NUMBERS, float))
        means: Any = numbers.groupby(list(_ABOUT), sort=False)[list(_NUMBERS)].mean()
        table = TruthTable(means.reset_index(), toys, {"seeds": seeds, "parts": list(parts), "swd_lens": __version__})
        if folder is not None:
            table.save(folder / FILE)
    return table


# ---------------------------------------------------------------------------------------------- cases


def _case(part: str, case: str, seed: int, cache: StepCache) -> _Case:
    if part == "planted":
        plant, more_edges, more_units = _PLANTS[case]
        drawn = planted(plant, seed)
        # Normal values at a twentieth of the places: what learned methods want, as few units are then at work.
        g = torch.Generator().manual_seed(seed + 1)
        inputs = torch.randn(_SAMPLES, plant.d_in, generator=g) * (torch.rand(_SAMPLES, plant.d_in, generator=g) < 0.05)
        told = round(more_edges * 2 * plant.units * (plant.reads + plant.writes) / 2), round(more_units * plant.units)
        return _Case({"": Problem(drawn.weight, drawn.gram, *told, inputs)}, {"": drawn})
    if part == "compiled":
        return _compiled_case(*_HOSTS[case])
    toy = _trained_toy(case, seed, cache)
    problem = Problem(toy.weight, toy.gram, toy.truth.edges, toy.truth.n_units, toy.inputs, toy.bias)
    return _Case({"": problem}, {"": toy.truth}, toy=toy)


def _compiled_case(how: Mapping[str, Any], through_answers: bool) -> _Case:
    """Both attn_o matrices of a compiled host, with the inputs that its prompts give them."""
    host = compiled(**how)
    lift, along = None, torch.eye(host.model.cfg.d_model)
    if through_answers:
        along = torch.nn.functional.normalize(host.model.unembed.W_U.detach(), dim=0)
        along = along[:, along.norm(dim=0) > 0.5]  # the answers; other tokens are never predicted
        lift = torch.linalg.pinv(along)
    problems, truths = {}, {}
    for layer, site in enumerate(SITES):
        weight = host.model.blocks[layer].attn.W_O.detach().flatten(0, 1) @ along
        true = host.truths[site]
        write = true.write @ along
        # Without what rounding leaves where turning there and back should leave zeros.
        truths[site] = TrueUnits(true.read, write * (write.abs() > 1e-5))
        name, taken = f"blocks.{layer}.attn.hook_z", []  # at every position of the training prompts, (pos, d_in)
        for row in (row for task in host.tasks.values() for row in task.train.tokens):
            with torch.no_grad():
                host.model.run_with_hooks(row[None], fwd_hooks=[(name, lambda z, hook, to=taken: to.append(z[0].flatten(1)))])
        rotated = host.rotation is not None and not through_answers
        # The budget of a rotated host, whose true vectors are dense, is that of the same host before it was turned.
        edges = compiled().truths[site].edges if rotated else truths[site].edges
        problems[site] = Problem(weight.contiguous(), None, edges, true.n_units, torch.cat(taken))
    return _Case(problems, truths, host=host, lift=lift)


def _trained_toy(case: str, seed: int, cache: StepCache) -> Toy:
    """The toy, trained now or in an earlier call."""

    def make() -> tuple[dict[str, Tensor], dict[str, Any]]:
        toy = _TOYS[case](seed)
        tensors = {"weight": toy.weight, "gram": toy.gram, "inputs": toy.inputs}
        tensors |= {} if toy.bias is None else {"bias": toy.bias}
        return tensors, {"loss": toy.loss, "reference": None if math.isnan(toy.reference) else toy.reference}

    def read(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Toy:
        truth = TrueUnits(torch.eye(len(tensors["weight"])), tensors["weight"].clone())
        reference = math.nan if values["reference"] is None else values["reference"]
        found = tensors["weight"], truth, tensors["gram"], tensors["inputs"]
        return Toy(case, *found, values["loss"], reference, tensors.get("bias"))

    return cache.tensors(("toy", case, str(seed)), make, read)


def _losses(case: _Case) -> dict[str, Any]:
    assert case.toy is not None
    published = dict(zip(("published MMCS", "published ML2R"), PUBLISHED.get(case.toy.name, (math.nan, math.nan)), strict=True))
    return {"loss": case.toy.loss, "reference": case.toy.reference, **published}


# ---------------------------------------------------------------------------------------------- measures


def _measured(make: Callable[[], _Case], method: str, cache: StepCache) -> dict[str, Any]:
    """A method's answers to a case's matrices, measured; means over these, sums of units and edges."""
    case, began = make(), time.perf_counter()
    try:
        answers = {site: answer(method, problem, cache) for site, problem in case.problems.items()}
    except SolveInputError:
        return {}  # it knows no such factors: NaN in the table
    seconds = time.perf_counter() - began
    found = {
        site: trimmed(a.read, a.write, case.problems[site].edges) if method in DENSE else (a.read, a.write)
        for site, a in answers.items()
    }
    mean: dict[str, list[float]] = {"F1": [], "MMCS": [], "error": []}
    for site, problem in case.problems.items():
        mean["F1"].append(support_f1(case.truths[site], *found[site]))
        mean["MMCS"].append(mmcs(case.truths[site], answers[site].read, answers[site].write))
        mean["error"].append(relative_error(problem.weight, *found[site], problem.gram))
    row: dict[str, Any] = {name: sum(values) / len(values) for name, values in mean.items()}
    row["units"] = sum(a.read.shape[1] for a in answers.values())
    row["edges"] = sum(int(a.count_nonzero() + b.count_nonzero()) for a, b in found.values())
    if case.host is not None:
        row |= _circuits(case, answers, found)
    if case.toy is not None:
        a = answers[""]
        row["row MMCS"], row["ML2R"] = column_mmcs(case.toy.weight, a.read, a.write)
    return {**row, "seconds": seconds}


def _circuits(case: _Case, answers: Mapping[str, Answer], found: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Unit and edge AUROC of ablation scores against the programs' circuits, means over the programs.

    First-order scores see no unit that a saturated attention reads: gradients through it are zero.
    """
    assert case.host is not None
    units, pairs = {}, []
    for site, a in answers.items():
        weight = case.host.model.blocks[SITES.index(site)].attn.W_O.detach().flatten(0, 1).contiguous()
        write = a.write if case.lift is None else a.write @ case.lift
        units[site] = Factors(a.read.contiguous(), write.contiguous(), {}, {}, weight)
    for program in PROGRAMS:
        scores = attribute(case.host.model, units, case.host.tasks[program], score="ablation", positions="all").scores
        pairs.append(circuit_aurocs(case.truths, case.host.circuits[program], found, scores))
    of_units, of_edges = zip(*pairs, strict=True)
    return {"unit AUROC": sum(of_units) / len(pairs), "edge AUROC": sum(of_edges) / len(pairs)}
