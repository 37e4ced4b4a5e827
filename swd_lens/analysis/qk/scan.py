"""Scan heads, pairs and prompts for QK units whose removal matters, everything from one dense and one attached run per prompt.

1. Take pairs from the static screen (the strongest few of each head), or as given.
2. Run prompts of equal length together, once dense and once with units; keep z, scores and patterns.
3. In every layer, take all its cases' units out at once (scores.py) and compare patterns.
4. Rank cases by causal effect: KL between the pattern before and after the removal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from swd_lens.analysis.qk import plots
from swd_lens.analysis.qk.prompts import batches, prompt_rows, strings_of
from swd_lens.analysis.qk.replay import check_pair, check_remove, indices, with_gamma
from swd_lens.analysis.qk.scores import Effects, LayerScores, effects, run_layers
from swd_lens.analysis.qk.screen import QKPair, QKScreen, qk_screen
from swd_lens.analysis.qk.vectors import QKError, layer_units, provenance
from swd_lens.base.display import card
from swd_lens.base.machine import plain_float32
from swd_lens.hosts import host_of

_NUMBERS = 2**24  # of all maps that are held at a time: 64 MiB a kind


@dataclass(frozen=True)
class QKCase:
    """One row of a scan.

    Attributes:
        prompt: its index in `QKScan.prompts`.
        dense_kl, removed_kl, max_change, signed_mean, agreement, share: see `QKReplay`.
    """

    pair: QKPair
    prompt: int
    dense_kl: float
    removed_kl: float
    max_change: float
    signed_mean: float
    agreement: float
    share: float


@dataclass(frozen=True, repr=False)
class QKScan:
    """All cases, ranked by removed KL.

    Attributes:
        frame: one row per head, pair and prompt: layer, head, q_unit, k_unit, gamma (distance 0), prompt (index), and the numbers
            of `QKReplay`.
        prompts: token ids of each prompt, as `qk_replay` takes them.
        texts: token strings of each prompt.
        shape: layers and heads of the host.
        settings: of what and how.
    """

    frame: pd.DataFrame
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    shape: tuple[int, int]
    settings: dict[str, Any]

    def best(
        self,
        n: int = 5,
        *,
        max_dense_kl: float | int | None = None,
        min_agreement: float | int | None = None,
        min_share: float | int | None = None,
    ) -> list[QKCase]:
        """The first n cases in rank, among those whose head is rebuilt well enough and whose map says what happens."""
        kept: Any = self.frame
        for column, least, most in (
            ("dense_kl", None, max_dense_kl),
            ("agreement", min_agreement, None),
            ("share", min_share, None),
        ):
            kept = kept if least is None else kept[kept[column] >= least]
            kept = kept if most is None else kept[kept[column] <= most]
        found = []
        for row in kept.head(n).to_dict("records"):
            layer, head, q, k = (int(row[name]) for name in ("layer", "head", "q_unit", "k_unit"))
            pair = QKPair(layer, head, q, k, float(row["gamma"]))
            found.append(QKCase(pair, int(row["prompt"]), **{name: float(row[name]) for name in Effects.NUMBERS}))
        return found

    def table(self, n: int | None = None) -> pd.DataFrame:
        """The first n cases (None: all), with the beginning of each prompt."""
        shown = self.frame if n is None else self.frame.head(n)
        starts = [_start(self.texts[i]) for i in shown["prompt"]]
        return shown.assign(text=starts).rename(columns=lambda name: name.replace("_", " ")).reset_index(drop=True)

    def plot(self) -> Figure:
        """Heat map of each head's largest removed KL; removed KL against agreement, all cases."""
        return plots.scan(self.frame, *self.shape, self.settings["remove"])

    def __repr__(self) -> str:
        first = self.best(1)
        tail = "" if not first else f", first {first[0].pair} (removed KL {first[0].removed_kl:.3g} nats)"
        return f"QKScan({len(self.frame):,} cases on {len(self.prompts)} prompts, remove={self.settings['remove']!r}{tail})"

    def _repr_html_(self) -> str:
        return card(repr(self), self.plot(), self.table(10))


def _start(tokens: Sequence[str], most: int = 48) -> str:
    text = "".join(tokens)
    return text if len(text) <= most else text[: most - 1] + "…"


def qk_scan(
    model: Any,
    factors: Any,
    prompts: Any,
    *,
    screen: QKScreen | None = None,
    pairs: Sequence[QKPair] | None = None,
    per_head: int = 5,
    top: int = 16,
    remove: str = "q",
    max_dense_kl: float | int | None = None,
    progress: bool = True,
) -> QKScan:
    """Replay many pairs on many prompts and rank them by what their removal does (paper: 12 x 12 x 5 x 3 = 2,160 cases).

    Each number is that of `qk_replay` for the same pair and prompt.

    Args:
        model: the host, with these sites not attached; left as it was, whatever happens.
        factors: attached all together.
        prompts: texts, rows of token ids, or a (rows, pos) tensor.
        screen: pairs come from it; None = `qk_screen(model, factors, top=top)`.
        pairs: these instead.
        per_head: the strongest pairs of each head in the screen.
        remove: "q", "k" or "pair", see `QKReplay`.
        max_dense_kl: leave out cases whose head is rebuilt worse than this (KL in nats); None = keep all and tell.

    Raises:
        QKError: no prompts or pairs, both a screen and pairs, and whatever `qk_replay` refuses.
        TokenError, UnsupportedHostError, AttachError: as `qk_replay`.
    """
    host = host_of(model)
    check_remove(remove)
    if screen is not None and pairs is not None:
        raise QKError("give pairs or a screen to take them from, not both")
    rows = prompt_rows(model, prompts)
    found = layer_units(host, factors)
    chosen: dict[str, Any] = {"pairs": "given"}
    if pairs is None:
        screen = qk_screen(model, factors, top=top) if screen is None else screen
        chosen = {
            "pairs": "of a screen",
            "per_head": per_head,
            **{name: screen.settings[name] for name in ("top", "distance")},
        }
        pairs = screen.pairs(per_head)
    if not pairs:
        raise QKError("there are no pairs to replay: every coefficient of the screen is zero, or the list is empty")
    of_layer: dict[int, list[QKPair]] = {}
    for pair in pairs:
        of_layer.setdefault(pair.layer, []).append(with_gamma(pair, check_pair(found, pair)))
    heads = max(units.heads.n_heads for units in found.values())
    frames, total = [], len(pairs) * len(rows)
    with torch.no_grad(), tqdm(total=total, desc="qk scan", unit="case", disable=not progress, leave=False) as bar:
        for places in batches(rows, max(1, _NUMBERS // (heads * len(of_layer)))):
            tokens = torch.stack([rows[place] for place in places])
            for layers in _groups(sorted(of_layer), heads * len(places) * tokens.shape[1] ** 2):
                runs = run_layers(host, factors, found, tokens, layers)
                with plain_float32(tokens.device):
                    for layer in layers:
                        # Popped: what a layer held goes before the next one makes its own.
                        frames += _cases(runs.pop(layer), of_layer[layer], places, remove)
                        bar.update(len(of_layer[layer]) * len(places))
    frame: Any = pd.concat(frames, ignore_index=True)
    if max_dense_kl is not None:
        frame = frame[frame["dense_kl"] <= max_dense_kl]
    order = ["removed_kl", "layer", "head", "q_unit", "k_unit", "prompt"]
    frame = frame.sort_values(order, ascending=[False, *[True] * 5], ignore_index=True)
    settings = {**provenance(host, factors, found), "remove": remove, "max_dense_kl": max_dense_kl, **chosen}
    texts = tuple(strings_of(model, row) for row in rows)
    prompts_ = tuple(tuple(row.tolist()) for row in rows)
    return QKScan(frame, prompts_, texts, (len(model.blocks), heads), settings)


def _groups(layers: list[int], numbers: int) -> list[list[int]]:
    """Layers that are run together: all of them, but for prompts so long that their maps would take gigabytes."""
    size = max(1, 4 * _NUMBERS // numbers)
    return [layers[i : i + size] for i in range(0, len(layers), size)]


def _cases(run: LayerScores, pairs: list[QKPair], places: Sequence[int], remove: str) -> list[pd.DataFrame]:
    """One layer's cases on one batch of prompts."""
    size = max(1, _NUMBERS // 4 // run.mask.numel() // len(places))
    made = []
    for start in range(0, len(pairs), size):
        some = pairs[start : start + size]
        found = effects(run, *indices(some, run.z_q.device), remove)
        columns = {name: np.tile([getattr(pair, name) for pair in some], len(places)) for name in _PAIR}
        columns["prompt"] = np.repeat(np.asarray(places), len(some))
        columns |= {name: getattr(found, name).cpu().numpy().astype(np.float64).ravel() for name in Effects.NUMBERS}
        made.append(pd.DataFrame(columns))
    return made


_PAIR = ("layer", "head", "q_unit", "k_unit", "gamma")
