"""Greater-than: something lasted from one year to a later one of the same century; only later years are right.

1. Draw a start year CCYY of the split (centuries 11-18, YY 02-98), an event and a template.
2. The prompt ends with the digits of the century, so the next token is two digits without a space.
3. Answers: YY+1 ... 99. Distractors: 00 ... YY-1, strictly (YY is in neither, as in Edge-Pruning's metric).
   The corrupt prompt starts in CC01, where every year is later.
4. `document`: the sentence with an end year and a few words after it (training text).

GPT-2's tokenizer splits " 1741" as " 17", "41" for most years of these centuries, but not for all (" 1700s" dates and
many of the 11th and 18th are one token or split elsewhere): the prompts are only comparable where it does, and a loader
for GPT-2 should drop the others.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from swd_lens.tasks.generators.family import Family
from swd_lens.tasks.generators.words import EVENTS, loose_words, start_years
from swd_lens.tasks.split import TaskExample, Unusable

FAMILY = "greater_than"
# Starts late in a century leave few right answers and are rare in a uniform draw: training text has 40% of them.
LATE_SHARE, LATE_FROM = 0.4, 70
LOOSE_SHARE = 0.2  # of training documents: loose words instead of templates, see words.LOOSE

TEMPLATES = {
    "seen": (
        "The {event} lasted from the year {start} to the year {cc}",
        "The {event} began in {start} and ended in {cc}",
        "The {event} went on from {start} until {cc}",
        "In {start} the {event} started, and it was over in {cc}",
        "The long {event} took place between {start} and {cc}",
        "People say that the {event} ran from {start} to {cc}",
        "Nobody forgot the {event} of the years {start} to {cc}",
        "It was a hard time: the {event} lasted from {start} to {cc}",
        "The old book is about the {event} from {start} to {cc}",
        "The {event} that began in the year {start} ended in the year {cc}",
        "From {start} until {cc}",
        "Between {start} and {cc}",
        "It was from {start} to {cc}",
        "They worked on the {event} from the year {start} to the year {cc}",
        "The {event} of {start} did not end before {cc}",
        "We know that the {event} started in {start} and stopped in {cc}",
        "Everybody lost in the {event} which began in {start} and went on until the year {cc}",
        "Only one {event} was so long: it opened in {start}, and the end came in {cc}",
        "The king was there for the {event}, from the year {start} until the year {cc}",
        "When did it happen? The {event} was in the years {start} to {cc}",
    ),
    "unseen": (
        "The first {event} opened in {start} and closed in {cc}",
        "We read that the {event} of {start} was only over in the year {cc}",
        "For a long time, from {start} up to {cc}",
        "After the start of the {event} in the year {start}, it stopped in {cc}",
    ),
}
TAILS = ("", ".", ", and nobody was happy.", ". Then there was peace.", ", when the king died.", ". It was a long time.")


def sample(rng: random.Random, split: str, templates: str, years: Sequence[int] = ()) -> TaskExample:
    """One prompt of `split`, start years drawn uniformly (from `years`, where given); `templates` is "seen" or "unseen"."""
    start = rng.choice(years or start_years(split))
    century, year = divmod(start, 100)
    index, event = rng.randrange(len(TEMPLATES[templates])), rng.choice(EVENTS)
    template = TEMPLATES[templates][index]
    return TaskExample(
        prompt=template.format(event=event, start=start, cc=century),
        answers=tuple(f"{later:02d}" for later in range(year + 1, 100)),
        distractors=tuple(f"{earlier:02d}" for earlier in range(year)),
        corrupt=template.format(event=event, start=100 * century + 1, cc=century),
        meta={"family": FAMILY, "split": split, "template": f"{templates}-{index}", "content": str(start)},
    )


def document(rng: random.Random, split: str) -> str:
    """The sentence completed with a later year, uniform over the right ones; one in twelve ends in the next century."""
    years = start_years(split)
    if rng.random() < LATE_SHARE:
        years = [year for year in years if year % 100 >= LATE_FROM]
    example = sample(rng, split, "seen", years)
    if split == "train" and rng.random() < LOOSE_SHARE:
        start = f"{loose_words(rng, 0, 4)}{example.meta['content']} {loose_words(rng, 1, 5)}"
        return f"{start[0].upper()}{start[1:]}{example.meta['content'][:2]}{rng.choice(example.answers)}."
    if rng.random() < 1 / 12:
        century = int(example.meta["content"]) // 100
        return f"{example.prompt[:-2]}{century + 1}{rng.randrange(100):02d}{rng.choice(TAILS)}"
    return example.prompt + rng.choice(example.answers) + rng.choice(TAILS)


def _check(example: TaskExample, tokenizer: Any) -> None:
    start = example.meta["content"]
    century, year = start[:-2], start[-2:]
    pieces = [piece.strip() for piece in tokenizer.pieces(example.prompt)]
    if (century, year) not in itertools.pairwise(pieces):
        raise Unusable("start year is not the tokens [century, two digits]", f"{start!r} in {pieces}")
    if pieces[-1] != century:
        raise Unusable("final century is not a token of its own", f"{century!r} in {pieces}")


FAMILIES = (Family(FAMILY, sample, check=_check, document=document, trained=3),)
