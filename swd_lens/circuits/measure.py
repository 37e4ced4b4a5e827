"""Measure circuits: what a surface carries of a task, what a circuit recovers of that, and how sure both are.

1. `Margins` holds every prompt's margin: of the dense host, with all units (full), with every unit at its reference activation
   (empty), and with each circuit kept or ablated. Q is the mean over prompts (paper §3.2).
2. `Carried` says what the units do for the task: Q(full) - Q(empty), with the standard error of that difference over prompts.
   Where it is not above two standard errors and a twentieth of |Q(dense)|, the units do not carry the task, and nothing that
   is measured in shares of it means anything.
3. `measured` makes one row per circuit: recovered = (Q(S) - Q(empty)) / (Q(full) - Q(empty)), sufficiency = Q(S) / Q(full)
   (the paper's), drop = Q(full) - Q(ablate S) in logits, each with a confidence interval. For comparisons of methods there is
   "recovered of dense", with Q(dense) in the place of Q(full): a method that damages the margin gets no easier target by that.
4. A `Threshold` is a value that a circuit has to reach. It is linear in the margins (`contrast`), so that whether it is reached
   is whether a mean is above zero.
5. Intervals: over prompts, for means Student's t with Hall's allowance for skewness (`_reach`), for ratios of means Fieller's
   of the same (it takes the error of the denominator with it; where that could be zero there is no interval).
   tests/circuits/test_measure.py simulates what they cover: draws of further prompts about the same contents.
6. Prompts about the same name or year are alike. `by_content` makes values of contents of them, for which the same intervals
   are of draws of further contents.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from swd_lens.base import errors
from swd_lens.base.errors import UndefinedSufficiencyWarning, legible, quoted
from swd_lens.hosts.sites import split_name
from swd_lens.tasks.task import TaskSplit

LEVEL = 0.95  # of every interval
RECOVERED = 0.9  # the usual threshold
COSTS = ("edges", "units")
VALUES = ("recovered", "sufficiency", "drop")  # of a circuit, in the order of a table's columns
LEAST_ERRORS, LEAST_SHARE = 2.0, 0.05  # of what a surface carries: in standard errors, and of |Q(dense)|
_SYMMETRIC = 1e-9  # skewness over sqrt(n), below which there is none
_FARTHEST = 2.0  # of Student's t: beyond that a few prompts decide everything, Hall's expansion included
_MOST_SHARE = 10  # of a threshold; a percentage that was meant is more


@dataclass(frozen=True)
class Margins:
    """Margins of prompts in logits, the same prompts everywhere."""

    # keep, ablate: with a circuit kept (all other units at their reference activation) and with it ablated
    keep: Float[Tensor, "circuit prompt"]
    ablate: Float[Tensor, "circuit prompt"]
    full: Float[Tensor, " prompt"]  # full, empty: with all units, and with every unit at its reference activation
    empty: Float[Tensor, " prompt"]
    dense: Float[Tensor, " prompt"]  # of the dense host

    def by_content(self, contents: Sequence[Hashable]) -> "Margins":
        """One margin per content in place of one per prompt, see `by_content`."""
        return Margins(**{field.name: by_content(getattr(self, field.name), contents) for field in fields(self)})


def by_content(values: Float[Tensor, "*circuit prompt"], contents: Sequence[Hashable]) -> Float[Tensor, "*circuit _content"]:
    """Values of prompts as values of contents (names, years, ...), with the same mean; where each prompt has its own, nothing
    changes.

    Prompts about one name or year share most of what their margins differ by, and other splits have other names: what a mean over
    prompts says of those, its number of contents says, not its number of prompts. The standard error of the values given here is
    the cluster-robust one of the prompts' mean; everything in this module that takes prompts takes contents as well.
    """
    place = {content: i for i, content in enumerate(dict.fromkeys(contents))}
    if len(place) == len(contents):
        return values
    of_prompt = torch.tensor([place[content] for content in contents])
    mean, n_prompts = values.double().mean(-1, keepdim=True), values.shape[-1]
    sums = torch.zeros(*values.shape[:-1], len(place), dtype=torch.float64)
    sums.index_add_(-1, of_prompt, (values.double() - mean).cpu())
    return mean + sums * (len(place) / n_prompts)


def content_members(contents: Sequence[Hashable]) -> Float[Tensor, "prompt content"]:
    """1 where a prompt is about a content, which stand in the order of their first prompts: values @ this are sums by content."""
    place = {content: i for i, content in enumerate(dict.fromkeys(contents))}
    members = torch.zeros(len(contents), len(place), dtype=torch.float64)
    members[torch.arange(len(contents)), torch.tensor([place[content] for content in contents])] = 1.0
    return members


def contents_of(split: TaskSplit) -> list[str]:
    """The name or thing that each prompt is about (`meta["content"]`); a prompt without one is its own content."""
    return [example.meta.get("content", f"prompt {i}") for i, example in enumerate(split.examples)]


@dataclass(frozen=True)
class Carried:
    """Margin that the units of a surface carry of a task, in logits."""

    logits: float  # Q(full) - Q(empty)
    se: float  # its standard error, paired over prompts; NaN of a single prompt, of which only its own margins are asked
    q_dense: float  # the dense host's mean margin

    @classmethod
    def of(cls, full: Float[Tensor, " prompt"], empty: Float[Tensor, " prompt"], q_dense: float) -> "Carried":
        difference = full.double() - empty.double()
        return cls(float(difference.mean()), float(_standard_error(difference)), q_dense)

    @property
    def enough(self) -> bool:
        """Whether the surface carries the task: above two standard errors, and above a twentieth of |Q(dense)|."""
        beyond_error = math.isnan(self.se) or self.logits > LEAST_ERRORS * self.se
        return beyond_error and self.logits > LEAST_SHARE * abs(self.q_dense)


@dataclass(frozen=True)
class Threshold:
    """A value that a circuit has to reach."""

    # "recovered", "recovered of dense", "sufficiency", "necessity" (a share of the drop that ablating every unit causes, which is
    # what the surface carries), or "drop" (logits)
    of: str
    value: float | int  # how much of it

    @classmethod
    def given(
        cls,
        *,
        recovered: float | int | None = None,
        sufficiency: float | int | None = None,
        necessity: float | int | None = None,
        drop: float | int | None = None,
        recovered_of_dense: float | int | None = None,
    ) -> "Threshold":
        """The one that was given; recovered 0.9 where none was. Raises ValueError: several, or a share above 10 (90 in place
        of 0.9)."""
        shares = {"recovered": recovered, "sufficiency": sufficiency, "necessity": necessity}
        shares["recovered of dense"] = recovered_of_dense
        for name, value in shares.items():
            if value is not None and not value <= _MOST_SHARE:
                raise ValueError(f"{legible(name)} is a share: {legible(name)}=0.9 is 90 %; got {quoted(value)}")
        named = {name: value for name, value in {**shares, "drop": drop}.items() if value is not None}
        if len(named) > 1:
            raise ValueError("give one threshold: recovered=0.9, sufficiency=0.9, necessity=0.5 or drop=1.0")
        return cls(*next(iter(named.items()), ("recovered", RECOVERED)))

    def contrast(self, margins: Margins) -> Float[Tensor, "circuit prompt"]:
        """Numbers whose mean over prompts is at least 0 where the threshold is reached."""
        keep, ablate, full, empty = margins.keep, margins.ablate, margins.full, margins.empty
        if self.of.startswith("recovered"):
            whole = full if self.of == "recovered" else margins.dense
            return keep - self.value * whole - (1 - self.value) * empty
        if self.of == "sufficiency":
            return keep - self.value * full
        if self.of == "necessity":
            return (full - ablate) - self.value * (full - empty)
        return full - ablate - self.value

    def reached(self, rows: pd.DataFrame) -> pd.Series:
        """Which rows of `measured` reach it; the last row is that of all units."""
        if self.of == "necessity":
            whole = rows["drop"].iloc[-1]
            return (rows["drop"] >= self.value * whole) & (whole > 0)
        return rows[self.of] >= self.value

    def __str__(self) -> str:
        return f"{self.of} {self.value:g}"


def measured(margins: Margins, carried: Carried, task: str, *, warn: bool = True) -> pd.DataFrame:
    """One row per circuit: recovered, sufficiency, drop, each with "... low" and "... high", "recovered of dense", "q keep" and
    "q ablate". What is recovered is NaN where the surface does not carry the task, sufficiency where Q(full) is not positive
    (with `warn` an UndefinedSufficiencyWarning says so)."""
    keep, ablate, full, empty = (m.double() for m in (margins.keep, margins.ablate, margins.full, margins.empty))
    q_full = float(full.mean())
    if warn and not q_full > 0:
        errors.warn(
            f"the mean margin of {quoted(task)} with all units is {q_full:.3f}, not positive: the model does not do this "
            "task here, so sufficiency is undefined (NaN)",
            UndefinedSufficiencyWarning,
        )
    columns: dict[str, Tensor] = {}
    for name, part, whole in (("recovered", keep - empty, full - empty), ("sufficiency", keep, full)):
        defined = carried.enough if name == "recovered" else q_full > 0
        nothing = torch.full((len(keep),), math.nan, dtype=torch.float64)
        columns[name] = part.mean(1) / whole.mean() if defined else nothing
        columns[f"{name} low"], columns[f"{name} high"] = ratio_interval(part, whole) if defined else (nothing, nothing)
    of_dense = (margins.dense.double() - empty).mean()
    of_dense = of_dense if of_dense > 0 else math.nan
    columns["recovered of dense"] = (keep - empty).mean(1) / of_dense
    columns["drop"] = (full - ablate).mean(1)
    columns["drop low"], columns["drop high"] = mean_interval(full - ablate)
    columns |= {"q keep": keep.mean(1), "q ablate": ablate.mean(1)}
    return pd.DataFrame({name: values.tolist() for name, values in columns.items()})


# ---------------------------------------------------------------------------------------------- intervals

Ends = tuple[Float[Tensor, " circuit"], Float[Tensor, " circuit"]]


def mean_interval(values: Float[Tensor, "circuit prompt"], level: float = LEVEL) -> Ends:
    """Lower and upper end of the interval of each mean (`_reach`); NaN of a single prompt."""
    mean, error_of_mean = values.mean(1), _standard_error(values)
    below, above = _reach(values, level)
    return mean - below * error_of_mean, mean + above * error_of_mean


def ratio_interval(part: Float[Tensor, "circuit prompt"], whole: Float[Tensor, " prompt"]) -> Ends:
    """Fieller's interval of mean(part) / mean(whole), prompts paired.

    It holds every r for which mean(part - r whole) is within its interval of 0; how far that one reaches to each side is taken
    from the ratio itself. NaN where the mean of `whole` is itself within its interval of 0: then every r, or all but a stretch
    of them, would be in it.
    """
    n, a, b = part.shape[1], part.mean(1), whole.mean()
    if n < 2 or b == 0:
        return torch.full_like(a, math.nan), torch.full_like(a, math.nan)
    below, above = _reach(part - (a / b)[:, None] * whole, LEVEL)
    p, w = part - a[:, None], whole - b
    ends, known = [], torch.ones(len(a), dtype=torch.bool, device=a.device)
    for reach, side in ((below, -1), (above, 1)):
        t2 = reach**2 / (n * (n - 1))
        # r with bb r^2 - 2 ab r + aa <= 0.
        aa, ab = a.square() - t2 * p.square().sum(1), a * b - t2 * (p * w).sum(1)
        bb = b.square() - t2 * w.square().sum()
        ends.append((ab + side * (ab.square() - aa * bb).clamp_min(0).sqrt()) / bb)
        known &= bb > 0
    low, high = (torch.where(known, end, math.nan) for end in ends)
    return low, high


def _reach(values: Float[Tensor, "circuit prompt"], level: float) -> Ends:
    """How many standard errors the interval of each mean reaches below and above it.

    To each side it is the farther of two: Student's t, and Hall's (1992, J. R. Statist. Soc. B 54, 221-228) of the same, which
    allows for skewness. Margins can be very skewed (what a circuit leaves out may matter for a few prompts): Student's t alone
    covers 89 % where a few prompts in a hundred make the mean, and neither is far too wide (tests/circuits/test_measure.py).
    """
    n, t = values.shape[1], t_quantile(values.shape[1], level)
    student = torch.full_like(values[:, 0], t)
    if n < 3:
        return student, student
    mid = values - values.mean(1, keepdim=True)
    third = mid.pow(3).sum(1) * n / ((n - 1) * (n - 2))
    skew = third / values.std(1).pow(3) / n**0.5
    skew = torch.where(skew.abs() > _SYMMETRIC, skew, math.nan)  # a constant's too

    def hall(x: float) -> Tensor:
        inside = 1 + skew * (x - skew / 6)
        return 3 / skew * (inside.sign() * inside.abs().pow(1 / 3) - 1)

    below, above = torch.fmax(student, hall(t)), torch.fmax(student, -hall(-t))
    return below.clamp(max=_FARTHEST * t), above.clamp(max=_FARTHEST * t)


def t_quantile(n: int, level: float) -> float:
    """How many standard errors a two-sided interval of a mean of n values reaches to each side; infinity of one value."""
    return float(stdtrit(n - 1, 0.5 + level / 2)) if n > 1 else math.inf


def crossing_interval(
    contrast: Float[Tensor, "circuit prompt"], costs: Float[Tensor, " circuit"], level: float = LEVEL
) -> tuple[float | None, float | None]:
    """The interval of the cost at which a curve of circuits first reaches a threshold, by inverting a test at each cost.

    Between two circuits of the curve a margin is read linearly in log(1 + cost). The lower end is the least cost at which the
    threshold may be reached (the upper end of the contrast's interval is above 0), the upper end the least from which on it is
    surely reached.

    Returns: (low, high); None where the curve does not get there.
    """
    steps = torch.linspace(0, 1, 33, dtype=torch.float64)[:-1]
    logs = costs.double().log1p()
    # Each stretch between two circuits in 32 steps, then the last circuit itself.
    share = steps.repeat(len(costs) - 1)[:, None]
    first = torch.arange(len(costs) - 1).repeat_interleave(len(steps))
    place = torch.cat([logs[first] + share[:, 0] * (logs[first + 1] - logs[first]), logs[-1:]])
    values = contrast.double()
    lower, upper = mean_interval(torch.cat([(1 - share) * values[first] + share * values[first + 1], values[-1:]]), level)
    possible, unsure = (upper >= 0).nonzero()[:, 0], (lower < 0).nonzero()[:, 0]
    # The threshold may be reached from between the step before on.
    low = float(place[max(0, int(possible[0]) - 1)].expm1()) if len(possible) else None
    after = int(unsure[-1]) + 1 if len(unsure) else 0
    return low, float(place[after].expm1()) if after < len(place) else None


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted over all of them by Holm's method (1979, Scand. J. Statist. 6, 65-70); NaN stays, and is not counted."""
    order = sorted((i for i, value in enumerate(p) if value == value), key=lambda i: p[i])
    adjusted, largest = [math.nan] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def _standard_error(values: Float[Tensor, "*circuit prompt"]) -> Float[Tensor, "*circuit"]:
    return values.std(-1) / values.shape[-1] ** 0.5 if values.shape[-1] > 1 else values.mean(-1) * math.nan


def surface_name(sites: Iterable[str]) -> str:
    """These sites as a sentence names them."""
    names = list(sites)
    if len(names) < 2:
        return names[0] if names else "the surface"
    return f"the surface of {names[0]} and {len(names) - 1} more"


def does_not_carry(surface: str, task: str, carried: Carried, q_full: float, q_empty: float, ablation: Any) -> str:
    """One sentence for where a number would mean nothing. surface: its sites, see `surface_name`; ablation: what replaced
    units are set to: "mean", "zero" or another."""
    reference = {"mean": "its mean", "zero": "zero"}.get(str(ablation), "its reference activation")
    return (
        f"{surface} does not carry {task}: with all units the margin is {q_full:.2f}, with every unit at "
        f"{reference} {q_empty:.2f} (a difference of {carried.logits:+.2f} ± {carried.se:.2f} logits; the model has "
        f"{carried.q_dense:.2f})."
    )


def part_of(sites: Iterable[str]) -> str:
    """Which part of a block these sites are in: "attention", "MLP", or "both". Circuits of unlike parts are not pooled."""
    parts = {"attention" if split_name(site)[1].startswith("attn") else "MLP" for site in sites}
    return parts.pop() if len(parts) == 1 else "both"
