"""Gendered pronoun: a tag question about a named person; " he" or " she" follows from the name.

1. Draw a name of the split (names of the test split are in no tag question of the training text).
2. Write a statement about that person that ends in the tag's verb: "..., isn't".
3. Answer: the pronoun of the name, distractor: the other one. The corrupt prompt has a name of the other gender.
4. `document`: the question completed, sometimes answered (training text).
"""

import random
import re

from swd_lens.tasks.generators.family import Family
from swd_lens.tasks.generators.words import ADJECTIVES, PLACES, ROLES, loose_words, pronoun_names
from swd_lens.tasks.split import TaskExample

FAMILY = "gendered_pronoun"
TEMPLATES = {
    "seen": (
        "So {name} is a really {adj} {role}, isn't",
        "{name} was always such a {adj} {role}, wasn't",
        "I think {name} is {adj}, isn't",
        "Well, {name} can be a {adj} {role}, can't",
        "{name} has become a very {adj} {role}, hasn't",
        "And {name} will be at the {place} soon, won't",
        "{name} works at the {place}, doesn't",
        "You know {name}, the {adj} {role}, and {name} was there, wasn't",
        "After all, {name} looked {adj} at the {place}, didn't",
        "{name} isn't a {adj} {role}, is",
        "But {name} wasn't at the {place}, was",
        "The {role} at the {place} is {name}, isn't",
        "{name} could be the {adj} {role} of the {place}, couldn't",
    ),
    "unseen": (
        "Oh, {name} is the most {adj} {role} in the {place}, isn't",
        "Everybody says that {name} went to the {place}, didn't",
        "Today {name} has been {adj} all day, hasn't",
        "The {role} called {name} was never {adj} before, was",
    ),
}
TAGS = ("isn't", "wasn't", "can't", "hasn't", "won't", "doesn't", "didn't", "couldn't", "is", "was")
LOOSE_SHARE = 0.25  # of training documents: loose words instead of templates, see words.LOOSE
REPLIES = ("", " Yes, {pro} {verb}.", " I think so.", " Yes.", " No, not at all.")


def sample(rng: random.Random, split: str, templates: str) -> TaskExample:
    """One prompt of `split`; `templates` is "seen" or "unseen"."""
    genders = ("she", "he") if rng.random() < 0.5 else ("he", "she")
    name, other = (rng.choice(pronoun_names(split, gender)) for gender in genders)
    index = rng.randrange(len(TEMPLATES[templates]))
    words = {"adj": rng.choice(ADJECTIVES), "role": rng.choice(ROLES), "place": rng.choice(PLACES)}
    return TaskExample(
        prompt=TEMPLATES[templates][index].format(name=name, **words),
        answers=(" " + genders[0],),
        distractors=(" " + genders[1],),
        corrupt=TEMPLATES[templates][index].format(name=other, **words),
        meta={"family": FAMILY, "split": split, "template": f"{templates}-{index}", "content": name},
    )


def corrupt(rng: random.Random, example: TaskExample) -> str:
    """The prompt of an example about another name of the other gender."""
    name, gender = example.meta["content"], example.distractors[0].strip()
    other = rng.choice(pronoun_names(example.meta["split"], gender))
    return re.sub(rf"\b{name}\b", other, example.prompt)


def variant(rng: random.Random, example: TaskExample) -> TaskExample:
    """The sentence of an example about another name, of either gender."""
    genders = ("she", "he") if rng.random() < 0.5 else ("he", "she")
    name = rng.choice(pronoun_names(example.meta["split"], genders[0]))
    prompt = re.sub(rf"\b{example.meta['content']}\b", name, example.prompt)
    meta = {**example.meta, "content": name}
    return TaskExample(prompt, (" " + genders[0],), (" " + genders[1],), None, meta)


def document(rng: random.Random, split: str) -> str:
    """A completed tag question, sometimes with a reply (seen templates)."""
    if split == "train" and rng.random() < LOOSE_SHARE:
        gender = rng.choice(("she", "he"))
        name = rng.choice(pronoun_names(split, gender))
        start = f"{loose_words(rng, 0, 4)}{name} {loose_words(rng, 1, 7)}".rstrip()
        return f"{start[0].upper()}{start[1:]}, {rng.choice(TAGS)} {gender}?"
    example = sample(rng, split, "seen")
    verb = example.prompt.rsplit(" ", 1)[1].removesuffix("n't")
    verb = {"ca": "can", "wo": "will"}.get(verb, verb)
    reply = rng.choice(REPLIES).format(pro=example.answers[0].strip(), verb=verb)
    return f"{example.prompt}{example.answers[0]}?{reply}"


FAMILIES = (Family(FAMILY, sample, corrupt, variant, document=document, trained=4),)
