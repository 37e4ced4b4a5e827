"""generate: what the dense and the replaced host write on, side by side, as `Samples`.

1. Prompts become token rows (strings by the host's tokenizer). Rows of one length run together, none of them padded.
2. The dense host first, then each replacement, attached only while it runs: step by step the logits at the last position
   in float32, one more token per row. The whole row runs again at every step, so that no cache is part of the comparison.
3. The next token is the likeliest one (temperature 0), or the largest of logits / temperature + Gumbel noise, which is a
   draw from the softmax. The noise depends on seed, prompt and step alone: every host gets the same, so that what differs
   between two continuations comes from the model. Ties go to the lowest id.
4. A row stops at a stop token (EOS, and all others of the host's generation_config), after `max_new_tokens`, or when the context
   is full; which of them is said. Rows that have stopped run along until all have: the batch, and with it the rounding of the
   others, is then the same for every host.
"""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.divergence import CHUNK_BYTES
from swd_lens.base.errors import TokenError, UnsupportedHostError, quoted, visible
from swd_lens.base.progress import tqdm
from swd_lens.base.record import PlainRecord, Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import Host, host_of, require_no_dropout
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import matches
from swd_lens.tasks.encoding import stop_tokens
from swd_lens.tasks.prompt import Prompt
from swd_lens.tasks.text import same_length
from swd_lens.units import attach

DENSE = "dense"
_MARK = "»"  # printed where a continuation leaves the dense one
_LONGEST = 600  # characters of a text in a notebook's card


@dataclass(frozen=True)
class Continuation(PlainRecord):
    """A text that one host wrote behind one prompt."""

    tokens: tuple[int, ...]  # the new ids; EOS or another stop token, if one came, is the last
    text: str | None  # decoded, that token left out; None without a tokenizer
    stop: str  # "eos" (a stop token), "length" (max_new_tokens) or "context" (prompt and new tokens fill n_ctx)
    departs: int | None  # index in `tokens` of the first one that differs from the dense host's; None if none does
    stopped_by: str | None = None  # the stop token, as the tokenizer writes it ("<|im_end|>"); None where none came

    def course(self, is_dense: bool) -> str:
        """Say how it went: "40 tokens", "departs at 7; <|im_end|> after 12 tokens"."""
        n = f"{len(self.tokens)} tokens"
        end = {"eos": f"{self.stopped_by or 'EOS'} after {n}", "context": f"{n}, context full", "length": n}[self.stop]
        if is_dense:
            return end
        return f"same; {end}" if self.departs is None else f"departs at {self.departs}; {end}"

    def marked(self, dense: "Continuation") -> str:
        """The text (or ids) with a mark where it leaves the dense host's."""
        if self.text is None or dense.text is None:
            return " ".join(_MARK * (i == self.departs) + str(token) for i, token in enumerate(self.tokens))
        if self.departs is None:
            return visible(self.text)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.text, dense.text, strict=False)))
        return f"{visible(self.text[:same])}{_MARK}{visible(self.text[same:])}"


@dataclass(frozen=True)
class Sample(PlainRecord):
    """One prompt and its continuations: label -> Continuation, "dense" first."""

    prompt: str | None
    prompt_tokens: tuple[int, ...]
    by_host: Mapping[str, Continuation]

    def rows(self) -> list[tuple[str, str, str]]:
        """(label, how it went, text with marks) of each host."""
        dense = self.by_host[DENSE]
        return [(label, c.course(label == DENSE), c.marked(dense)) for label, c in self.by_host.items()]


@dataclass(frozen=True, repr=False)
class Samples(Record):
    """Continuations of several prompts by several hosts; printing it shows them side by side.

    Attributes:
        samples: one per prompt, in their order.
        settings: max_new_tokens, temperature, seed, and whether prompts begin with BOS (None: prompts were token rows).
    """

    samples: tuple[Sample, ...]
    settings: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def table(self) -> pd.DataFrame:
        """One row per prompt and host; "departs at" counts new tokens from 0, empty where the dense host's are the same."""
        rows = [
            {"prompt": _text_or_ids(sample.prompt, sample.prompt_tokens), "host": label}
            | {"new tokens": len(c.tokens), "departs at": c.departs, "stop": c.stop}
            | {"text": _text_or_ids(c.text, c.tokens)}
            for sample in self.samples
            for label, c in sample.by_host.items()
        ]
        return pd.DataFrame(rows).astype({"departs at": "Int64"})

    def side_by_side(self, width: int = 100) -> str:
        """Plain text, one column per host, wrapped to `width` characters."""
        out = io.StringIO()
        console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
        console.print(Text(self.title()))
        for number, sample in enumerate(self.samples):
            console.print(Text(f"\n[{number}] {visible(_text_or_ids(sample.prompt, sample.prompt_tokens))}"))
            columns = Table(box=SIMPLE, expand=True, padding=(0, 1))
            labels, courses, texts = zip(*sample.rows(), strict=True)
            for label in labels:
                columns.add_column(Text(visible(label)), ratio=1, overflow="fold")
            columns.add_row(*map(Text, courses))
            columns.add_row(*map(Text, texts))
            console.print(columns)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __repr__(self) -> str:
        return self.side_by_side()

    def title(self) -> str:
        temperature = self.settings["temperature"]
        how = "greedy" if temperature == 0 else f"temperature {temperature:g}, seed {self.settings['seed']}"
        return f"Samples: {len(self.samples)} prompts, {how}; {_MARK} marks where a continuation leaves the dense one"

    def parts(self) -> tuple[Any, ...]:
        rows = [
            [text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …" for text in (prompt, label, how, written)]
            for sample in self.samples
            for prompt in [visible(_text_or_ids(sample.prompt, sample.prompt_tokens))]
            for label, how, written in sample.rows()
        ]
        return (pd.DataFrame(rows, columns=["prompt", "host", "how", "text"]),)


def _text_or_ids(text: str | None, tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens)) if text is None else text


# ---------------------------------------------------------------------------------------------- generate


@with_torch_defaults
def generate(
    model: Any,
    factors: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 40,
    temperature: float | int = 0,
    seed: int = 0,
    prepend_bos: bool | None = None,
    batch_size: int = 16,
    progress: bool = False,
) -> Samples:
    """Let the dense host and one or several replacements of it continue the same prompts (ours).

    Args:
        model: the host, with these sites not attached.
        factors: what to attach (see `swd_lens.attach`), or several: {"SWD": before, "SWD-FT": after}.
        prompts: a string, the messages of a chat (`[{"role": "user", "content": "..."}]`), several of them, or token ids:
            (rows, pos), or a list of rows of any lengths.
        max_new_tokens: at most so many per prompt; fewer where a stop token comes (EOS, or another that the host's
            generation_config names) or n_ctx is reached.
        temperature: 0 takes the likeliest token.
        seed: of the sampling noise, which is the same for every host. Prompts that are equal are sampled differently.
        prepend_bos: of prompts that are strings; None = as `swd_lens.load_task`: with BOS where the host was trained so.
        batch_size: prompts per forward.
        progress: show a bar.

    Raises:
        TokenError: no prompts, an empty one, one longer than the context, or strings for a host without a tokenizer.
        ValueError: numbers out of range; a label "dense"; train mode with dropout; logits that are not finite.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: the host attends both ways, so it cannot write on.
    """
    bounded("max_new_tokens", max_new_tokens, 1)
    bounded("batch_size", batch_size, 1)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature}: give 0 for the likeliest token, or a finite number above it")
    if not facts_of(model).causal:
        raise UnsupportedHostError("this host attends both ways, so it cannot write on from a prompt; give a causal one")
    require_no_dropout(model)
    host = host_of(model)
    size = min(batch_size, max(1, CHUNK_BYTES // (8 * int(model.cfg.d_vocab))))  # of logits, float64 where they are sampled
    replacements = _labelled(host, factors)
    rows, with_bos = prompt_rows(model, prompts, prepend_bos)
    written: dict[str, dict[int, tuple[int, ...]]] = {}
    total = (1 + len(replacements)) * len(rows)
    with torch.no_grad(), tqdm(total=total, desc="generate", unit="prompt", disable=not progress, leave=False) as bar:
        for label, units in {DENSE: None, **replacements}.items():
            written[label] = {}
            with nullcontext() if units is None else attach(model, units):
                for batch in same_length([len(row) for row in rows], lambda _: size):
                    new = _continue(host, rows, batch, max_new_tokens, float(temperature), seed)
                    written[label].update(zip(batch, new, strict=True))
                    bar.update(len(batch))
    samples = tuple(
        _sample(model, row, {label: by_prompt[i] for label, by_prompt in written.items()}, max_new_tokens)
        for i, row in enumerate(rows)
    )
    settings = {"max_new_tokens": max_new_tokens, "temperature": float(temperature), "seed": seed}
    return Samples(samples, {**settings, "prepend_bos": with_bos, **standing_hooks(model)})


def prompt_rows(model: Any, prompts: Any, prepend_bos: bool | None = None) -> tuple[list[tuple[int, ...]], bool | None]:
    """Token ids of each prompt, and whether strings among them got a BOS. Raises TokenError: see `generate`."""
    read = Prompt.several(model, prompts, "generate", prepend_bos=prepend_bos)
    if not read:
        raise TokenError("there are no prompts to continue; give at least one")
    for prompt in read:
        if not prompt.ids:
            raise TokenError(f"prompt {quoted(prompt.text)} has no tokens: there is nothing to continue")
        prompt.row(model)  # refuses what the context cannot hold
    return [prompt.ids for prompt in read], next((p.prepend_bos for p in read if p.text is not None), None)


def _labelled(host: Host, factors: Any) -> dict[str, Any]:
    """label -> what to attach; one replacement is called "replaced"."""
    several = False
    if isinstance(factors, Mapping) and factors:
        sites = [*host.sites(), *host.alternatives()]
        named = all(any(matches(site, str(name)) for site in sites) for name in factors)
        several = not named or any(isinstance(units, Mapping) for units in factors.values())
    labelled = {str(label): units for label, units in factors.items()} if several else {"replaced": factors}
    if DENSE in labelled:
        raise ValueError(f"{quoted(DENSE)} is the host without factors, which is always shown; give your factors another label")
    return labelled


def _continue(
    host: Host, rows: Sequence[tuple[int, ...]], batch: Sequence[int], most: int, temperature: float, seed: int
) -> list[tuple[int, ...]]:
    """New tokens of each row of a batch, EOS included."""
    tokens = torch.tensor([rows[prompt] for prompt in batch])
    start, n_ctx, stop = tokens.shape[1], int(host.model.cfg.n_ctx), stop_tokens(host.model)
    running = torch.ones(len(tokens), dtype=torch.bool)
    for step in range(min(most, n_ctx - start)):
        values = host.last_logits(tokens).float().cpu()
        if not torch.isfinite(values).all():
            raise ValueError(f"the host's logits at position {tokens.shape[1] - 1} are not finite; it cannot write on")
        if temperature > 0:
            noise = torch.stack([_gumbel(seed, prompt, step, values.shape[1]) for prompt in batch])
            values = values.double() / temperature + noise
        # The largest entry; of equal ones the lowest id, on every device.
        ids = torch.arange(values.shape[1])
        largest = ids.where(values == values.amax(1, keepdim=True), values.shape[1]).amin(1)
        tokens = torch.cat([tokens, largest[:, None]], 1)
        running &= ~torch.isin(largest, torch.tensor(stop, dtype=largest.dtype))
        if not running.any():
            break
    rows = tokens[:, start:].tolist()
    ends = [next((place for place, token in enumerate(row) if token in stop), len(row)) for row in rows]
    return [tuple(row[: end + 1]) for row, end in zip(rows, ends, strict=True)]


def _gumbel(seed: int, prompt: int, step: int, vocab: int) -> Float[Tensor, " vocab"]:
    """Standard Gumbel noise, float64. A digest, because sums of seed, prompt and step would repeat each other's noise."""
    digest = hashlib.sha256(f"{seed}/{prompt}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    uniform = torch.rand(vocab, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log(uniform))


def _sample(model: Any, row: tuple[int, ...], written: Mapping[str, tuple[int, ...]], most: int) -> Sample:
    """Decode one prompt's continuations, and compare them with the dense host's."""
    ends, dense, decodes = stop_tokens(model), written[DENSE], model.tokenizer is not None
    prompt = model.tokenizer.decode(list(row)) if decodes else ""
    by_host = {}
    for label, tokens in written.items():
        ended = tokens[-1:] != () and tokens[-1] in ends
        stop = "eos" if ended else "length" if len(tokens) == most else "context"
        departs = next((i for i, (a, b) in enumerate(zip(tokens, dense, strict=False)) if a != b), None)
        stopped_by = visible(model.tokenizer.decode([tokens[-1]])) if ended else None
        new, text = tokens[:-1] if ended else tokens, None
        if decodes:
            # Decoded together with the prompt: some tokenizers drop the space before a text's first word.
            whole = model.tokenizer.decode([*row, *new])
            text = whole[len(prompt) :] if whole.startswith(prompt) else model.tokenizer.decode(list(new))
        by_host[label] = Continuation(tokens, text, stop, departs, stopped_by)
    return Sample(prompt if decodes else None, row, by_host)
