"""effects: what an edit does beside what it is for.

1. The margin of its own prompt before and after: the realised change.
2. KL(before || after) of the next token behind other prompts, at the last position of each.
3. KL(before || after) of every next-token prediction on text, streamed: one batch of rows in memory at a time.

"Before" is the dense host; of an edit of a replacement it is the host with the unchanged factors attached. Logits are the
host's, softmax and sums are float64: these divergences go down to 1e-9.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.analysis.edit.edited import Edit
from swd_lens.analysis.edit.standing import written
from swd_lens.analysis.edit.target import EditError, Reader
from swd_lens.base._version import __version__
from swd_lens.base.display import card
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.machine import plain_float32
from swd_lens.hosts import Host, Start, host_of, require_no_dropout, sites_of
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.tasks.text import TokenError
from swd_lens.units import attach

_POSITIONS = 256  # whose distributions are held in float64 at a time


@dataclass(frozen=True, repr=False)
class SideEffects:
    """What one edit does to its own prompt, to other prompts and to text.

    Attributes:
        edit: the edit.
        margin_before, margin_after: answer logit minus foil logit at its prompt's last position.
        prompts: the other prompts, as text.
        kl_prompts: KL(before || after) of the token behind each, nats.
        kl_text: mean KL per next-token prediction on the text, nats; None without text.
        n_predictions: how many that is a mean over.
        settings: of the edit, and of this measurement.
    """

    edit: Edit
    margin_before: float
    margin_after: float
    prompts: tuple[str, ...]
    kl_prompts: tuple[float, ...]
    kl_text: float | None
    n_predictions: int
    settings: dict[str, Any]

    @property
    def change(self) -> float:
        """The realised change of the margin, logits."""
        return self.margin_after - self.margin_before

    @property
    def mean_kl(self) -> float:
        """Mean over the other prompts; NaN without any."""
        return sum(self.kl_prompts) / len(self.kl_prompts) if self.kl_prompts else float("nan")

    def row(self) -> dict[str, Any]:
        """The numbers of `table`, by column."""
        return {
            "method": self.edit.method,
            "unit": self.edit.settings.get("unit", ""),
            "requested shift": self.edit.shift,
            "h* dW d": self.edit.local_shift,
            "margin before": self.margin_before,
            "margin after": self.margin_after,
            "margin change": self.change,
            "KL other prompts": self.mean_kl,
            "largest KL": max(self.kl_prompts, default=float("nan")),
            "KL text": float("nan") if self.kl_text is None else self.kl_text,
            "relative norm": self.edit.delta.norm / self.edit.settings["weight_norm"],
        }

    def table(self) -> pd.DataFrame:
        """One row: the margin before and after, mean and largest KL (nats)."""
        return pd.DataFrame([self.row()])

    def per_prompt(self) -> pd.DataFrame:
        """One row per other prompt: its KL, largest first."""
        rows = pd.DataFrame({"prompt": list(self.prompts), "KL": list(self.kl_prompts)})
        return rows.sort_values("KL", ascending=False, kind="stable", ignore_index=True)

    def plot(self):
        """KL behind each other prompt, as bars; a matplotlib Figure."""
        rows = self.per_prompt().iloc[:24]
        figure, axes = new_figure(1, 1, width=6.4, height=0.9 + 0.24 * max(1, len(rows)))
        ax = axes[0, 0]
        places = range(len(rows) - 1, -1, -1)
        ax.barh(list(places), rows["KL"], color=style(0)["color"], height=0.62)
        ax.set_yticks(list(places), [literal(_short(prompt)) for prompt in rows["prompt"]])
        ax.grid(False, axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set_xlabel("KL(before || after) of the next token (nats)", fontsize=9, color=INK)
        what = f"{self.edit.method}: margin {self.margin_before:+.2f} to {self.margin_after:+.2f} on its own prompt"
        ax.set_title(literal(what), fontsize=10, color=INK, loc="left")
        return figure

    def __repr__(self) -> str:
        text = "" if self.kl_text is None else f", on text {self.kl_text:.2g} per token"
        return (
            f"SideEffects({self.edit.method} of {self.edit.site}: margin {self.margin_before:.3f} -> {self.margin_after:.3f} "
            f"({self.change:+.3f}), KL on {len(self.prompts)} other prompts {self.mean_kl:.2g}{text})"
        )

    def _repr_html_(self) -> str:
        return card(f"Side effects of an edit of {self.edit.site}", self.table(), self.plot() if self.prompts else None)


def side_effects(
    model: Any,
    edit: Edit,
    prompts: Sequence[Any] = (),
    tokens: Any = None,
    *,
    batch_size: int = 8,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> SideEffects:
    """Measure an edit that is not applied now: its own prompt, other prompts, and text. The host is left as it was.

    Args:
        model: the host that the edit was made for.
        prompts: other prompts (texts, or rows of ids); the next token's distribution is compared.
        tokens: (rows, pos) ids, or a TokenStream; each row predicts its own tokens 1..pos-1. None = no text.
        batch_size: prompts or rows per forward.
        prepend_bos: of prompts given as text; None = as the host was trained.

    Raises:
        EditError: the edit is not for this host's W (or is applied now), or a prompt cannot be tokenized.
        TokenError: bad tokens, or rows of a single token.
        AttachError: units are attached at the site.
    """
    return measure(model, [edit], prompts, tokens, batch_size=batch_size, prepend_bos=prepend_bos, progress=progress)[0]


def measure(
    model: Any,
    edits: Sequence[Edit],
    prompts: Sequence[Any] = (),
    tokens: Any = None,
    *,
    batch_size: int = 8,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> list[SideEffects]:
    """`side_effects` of several edits: what is "before" is run once for all that share it."""
    require_no_dropout(model)
    if isinstance(prompts, str):
        raise EditError(f"prompts must be a list, got the one text {prompts!r}; put it in brackets")
    host, reader = host_of(model), Reader(model, prepend_bos)
    for edit in edits:
        with edit.applied(model):  # every check, once
            pass
    read = [reader.prompt(prompt) for prompt in prompts]
    stream = None if tokens is None else _checked(as_stream(tokens, model))
    with torch.no_grad(), plain_float32(next(model.parameters()).device):
        before, after = _margins(host, edits)
        behind = _prompts(host, edits, [ids for _, ids, _ in read], batch_size, progress)
        on_text, n = _text(host, edits, stream, batch_size, progress)
    about = {"n_prompts": len(read), "n_text_predictions": n, "swd_lens": __version__}
    return [
        SideEffects(
            edit,
            before[i],
            after[i],
            tuple(text for text, _, _ in read),
            tuple(behind[i].tolist()),
            None if stream is None else on_text[i] / n,
            n,
            {**edit.settings, **about},
        )
        for i, edit in enumerate(edits)
    ]


def _checked(stream: TokenStream) -> TokenStream:
    if stream.row_length < 2:
        raise TokenError("KL on text needs rows of at least two tokens: each position predicts the next")
    return stream


def _margins(host: Host, edits: Sequence[Edit]) -> tuple[list[float], list[float]]:
    before, after = [0.0] * len(edits), [0.0] * len(edits)
    for members in _groups(edits, by_prompt=True):
        target = edits[members[0]].target
        runs = _runs(host, [edits[i] for i in members], target.tokens[None])
        first, *later = (float(logits[0, target.answer_id] - logits[0, target.foil_id]) for logits in _double(runs))
        for i, margin in zip(members, later, strict=True):
            before[i], after[i] = first, margin
    return before, after


def _prompts(
    host: Host, edits: Sequence[Edit], prompts: Sequence[Int[Tensor, " _pos"]], batch_size: int, progress: bool
) -> Float[Tensor, "edit prompt"]:
    found = torch.zeros(len(edits), len(prompts), dtype=torch.float64)
    by_length: dict[int, list[int]] = {}
    for i, ids in enumerate(prompts):
        by_length.setdefault(len(ids), []).append(i)
    batches = [some[at : at + batch_size] for some in by_length.values() for at in range(0, len(some), batch_size)]
    for chosen in tqdm(batches, desc="prompts", unit="batch", disable=not progress, leave=False):
        rows = torch.stack([prompts[i] for i in chosen])
        for i, kl in _divergences(host, edits, rows):
            found[i, chosen] = kl
    return found


def _text(
    host: Host, edits: Sequence[Edit], stream: TokenStream | None, batch_size: int, progress: bool
) -> tuple[list[float], int]:
    """Sums of KL per edit, and the number of predictions."""
    sums = [0.0] * len(edits)
    if stream is None:
        return sums, 0
    total = -(-stream.n_rows // batch_size)
    bar = tqdm(stream.batches(batch_size), desc="text", unit="batch", total=total, disable=not progress, leave=False)
    for rows in bar:
        for i, kl in _divergences(host, edits, rows, everywhere=True):
            sums[i] += float(kl.sum())
    return sums, stream.n_rows * (stream.row_length - 1)


def _divergences(
    host: Host, edits: Sequence[Edit], rows: Int[Tensor, "rows pos"], everywhere: bool = False
) -> Iterator[tuple[int, Float[Tensor, " _predictions"]]]:
    """(which edit, KL per prediction) for each; those that share a base share its run."""
    for members in _groups(edits):
        runs = _runs(host, [edits[i] for i in members], rows, everywhere)
        before = next(runs)
        for i, after in zip(members, runs, strict=True):
            yield i, divergence(before, after)


def _groups(edits: Sequence[Edit], by_prompt: bool = False) -> list[list[int]]:
    """Which edits share their base (and their prompt)."""
    groups: dict[Any, list[int]] = {}
    for i, edit in enumerate(edits):
        groups.setdefault((id(edit.replaced), id(edit.target) if by_prompt else 0), []).append(i)
    return list(groups.values())


def _runs(
    host: Host, edits: Sequence[Edit], rows: Int[Tensor, "rows pos"], everywhere: bool = False
) -> Iterator[Float[Tensor, "_predictions vocab"]]:
    """Logits before the edits (which share their base), then under each in turn: at the last position, or at all but it."""
    layer = min(sites_of(host, edit.site)[0].layer for edit in edits)
    with _base(host, edits[0]):
        # No edit reaches what enters its block: that is run once.
        start = None if everywhere else Start(layer, host.residual(rows, layer))
        before = _logits(host, rows, start)
    yield before
    for edit in edits:
        with _under(host, edit):
            after = _logits(host, rows, start)
        yield after


def _logits(host: Host, rows: Int[Tensor, "rows pos"], start: Start | None) -> Float[Tensor, "_predictions vocab"]:
    return host.run(rows)[:, :-1].flatten(0, 1) if start is None else host.last_logits(rows, start=start)


def _double(runs: Iterator[Tensor]) -> Iterator[Tensor]:
    for logits in runs:
        yield logits.double().cpu()


def _base(host: Host, edit: Edit) -> AbstractContextManager[Any]:
    return nullcontext() if edit.replaced is None else attach(host.model, edit.replaced)


@contextmanager
def _under(host: Host, edit: Edit) -> Iterator[None]:
    if edit.factors is not None:
        with attach(host.model, edit.factors):
            yield
    else:
        with written(host, sites_of(host, edit.site)[0], edit.delta):
            yield


def divergence(
    before: Float[Tensor, "predictions vocab"], after: Float[Tensor, "predictions vocab"]
) -> Float[Tensor, " predictions"]:
    """KL(before || after) in nats of every row of logits; float64, on the CPU, never below 0."""
    found = []
    for p, q in zip(before.split(_POSITIONS), after.split(_POSITIONS), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        found.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0).cpu())
    return torch.cat(found)


def _short(text: str, n: int = 46) -> str:
    """A prompt's end: where it differs from others is usually behind."""
    return text if len(text) <= n else "…" + text[-(n - 1) :]
