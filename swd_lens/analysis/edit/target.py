"""target: the aim of an edit. A prompt, the token that should gain and the one that should lose, seen from one site.

1. Answer and foil are one token each (tasks/tokenize.py decides, as for tasks); ids are taken as they are.
2. h*, the site's input at the prompt's last position, is read off one forward of the host as it is now, with its margin.
3. d = u_answer - u_foil, the difference of two unembedding columns: a change of the site's output y by dy moves the margin
   by dy . d, as far as the residual stream goes straight to the unembedding. The final normalization is not in d (paper,
   app. component editing); direction="through_norm" puts its weight in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.checks import one_of
from swd_lens.base.errors import EditError, quoted
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.hosts.recording import record
from swd_lens.hosts.sites import RESIDUAL_MATRICES, Site, split_name
from swd_lens.tasks.prompt import Prompt, decoded
from swd_lens.tasks.split import Unusable
from swd_lens.tasks.tokenize import TaskTokenizer

DIRECTIONS = ("unembedding", "through_norm")
# Sites whose output is added to the residual stream and that have one matrix to change.
EDITABLE = RESIDUAL_MATRICES


@dataclass(frozen=True, eq=False)
class Target:
    """One prompt with its answer and foil, and what an edit of one site needs to know of them."""

    site: str  # the site's name
    prompt: str  # prompt, answer, foil: as texts, where they were given so (else how the ids read)
    answer: str
    foil: str
    tokens: Int[Tensor, " pos"]  # (pos,) the prompt's ids, BOS included
    answer_id: int  # answer_id, foil_id: the two tokens
    foil_id: int
    input: Float[Tensor, " d_in"]  # (d_in,) h*, the site's input at the last position; float32, on the CPU
    direction: Float[Tensor, " d_out"]  # (d_out,) d; float32, on the CPU
    margin: float  # answer logit minus foil logit at the last position, before any edit
    direction_is: str = "unembedding"  # one of DIRECTIONS
    prepend_bos: bool | None = None  # whether the prompt's text was given a BOS; None: it came as ids

    def described(self) -> dict[str, Any]:
        """Plain JSON values: everything but the two vectors."""
        return {
            "prompt": self.prompt,
            "answer": self.answer,
            "foil": self.foil,
            "tokens": self.tokens.tolist(),
            "answer_id": self.answer_id,
            "foil_id": self.foil_id,
            "margin": self.margin,
            "direction": self.direction_is,
            "prepend_bos": self.prepend_bos,
        }

    @classmethod
    def of_described(cls, site: str, values: Mapping[str, Any], input: Tensor, direction: Tensor) -> "Target":
        """Make a target of what was `described`, with h* and d. Raises KeyError, TypeError: a value is missing, or unknown."""
        known = {**values, "direction_is": values["direction"], "tokens": torch.tensor(values["tokens"])}
        return cls(**known | {"site": site, "input": input, "direction": direction})


def read_prompt(model: Any, given: Any, prepend_bos: bool | None = None) -> Prompt:
    """One prompt with something to score, from a text or (pos,) token ids. Raises EditError: several rows of ids, nothing to
    score, or more tokens than the context holds; TokenError: see `Prompt.of`."""
    prompt = Prompt.of(model, given, "edit", prepend_bos=prepend_bos)
    if prompt.n_rows != 1:
        raise EditError(f"a prompt is one row of token ids, got {prompt.n_rows} rows; give them one by one")
    if prompt.unusable is not None:
        raise EditError(f"{prompt.unusable}. Give a shorter prompt, or one that is not empty: {quoted(given)}")
    return prompt


def shown_text(model: Any, prompt: Prompt) -> str:
    """A prompt as it was given, or how its ids read."""
    return decoded(model, prompt.ids) if prompt.text is None else prompt.text


def ending(text: str, n: int) -> str:
    """The last n characters: where a prompt differs from others is usually behind."""
    return text if len(text) <= n else "…" + text[-(n - 1) :]


def _word(model: Any, given: str | int, role: str) -> tuple[str, int]:
    """(text, id) of an answer or foil. Raises EditError: not exactly one token, or an id outside the vocabulary."""
    if isinstance(given, int):
        d_vocab = int(model.cfg.d_vocab)
        if not 0 <= given < d_vocab:
            raise EditError(f"{role} {given} is no token of this host; ids go from 0 to {d_vocab - 1}")
        return decoded(model, [given]), given
    try:
        return given, TaskTokenizer("edit", model).single(given, role)
    except Unusable as why:
        raise EditError(f"{why}. An edit moves the logits of single tokens; mind the leading space") from None


def require_editable(site: Site | str) -> None:
    """Raises ValueError where a site does not write to the residual stream (its output has no direct effect on logits)."""
    name = site if isinstance(site, str) else site.name
    if split_name(name)[1] not in EDITABLE:
        raise EditError(f"{name} does not write to the residual stream; an edit takes units of mlp_out and attn_o")


def require_number(what: str, value: Any) -> float:
    """A finite number, as a float; else EditError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise EditError(f"{what} must be a number, got {quoted(value)}") from None
    if not math.isfinite(number):
        raise EditError(f"{what} must be a finite number (neither infinite nor nan), got {number}")
    return number


def find_target(
    model: Any,
    site: Site,
    prompt: Any,
    answer: str | int,
    foil: str | int,
    *,
    direction: str = "unembedding",
    prepend_bos: bool | None = None,
) -> Target:
    """Tokens, h*, d and the margin of one prompt, in the host as it is now (units attached to it take part).

    Args:
        prompt: a text, or (pos,) token ids.
        answer, foil: texts of one token each, or token ids.
        direction: "unembedding" (paper): d = u_answer - u_foil; "through_norm": times the final normalization's weight,
            where it is not folded into the unembedding.
        prepend_bos: of a text; None = what the host was trained with, as for tasks.

    Raises:
        EditError: a site that does not write to the residual stream, answer or foil not one token, both the same, an unknown
            direction, or a margin that is not finite.
        UnsupportedHostError: the host's forward never shows the site's input, or it has no unembedding.
    """
    require_editable(site)
    require_no_dropout(model)
    one_of("direction", direction, DIRECTIONS, EditError)
    host, read = host_of(model), read_prompt(model, prompt, prepend_bos)
    (answer, answer_id), (foil, foil_id) = _word(model, answer, "an answer"), _word(model, foil, "a foil")
    norm, unembedding = host.readout()
    d = (unembedding[:, answer_id] - unembedding[:, foil_id]).float().cpu()
    if norm is not None and direction == "through_norm":
        d = d * norm.cpu()
    if answer_id == foil_id or not bool(d.any()):
        raise EditError(
            f"answer {quoted(answer)} and foil {quoted(foil)} have the same unembedding; there is no margin to move between them"
        )
    tokens = read.row(model)
    seen = record(host, tokens[None], inputs=[site], run="last")
    assert seen.logits is not None
    logits = seen.logits[0].detach().double().cpu()
    margin = float(logits[answer_id] - logits[foil_id])
    if not math.isfinite(margin):
        raise EditError(
            f"the margin of {quoted(answer)} over {quoted(foil)} on {quoted(shown_text(model, read))} is {margin}; run "
            "the host in float32"
        )
    return Target(
        site=site.name,
        prompt=shown_text(model, read),
        answer=answer,
        foil=foil,
        tokens=tokens,
        answer_id=answer_id,
        foil_id=foil_id,
        input=seen.inputs[site.name][0, -1].detach().float().cpu(),
        direction=d,
        margin=margin,
        direction_is=direction,
        prepend_bos=read.prepend_bos,
    )
