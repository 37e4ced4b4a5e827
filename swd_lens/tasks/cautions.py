"""Cautions: what makes a task another one than it looks, although every prompt and answer can be tokenized.

1. A prompt's text begins with BOS, which the host puts before prompts: it gets no second one.
2. A prompt ends in a space, but the word that follows brings its own: the space is a token of its own there, which no text has.
3. An answer has no space before it where the prompt ends within a line: it goes on the last word ("Paris" behind "is" is
   "isParis"). Only of letters that have cases: there spaces stand between words.
4. An answer stands in the prompt and no distractor does: a host that copies does the task.

`Cautions` collects the prompts of a task, and warns once for each of these, naming the first of them.
"""

from typing import Any

from swd_lens.base.errors import TextWarning, quoted, warn
from swd_lens.tasks.split import TaskExample

_NAMED = 3  # prompts in a warning
_END = 60  # characters of a prompt


def begins_twice(tokenizer: Any, text: str) -> bool:
    """Whether a text brings the BOS that would be put before it."""
    bos = getattr(tokenizer, "bos_token", None)
    return bool(bos) and text.startswith(bos)


def warn_of_second_bos(tokenizer: Any, what: str, texts: list[str]) -> None:
    """One TextWarning where texts brought their own BOS, which then got no second one."""
    if texts:
        named, bos = _named(texts, at_end=False), tokenizer.bos_token
        warn(
            f"{what}: {len(texts)} prompts begin with {quoted(bos)}, which this host puts before every prompt; they get "
            f"no second one: {named}",
            TextWarning,
        )


class Cautions:
    """Traps that were found in the prompts of a task. tokenizer: a `TaskTokenizer`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.with_bos, self.with_space = dict[str, None](), dict[str, None]()
        self.glued, self.given_away = dict[tuple[str, str], None](), dict[tuple[str, str], None]()

    def see(self, example: TaskExample, ids: list[int], answers: tuple[int, ...], distractors: tuple[int, ...]) -> None:
        """Note one example: its texts, and the ids of its prompt, answers and distractors (none where a metric judges)."""
        prompt = example.prompt
        if self.tokenizer.prepend_bos and begins_twice(self.tokenizer.tokenizer, prompt):
            self.with_bos[prompt] = None
        if prompt.endswith(" "):
            self.with_space[prompt] = None
        for text in (*example.answers, *example.distractors):
            if self.goes_on_the_word(prompt, text):
                self.glued[prompt, text] = None
                break
        decode = self.tokenizer.tokenizer.decode
        inside = [token for token in answers if token in ids and decode([token]).strip()[:1].isalpha()]
        if inside and not any(token in ids for token in distractors):
            self.given_away[prompt, decode([inside[0]])] = None

    def goes_on_the_word(self, prompt: str, answer: str) -> bool:
        """Whether an answer would be glued to the prompt's last word, while it is a token with its space, too."""
        if not (_has_case(answer[:1]) and (_has_case(prompt[-1:]) or prompt[-1:].isdigit())):
            return False
        alone, spaced = self.tokenizer.short(answer), self.tokenizer.short(" " + answer)
        return len(alone) == 1 and len(spaced) == 1 and alone != spaced

    def warn(self, what: str) -> None:
        """Warn once for each kind that was found. what: whose prompts, for the messages."""
        warn_of_second_bos(self.tokenizer.tokenizer, what, list(self.with_bos))
        messages = []
        if self.with_space:
            messages.append(
                f"{len(self.with_space)} prompts end in a space: {_named(list(self.with_space))}. Words bring their own space "
                "(' Paris'), so that a space alone is a token that stands before no word in text; take it off, and put it "
                "before the answers"
            )
        if self.glued:
            n, (prompt, answer) = len(self.glued), next(iter(self.glued))
            messages.append(
                f"answers without a space before them go on with the last word of {n} prompts: {quoted(answer)} behind "
                f"{_named([prompt])}. This host has a token for it with the space, too; if a new word is meant, put it there"
            )
        if self.given_away:
            n, (prompt, answer) = len(self.given_away), next(iter(self.given_away))
            messages.append(
                f"in {n} prompts an answer stands and no distractor does: {quoted(answer)} in {_named([prompt])}. A host that "
                "copies does them; put a distractor into the prompt as well"
            )
        for message in messages:
            warn(f"{what}: {message}", TextWarning)


def _has_case(character: str) -> bool:
    """Whether it is a letter of Latin, Greek, Cyrillic, ...: of scripts with spaces between words."""
    return character.lower() != character.upper()


def _named(texts: list[str], at_end: bool = True) -> str:
    """The first texts, each by its end (or its beginning), and how many more there are."""
    shown = [text if len(text) <= _END else f"…{text[-_END:]}" if at_end else f"{text[:_END]}…" for text in texts[:_NAMED]]
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(map(repr, shown)) + more
