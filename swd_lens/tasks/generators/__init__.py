"""The task families as seeded generators of strings: no tokenizer, no tensor, no download.

1. `words` holds the word lists and gives every piece of content (name pair, object and place, start year, neighbouring
   arguments, some names) to one split. `content_of` says whose content each split of a task has.
2. Each family draws content of a split, writes a prompt on a seen or an unseen template, and says which next tokens are right
   and wrong: four modules, `FAMILIES`, for the tasks that the embedded model was trained on, and `TABLES`, sentences as data,
   for what models of real text know.
3. `stream` gives different ones without end, the same ones for the same seed; `generate` takes n of them.

All text is our own wording. "unseen" templates are in no training text of the embedded model.
"""

import itertools
import random
from collections.abc import Iterator

from swd_lens.base.errors import legible, quoted
from swd_lens.tasks.generators import docstring, gendered_pronoun, greater_than, ioi, tables
from swd_lens.tasks.generators.tables import TABLES
from swd_lens.tasks.generators.words import OWNERS, SPLITS, TASK_PARTS
from swd_lens.tasks.split import TaskExample

_MODULES = {module.FAMILY: module for module in (ioi, docstring, greater_than, gendered_pronoun)}
FAMILIES = tuple(_MODULES)
GENERATED = (*FAMILIES, *TABLES)
TEMPLATES = ("seen", "unseen", "all")
_TRIES = 500  # draws without a new prompt before we believe that there are no more


def content_of(family: str) -> dict[str, str]:
    """Split of a task ("train", "validation", "test") -> whose content its prompts have, as `generate` calls it.

    The embedded model read the "train" content of its own families (FAMILIES), so a task of theirs has none of that; the other
    families were in no training text of ours.
    """
    return dict(zip(SPLITS, (*TASK_PARTS, "test") if family in FAMILIES else SPLITS, strict=True))


def generate(family: str, split: str, n: int, seed: int = 0, templates: str = "seen") -> list[TaskExample]:
    """`n` different prompts of a task family.

    Args:
        family: one of GENERATED: "ioi", "docstring", "greater_than", "gendered_pronoun", "capital", "agreement", "succession",
            "greater_digit".
        split: "train", "validation" or "test"; the splits share no content key (`meta["content"]`). Of FAMILIES also
            "task train" or "task validation", the two parts of "validation" that a task has (`content_of`).
        n: how many, at least 1. The first prompts of a larger request are those of a smaller one.
        seed: another seed, other prompts of the same split.
        templates: "seen" (those of the training text), "unseen" (never trained on) or "all" (either, half and half).

    Raises:
        ValueError: an unknown family, split or templates (the valid ones are listed), n < 1, or more prompts asked for
            than the split has.
    """
    if n < 1:
        raise ValueError(f"n is {n}; ask for at least 1 prompt")
    examples = list(itertools.islice(stream(family, split, seed, templates), n))
    if len(examples) < n:
        raise ValueError(f"{family}/{split}/{templates} has about {len(examples)} different prompts; n is {n}")
    return examples


def stream(family: str, split: str, seed: int = 0, templates: str = "seen") -> Iterator[TaskExample]:
    """The prompts of `generate`, one after the other, until there seem to be no more different ones.

    Raises:
        ValueError: an unknown family, split or templates.
    """
    _check("family", family, GENERATED)
    _check("split", split, OWNERS if family in FAMILIES else SPLITS)
    _check("templates", templates, TEMPLATES)
    return _draw(family, split, seed, templates)


def _draw(family: str, split: str, seed: int, templates: str) -> Iterator[TaskExample]:
    rng = random.Random(f"{family}/{split}/{templates}/{seed}")  # a string seed is the same in every process
    prompts: set[str] = set()
    misses = 0
    while misses <= _TRIES:
        kind = rng.choice(("seen", "unseen")) if templates == "all" else templates
        example = {**_MODULES, **TABLES}[family].sample(rng, split, kind)
        misses = misses + 1 if example.prompt in prompts else 0
        if not misses:
            prompts.add(example.prompt)
            yield example


def corrupts(example: TaskExample) -> Iterator[str]:
    """Further corrupt prompts of a generated example, drawn like the one it has, the same ones every time.

    Without end for ioi, gendered_pronoun and capital; none for the other families, whose corrupt prompts differ in other ways
    than names.
    """
    family = example.meta["family"]
    redraw = {"ioi": ioi.corrupt, "gendered_pronoun": gendered_pronoun.corrupt}.get(family)
    redraw = tables.corrupt if "swaps" in example.meta else redraw
    rng = random.Random(f"{family}/corrupt/{example.prompt}")
    while redraw is not None:
        yield redraw(rng, example)


def variants(example: TaskExample) -> Iterator[TaskExample]:
    """Further examples of the same sentence about other people of its split, drawn the same way every time; answers change along.

    Without end for ioi and gendered_pronoun; none for the other families, whose prompts have few templates, and for prompts that
    are not of a family.
    """
    family = example.meta.get("family", "")
    redraw = {"ioi": ioi.variant, "gendered_pronoun": gendered_pronoun.variant}.get(family)
    rng = random.Random(f"{family}/variant/{example.prompt}")
    while redraw is not None:
        yield redraw(rng, example)


def training_document(family: str, rng: random.Random, split: str = "train") -> str:
    """One complete text of a family (prompt, answer and what follows) with content of `split`, on seen templates."""
    _check("family", family, FAMILIES)
    _check("split", split, SPLITS)
    return _MODULES[family].document(rng, split)


def _check(what: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"unknown {legible(what)} {quoted(value)}; choose one of {', '.join(valid)}")
