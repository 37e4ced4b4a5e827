"""effects: measure what an edit changes beside its own aim.

1. The margin of its own prompt before and after: the realised change.
2. KL(before || after) of the next token behind other prompts, at the last position of each.
3. KL(before || after) of every next-token prediction on text, streamed: one batch of rows in memory at a time, logits a part at
   a time.
4. What enters the first edited block is run once for "before" and for every edit.

"Before" is the dense host; of an edit of a replacement it is the host with the unchanged factors attached. Logits are the
host's, softmax and sums are float64: these divergences go down to 1e-9.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from swd_lens.analysis.edit.edited import Edit
from swd_lens.analysis.edit.target import ending, read_prompt, shown_text
from swd_lens.base import __version__
from swd_lens.base.display import card, folded_settings
from swd_lens.base.divergence import CHUNK_BYTES, kl_per_prediction
from swd_lens.base.errors import EditError, TokenError, quoted, visible
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.interrupts import Undo
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import Host, Start, host_of, require_no_dropout, sites_of
from swd_lens.hosts.predictions import TOKENS, Predictions
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.weights import stored_matrix
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.text import same_length
from swd_lens.units import attach


@with_torch_defaults
@dataclass(frozen=True, repr=False)
class SideEffects:
    """The effect of one edit on its own prompt, on other prompts and on text.

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
            "relative norm": self.edit.relative_norm,
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
        heights = list(range(len(rows) - 1, -1, -1))
        ax.barh(heights, rows["KL"], color=style(0)["color"], height=0.62)
        ax.set_yticks(heights, [literal(visible(ending(prompt, 46))) for prompt in rows["prompt"]])
        ax.grid(False, axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set_xlabel("KL(before || after) of the next token (nats)")
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
        figure = self.plot() if self.prompts else None
        title = f"Side effects of an edit of {self.edit.site}"
        return card(title, self.table(), figure, folded_settings(self.settings))


@with_torch_defaults
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
    """Measure an edit that is not applied now: its own prompt, other prompts, and text. The host is left as it was (ours).

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
        raise EditError(f"prompts must be a list, got the one text {quoted(prompts)}; put it in brackets")
    host = host_of(model)
    for edit in edits:
        edit.check(model)
    read = [read_prompt(model, prompt, prepend_bos) for prompt in prompts]
    rows = [prompt.row(model) for prompt in read]
    stream = None if tokens is None else as_stream(tokens, model)
    if stream is not None and stream.row_length < 2:
        raise TokenError("KL on text needs rows of at least two tokens: each position predicts the next")
    with torch.no_grad():
        # 1. Margins of the edits' own prompts, before and under each.
        numbered, margins = dict(enumerate(edits)), {}
        for target in {id(edit.target): edit.target for edit in edits}.values():
            of_target = {i: edit for i, edit in numbered.items() if edit.target is target}
            for i, *runs in _runs(host, of_target, target.tokens[None]):
                logits = torch.cat(runs).double()
                margins[i] = (logits[:, target.answer_id] - logits[:, target.foil_id]).tolist()
        # 2. KL of the token behind each prompt; prompts of one length run together.
        kl_prompts = torch.zeros(len(edits), len(rows), dtype=torch.float64)
        size = min(batch_size, max(1, CHUNK_BYTES // (8 * int(host.model.cfg.d_vocab))))
        batches = same_length([len(ids) for ids in rows], lambda length: size)
        for batch in tqdm(batches, desc="prompts", unit="batch", disable=not progress, leave=False):
            for i, before, after in _runs(host, numbered, torch.stack([rows[i] for i in batch])):
                kl_prompts[i, batch] = kl_per_prediction(before, after)
                del before, after  # not beside the next run's logits
        # 3. Sums of KL on text.
        kl_text, n = [0.0] * len(edits), 0
        if stream is not None:
            predictions, size = Predictions(host), min(batch_size, max(1, TOKENS // stream.row_length))
            n, total = stream.n_rows * (stream.row_length - 1), -(-stream.n_rows // size)
            for text in tqdm(stream.batches(size), desc="text", unit="batch", total=total, disable=not progress, leave=False):
                for i, before, after in _runs(host, numbered, text, predictions):
                    kl_text[i] += float(predictions.total(_kl, text, before, after))
    measurement = {"n_prompts": len(read), "n_text_predictions": n, "swd_lens": __version__, **standing_hooks(model)}
    measurement |= {} if stream is None else stream.about(model)
    return [
        SideEffects(
            edit=edit,
            margin_before=margins[i][0],
            margin_after=margins[i][1],
            prompts=tuple(shown_text(model, prompt) for prompt in read),
            kl_prompts=tuple(kl_prompts[i].tolist()),
            kl_text=None if stream is None else kl_text[i] / n,
            n_predictions=n,
            settings={**edit.settings, **measurement},
        )
        for i, edit in enumerate(edits)
    ]


def _kl(_targets: Tensor, before: Tensor, after: Tensor) -> Float[Tensor, ""]:
    return kl_per_prediction(before.flatten(0, 1), after.flatten(0, 1)).sum()


def _runs(
    host: Host, edits: Mapping[int, Edit], rows: Int[Tensor, "rows pos"], predictions: Predictions | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each edit's number, and what `Predictions.run` gives, or the last position's logits, before it and under it. Edits of one
    base share the run before them; no edit reaches what enters its block: that is run once."""
    by_base: dict[int, list[int]] = {}
    for i, edit in edits.items():
        by_base.setdefault(id(edit.replaced), []).append(i)
    for members in by_base.values():
        base, layer = edits[members[0]].replaced, min(sites_of(host, edits[i].site)[0].layer for i in members)
        with nullcontext() if base is None else attach(host.model, base):
            if predictions is None:
                run = partial(host.last_logits, start=Start(layer, host.residual(rows, layer)))
            else:
                run = partial(predictions.run, start=predictions.start(rows, layer))
            before = run(rows)
        for i in members:
            edit = edits[i]
            with _written(host, edit) if edit.factors is None else attach(host.model, edit.factors):
                after = run(rows)
            yield i, before, after


@contextmanager
def _written(host: Host, edit: Edit) -> Iterator[None]:
    """W + dW for a moment, unchecked: `measure` has checked once. Restored bit for bit."""
    stored = stored_matrix(host, sites_of(host, edit.site)[0])
    kept = stored.parameter.detach().clone()
    with Undo() as undo:
        undo.push(lambda: stored.restore(kept))
        stored.write(edit.delta.added_to(stored.matrix()))
        yield
