"""Word lists of the task families, and the rule that gives every piece of content to one split.

1. The lists: every name, place, object, argument, event is one GPT-2 token with its leading space (tested),
   so the same prompts serve the embedded model and GPT-2.
2. `split_of(kind, *key)`: a stable hash of the content decides train, validation or test; no prompt of one split shares
   its decisive content with another split, and nothing has to be stored.
3. A task's own three splits lie in what the embedded model never read: train and validation divide the text's "validation"
   (`TASK_PARTS`, `owners_of`), test is the text's.
4. `draw_*`: draw content that belongs to a given split or part.
"""

import functools
import hashlib
import itertools
import random

SPLITS = ("train", "validation", "test")
# The text's "validation" content in two: three fifths train a task, two fifths are its validation.
TASK_PARTS = ("task train", "task validation")
OWNERS = (*SPLITS, *TASK_PARTS)


def as_words(text: str) -> tuple[str, ...]:
    """The words of a list written as a sentence."""
    return tuple(text.split())


# Names whose gender an English reader would not doubt: the pronoun task needs that.
FEMALE = as_words(
    "Mary Anna Emma Lucy Alice Julia Laura Sarah Kate Jane Amy Lisa Karen Susan Linda Helen Diana Nancy Emily Grace "
    "Claire Ruth Rachel Maria Martha Sophie Hannah Olivia Megan Nicole Jennifer Jessica Angela Barbara Betty Catherine "
    "Elizabeth Margaret Rebecca Victoria Melissa Natalie Molly Ellen Julie Sylvia Paula Wendy"
)
MALE = as_words(
    "John James Robert Michael William David Richard Joseph Thomas Charles Daniel Matthew Anthony Mark Paul Steven "
    "Andrew Kenneth George Joshua Kevin Brian Edward Ronald Jason Ryan Jacob Gary Nicholas Eric Jonathan Stephen Larry "
    "Justin Scott Benjamin Frank Gregory Patrick Jack Henry Peter Adam Nathan Walter Simon Oscar Hugo"
)
NAMES = FEMALE + MALE

PLACES = as_words(
    "park school garden market station office library hospital museum church farm beach river store restaurant hotel "
    "bakery factory theater castle bank forest village harbor bridge stadium gym zoo cinema studio barn tower lake "
    "palace temple cafe"
)
OBJECTS = as_words(
    "book ball letter ring basket bottle drink cake flower hat lamp map pencil phone picture plate radio ticket toy "
    "watch camera bag box coin coat key knife gift guitar card bell candle chair clock cup drum flag fork glove "
    "magazine mirror necklace newspaper package painting ribbon rope scarf shirt spoon stone towel wallet pen snack "
    "sandwich blanket"
)
ARGUMENTS = as_words(
    "path name size value mode text data key index count file line node item user date time type state color width "
    "height depth level limit offset length label title body image page table row column field query result source "
    "target parent root tree graph model layer batch input output token word string number object method module config "
    "option flag format filter group hash host port address server client request response session message event error "
    "code status step rate scale shape point vector matrix weight cost price score rank order version tag"
)
EVENTS = as_words(
    "war siege voyage trial strike reign famine drought project campaign treaty journey tour mission expedition "
    "festival conflict crisis plague dynasty empire rebellion occupation alliance construction program partnership "
    "study contract feud debate career regime truce blockade colony experiment"
)
CENTURIES = tuple(range(11, 19))

ADJECTIVES = as_words(
    "good great kind clever brave quiet happy nice young old strong funny famous careful honest patient gentle "
    "friendly busy smart"
)
ROLES = as_words(
    "friend teacher doctor singer writer player driver cook painter nurse lawyer student farmer dancer baker "
    "scientist neighbor captain pilot judge"
)


# Joints of sentences in no particular order. A share of the training documents is made of them instead of a template, so
# that the model has to go by the names and years themselves: without these it learns where each template puts them, and
# unseen templates stay near chance (measured: IOI .48 to .78 of them at 7M to 24M tokens).
LOOSE = as_words(
    "the a and at in on of with from by near behind after before then when while so that was were had is very old new "
    "small long day morning evening week way people friends door table house there here now also only together once "
    "again never always went came saw met talked called found left took walked sat stood waited worked lived knew"
)


def loose_words(rng: random.Random, least: int, most: int) -> str:
    """Between `least` and `most` words of LOOSE, each followed by a space."""
    return "".join(rng.choice(LOOSE) + " " for _ in range(rng.randint(least, most)))


@functools.cache
def split_of(kind: str, *key: str) -> str:
    """The split that owns a piece of content (`key`, in the order that identifies it): "test" for 15% of keys, "validation" for
    10%, else "train". Kinds ("names", "object_place", "year", "arguments") are split independently."""
    return owners_of(kind, *key)[0]


@functools.cache
def owners_of(kind: str, *key: str) -> tuple[str, ...]:
    """The split that owns a piece of content, see `split_of`, and of "validation" the part of it: "task train" for 6% of all
    keys, "task validation" for 4%."""
    digest = hashlib.blake2b("/".join((kind, *key)).encode(), digest_size=4).digest()
    bucket = int.from_bytes(digest, "big") % 100
    if bucket < 15 or bucket >= 25:
        return ("test",) if bucket < 15 else ("train",)
    return "validation", TASK_PARTS[bucket >= 21]


@functools.cache
def name_pairs(split: str) -> tuple[tuple[str, str], ...]:
    """All unordered pairs of different names owned by `split` (each once, alphabetical)."""
    pairs = itertools.combinations(sorted(NAMES), 2)
    return tuple(pair for pair in pairs if split in owners_of("names", *pair))


@functools.cache
def object_places(split: str) -> tuple[tuple[str, str], ...]:
    """All (object, place) combinations owned by `split`."""
    return tuple(pair for pair in itertools.product(OBJECTS, PLACES) if split in owners_of("object_place", *pair))


@functools.cache
def objects_at(split: str, place: str) -> tuple[str, ...]:
    """The objects that `split` owns at a place."""
    return tuple(thing for thing, where in object_places(split) if where == place)


@functools.cache
def start_years(split: str) -> tuple[int, ...]:
    """All start years owned by `split`; their last two digits run from 02 to 98, so both sides of a question exist."""
    years = (100 * century + year for century in CENTURIES for year in range(2, 99))
    return tuple(year for year in years if split in owners_of("year", str(year)))


@functools.cache
def next_arguments(split: str, argument: str) -> tuple[str, ...]:
    """The arguments that may stand right after `argument` in a signature of `split` (ordered pairs are split)."""
    return tuple(other for other in ARGUMENTS if other != argument and split in owners_of("arguments", argument, other))


@functools.cache
def pronoun_names(split: str, gender: str) -> tuple[str, ...]:
    """The names of one gender ("she" or "he") that tag questions of `split` may be about: by list position, not by hash, so that
    both genders give the same number, 7 test, 5 validation (3 train a task, 2 are its validation), 36 train names each."""
    names = FEMALE if gender == "she" else MALE
    test = ("test",)
    owners = {3: test, 9: test, 15: test, 6: ("validation", TASK_PARTS[0]), 12: ("validation", TASK_PARTS[1])}
    return tuple(name for i, name in enumerate(names) if split in owners.get(i % 20, ("train",)))


def draw_pair(rng: random.Random, split: str) -> tuple[str, str]:
    """A pair of names owned by `split`, in random order."""
    first, second = rng.choice(name_pairs(split))
    return (first, second) if rng.random() < 0.5 else (second, first)


def draw_arguments(rng: random.Random, split: str, count: int) -> list[str]:
    """`count` different arguments, every two neighbours owned by `split`."""
    while True:  # a dead end (all successors used) is rare: start again
        arguments = [rng.choice(ARGUMENTS)]
        while len(arguments) < count:
            free = [a for a in next_arguments(split, arguments[-1]) if a not in arguments]
            if not free:
                break
            arguments.append(rng.choice(free))
        else:
            return arguments
