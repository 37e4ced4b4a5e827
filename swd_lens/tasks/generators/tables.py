"""Task families of one shape, for models that know more than the embedded one: sentences as data, and what is drawn into them.

1. A family has templates, and a function that draws a piece of content that the split owns.
2. What is drawn (`Draw`): words for the template's slots, right and wrong next words, and the words that make the corrupt prompt.
3. `_family` puts them into a template. {name} and {event} are filled with words that do not matter.

The families: capital (of a country), agreement (of a verb with its subject, a noun of the other number between them),
succession (days, months, numbers in words), greater_digit (greater-than where every digit is a token: the last one is asked).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swd_lens.base.errors import TaskError, quoted
from swd_lens.tasks.generators import greater_than
from swd_lens.tasks.generators.family import Family
from swd_lens.tasks.generators.words import EVENTS, NAMES, as_words, start_years
from swd_lens.tasks.split import TaskExample

_OWNERS = ("train", "train", "train", "validation", "test", "test")


@dataclass(frozen=True)
class Draw:
    """One piece of content: `corrupt` holds the slots that the corrupt prompt fills otherwise, `swaps` the words that could stand
    in place of `word` in further corrupt prompts."""

    content: str
    slots: Mapping[str, str]
    answers: tuple[str, ...]
    distractors: tuple[str, ...]
    corrupt: Mapping[str, str]
    word: str = ""
    swaps: tuple[str, ...] = ()


def _family(
    name: str,
    templates: Mapping[str, tuple[str, ...]],
    draw: Callable[[random.Random, str], Draw],
    *,
    space: str = " ",
    **how: Any,
) -> Family:
    """A family: its templates, "seen" (the usual ones) and "unseen" (kept apart, as for the other families), and how a piece of
    content that the split owns is drawn. space: before answers. how: see `Family`."""

    def sample(rng: random.Random, split: str, kind: str) -> TaskExample:
        drawn, index = draw(rng, split), rng.randrange(len(templates[kind]))
        slots = {"name": rng.choice(NAMES), "event": rng.choice(EVENTS), **drawn.slots}
        meta = {"family": name, "split": split, "template": f"{kind}-{index}", "content": drawn.content}
        return TaskExample(
            prompt=templates[kind][index].format(**slots),
            answers=tuple(space + word for word in drawn.answers),
            distractors=tuple(space + word for word in drawn.distractors),
            corrupt=templates[kind][index].format(**{**slots, **drawn.corrupt}),
            meta={**meta, **({"word": drawn.word, "swaps": "|".join(drawn.swaps)} if drawn.swaps else {})},
        )

    return Family(name, sample, **how)


def _owned(items: Sequence[str], split: str) -> list[str]:
    """The items that a split owns, by their place in the list: half of them train, a sixth validation, a third test."""
    return [item for i, item in enumerate(items) if _OWNERS[i % len(_OWNERS)] == split]


# ---------------------------------------------------------------------------------------------- capitals

# Countries whose name and capital are few tokens for most tokenizers.
_PAIRS = """\
France: Paris, England: London, Germany: Berlin, Italy: Rome, Spain: Madrid, Russia: Moscow, Japan: Tokyo, China: Beijing, \
Egypt: Cairo, Greece: Athens, Austria: Vienna, Ireland: Dublin, Portugal: Lisbon, Poland: Warsaw, Hungary: Budapest, \
Norway: Oslo, Sweden: Stockholm, Finland: Helsinki, Denmark: Copenhagen, Belgium: Brussels, Canada: Ottawa, \
Australia: Canberra, the Philippines: Manila, Iraq: Baghdad, Iran: Tehran, Afghanistan: Kabul, Syria: Damascus, Peru: Lima, \
Chile: Santiago, Cuba: Havana, Kenya: Nairobi, Bulgaria: Sofia, Tunisia: Tunis, New Zealand: Wellington, South Korea: Seoul, \
Switzerland: Bern"""
CAPITALS: dict[str, str] = {country: city for country, city in (pair.split(": ") for pair in _PAIRS.split(", "))}
WRONG_CAPITALS = 4


def _capital(rng: random.Random, split: str) -> Draw:
    owned = _owned(list(CAPITALS), split)
    country = rng.choice(owned)
    others = [other for other in owned if other != country]
    wrong = rng.sample([city for city in CAPITALS.values() if city != CAPITALS[country]], WRONG_CAPITALS)
    return Draw(
        country, {"country": country}, (CAPITALS[country],), tuple(wrong), {"country": rng.choice(others)}, country, tuple(others)
    )


# ---------------------------------------------------------------------------------------------- agreement

PEOPLE = as_words(
    "author pilot doctor teacher farmer singer student writer driver nurse lawyer judge player painter soldier artist king "
    "queen boy girl friend neighbor manager officer worker scientist actor dancer captain guest"
)
THINGS = as_words(
    "window door table tree car house boat bridge river garden picture letter book horse dog cat bird chair lamp clock tower "
    "road wall"
)
SINGULAR, PLURAL = as_words("is was has"), as_words("are were have")


def _agreement(rng: random.Random, split: str) -> Draw:
    person, thing = rng.choice(_owned(PEOPLE, split)), rng.choice(THINGS)
    several = rng.random() < 0.5
    subject, other = (person + "s", thing) if several else (person, thing + "s")
    right, wrong = (PLURAL, SINGULAR) if several else (SINGULAR, PLURAL)
    swapped = person if several else person + "s"
    slots = {"subject": subject, "other": other, "where": rng.choice(("near", "behind", "beside", "by", "with"))}
    return Draw(person, slots, right, wrong, {"subject": swapped})


# ---------------------------------------------------------------------------------------------- succession

DAYS = as_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = as_words("January February March April May June July August September October November December")
NUMBERS = as_words(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
_BEFORE = 3  # items that a prompt shows


def _succession(rng: random.Random, split: str) -> Draw:
    items = rng.choice((DAYS, MONTHS, NUMBERS))
    after = NUMBERS[_BEFORE:] if items is NUMBERS else items  # numbers have a first one, days and months none
    owned = _owned(after, split)
    answer = rng.choice(owned)
    other = rng.choice([item for item in after if item != answer])
    wrong = tuple(item for item in items if item != answer)
    return Draw(answer, _before(items, answer), (answer,), wrong, _before(items, other))


def _before(items: tuple[str, ...], answer: str) -> dict[str, str]:
    last = items.index(answer)
    return {slot: items[(last - _BEFORE + i) % len(items)] for i, slot in enumerate("abc")}


def _greater_digit(rng: random.Random, split: str) -> Draw:
    # Of the years that greater_than gives to this split those with a right and a wrong last digit beside their own.
    start = rng.choice([year for year in start_years(split) if 1 <= year % 10 <= 8])
    decade, digit = divmod(start, 10)
    return Draw(
        str(start),
        {"start": str(start), "cc": str(decade)},
        tuple(str(later) for later in range(digit + 1, 10)),
        tuple(str(earlier) for earlier in range(digit + 1)),
        {"start": f"{decade}0"},
    )


# ---------------------------------------------------------------------------------------------- the families


def _corrupt(rng: random.Random, example: TaskExample) -> str:
    """The prompt of an example with another word in place of the one that decides."""
    return example.prompt.replace(example.meta["word"], rng.choice(example.meta["swaps"].split("|")))


def _check_digits(example: TaskExample, tokenizer: Any) -> None:
    # Not dropped one by one: with such a tokenizer no prompt is usable, and the user should read why.
    pieces = [piece.strip() for piece in tokenizer.pieces(f" {example.meta['content']}")]
    if [piece for piece in pieces if piece] != list(example.meta["content"]):
        raise TaskError(
            f"task {quoted(tokenizer.task)} asks for the last digit of a year, and this tokenizer does not make a "
            f"token of each digit ({example.meta['content']} is {pieces}); use greater_than"
        )


FAMILIES = (
    _family(
        "capital",
        {
            "seen": (
                "The capital of {country} is",
                "As everybody knows, the capital of {country} is",
                "{name} said that the capital of {country} is",
                "In the old atlas of {name}, the capital city of {country} is",
                "The {event} was over when {name} came to the capital of {country}, the city of",
            ),
            "unseen": (
                "The country of {country} has as its capital the city of",
                "{name} wrote a letter from the capital of {country}, that is, from",
                "Nobody told {name} that the name of the capital of {country} is",
            ),
        },
        _capital,
        corrupt=_corrupt,
    ),
    _family(
        "agreement",
        {
            "seen": (
                "The {subject} {where} the {other}",
                "Today the {subject} {where} the {other}",
                "{name} knows that the {subject} {where} the {other}",
                "In the story of {name}, the {subject} {where} the {other}",
                "Everybody says that the {subject} {where} the {other}",
            ),
            "unseen": (
                "According to {name}, the {subject} {where} the old {other}",
                "It is said that the {subject} {where} the {other}",
                "We heard from {name} that the {subject} {where} the small {other}",
            ),
        },
        _agreement,
    ),
    _family(
        "succession",
        {
            "seen": (
                "{a}, {b}, {c},",
                "First {a}, then {b}, then {c}, then",
                "{name} wrote: {a}, {b}, {c},",
                "The list of {name} goes on: {a}, {b}, {c},",
                "In this order: {a}, {b}, {c},",
                "{name} said them one after the other: {a}, {b}, {c},",
            ),
            "unseen": (
                "After {a} comes {b}, after {b} comes {c}, and after {c} comes",
                "{name} read aloud: {a}; {b}; {c};",
                "The words in the row are {a}, {b}, {c} and",
            ),
        },
        _succession,
    ),
    _family("greater_digit", greater_than.TEMPLATES, _greater_digit, space="", check=_check_digits),
)
