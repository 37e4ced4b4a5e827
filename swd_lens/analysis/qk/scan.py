"""Scan heads, pairs and prompts for QK units whose removal matters, everything from one dense and one attached run per prompt.

1. Take pairs from the static screen (the strongest few of each head), or as given.
2. Run prompts of equal length together, once dense and once with units; keep z, scores and patterns.
3. In every layer, take all its cases' units out at once (replay.py) and compare patterns.
4. Rank cases by causal effect: KL between the pattern before and after the removal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from swd_lens.analysis.qk.replay import NUMBERS, REMOVE, Removal, removals, with_gamma
from swd_lens.analysis.qk.scores import LayerScores, attended_row, layer_units, provenance, run_layers
from swd_lens.analysis.qk.screen import QKPair, QKScreen, draw_heads, qk_screen
from swd_lens.base.checks import one_of
from swd_lens.base.display import Folded
from swd_lens.base.errors import QKError
from swd_lens.base.figures import new_figure, style
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record, column
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.prompt import Prompt, token_strings
from swd_lens.tasks.text import same_length
from swd_lens.units import UnitSet

_NUMBERS = 2**24  # of all maps that are held at a time: 64 MiB a kind
_PAIR = ("layer", "head", "q_unit", "k_unit", "gamma")
_TEXT = 48  # characters of a prompt in a table


@dataclass(frozen=True, kw_only=True)
class QKCase(Removal):
    """One row of a scan; the numbers are those of `Removal`.

    Attributes:
        prompt: its index in `QKScan.prompts`.
    """

    pair: QKPair
    prompt: int


@dataclass(frozen=True, repr=False)
class QKScan(Record):
    """All cases, ranked by removed KL.

    Attributes:
        frame: one row per head, pair and prompt: layer, head, q unit, k unit, gamma (distance 0), prompt (index), the numbers of
            `QKReplay` ("removed KL" and so on), and "size", |gamma| x rms(z_a) x rms(z_b) over the prompt's positions (with
            normed queries and keys, z times the norm's scale). gamma depends on how units are scaled; size, as what removals
            do, does not.
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
        frame: Any = self.frame
        if max_dense_kl is not None:
            frame = frame[frame["dense KL"] <= max_dense_kl]
        for name, least in (("agreement", min_agreement), ("share", min_share)):
            if least is not None:
                frame = frame[frame[name] >= least]
        cases = []
        for row in frame.head(n).to_dict("records"):
            pair = QKPair(**{name: int(row[column(name)]) for name in _PAIR[:4]}, gamma=float(row["gamma"]))
            numbers = {name: float(row[column(name)]) for name in NUMBERS}
            cases.append(QKCase(pair=pair, prompt=int(row["prompt"]), **numbers))
        return cases

    def table(self, n: int | None = None) -> pd.DataFrame:
        """The first n cases (None: all), with the beginning of each prompt."""
        frame = self.frame if n is None else self.frame.head(n)
        texts = ["".join(self.texts[i]) for i in frame["prompt"]]
        texts = [text if len(text) <= _TEXT else text[: _TEXT - 1] + "…" for text in texts]
        return frame.assign(text=texts).reset_index(drop=True)

    def plot(self) -> Figure:
        """Heat map of each head's largest removed KL; removed KL against agreement, all cases."""
        figure, axes = new_figure(1, 2, width=4.4, height=3.3)
        largest = np.full(self.shape, np.nan)
        by_head: Any = self.frame.groupby(["layer", "head"])["removed KL"].max()
        for (layer, head), removed_kl in by_head.items():
            largest[layer, head] = removed_kl
        remove = self.settings["remove"]
        removed = "pair" if remove == "pair" else f"{remove.upper()} unit"
        draw_heads(axes[0, 0], largest, "largest removed KL (nats)", f"What removing a {removed} does")
        ax, layers = axes[0, 1], sorted(self.frame["layer"].unique())
        for index, layer in enumerate(layers):
            cases: Any = self.frame[self.frame["layer"] == layer]
            ax.scatter(
                cases["agreement"],
                cases["removed KL"].clip(lower=1e-7),
                s=11,
                marker="osD^vPX*"[index % 8],
                color=style(index)["color"],
                alpha=0.8,
                linewidths=0,
                label=f"layer {layer}",
            )
        ax.set_yscale("log")
        ax.set_xlim(-1.05, 1.05)
        ax.set(xlabel="agreement of the change with the pair's map", ylabel="removed KL (nats)")
        ax.set_title(f"{len(self.frame):,} cases of head, pair and prompt", fontsize=9)
        if 0 < len(layers) <= 16:
            ax.legend(fontsize=7, frameon=False, ncols=1 + len(layers) // 9, loc="lower left")
        return figure

    def __repr__(self) -> str:
        first = self.best(1)
        tail = "" if not first else f", first {first[0].pair} (removed KL {first[0].removed_kl:.3g} nats)"
        return f"QKScan({len(self.frame):,} cases on {len(self.prompts)} prompts, remove={self.settings['remove']!r}{tail})"

    def parts(self) -> tuple[Any, ...]:
        prompts = {f"prompt {i}": "".join(tokens) for i, tokens in enumerate(self.texts)}
        return self.plot(), self.table(10).drop(columns="text"), Folded(f"{len(prompts)} prompts", prompts)


@with_torch_defaults
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
    units = UnitSet.of(model, factors)
    one_of("remove", remove, REMOVE, QKError)
    if screen is not None and pairs is not None:
        raise QKError("give pairs or a screen to take them from, not both")
    rows = [attended_row(model, prompt) for prompt in Prompt.several(model, prompts, "qk")]
    if not rows:
        raise QKError("there are no prompts; give at least one")
    layers = layer_units(units)
    choice: dict[str, Any] = {"pairs": "given"}
    if pairs is None:
        screen = qk_screen(model, units, top=top) if screen is None else screen
        choice = {"pairs": "of a screen", "per_head": per_head}
        choice |= {name: screen.settings[name] for name in ("top", "distance")}
        pairs = screen.pairs(per_head)
    if not pairs:
        raise QKError("there are no pairs to replay: every coefficient of the screen is zero, or the list is empty")
    by_layer: dict[int, list[QKPair]] = {}
    for pair in pairs:
        by_layer.setdefault(pair.layer, []).append(with_gamma(layers, pair))
    n_heads = max(of_layer.heads.n_heads for of_layer in layers.values())
    frames, total = [], len(pairs) * len(rows)
    with torch.no_grad(), tqdm(total=total, desc="qk scan", unit="case", disable=not progress, leave=False) as bar:
        maps_at_once = n_heads * len(by_layer)
        for batch in same_length([len(row) for row in rows], lambda length: _NUMBERS // maps_at_once // length**2):
            tokens = torch.stack([rows[i] for i in batch])
            # All layers are run together, but for prompts so long that their maps would take gigabytes.
            at_once = max(1, 4 * _NUMBERS // (n_heads * len(batch) * tokens.shape[1] ** 2))
            for chunk in _chunks(sorted(by_layer), at_once):
                runs = run_layers(units, {layer: layers[layer] for layer in chunk}, tokens)
                for layer in chunk:
                    # Popped: what a layer held goes before the next one makes its own.
                    frames += _cases(runs.pop(layer), by_layer[layer], batch, remove)
                    bar.update(len(by_layer[layer]) * len(batch))
    frame: Any = pd.concat(frames, ignore_index=True)
    if max_dense_kl is not None:
        frame = frame[frame["dense KL"] <= max_dense_kl]
    order = ["removed KL", "layer", "head", "q unit", "k unit", "prompt"]
    return QKScan(
        frame.sort_values(order, ascending=[False, *[True] * 5], ignore_index=True),
        prompts=tuple(tuple(row.tolist()) for row in rows),
        texts=tuple(token_strings(model, row.tolist()) for row in rows),
        shape=(len(model.blocks), n_heads),
        settings={**provenance(units, layers), "remove": remove, "max_dense_kl": max_dense_kl, **choice},
    )


def _chunks(items: Sequence[Any], size: int) -> list[Any]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _cases(run: LayerScores, pairs: Sequence[QKPair], prompts: Sequence[int], remove: str) -> list[pd.DataFrame]:
    """One layer's cases on one batch of prompts."""
    frames = []
    for chunk in _chunks(pairs, max(1, _NUMBERS // 4 // run.mask.numel() // len(prompts))):
        _, numbers = removals(run, chunk, remove)
        columns = {name: np.tile([getattr(pair, name) for pair in chunk], len(prompts)) for name in _PAIR}
        columns["prompt"] = np.repeat(np.asarray(prompts), len(chunk))
        columns |= {name: values.cpu().numpy().astype(np.float64).ravel() for name, values in numbers.items()}
        # |gamma| rms(z_a) rms(z_b) of each pair on each prompt, float64.
        device = run.q.z.device
        head, q, k, gamma = (
            torch.tensor([getattr(pair, name) for pair in chunk], device=device) for name in ("head", "q_unit", "k_unit", "gamma")
        )
        sides = run.q.activations(q, head), run.k.activations(k, head // run.heads.group)
        z_a, z_b = (z.double().square().mean(-1).sqrt() for z in sides)
        columns["size"] = (gamma.double().abs() * z_a * z_b).cpu().numpy().ravel()
        frames.append(pd.DataFrame(columns).rename(columns=column))
    return frames
