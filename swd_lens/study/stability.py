"""stability: whether the units that carry a task are the same ones when what should not matter is changed.

1. The base: factors of one matrix from a random half of the text, scores on the training prompts, and the cheapest prefix that
   recovers enough on the validation prompts. The claim is that these units carry the task.
2. Variations of it, one thing at a time, round the axes (variations.py): solver's start, draw of text, draw of prompts,
   templates, sparsity, preset, width, amount of text, another text.
3. Of each run: its units matched one to one with the base's (units/similarity.py); its own circuit, found as the base's was,
   beside the base's (edges in common, claims that recur, what both write); and on the test prompts what the counterparts of the
   claimed units recover, beside random units of as many edges, and what ablating them does to the task and to a re-paired one.
   That is the same prompts with answers dealt to others: it keeps the prompts, the answers and how often each is right.
4. Null runs, measured in the same way: factors of a matrix with W's singular values and random singular vectors (same Gram,
   budget and solver) in place of the run's, random units of as many edges in place of the circuit.
5. The card (stability_card.py): criteria whose thresholds are fixed beforehand, and the verdict.

Each run is a part of the call (base/step_cache.py): with `out`, the same call after an interruption goes on behind the last
finished one, and a call with more runs adds to them.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import TaskError, TokenError, quoted
from swd_lens.base.fingerprints import splits_fingerprint
from swd_lens.base.interrupted import reached, says_when_interrupted
from swd_lens.base.progress import tqdm
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits.attribution import attribute
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.evaluate import evaluate, evaluate_circuits, random_set
from swd_lens.circuits.measure import RECOVERED, Threshold
from swd_lens.circuits.scores import UnitScores
from swd_lens.factorization.calibration_text import grams_of
from swd_lens.factorization.checkpoint import host_fingerprint, tokens_fingerprint
from swd_lens.factorization.factorize import factorize
from swd_lens.factorization.solve import solve
from swd_lens.hosts import Host, find_sites, host_of, require_no_dropout
from swd_lens.hosts.recording import record, standing_hooks
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.solver.spec import PRESETS, AnnealSpec
from swd_lens.study.stability_card import MEASURES, OF_NULLS, Stability
from swd_lens.study.variations import AXES, Base, Variation, planned
from swd_lens.tasks.split import TaskSplit
from swd_lens.tasks.task import Task
from swd_lens.tasks.text import as_rows
from swd_lens.units import attach
from swd_lens.units.attach import require_free
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.similarity import UnitMatch, edge_jaccard, match_units

RUNS, NULLS = 36, 4
ALIKE = 0.5  # a claimed unit's counterpart is the same unit only where it is at least so alike
_RANDOM_SETS, _DEALS = 5, 16  # of random units, and of answers dealt to other prompts, per run
_BATCH = 256  # prompts per forward
FILE = "stability.json"


@says_when_interrupted
@with_torch_defaults
def stability(
    model: Any,
    site: Pattern,
    task: Task,
    *,
    tokens: Any,
    vary: Sequence[str] = tuple(AXES),
    n: int = RUNS,
    nulls: int = NULLS,
    corpora: Mapping[str, Any] | None = None,
    sparsity: float | int = 0.75,
    preset: str = DEFAULT_PRESET,
    recovered: float | int = RECOVERED,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **solver: Any,
) -> Stability:
    """Factorize one matrix again and again, one thing changed at a time, and see whether a task's units stay the same.

    Args:
        model: the host, with this site not attached.
        site: one matrix.
        task: tokenized for this host; its margin, not a metric of its own.
        tokens: (rows, pos) calibration ids, of which each draw takes half.
        vary: axes, of AXES: "start", "data", "prompts", "templates", "sparsity", "preset", "units", "tokens", "corpus". Those
            that have nothing to vary here are left out; the card says why.
        n: runs beside the base, going round the axes. The default is what the verdict needs to stand still
            (tests/benchmarks/RESULTS.md).
        nulls: null runs.
        corpora: name -> (rows, pos) other texts, for the axis "corpus".
        sparsity, preset, solver: the base's, see `swd_lens.factorize`.
        recovered: how much of what the site carries a circuit has to recover.
        seed: of all draws.
        out: a folder that gets every run as soon as it is measured, and the card (stability.json) in the end. The same call after
            an interruption goes on from there; another n or other nulls may be asked of it.
        overwrite: start again, in place of what `out` holds.
        progress: show a bar over runs.

    Returns:
        Stability. Numbers of a circuit are on the test prompts; circuits are chosen on the validation prompts.

    Raises:
        ValueError: not one site, no axis or an unknown one, n below 2, nothing that can be varied, or the base's units do not
            carry the task, or no prefix of theirs recovers so much of it.
        TaskError: a task with a metric in the margin's place: answers could not be dealt to other prompts.
        TokenError: tokens or prompts of another host, or a single row of text.
        UnknownSiteError, UnsupportedHostError, AttachError: see `swd_lens.factorize`.
        ResumeError: `out` holds runs of another question; every difference is named.
        OSError: `out` cannot be written (a FolderInUseError: another call writes it).
    """
    bounded("n, the number of runs,", n, 2)
    bounded("nulls", nulls, 0)
    matrix, pool = _checked(model, site, task, tokens, vary)
    other = {name: as_rows(rows, model) for name, rows in (corpora or {}).items()}
    options = {"sparsity": sparsity, "preset": preset, **solver}
    question = {"swd_lens": __version__, "the host": host_fingerprint(model), "site": matrix.name}
    question |= {"the task": splits_fingerprint(task.splits), "tokens": tokens_fingerprint(pool), "recovered": recovered}
    question |= {"seed": seed, **standing_hooks(model)}
    # Further texts may be added to a call that is there.
    growing = {"corpora": {name: tokens_fingerprint(rows) for name, rows in other.items()}}
    folder = None if out is None else Path(out)
    with nullcontext() if folder is None else writing(folder, "stability"):
        parts = StepCache(folder, {**question, "solver": options}, growing, overwrite=overwrite)
        base = _Measured(model, matrix, task, parts, folder, float(recovered), overwrite)
        base.prepare(Base(pool, task.train, options, 0, other, seed))
        variations, left_out = planned(base.base, list(dict.fromkeys(vary)), n)
        if len(variations) < 2:
            reasons = "; ".join(f"{axis}: {reason}" for axis, reason in left_out.items())
            raise ValueError(f"fewer than two runs can be made along {', '.join(vary)} ({reasons}); name further axes")
        runs, null_runs = base.all_runs(variations, nulls, progress)
        about = {**question, **options, "model": str(model.cfg.model_name), "basis": base.base.options.get("basis")}
        about |= {"n_train": len(task.train), "n_test": len(task.test), "vary": list(vary)}
        about |= {"tokens of a draw": base.base.n_rows * pool.shape[1]}
        about |= {"runs": len(runs), "nulls": nulls, "a counterpart is at least alike": ALIKE}
        card = Stability(task.name, matrix.name, base.claimed, base.numbers, runs, null_runs, left_out, about)
        if folder is not None:
            card.save(folder / FILE)
    return card


def _checked(model: Any, site: Pattern, task: Task, tokens: Any, vary: Sequence[str]) -> tuple[Site, Int[Tensor, "_rows _pos"]]:
    """The one matrix and the text, when units of it can be varied along these axes; see `stability`."""
    for axis in vary:
        one_of("vary", axis, AXES)
    sites = find_sites(model, site)
    if len(sites) != 1:
        raise ValueError(f"{quoted(site)} names {len(sites)} sites; stability is of one matrix's units")
    if task.test.metric is not None:
        raise TaskError(f"task {quoted(task.name)} has a metric in the margin's place, which has no answers to re-pair")
    require_no_dropout(model)
    require_free(host_of(model), sites)
    pool = as_rows(tokens, model)
    if len(pool) < 2:
        raise TokenError("stability draws halves of the text: give at least two rows of tokens")
    return sites[0], pool


@dataclass
class _Measured:
    """The base of a stability study, and what every run is held against.

    Attributes:
        recovered: how much a circuit has to recover.
        base: the setting, once prepared; factors, gram, scores, claimed: what came of it.
    """

    model: Any
    site: Site
    task: Task
    parts: StepCache
    folder: Path | None
    recovered: float
    overwrite: bool
    dense: DenseCache = field(default_factory=DenseCache)
    numbers: dict[str, float] = field(default_factory=dict)

    def prepare(self, base: Base) -> None:
        """Run the base setting.

        Raises:
            ValueError: its units do not carry the task, or recover too little.
        """
        place = None if self.folder is None else self.folder / "base"
        setting = base.setting
        text = base.text(setting.rows, self.model)
        how = {"progress": False, "out": place, "overwrite": self.overwrite}
        made = factorize(self.model, self.site.name, tokens=text, **how, **setting.options)
        self.factors: Factors = made[self.site.name]
        self.gram = grams_of(self.model, [self.site], text)[self.site.name]
        basis = self.factors.settings.get("basis")
        # All runs start from the side that the base was told: what text says of it is no variation of ours.
        # "neurons" is a word of `factorize`'s for one of the sides that the solver knows.
        anneals = isinstance(PRESETS.get(str(base.options["preset"])), AnnealSpec)
        told = {"basis": basis} if anneals or base.options.get("basis") == "neurons" else {}
        options = {**base.options, **told}
        self.base = Base(base.pool, base.train, options, self.factors.n_units, base.corpora, base.seed, base._texts)
        self.scores = attribute(self.model, made, base.train, dense=self.dense)
        curve = evaluate(self.model, made, self.task.validation, self.scores, random_sets=0, dense=self.dense)
        self.circuit = curve.circuit_at(recovered=self.recovered)
        self.claimed = [unit for _, unit in self.circuit.units]
        if not self.circuit.n_edges:
            raise ValueError(
                f"the empty circuit recovers {self.recovered:g} of what {self.site.name} carries of {quoted(self.task.name)}: "
                "there are no units to make a claim of"
            )
        alike = torch.ones(self.factors.n_units, dtype=torch.float64)
        identity = UnitMatch(torch.arange(self.factors.n_units), alike, alike)
        found = self._of_units(made, self.scores, self.claimed, self.claimed, identity, "base", 0)
        self.numbers = {**found, "units": float(len(self.claimed))}

    def all_runs(self, variations: Sequence[Variation], nulls: int, progress: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Measure all runs and null runs, or take over what is finished of them."""
        rows: list[dict[str, Any]] = []
        null_rows: list[dict[str, Any]] = []
        total = len(variations) + nulls
        with tqdm(total=total, desc=f"stability of {self.task.name}", unit="run", disable=not progress, leave=False) as bar:
            for variation in variations:
                bar.set_postfix_str(" ".join(variation.key))
                found = self.parts.values(("run", *variation.key), partial(self.run, variation), dict)
                rows.append({"axis": variation.axis, "value": str(variation.value), **found})
                reached(f", {len(rows)} of {total} runs measured")
                bar.update()
            for k in range(nulls):
                bar.set_postfix_str(f"null {k}")
                found = self.parts.values(("null", str(k)), partial(self.null_run, k), dict)
                null_rows.append({"axis": "null", "value": str(k), **found})
                reached(f", {len(rows) + len(null_rows)} of {total} runs measured")
                bar.update()
        columns = ["axis", "value", "carries", *MEASURES]
        return pd.DataFrame(rows, columns=columns), pd.DataFrame(null_rows, columns=[*columns, *OF_NULLS])

    # ------------------------------------------------------------------ a run

    def run(self, variation: Variation) -> dict[str, Any]:
        """One variation: its numbers, by the names of `MEASURES`."""
        setting = variation.setting(self.base)
        made = FactorSet({self.site.name: self.factors})  # the base's, where nothing of the setting bears on factors
        if setting.refits:
            text = self.base.text(setting.rows, self.model)
            made = factorize(self.model, self.site.name, tokens=text, progress=False, **setting.options)
        f = made[self.site.name]
        match = match_units(self.factors, f, self.gram)
        scores = attribute(self.model, made, setting.train, dense=self.dense)
        curve = evaluate(self.model, made, self.task.validation, scores, random_sets=0, dense=self.dense)
        reached_by = curve.row_of(Threshold("recovered", self.recovered), "edges") if curve.carries else None
        own = [] if reached_by is None else [unit for _, unit in scores.ranking()[: int(reached_by["units"])]]
        numbers = self._of_units(made, scores, match.partners(self.claimed), own, match, *variation.key)
        return {"carries": bool(curve.carries), **numbers}

    def null_run(self, k: int) -> dict[str, Any]:
        """Null run k: units of a matrix with W's singular values alone, and random units of the base in the circuit's place."""
        generator = torch.Generator().manual_seed(self.base.seed * 7919 + k)
        fake, turned = self._spectrum_matched(generator, k + 1)
        match = match_units(self.factors, fake, self.gram)
        drawn = _random_units(fake, self.circuit.n_edges, generator)
        units = _random_units(self.factors, self.circuit.n_edges, generator)
        base = FactorSet({self.site.name: self.factors})
        numbers = self._of_units(base, self.scores, units, units, match, "null", k)
        atoms = match_units(self.factors, _random_atoms(self.factors, generator), self.gram)
        numbers |= self._compared(fake, drawn, match)
        across = math.nan if turned is None else float(match_units(fake, turned, self.gram).similarity.mean())
        beside = {"similarity of atoms": float(atoms.similarity.mean()), "similarity across starts": across}
        return {"carries": True, **numbers, **beside}

    def _spectrum_matched(self, generator: torch.Generator, seed: int) -> tuple[Factors, Factors | None]:
        """Factors of a matrix of W's singular values and random singular vectors, made as the base's were; and from a rotated
        start, where the solver has one.
        """
        weight = host_of(self.model).weight(self.site).detach().cpu().double()
        values = torch.linalg.svdvals(weight)
        # As many orthonormal vectors on either side, uniformly drawn.
        drawn = (torch.randn(n, len(values), generator=generator, dtype=torch.float64) for n in weight.shape)
        left, right = (q * r.diagonal().sign() for q, r in map(torch.linalg.qr, drawn))
        matrix = ((left * values) @ right.T).float()
        settings = {key: value for key, value in self.base.options.items() if key not in _NOT_OF_THE_SOLVER}
        settings |= {"gram": self.gram.cpu(), "tokens": self.base.n_rows * self.base.pool.shape[1]}
        plain = solve(matrix, **settings)
        rotates = isinstance(PRESETS.get(str(self.base.options["preset"])), AnnealSpec)
        return plain, solve(matrix, **{**settings, "start": "rotated", "seed": seed}) if rotates else None

    # ------------------------------------------------------------------ what a run is measured by

    def _of_units(
        self,
        made: FactorSet,
        scores: UnitScores,
        claimed: list[int],
        own: list[int],
        match: UnitMatch,
        axis: str,
        value: int | str,
    ) -> dict[str, float]:
        """All numbers of a run: its units beside the base's, and what they do on test prompts.

        Args:
            claimed: counterparts of the base's claimed units.
            own: the run's own circuit.
        """
        f, site = made[self.site.name], self.site.name
        # A seed of its own for a run, the same on every machine.
        digest = hashlib.sha256(repr((self.base.seed, axis, str(value))).encode()).digest()
        draws = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        random = [_random_units(f, self.circuit.n_edges, draws) for _ in range(_RANDOM_SETS)]
        sets = {"claimed": claimed, **{f"random {i}": units for i, units in enumerate(random)}}
        circuits = {name: Circuit.of(made, scores, [(site, unit) for unit in units]) for name, units in sets.items()}
        rows = evaluate_circuits(self.model, made, self.task.test, circuits, dense=self.dense).set_index("circuit")
        # Margin that ablating the circuit takes off, in logits: of the task, and the mean of |it| over re-paired ones.
        host = host_of(self.model)
        with attach(self.model, made):
            full = _logits(host, self.task.test)
            with self.model.hooks(fwd_hooks=circuits["claimed"].hooks("ablate")):
                without = _logits(host, self.task.test)
        drop, repaired = re_paired(full - without, self.task.test, self.base.seed)
        return {
            **self._compared(f, own, match),
            "recovered": float(rows.loc["claimed", "recovered"]),
            "random recovered": float(rows["recovered"].iloc[1:].mean()),
            "drop": drop,
            "re-paired drop": repaired,
        }

    def _compared(self, f: Factors, own: list[int], match: UnitMatch) -> dict[str, float]:
        """Units and circuit of a run beside the base's; nothing here runs the host."""
        inside = set(own)
        recurs = [int(match.partner[u]) in inside and float(match.similarity[u]) >= ALIKE for u in self.claimed]
        # Cosine, over test prompts, of what the base's circuit and a run's write (the sum of z_i B_i, less its mean).
        ours, its = (
            self._inputs @ of.read[:, units].cpu().double() @ of.write[units].cpu().double()
            for of, units in ((self.factors, self.claimed), (f, own))
        )
        norm = float(ours.norm() * its.norm())
        return {
            "similarity": float(match.similarity.mean()),
            "similarity of claimed": float(match.similarity[self.claimed].mean()),
            "similarity by number": float(match.by_number.mean()),
            "contribution": float((ours * its).sum()) / norm if norm > 0 else 0.0,
            "edges shared": edge_jaccard(self.factors, self.claimed, f, own, match),
            "claims recurring": sum(recurs) / len(recurs),
            "edges": float(f.edges_per_unit[own].sum()) if own else 0.0,
        }

    @cached_property
    def _inputs(self) -> Float[Tensor, "prompt d_in"]:
        """Inputs of the site at the scoring position of every test prompt, less the mean: no run changes it."""
        host, inputs = host_of(self.model), torch.zeros(len(self.task.test), self.site.d_in, dtype=torch.float64)
        for bucket in self.task.test.buckets(_BATCH):
            seen = record(host, bucket.tokens, inputs=[self.site], keep=lambda h: h[:, -1].double().cpu())
            inputs[bucket.index] = seen.inputs[self.site.name]
        return inputs - inputs.mean(0)


_NOT_OF_THE_SOLVER = ("calibration", "batch_size", "gram_dtype", "weigh_outputs", "device", "workers", "threads")


def re_paired(lost: Float[Tensor, "prompt answer"], split: TaskSplit, seed: int) -> tuple[float, float]:
    """Mean margin that is lost, and the mean over deals of |the mean margin lost| when answers are dealt to other prompts.

    A deal gives each prompt the answers and distractors of another one; prompts, answers and their frequencies stay.

    Args:
        lost: logits, of `split.token_ids`, that something takes off.
        seed: of the deals.
    """
    weights = torch.zeros_like(lost)
    for bucket in split.buckets(_BATCH):
        weights[bucket.index] = (bucket.answers - bucket.distractors).double()
    generator = torch.Generator().manual_seed(seed)
    n, dealt = len(split), []
    for _ in range(_DEALS):
        order = torch.randperm(n, generator=generator)
        dealt.append(abs(float((lost[order] * weights[order.roll(1)]).sum(1).mean())))  # nobody keeps their own
    return float((lost * weights).sum(1).mean()), sum(dealt) / len(dealt)


def _logits(host: Host, split: TaskSplit) -> Float[Tensor, "prompt answer"]:
    """Logits of the split's answers and distractors behind each prompt, in the host as it is now."""
    assert split.token_ids is not None
    logits = torch.zeros(len(split), len(split.token_ids), dtype=torch.float64)
    with torch.no_grad():
        for bucket in split.buckets(_BATCH):
            logits[bucket.index] = host.last_logits(bucket.tokens, token_ids=bucket.token_ids).double().cpu()
    return logits


def _random_units(f: Factors, n_edges: int, generator: torch.Generator) -> list[int]:
    """Random units of at most so many edges in all."""
    return random_set(f.edges_per_unit.cpu() * f.valid_units.cpu(), n_edges, generator).nonzero()[:, 0].tolist()


def _random_atoms(f: Factors, generator: torch.Generator) -> Factors:
    """Atoms with as many nonzeros in each read and write vector, normal values at random places."""

    def scattered(counts: Tensor, width: int) -> Float[Tensor, "unit width"]:
        order = torch.rand(len(counts), width, generator=generator, dtype=torch.float32).argsort(1).argsort(1)
        return torch.randn(len(counts), width, generator=generator, dtype=torch.float32) * (order < counts[:, None])

    reads, writes = (f.read != 0).sum(0).cpu(), (f.write != 0).sum(1).cpu()
    return Factors(scattered(reads, f.d_in).T.contiguous(), scattered(writes, f.d_out))
