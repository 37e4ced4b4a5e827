"""aligned_prompts: prompts of a task in which each position means the same, so that what happens there can be averaged.

1. Aligned are prompts of one length and, where the examples say so (`meta`), of one template and order. The largest such group of
   a split is taken; of equal ones the first.
2. A generator that tells a story in many ways leaves few prompts of each. Where its family can (`variants`: ioi,
   gendered_pronoun), the group's first example is drawn again, about other people of the same split.
3. `Aligned.roles` names the positions: by the token that all prompts have there, "[answer]" or "[wrong answer]" where every
   prompt has its own there, else by the most frequent token, "[school …]".

What is left out is counted, and why.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.errors import TaskError, visible_token
from swd_lens.tasks.generators import variants
from swd_lens.tasks.prompt import decoded
from swd_lens.tasks.split import PER_PROMPT, TaskExample, TaskSplit
from swd_lens.tasks.task import Task, TaskBuilder

ANSWER, WRONG = "[answer]", "[wrong answer]"
_KEYS = ("template", "order")  # of meta
_DRAWS = 20  # per prompt that is wanted: names of several tokens make prompts of another length


@dataclass(frozen=True)
class Aligned:
    """Aligned prompts."""

    split: TaskSplit  # of one length and template
    drawn: int  # how many of them are variants of the first one, which the split did not have
    left_out: Mapping[str, int]  # reason -> how many prompts of the split
    roles: tuple[str, ...]  # what each position is called

    @property
    def tokens(self) -> Int[Tensor, "prompt pos"]:
        return torch.stack(list(self.split.tokens))

    @property
    def text(self) -> str:
        """The prompt, with roles where prompts differ."""
        return "".join(self.roles).replace("·", " ")

    @property
    def typical(self) -> list[int]:
        """The most frequent token of every position."""
        return self.tokens.mode(0).values.tolist()


def aligned_prompts(model: Any, prompts: Any, n: int = 16, *, like: int | None = None, drawn: bool = True) -> Aligned:
    """At most n prompts of the largest group of aligned ones of a split (of a Task the train split); of equal ones that of the
    shortest prompts.

    like: number of an example: the prompts aligned with that one, which comes first; None: the largest group. drawn: a group of
    fewer is filled up with variants of its first prompt, where its family has any. Raises TaskError: the prompts are of another
    host, n is below 1, or there is no such example.
    """
    split = prompts.train if isinstance(prompts, Task) else prompts
    if not isinstance(split, TaskSplit):
        raise TaskError(f"aligned prompts are taken from a Task or one of its splits, got {type(split).__name__}")
    bounded("n", n, 1, error=TaskError)
    if like is not None and not 0 <= like < len(split):
        raise TaskError(f"like={like}: the split has examples 0 to {len(split) - 1}")
    split.require_host(model)
    keys = [_key(split, i) for i in range(len(split))]
    first = groups_of(split)[0] if like is None else like
    members = [first, *(i for i, key in enumerate(keys) if key == keys[first] and i != first)]
    other_length = sum(key[0] != keys[first][0] for key in keys)
    left_out = {
        "of another length": other_length,
        "of another template or order": len(keys) - len(members) - other_length,
        "not needed": max(0, len(members) - n),
    }
    group = split.at(members[:n])
    added = _variants(model, group, n - len(group)) if drawn and len(group) < n else None
    if added is not None:
        both = {name: (*getattr(group, name), *getattr(added, name)) for name in PER_PROMPT}
        group = replace(group, **both)
    kept = {reason: count for reason, count in left_out.items() if count}
    # Name the positions. Words count as the same with and without the space before them.
    sides = {ANSWER: group.answer_ids, WRONG: group.distractor_ids}
    words = {role: [[decoded(model, [token]).strip() for token in ids] for ids in side] for role, side in sides.items()}
    roles = []
    for column in torch.stack(list(group.tokens)).T.tolist():
        texts = [decoded(model, [token]) for token in column]
        space = "·" if all(text.startswith(" ") for text in texts) else ""
        own = [
            role
            for role, of_prompts in words.items()
            if all(text.strip() in of_prompt for text, of_prompt in zip(texts, of_prompts, strict=True))
        ]
        if len(set(column)) == 1:
            roles.append(visible_token(texts[0]))
        else:
            roles.append(space + (own[0] if own else f"[{Counter(texts).most_common(1)[0][0].strip()} …]"))
    return Aligned(group, 0 if added is None else len(added), kept, tuple(roles))


def groups_of(split: TaskSplit) -> list[int]:
    """The first example of every group of aligned prompts: the largest group first, of equal ones the shortest prompts."""
    keys = [_key(split, i) for i in range(len(split))]
    sizes = Counter(keys)
    return [keys.index(key) for key in sorted(sizes, key=lambda key: (-sizes[key], key[0]))]


def _key(split: TaskSplit, i: int) -> tuple[Any, ...]:
    return (len(split.tokens[i]), *(split.examples[i].meta.get(key) for key in _KEYS))


def _variants(model: Any, group: TaskSplit, n: int) -> TaskSplit | None:
    """Up to n further prompts like the first of a group; None where its family has none."""
    drawn = list(itertools.islice(variants(group.examples[0]), _DRAWS * n))
    if not drawn:
        return None
    length, known = len(group.tokens[0]), {example.prompt for example in group.examples}
    collector = TaskBuilder(group.task, model, group.prepend_bos).train

    def fits(example: TaskExample) -> bool:
        return example.prompt not in known and len(collector.tokenizer.prompt(example.prompt)) == length

    collector.fill((example for example in drawn if fits(example)), n)
    return collector.finish() if collector.kept else None
