"""The task families as seeded generators of strings: no tokenizer, no tensor, no download.

1. `words` holds the word lists and gives every piece of content (name pair, object and place, start year, neighbouring
   arguments, some names) to one split. `content_of` says whose content each split of a task has.
2. Each family draws content of a split, writes a prompt on a seen or an unseen template, and says which next tokens are right
   and wrong. Modules declare their families (family.py) and are found here: `FAMILIES`, on which the embedded model was
   trained, and sentences as data for what models of real text know (tables.py); together `GENERATED`.
3. `stream` gives different prompts without end, the same ones for the same seed; `generate` takes n of them.

All text is our own wording. "unseen" templates are in no training text of the embedded model.
"""

import importlib
import itertools
import pkgutil
import random
from collections.abc import Iterator

from swd_lens.base.checks import bounded, one_of
from swd_lens.tasks.generators.family import Family
from swd_lens.tasks.generators.words import OWNERS, SPLITS, TASK_PARTS
from swd_lens.tasks.split import TaskExample

_MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
_DECLARED: list[Family] = [family for module in _MODULES for family in getattr(module, "FAMILIES", ())]
_BY_NAME = {family.name: family for family in sorted(_DECLARED, key=lambda family: family.trained or len(_DECLARED) + 1)}
GENERATED = tuple(_BY_NAME)
FAMILIES = tuple(name for name, family in _BY_NAME.items() if family.trained)
TEMPLATES = ("seen", "unseen", "all")
_TRIES = 500  # draws without a new prompt before we believe that there are no more


def content_of(family: str) -> dict[str, str]:
    """Split of a task -> whose content its prompts have, as `generate` calls it. The embedded model read the "train" content of
    its own families (FAMILIES), so a task of theirs has none of that; the others were in no training text of ours."""
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
    bounded("n", n, 1)
    examples = list(itertools.islice(stream(family, split, seed, templates), n))
    if len(examples) < n:
        raise ValueError(f"{family}/{split}/{templates} has about {len(examples)} different prompts; n is {n}")
    return examples


def stream(family: str, split: str, seed: int = 0, templates: str = "seen") -> Iterator[TaskExample]:
    """The prompts of `generate`, one after the other, until there seem to be no more different ones. Raises ValueError: an
    unknown family, split or templates."""
    one_of("family", family, GENERATED)
    one_of("split", split, OWNERS if family in FAMILIES else SPLITS)
    one_of("templates", templates, TEMPLATES)
    return _draw(family, split, seed, templates)


def _draw(family: str, split: str, seed: int, templates: str) -> Iterator[TaskExample]:
    rng = random.Random(f"{family}/{split}/{templates}/{seed}")  # a string seed is the same in every process
    prompts: set[str] = set()
    misses = 0
    while misses <= _TRIES:
        kind = rng.choice(("seen", "unseen")) if templates == "all" else templates
        example = _BY_NAME[family].sample(rng, split, kind)
        misses = misses + 1 if example.prompt in prompts else 0
        if not misses:
            prompts.add(example.prompt)
            yield example


def family_of(example: TaskExample) -> Family | None:
    """The family that an example is of; None where it is of no generator."""
    return _BY_NAME.get(example.meta.get("family", ""))


def corrupts(example: TaskExample) -> Iterator[str]:
    """Further corrupt prompts of a generated example, drawn like the one it has, the same ones every time: without end for ioi,
    gendered_pronoun and capital; none for the other families, whose corrupt prompts differ in other ways than names."""
    family = family_of(example)
    rng = random.Random(f"{example.meta.get('family')}/corrupt/{example.prompt}")
    while family is not None and family.corrupt is not None:
        yield family.corrupt(rng, example)


def variants(example: TaskExample) -> Iterator[TaskExample]:
    """Further examples of the same sentence about other people of its split, drawn the same way every time; answers change along.
    Without end for ioi and gendered_pronoun; none for families of few templates, and for prompts that are not of a family."""
    family = family_of(example)
    rng = random.Random(f"{example.meta.get('family')}/variant/{example.prompt}")
    while family is not None and family.variant is not None:
        yield family.variant(rng, example)


def training_document(family: str, rng: random.Random, split: str = "train") -> str:
    """One complete text of a family (prompt, answer and what follows) with content of `split`, on seen templates."""
    one_of("family", family, FAMILIES)
    one_of("split", split, SPLITS)
    document = _BY_NAME[family].document
    assert document is not None
    return document(rng, split)
