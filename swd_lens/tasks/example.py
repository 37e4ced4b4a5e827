"""TaskExample: one prompt of a task, in strings, before any tokenizer has seen it; and what can be wrong with tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TaskExample:
    """One prompt, the next tokens that are right and those that are wrong.

    Attributes:
        prompt: the text up to the scoring position (its last token).
        answers: right continuations, each of which should be one token (leading space included, " Mary").
        distractors: wrong continuations, each one token; the task margin is mean answer logit minus mean distractor logit.
        corrupt: the same prompt with the decisive content changed (for resampling), or None.
        meta: where the example comes from: family, split, template, ... (strings only; goes into reports).
    """

    prompt: str
    answers: tuple[str, ...]
    distractors: tuple[str, ...]
    corrupt: str | None = None
    meta: Mapping[str, str] = field(default_factory=dict)


class Unusable(Exception):
    """One example that cannot be scored; it is dropped and counted under `reason`, or refused with the detail."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
