"""Docstring completion: a Python signature, some of its arguments documented; the next one comes next.

1. Draw arguments, every two neighbours owned by the split; choose where the documentation starts.
2. Write the signature, a summary, two (in training text: any number of) documented lines, and the next ":param".
3. Answer: the argument after the last documented one. Distractors: the other arguments and eight unused ones.
   The corrupt prompt has a signature of unrelated arguments above the same documentation.
4. `document`: the whole function with 4-7 arguments, documentation starting anywhere (training text).
"""

import random

from swd_lens.tasks.generators.family import Family
from swd_lens.tasks.generators.words import ADJECTIVES, ARGUMENTS, OBJECTS, PLACES, as_words, draw_arguments
from swd_lens.tasks.split import TaskExample

FAMILY = "docstring"
UNUSED_DISTRACTORS = 8  # names that do not stand in the prompt: "any argument of this prompt" is not yet right

FUNCTIONS = as_words("load save read write open close send fetch parse build make find update remove check run")
CLASSES = as_words("Reader Writer Worker Manager Loader Parser")
MARKERS = {"seen": (":param", ":arg"), "unseen": (":param",)}
# {args} is the signature after self; {about} the summary. Everything before the first documented argument.
FRAMES = {
    "seen": (
        'def {f}(self, {args}):\n    """{about}\n\n',
        '\ndef {f}(self, {args}):\n    """{about}.\n\n',
        'def {f}(self, {args}):\n    """\n    {about}\n\n',
        'def {f}({args}):\n    """{about}\n\n',
        '# {about}\ndef {f}(self, {args}):\n    """\n',
        'from {c} import {f}\n\ndef {f}(self, {args}):\n    """{about}.\n',
    ),
    "unseen": (
        'class {c}:\n    """{about}"""\n\ndef {f}(self, {args}):\n    """{about}\n\n',
        'async def {f}(self, {args}) -> None:\n    """{about}\n\n',
        '@property\ndef {f}(self, {args}):\n    """{about}\n    and return it.\n\n',
        'def {f}(cls, {args}) -> bool:\n    """{about}: see {c}.\n\n',
    ),
}


def _frame(rng: random.Random, templates: str, index: int) -> str:
    about = f"{rng.choice(FUNCTIONS)} the {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"
    return FRAMES[templates][index].format(f=rng.choice(FUNCTIONS), c=rng.choice(CLASSES), about=about, args="\0")


def _line(rng: random.Random, marker: str, argument: str) -> str:
    return f"    {marker} {argument}: {rng.choice(ADJECTIVES)} {rng.choice(OBJECTS + PLACES)}\n"


def sample(rng: random.Random, split: str, templates: str) -> TaskExample:
    """One prompt of `split`: six arguments, two of them documented; `templates` is "seen" or "unseen"."""
    arguments = draw_arguments(rng, split, 6)
    start = rng.randrange(4)  # leaves room for two documented arguments and the answer
    answer = arguments[start + 2]
    index, marker = rng.randrange(len(FRAMES[templates])), rng.choice(MARKERS[templates])
    lines = "".join(_line(rng, marker, argument) for argument in arguments[start : start + 2])
    text = _frame(rng, templates, index) + lines + f"    {marker}"
    unused = rng.sample([a for a in ARGUMENTS if a not in arguments], UNUSED_DISTRACTORS)
    # the corrupt signature: arguments that the documentation does not know, in an order the split allows
    corrupt = draw_arguments(rng, split, 6)
    while set(corrupt) & set(arguments):
        corrupt = draw_arguments(rng, split, 6)
    return TaskExample(
        prompt=text.replace("\0", ", ".join(arguments)),
        answers=(" " + answer,),
        distractors=tuple(" " + a for a in [a for a in arguments if a != answer] + unused),
        corrupt=text.replace("\0", ", ".join(corrupt)),
        meta={
            "family": FAMILY,
            "split": split,
            "template": f"{templates}-{index}-{marker[1:]}",
            "content": f"{arguments[start + 1]}>{answer}",
        },
    )


def document(rng: random.Random, split: str) -> str:
    """A function whose documentation starts anywhere and goes to the last argument or stops before (seen templates)."""
    arguments = draw_arguments(rng, split, rng.randint(4, 7))
    start = rng.randrange(len(arguments) - 1)
    stop = len(arguments) if rng.random() < 0.7 else rng.randint(start + 2, len(arguments))
    marker = rng.choice(MARKERS["seen"])
    text = _frame(rng, "seen", rng.randrange(len(FRAMES["seen"]))).replace("\0", ", ".join(arguments))
    text += "".join(_line(rng, marker, argument) for argument in arguments[start:stop])
    return text + '    """\n' + rng.choice(("", f"    return {rng.choice(arguments)}\n", "    return None\n"))


FAMILIES = (Family(FAMILY, sample, document=document, trained=2),)
