"""replace_model: a whole surface replaced and repaired in one call. Budgets, factors, fine-tuning, what is left of the model.

1. Budgets: the same sparsity for every matrix, or the same total allocated over them (allocate.py).
2. Factors of every matrix (factorization/factorize.py), and their fidelity on held-out text.
3. Fixed-support fine-tuning of the nonzero values (finetune/), and the fidelity again: the share of the cross-entropy
   increase that was recovered.
4. Continuations of a few prompts, dense and replaced, side by side (generate.py).

With out= every step leaves its folder there, and the same call after an interruption goes on where it stopped.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base import __version__
from swd_lens.base.checks import one_of
from swd_lens.base.errors import SparsityError, TokenError, legible, quoted
from swd_lens.base.files import write_json, write_text
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.progress import Steps
from swd_lens.base.record import Record
from swd_lens.base.settings import AUTO
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits.fidelity import Fidelity, fidelities
from swd_lens.factorization.allocate import BY, allocate
from swd_lens.factorization.allocation import Allocation
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.factorization.factorize import factorize
from swd_lens.factorization.matrices import basis_asked
from swd_lens.hosts import find_sites
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Pattern
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.study.generate import Samples, generate, prompt_rows
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.text import as_rows
from swd_lens.train.finetune import finetune as finetune_factors
from swd_lens.train.finetune.run import is_of_other_factors
from swd_lens.train.finetune.spec import resolve as resolve_finetuning
from swd_lens.units.factors import FactorSet

BUDGETS = ("uniform", *BY)
DEFAULT = "default"
# What stands in `out`.
FACTORS, FINETUNED = "factors", "finetune"
NUMBERS, SAMPLES = "replacement.json", "samples.txt"
# Rows that allocation takes of a stream, in tokens: its Grams rank matrices, they do not make the final factors.
_ALLOCATION_TOKENS = 65_536
# On disk, from above: a value and where it stands; twice, and a checkpoint with moments of the values, where they are tuned.
_BYTES_PER_EDGE, _BYTES_PER_TUNED_EDGE = 8, 48
# Arguments of `swd_lens.finetune` that `finetune_options` may not hold, and those that are no settings of its recipe.
_OWN = ("out", "overwrite")
_BESIDE_RECIPE = ("preset", "progress", "heldout", "eval_every", "checkpoint_every")


@dataclass(frozen=True, repr=False)
class ModelReplacement(Record):
    """A replaced surface, before and after fine-tuning.

    Attributes:
        factors: as factorized.
        finetuned: the same supports with fine-tuned values; None without fine-tuning.
        before, after: fidelity on the held-out tokens; after is None without fine-tuning.
        allocation: None for uniform budgets.
        samples: continuations by the dense model and both replacements; None without prompts.
        settings: what was asked for; plain JSON values.
    """

    in_memory = ("factors", "finetuned")
    derived = ("recovered",)

    factors: FactorSet
    finetuned: FactorSet | None
    before: Fidelity
    after: Fidelity | None
    allocation: Allocation | None
    samples: Samples | None
    settings: Mapping[str, Any]

    @property
    def best(self) -> FactorSet:
        """The fine-tuned factors, where there are any."""
        return self.factors if self.finetuned is None else self.finetuned

    @property
    def recovered(self) -> float | None:
        """Share of the CE increase that fine-tuning took back: 1 - CE delta after / before; None without it, or without one."""
        if self.after is None or self.before.ce_delta <= 0:
            return None
        return 1.0 - self.after.ce_delta / self.before.ce_delta

    def table(self) -> pd.DataFrame:
        """One row per replacement: edges, sparsity and fidelity."""
        stages = [("factorized", self.factors, self.before), ("fine-tuned", self.finetuned, self.after)]
        rows = [
            {"replacement": name, "sites": len(f), "edges": f.edges, "s": f.sparsity} | measured.table().iloc[0].to_dict()
            for name, f, measured in stages
            if f is not None and measured is not None
        ]
        return pd.DataFrame(rows)

    def as_dict(self) -> dict[str, Any]:
        """Every number, as plain values."""
        return {**super().as_dict(), "edges": self.factors.edges, "sparsity": self.factors.sparsity}

    def write(self, folder: Path) -> None:
        """Write the numbers and the samples into a folder."""
        write_json(folder / NUMBERS, self.as_dict())
        if self.samples is not None:
            write_text(folder / SAMPLES, self.samples.side_by_side())

    def __repr__(self) -> str:
        return f"{self.title()}\n{self.table().to_string(index=False)}"

    def title(self) -> str:
        recovered = "" if self.recovered is None else f"; fine-tuning recovered {self.recovered:.1%} of the CE increase"
        n = len(self.factors)
        share = self.factors.share
        left = "" if share is None else f" ({share:.1%} of the entries of the blocks' matrices, the rest dense)"
        return f"ModelReplacement: {n} matrices{left}, {self.factors.edges:,} edges, s={self.factors.sparsity:.4f}{recovered}"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.allocation, self.samples


@says_when_interrupted
@with_torch_defaults
def replace_model(
    model: Any,
    sites: Pattern = "all",
    *,
    heldout: Any,
    sparsity: float | int | Mapping[str, float] = 0.5,
    tokens: Any = None,
    budgets: str | None = None,
    calibration: str | None = None,
    preset: str = DEFAULT_PRESET,
    finetune: str | None = DEFAULT,
    finetune_tokens: Any = None,
    finetune_options: Mapping[str, Any] | None = None,
    prompts: Any = (),
    max_new_tokens: int = 40,
    batch_size: int = 16,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda text: None,
    progress: bool = True,
    **options: Any,
) -> ModelReplacement:
    """Factorize a surface, fine-tune the values on their fixed supports, and measure (paper §full-model, app. swd-optimization).

    Args:
        model: the host.
        sites: the surface; "all" is every attention and MLP matrix.
        heldout: (rows, pos) ids that nothing was fitted on.
        sparsity: s in (0, 1); the total budget is that of this s in every matrix. A mapping site -> s is taken as it is.
        tokens: calibration tokens, see `swd_lens.factorize`; None = zero-data.
        budgets: "uniform", or allocated by "kl" or "error", see `swd_lens.allocate`. None: "kl", and "uniform" for the paper's
            preset, zero-data, a single matrix, and a mapping.
        calibration: see `swd_lens.factorize`. None: "corrected", and "sequential" for the paper's preset.
        preset: of the solver; "paper" also sets budgets, calibration and fine-tuning as the paper has them.
        finetune: preset of the fine-tuning, "best" or "paper"; "default": the one that goes with `preset`. None leaves it out.
        finetune_tokens: to fine-tune on; None = the calibration tokens.
        finetune_options: further arguments of `swd_lens.finetune` (passes=, learning_rate=, heldout=, ...).
        prompts: to be continued by the dense and the replaced model: strings or token rows, see `swd_lens.generate`.
        batch_size: rows per calibration forward.
        out: a folder for budgets, factors, fine-tuning, numbers and samples; the same call goes on from what is there.
        overwrite: start again in place of what `out` holds. Interrupted, the same call without it goes on.
        on_step: called with a line of text before each step (a `Steps` is told of all steps first); progress: bars within them.
        options: further arguments of `swd_lens.factorize` (calibration=, units=, workers=, outer_iterations=, ...). Unless
            `basis` says otherwise units start as the short side's coordinates, as of whole models the least error counts.

    Raises:
        ValueError: unknown budgets; fine-tuning without tokens; whatever the steps raise. Held-out text, prompts and the
            settings of fine-tuning are checked before the first of them.
        ResumeError: `out` holds something that was made otherwise.
        OSError: `out` cannot be written (a FolderInUseError: another call writes it); before any work.
    """
    # 1. What is asked for; what would fail only after the factors are made is refused here.
    names = [site.name for site in find_sites(model, sites)]
    asked = _settled(names, sparsity, tokens is not None, budgets, calibration, preset, finetune)
    if basis_asked(preset, options.get("units"), options) == AUTO:
        options.setdefault("basis", "paper")
    tuning, text = dict(finetune_options or {}), tokens if finetune_tokens is None else finetune_tokens
    _check_later_steps(model, heldout, prompts, asked["finetune"], tuning, text)
    steps = on_step if isinstance(on_step, Steps) else Steps(on_step, [], complete=False)
    kinds = ["allocate"] * (asked["budgets"] != "uniform") + ["factorize"] + ["tune"] * (asked["finetune"] is not None)
    steps.follow([*kinds, "fidelity", *["continue"] * (len(prompts) > 0)])
    call = _Call(model, names, asked, None if out is None else Path(out), overwrite, steps, progress)
    with call.held():
        # 2. and 3. Budgets and factors, whose values are tuned.
        how = {"batch_size": batch_size, **options}
        allocation = call.allocation(tokens, how) if asked["budgets"] != "uniform" else None
        factors = call.factors(tokens, allocation or sparsity, how)
        finetuned = None if asked["finetune"] is None else call.tuned(factors, text, tuning)
        # 4. Fidelity, together: the dense host runs once for both; and samples.
        steps("fidelity on held-out text")
        replaced = {"SWD": factors} | ({} if finetuned is None else {"SWD-FT": finetuned})
        measured, samples = fidelities(model, replaced, heldout, progress=progress), None
        if len(prompts):
            steps("continue the prompts")
            samples = generate(model, replaced, prompts, max_new_tokens=max_new_tokens, progress=progress)
        settings = {**asked, "options": _plain(options), "finetune_options": _plain(tuning), **standing_hooks(model)}
        replacement = ModelReplacement(factors, finetuned, measured["SWD"], measured.get("SWD-FT"), allocation, samples, settings)
        if call.folder is not None:
            replacement.write(call.folder)
        return replacement


# ---------------------------------------------------------------------------------------------- what is asked for


def _settled(
    names: list[str],
    sparsity: Any,
    calibrated: bool,
    budgets: str | None,
    calibration: str | None,
    preset: str,
    tuning: str | None,
) -> dict[str, Any]:
    """The arguments with what goes with the preset in place of None and "default". Raises ValueError: unknown budgets, or
    budgets to be shared out of sparsities that are given."""
    paper, given = preset == "paper", isinstance(sparsity, Mapping)
    if budgets is None:
        budgets = "uniform" if paper or given or not calibrated or len(names) == 1 else "kl"
    one_of("budgets", budgets, BUDGETS)
    if given and budgets != "uniform":
        raise SparsityError(f"sparsity is a mapping already; budgets={quoted(budgets)} needs one number whose total is spent")
    return {
        "swd_lens": __version__,
        "sites": names,
        "sparsity": dict(sparsity) if isinstance(sparsity, Mapping) else float(sparsity),
        "budgets": budgets,
        "calibration": calibration or ("sequential" if paper else "corrected"),
        "preset": preset,
        "finetune": ("paper" if paper else "best") if tuning == DEFAULT else tuning,
    }


def _check_later_steps(
    model: Any, heldout: Any, prompts: Any, finetune: str | None, finetune_options: Mapping[str, Any], text: Any
) -> None:
    """Refuse what would fail only after the factors are made."""
    if finetune is not None and text is None:
        raise ValueError("fine-tuning needs finetune_tokens= (zero-data factors have no tokens); or finetune=None")
    if heldout is None:
        raise TokenError("heldout=None: give token rows that nothing is fitted on; what is left of the model is measured there")
    as_rows(heldout, model)
    if len(prompts):
        prompt_rows(model, prompts)
    if own := [name for name in _OWN if name in finetune_options]:
        raise ValueError(f"finetune_options holds {legible(', '.join(own))}, which replace_model sets itself; leave it out")
    if finetune is not None:
        recipe = {key: value for key, value in finetune_options.items() if key not in _BESIDE_RECIPE}
        resolve_finetuning(finetune_options.get("preset", finetune), recipe)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, str | int | float | bool | None) else str(value) for key, value in options.items()}


# ---------------------------------------------------------------------------------------------- the work


@dataclass(frozen=True)
class _Call:
    """One call of `replace_model`, and the steps that leave something in its folder."""

    model: Any
    names: list[str]  # of the sites
    asked: Mapping[str, Any]  # see `_settled`
    folder: Path | None
    overwrite: bool
    steps: Steps
    progress: bool

    def held(self) -> AbstractContextManager[Any]:
        """Hold the folder, if there is one, with room for what it will take; of one that holds some the steps know better."""
        if self.folder is None:
            return nullcontext()
        s, n_bytes = self.asked["sparsity"], 0
        if isinstance(s, float) and not (self.folder / FACTORS).exists():
            edges = max(0.0, 1.0 - s) * sum(site.numel for site in find_sites(self.model, self.names))
            n_bytes = int(edges * (_BYTES_PER_EDGE if self.asked["finetune"] is None else _BYTES_PER_TUNED_EDGE))
        return writing(self.folder, "replace_model", n_bytes)

    def allocation(self, tokens: Any, options: Mapping[str, Any]) -> Allocation:
        """Share out the budget, now or earlier; text of its own length ranks the matrices, it does not make the final factors.
        Raises ResumeError: the folder holds the budgets of another call."""
        rows = None
        if tokens is not None:
            stream = as_stream(tokens, self.model)
            n_rows = max(1, _ALLOCATION_TOKENS // stream.row_length)
            rows = next(iter(stream.batches(min(n_rows, stream.n_rows))))
        how = {name: value for name, value in options.items() if name in ("units", "basis", "batch_size")}
        how |= {"by": self.asked["budgets"]}
        question = {**how, "sites": self.names, "sparsity": self.asked["sparsity"]}
        question |= {"the host": host_fingerprint(self.model)}
        question |= {"tokens": None if rows is None else as_stream(rows, self.model).fingerprint()}

        def allocated() -> dict[str, Any]:
            self.steps(f"allocate the budget by {how['by']}")
            return allocate(self.model, self.names, self.asked["sparsity"], rows, progress=self.progress, **how).as_dict()

        cache = StepCache(self.folder, question, overwrite=self.overwrite)
        return cache.values(("budgets",), allocated, Allocation.from_dict)

    def factors(self, tokens: Any, sparsity: Any, options: Mapping[str, Any]) -> FactorSet:
        self.steps(f"factorize {len(self.names)} matrices")
        return factorize(
            self.model,
            self.names,
            sparsity=sparsity,
            tokens=tokens,
            calibration=self.asked["calibration"],
            preset=self.asked["preset"],
            progress=self.progress,
            out=None if self.folder is None else self.folder / FACTORS,
            overwrite=self.overwrite,
            **options,
        )

    def tuned(self, factors: FactorSet, text: Any, options: Mapping[str, Any]) -> FactorSet:
        """Tune the values; a folder of other factors is what an overwriting call that was interrupted has left."""
        self.steps("tune the values on their supports")
        out = None if self.folder is None else self.folder / FINETUNED
        overwrite = self.overwrite or (out is not None and is_of_other_factors(out, factors))
        how: dict[str, Any] = {"preset": self.asked["finetune"], "progress": self.progress, **options}
        return finetune_factors(self.model, factors, text, out=out, overwrite=overwrite, **how)
