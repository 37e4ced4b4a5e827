"""Text of the embedded model, generated on the fly and packed into rows; and its tokenizer.

1. `document`: draw a kind (four task families, copy lists, filler) by the mixing schedule, then write one text of it.
2. `Packer.row`: documents as token ids, "BOS text EOS", one after the other until the row is full; the last is cut
   off and the next row starts with a new document, so nothing stands in a row without its beginning.
3. `load_tokenizer`: whole words, split the way GPT-2 splits them; it adds BOS only if told to (TransformerLens'
   prepend_bos), never EOS.

4. `filler`: everything the model reads that is not one of the four tasks, a small general language distribution: stories and
   biographies, where pronouns follow from names (for all names, also those never seen in a tag question); dialogue, code,
   number sequences. `copy_list` teaches induction before anything else can be learned. Each takes a `random.Random` and returns
   one document. The sentences also use every word of the unseen task templates, in other sentences: an unseen template is a new
   sentence, not a new word.

How the tokenizer was built, and batches for training, are tests/embedded/text.py of the repository.
"""

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swd_lens.base.errors import legible, quoted
from swd_lens.tasks.generators import training_document
from swd_lens.tasks.generators.docstring import CLASSES, FUNCTIONS
from swd_lens.tasks.generators.words import (
    ADJECTIVES,
    ARGUMENTS,
    EVENTS,
    FEMALE,
    MALE,
    NAMES,
    OBJECTS,
    PLACES,
    ROLES,
    as_words,
    split_of,
)

# IOI needs most (it is learned last), pronouns are easy.
MIX = {"ioi": 0.28, "docstring": 0.14, "greater_than": 0.28, "gendered_pronoun": 0.05, "copy": 0.06, "filler": 0.19}
KINDS = tuple(MIX)
# Mean tokens of a document of each kind (measured on 4,000), which turn token shares into document shares.
MEAN_TOKENS = {"ioi": 33, "docstring": 63, "greater_than": 19, "gendered_pronoun": 18, "copy": 37, "filler": 39}
N_CTX = 128

BOS, EOS, UNK = "<|bos|>", "<|eos|>", "<|unk|>"


def document(rng: random.Random, mix: dict[str, float], split: str = "train") -> str:
    """One document: a kind drawn so that the kinds have the token shares `mix`; content of `split`."""
    kind = rng.choices(KINDS, [mix[kind] / MEAN_TOKENS[kind] for kind in KINDS])[0]
    if kind == "copy":
        return copy_list(rng)
    if kind == "filler":
        return filler(rng)
    return training_document(kind, rng, split)


class Packer:
    """Turns documents into rows of token ids. tokenizer: the embedded model's; split: whose content the task documents have.
    Raises ValueError: on a text with a word outside the vocabulary (the corpus and the tokenizer do not fit)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, split: str = "train"):
        self.split = split
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.bos, self.eos, self.unk = vocabulary[BOS], vocabulary[EOS], vocabulary[UNK]

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without special tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.unk in ids:
            unknown = [piece for piece in self.tokenizer.tokenize(text) if piece == self.tokenizer.unk_token]
            raise ValueError(f"{len(unknown)} pieces outside the vocabulary in {quoted(text)}: rebuild the tokenizer")
        return ids

    def row(self, rng: random.Random, mix: dict[str, float], length: int, bos_dropped: float) -> list[list[int]]:
        """The documents (ids) of one row; together exactly `length` tokens, the last one cut off."""
        documents, left = [], length
        while left > 0:
            ids = [*self.encode(document(rng, mix, self.split)), self.eos]
            if not documents or rng.random() >= bos_dropped:
                ids.insert(0, self.bos)
            documents.append(ids[:left])
            left -= len(documents[-1])
        return documents

    def plain_rows(self, seed: int, n_rows: int, mix: dict[str, float]) -> Int[Tensor, "row pos"]:
        """Rows of N_CTX tokens for an ordinary causal forward, every document with its BOS and EOS."""
        rng = random.Random(f"text/{self.split}/{seed}")
        return torch.tensor([list(chain(*self.row(rng, mix, N_CTX, 0.0))) for _ in range(n_rows)])


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a folder, loaded in the way TransformerLens can reload it (it needs name_or_path)."""
    if not Path(folder, "tokenizer.json").is_file():
        raise FileNotFoundError(f"{legible(folder)} has no tokenizer.json; give a folder that embedded.train wrote")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


COLORS = as_words("red blue green white black yellow brown")
ANIMALS = as_words("dog cat horse bird cow sheep fox bear")
FOODS = as_words("bread soup rice fish cheese fruit meat salad")
DAYS = as_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
TIMES = as_words("morning afternoon evening night")
PRONOUNS = {"she": ("she", "her", "her", "woman", "girl"), "he": ("he", "him", "his", "man", "boy")}

# {n} name, {p} she/he, {P} She/He, {o} her/him, {s} her/his, {m} a friend of any gender
STORY = (
    "{P} went to the {place} because {p} wanted a {object}.",
    "{P} found {s} {object} behind the {place}.",
    "{P} was {adj}, but {s} {animal} was not.",
    "In the {time}, {p} talked to {m} about the {object}.",
    "{m} gave {o} some {food} and said that it was good.",
    "{P} carried the {color} {object} over the {place}.",
    "{P} quickly sent {s} {object} home.",
    "Everybody was happy when {p} called.",
    "{P} closed the door and opened a {object}, so the {animal} stopped.",
    "The {color} {object} belongs to the {role}, not to {m}.",
    "After {s} walk {p} was happy to leave the {place} empty.",
    "Late in the {time} {p} read the first book of {s} life.",
    "{P} and {s} {animal} ate {food} all day.",
    "The most {adj} {role} in the {place} called {o}.",
    "{P} never saw {m} before, but {m} was {adj} to {o}.",
    "It was only a {object}, up in the {place}, and {p} took it.",
    "At the start of the {time} {p} ate {food}, then {p} went home.",
    "During the {time} {p} sat around the {place} with {m}.",
)
OPENINGS = (
    "{n} was a {adj} {role} who lived near the {place}.",
    "Once there was a {g} called {n}.",
    "On {day}, {n} lost {s} {object}.",
    "Today {n} has been at the {place} all day.",
    "Everybody says that {n} has a {color} {animal}.",
    "Oh, {n} was late on {day} {time}.",
    "Late on {day}, {n} saw a {animal} near the {place}.",
    "During lunch, {n} talked about the {event}.",
    "For many years {n} was the only {role} at the {place}.",
)
BIOGRAPHY = (
    "{n} was born in {year} in a small village. {P} was a {role}, and {s} {object} is in the museum today.",
    "{n} is a {adj} {role}. {P} lives near the {place} with {s} {animal}. People like {o}.",
    "The {role} {n} wrote the first book about the {event}. {P} was {adj} all {s} life.",
    "{n}, a {g} of {age} years, works as a {role}. {P} says that the {place} is {s} home.",
)
LINES = (
    'Where is the {object}?" asked {n}. "It is at the {place}," said {m}.',
    'I saw {m} on {day}," said {n}. "Was the {role} there?" "No, only the {animal}."',
    'Do you like {food}?" asked {n}. "Yes, and I like {food2} too," said {m}.',
    'We will read about the {event}," said {n}. "After that, we can go to the {place}."',
    'The {object} is {color}," said {n} to {m}. "I know," said {m}.',
)


def _words(rng: random.Random) -> dict[str, str]:
    """One draw of everything a sentence may mention; the person's name and pronouns agree."""
    pronoun = rng.choice(("she", "he"))
    subject, objective, possessive, adult, child = PRONOUNS[pronoun]
    name = rng.choice(FEMALE if pronoun == "she" else MALE)
    return {
        "n": name,
        "m": rng.choice([m for m in NAMES if m != name and split_of("names", *sorted((m, name))) == "train"]),
        "p": subject,
        "P": subject.capitalize(),
        "o": objective,
        "s": possessive,
        "g": rng.choice((adult, child)),
        **_things(rng),
    }


def _things(rng: random.Random) -> dict[str, str]:
    return {
        "place": rng.choice(PLACES),
        "object": rng.choice(OBJECTS),
        "adj": rng.choice(ADJECTIVES),
        "role": rng.choice(ROLES),
        "animal": rng.choice(ANIMALS),
        "color": rng.choice(COLORS),
        "food": rng.choice(FOODS),
        "food2": rng.choice(FOODS),
        "day": rng.choice(DAYS),
        "time": rng.choice(TIMES),
        "event": rng.choice(EVENTS),
        "year": str(rng.randint(1100, 1899)),
        "age": str(rng.randint(20, 89)),
    }


def story(rng: random.Random) -> str:
    """A person, then two to five sentences about that person."""
    words = _words(rng)
    sentences = [rng.choice(OPENINGS), *rng.sample(STORY, rng.randint(2, 5))]
    return " ".join(sentence.format(**{**words, **_things(rng)}) for sentence in sentences)


def biography(rng: random.Random) -> str:
    """Two or three sentences about one person."""
    return rng.choice(BIOGRAPHY).format(**_words(rng))


def dialogue(rng: random.Random) -> str:
    """One to three exchanges between two people, a line each."""
    words = _words(rng)
    lines = (rng.choice(LINES).format(**{**words, **_things(rng)}) for _ in range(rng.randint(1, 3)))
    return "\n".join('"' + line for line in lines)


def code(rng: random.Random) -> str:
    """A few lines of Python: a function, a class or an assignment block."""
    a, b, c = rng.sample(ARGUMENTS, 3)
    f, g = rng.sample(FUNCTIONS, 2)
    kind = rng.randrange(5)
    if kind == 0:
        about = rng.choice(("", f'    """{f} the {a}\n    and return the {c}."""\n', f"    # then return {c}\n"))
        return f"def {f}({a}, {b}):\n{about}    {c} = {g}({a})\n    return {c} + {b}\n"
    if kind == 1:
        name = rng.choice(CLASSES)
        return f"class {name}:\n    @property\n    def {f}(self) -> bool:\n        return self.{a} is None\n"
    if kind == 2:
        return f"for {a} in {b}:\n    if {a} > {rng.randrange(100)}:\n        {c} = {a}\n    else:\n        {f}({c})\n"
    if kind == 3:
        return f"async def {f}(cls, {a}, {b}) -> None:\n    {a} = cls.{b}\n    return {g}({a}, {b})\n"
    header = f"from {rng.choice(CLASSES)} import {f}\n# see {g}\n"
    return header + f"{a} = {rng.randrange(100)}\n{b} = {a} * {rng.randrange(10)}\nprint({b})\n"


def numbers(rng: random.Random) -> str:
    """A rising or falling sequence, or a comparison of two-digit numbers (the order of digits, which years need)."""
    kind = rng.randrange(4)
    if kind == 0:
        step, start = rng.choice((1, 1, 2, 5, 10)), rng.randrange(10, 50)
        values = [start + step * i for i in range(rng.randint(5, 10)) if start + step * i < 100]
        return "Count: " + ", ".join(map(str, values if rng.random() < 0.7 else values[::-1]))
    if kind == 1:
        years = sorted(rng.sample(range(1100, 1900), 4))
        return f"The years of the {rng.choice(EVENTS)}: " + ", ".join(map(str, years)) + "."
    low, high = sorted(rng.sample(range(100), 2))
    if kind == 2:
        return f"{high:02d} is more than {low:02d}, and {low:02d} is less than {high:02d}."
    return " < ".join(f"{value:02d}" for value in sorted(rng.sample(range(100), 5)))


FILLERS: tuple[Callable[[random.Random], str], ...] = (story, biography, dialogue, code, numbers)
FILLER_WEIGHTS = (0.4, 0.2, 0.15, 0.15, 0.1)  # mostly prose: that is where pronouns are learned


def filler(rng: random.Random) -> str:
    """One document of any filler kind."""
    return rng.choices(FILLERS, FILLER_WEIGHTS)[0](rng)


def copy_list(rng: random.Random) -> str:
    """A list of random words and the same list again: nothing but copying predicts the second half."""
    pools = (NAMES, ARGUMENTS, OBJECTS, PLACES, ROLES, [str(n) for n in range(10, 100)])
    pool = tuple(chain(*pools)) if rng.random() < 0.5 else rng.choice(pools)
    words = rng.sample(pool, rng.randint(4, 14))
    opening, again = rng.choice((("The list is: ", " Again: "), ("Words: ", " Once more: "), ("", "\n")))
    joint = rng.choice((", ", " ", ", "))
    return f"{opening}{joint.join(words)}.{again}{joint.join(words)}."
