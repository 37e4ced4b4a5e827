"""Where units fire most: a running top n, with the text around each place.

1. Per batch, each unit's largest |z| in every row of text: at most `per_row` places of a row, so that one odd passage does not
   fill the list (paper app. E.1: 20 by |z|). One, unless the text has fewer rows than places are asked for.
2. These and the n best so far are sorted together; of equal ones the earlier row stays ahead. Of the places in one document all
   but the largest stand behind those of other documents, so that a list holds n documents where the text has so many. Documents
   are told by the end-of-text tokens between them; where there are none, nothing but rows is known.
3. The tokens and z around a place are copied when it enters the list: the text is read once, and memory depends on
   n and the number of units only. Token ids become strings (`TokenNames`) when a unit is looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.errors import quoted
from swd_lens.base.record import PlainRecord

NO_TOKEN = -1  # in a window that reaches over an end of its row
_SENTENCEPIECE_SPACE = "\u2581"


class TokenNames:
    """Token id -> its string, each asked of the tokenizer once; ids in brackets where the host has no tokenizer."""

    def __init__(self, model: Any):
        self._tokenizer = getattr(model, "tokenizer", None)
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            text = f"[{token}]"
            if self._tokenizer is not None:
                text = self._tokenizer.decode([token])
                # SentencePiece drops the space of a token that is decoded alone.
                piece = getattr(self._tokenizer, "convert_ids_to_tokens", lambda token: "")(token)
                if isinstance(piece, str) and piece.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" "):
                    text = " " + text
            self._known[token] = text
        return self._known[token]


@dataclass(frozen=True)
class Context(PlainRecord):
    """One place where a unit fires."""

    tokens: tuple[str, ...]  # the token strings of the window
    z: tuple[float, ...]  # the unit's activation on each of them
    peak: int  # index in the window of the position that was ranked

    def __post_init__(self) -> None:
        n, m = len(self.tokens), len(self.z)
        if n != m or self.peak not in range(n):
            raise ValueError(f"a context of {n} tokens has {m} z and its peak at {quoted(self.peak)}")

    def text(self, mark: tuple[str, str] = ("", "")) -> str:
        """The window as running text, the ranked token between two marks; they go inside a token's leading space."""
        pieces = list(self.tokens)
        token = pieces[self.peak]
        bare = token.lstrip(" ")
        lead = token[: len(token) - len(bare)] if bare else ""
        pieces[self.peak] = lead + mark[0] + token[len(lead) :] + mark[1]
        return "".join(pieces)

    def around_peak(self, n: int) -> "Context":
        """The part of the window within n tokens of the peak."""
        start, stop = max(0, self.peak - n), self.peak + n + 1
        return Context(self.tokens[start:stop], self.z[start:stop], self.peak - start)


class TopPlaces:
    """The n places of largest |z| of each unit, in rows of text that come batch by batch.

    Args:
        n: places per unit.
        before, after: tokens kept on either side of a place.
        per_row: at most this many places of one row.
        ends: ids of the tokens that end a document.
    """

    def __init__(self, n: int, before: int, after: int, per_row: int = 1, ends: Sequence[int] = ()):
        if n < 1 or before < 0 or after < 0:
            raise ValueError(f"n must be 1 or more, before and after 0 or more; got n={n}, before={before}, after={after}")
        self.n, self.before, self.after, self.per_row = n, before, after, per_row
        self.ends = torch.tensor(list(ends), dtype=torch.int64)
        self.ended, self._rest = 0, 0  # documents that have ended so far, and whether another has begun
        self._begun: bool | None = None
        self.value = torch.empty(0, dtype=torch.float32)  # (unit, n), largest first; -1 where there is no place yet
        self.row = self.pos = self.tokens = self.z = torch.empty(0, dtype=torch.float32)
        self.document = self.key = torch.empty(0, dtype=torch.float32)  # key: what a list is sorted by

    @property
    def documents(self) -> int | None:
        """How many documents the text has had so far; None where no end of one was seen, so that they are not known."""
        return self.ended + self._rest if self.ended else None

    def add(
        self,
        first_row: int,
        rows: Int[Tensor, "rows pos"],
        z: Float[Tensor, "rows pos unit"],
        counted: Bool[Tensor, "rows pos"] | None = None,
    ) -> None:
        """A batch: its rows count from `first_row`; places that do not count are none, but stand in windows."""
        if not len(self.value):
            shape, width = (z.shape[-1], self.n), self.before + 1 + self.after
            self.value = torch.full(shape, -1.0, device=z.device, dtype=torch.float32)
            self.row = torch.full(shape, -1, dtype=torch.int64, device=z.device)
            self.pos, self.document = self.row.clone(), self.row.clone()
            self.key = torch.full(shape, _NONE, device=z.device, dtype=torch.float32)
            self.tokens = torch.full((*shape, width), NO_TOKEN, dtype=torch.int32, device=z.device)
            self.z = torch.zeros(*shape, width, device=z.device, dtype=torch.float32)
        # |z| and position of each row's largest entries (-1 of one that does not count); of equal ones the earlier position
        # comes first.
        size = z.abs()
        if counted is not None:
            size = size.masked_fill(~counted[..., None].to(z.device), -1.0)
        if self.per_row == 1:
            value, pos = size.max(1, keepdim=True)
        else:
            largest = size.sort(dim=1, descending=True, stable=True)
            value, pos = largest.values[:, : self.per_row], largest.indices[:, : self.per_row]
        value, pos = value.permute(2, 0, 1).flatten(1), pos.permute(2, 0, 1).flatten(1)
        of_row = torch.arange(pos.shape[1], device=z.device) // (pos.shape[1] // len(rows))
        documents = self._documents(rows).to(z.device)
        document = documents[of_row.expand_as(pos), pos]
        units = self._changed(value, document, int(documents[0, 0]))  # the others' lists stay as they are
        if not len(units):
            return
        value, pos, document, z, rows = value[units], pos[units], document[units], z[..., units], rows.to(z.device)
        row = (first_row + of_row).expand_as(pos)
        key = sort_keys(torch.cat([self.value[units], value], 1), torch.cat([self.document[units], document], 1))
        keep = key.sort(dim=1, descending=True, stable=True).indices[:, : self.n]
        stays = keep.clamp(max=self.n - 1)[..., None].expand(-1, -1, self.tokens.shape[-1])
        tokens, around = self.tokens[units].gather(1, stays), self.z[units].gather(1, stays)
        unit, slot = (keep >= self.n).nonzero(as_tuple=True)
        at = keep[unit, slot] - self.n
        # Token ids and z around each place that enters a list.
        of_place, offsets = of_row[at][:, None], torch.arange(-self.before, self.after + 1, device=z.device)
        places = pos[unit, at][:, None] + offsets
        outside = (places < 0) | (places >= rows.shape[1])
        places = places.clamp(0, rows.shape[1] - 1)
        tokens[unit, slot] = rows[of_place, places].masked_fill(outside, NO_TOKEN).to(torch.int32)
        around[unit, slot] = z[of_place, places, unit[:, None]].masked_fill(outside, 0.0)
        self.value[units] = torch.cat([self.value[units], value], 1).gather(1, keep)
        self.key[units] = key.gather(1, keep)
        self.document[units] = torch.cat([self.document[units], document], 1).gather(1, keep)
        self.row[units] = torch.cat([self.row[units], row], 1).gather(1, keep)
        self.pos[units] = torch.cat([self.pos[units], pos], 1).gather(1, keep)
        self.tokens[units], self.z[units] = tokens, around

    def _documents(self, rows: Int[Tensor, "rows pos"]) -> Int[Tensor, "rows pos"]:
        """The number of the document of every token, counted over the whole text; an end belongs to what it ends."""
        ends = torch.isin(rows.cpu(), self.ends)
        if self._begun is None:  # a text that begins with the token has it as BOS, at the beginning of every row
            self._begun = bool(ends[0, 0])
        if self._begun:
            ends[:, 0] = False
        counted = ends.flatten().long().cumsum(0)
        numbers = self.ended + counted - ends.flatten().long()
        self.ended += int(counted[-1])
        self._rest = int(not ends[-1, -1])
        return numbers.view(rows.shape)

    def _changed(
        self, value: Float[Tensor, "unit place"], document: Int[Tensor, "unit place"], first: int
    ) -> Int[Tensor, " changed"]:
        """The units whose lists these places may change: `first` is the document that may stand in them already."""
        least, there = self.key[:, -1:], self.document == first
        of_first = document == first
        # A further place of a document that the list has: it may replace that one's, or fill the list's end.
        best = self.value.masked_fill(~there, -1.0).amax(1, keepdim=True)
        behind = of_first & (best >= 0) & (value <= best)
        key = torch.where(behind, _behind(value), value)
        return (key > least).logical_and(value >= 0).any(1).nonzero()[:, 0]

    def contexts(self, unit: int, names: TokenNames, *, n: int | None = None, firing: bool = False) -> list[Context]:
        """The unit's places (the first n of them), largest |z| first; `firing` leaves out rows where it is 0 everywhere."""
        contexts = []
        lists = (part[unit, :n].tolist() for part in (self.value, self.tokens, self.z))
        for value, tokens, z in zip(*lists, strict=True):
            if value < 0 or (firing and value == 0):
                break
            inside = [i for i, token in enumerate(tokens) if token != NO_TOKEN]
            strings = tuple(names(tokens[i]) for i in inside)
            contexts.append(Context(strings, tuple(z[i] for i in inside), self.before - inside[0]))
        return contexts

    def share_on(self, ids: Sequence[int]) -> Float[Tensor, " unit"]:
        """Per unit the share of its places at which it fires that lie on these tokens; 0 where it fires nowhere."""
        fires = (self.value > 0).cpu()
        on = torch.isin(self.tokens[..., self.before].cpu(), torch.tensor(list(ids), dtype=torch.int32)) & fires
        return (on.sum(1) / fires.sum(1).clamp(min=1)).float()

    def cpu(self) -> "TopPlaces":
        """Itself, with everything on the CPU."""
        for name in ("value", "row", "pos", "tokens", "z", "document", "key"):
            setattr(self, name, getattr(self, name).cpu())
        return self


_NONE = -2.0


def sort_keys(value: Float[Tensor, "unit place"], document: Int[Tensor, "unit place"]) -> Float[Tensor, "unit place"]:
    """Keys to sort places by: their values; of several places of one document, all but the largest from -1 to 0, by value; and
    where there is no place (a value below 0) still less."""
    order = value.sort(dim=1, descending=True, stable=True).indices
    by_document = document.gather(1, order).sort(dim=1, stable=True)  # a document's places stand together, the largest first
    again = torch.zeros_like(value, dtype=torch.bool)
    again[:, 1:] = by_document.values[:, 1:] == by_document.values[:, :-1]
    further = torch.zeros_like(again).scatter(1, by_document.indices, again)
    further = torch.zeros_like(again).scatter(1, order, further)
    return torch.where(value < 0, _NONE, torch.where(further, _behind(value), value))


def _behind(value: Tensor) -> Tensor:
    """From -1 to 0, in the order of values from 0 up."""
    return -1 / (1 + value.clamp(min=0))
