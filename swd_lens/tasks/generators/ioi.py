"""Indirect object identification: two people, one gives something; the receiver is the other one.

1. Draw a name pair and an (object, place) of the split; one of the two is the giver (S), the other the receiver (IO).
2. Write an opener that names both, perhaps a sentence that does not matter, and an action of S that ends in "to".
3. Answer " IO", distractor " S". The corrupt prompt has three unrelated names, so nothing is repeated.
4. `document`: the same, told to its end, sometimes with further exchanges or a third person (training text).
"""

import random
import re

from swd_lens.tasks.generators.family import Family
from swd_lens.tasks.generators.words import NAMES, draw_pair, loose_words, object_places, objects_at, split_of
from swd_lens.tasks.split import TaskExample

FAMILY = "ioi"

# Openers that end in a full stop may be followed by a sentence that does not matter.
OPENERS = {
    "seen": (
        "When {a} and {b} got to the {place},",
        "After {a} and {b} had lunch at the {place},",
        "While {a} and {b} were waiting near the {place},",
        "As soon as {a} and {b} came back from the {place},",
        "Once {a} and {b} were inside the {place},",
        "Last week {a} and {b} went to the {place}, and",
        "Because {a} and {b} work at the {place},",
        "Before {a} and {b} left the {place},",
        "{a} and {b} spent the whole day at the {place}.",
        "{a} met {b} in front of the {place}.",
        "This morning {a} took {b} to the {place}.",
        "Yesterday {a} and {b} walked to the {place} together.",
        "{a} saw {b} at the {place}.",
        "There was a party at the {place}, and {a} danced with {b}.",
        "{a} and {b} are old friends who live near the {place}.",
        "At the {place}, {a} sat next to {b}.",
        "In the morning, at the {place}, {a} and {b} had an idea, so",
        "It was late when {a} and {b} came to the {place}, and then",
        "Near the {place} {a} and {b} saw a dog, and after that",
        "{a} and {b} were alone in the {place}, so",
        "{a} is a good friend of {b}, and at the {place}",
        "People at the {place} know {a} and {b} well.",
        "The {place} was full of people when {a} saw {b}.",
        "The {place} is the home of {a} and {b}.",
        "On the way to the {place}, {a} met {b}.",
        "Nobody in the {place} was as happy as {a} and {b}.",
        "Everybody knows that {a} likes {b} and the {place}.",
        "There, in the middle of the {place}, stood {a} with {b}.",
        "{a} called {b} from the {place}.",
        "{a} had a talk with {b} about the {place}, and then",
        "{a} lives with {b} in a house by the {place}.",
        "After a long day at the {place}, {a} and {b} were tired, and",
        "Behind the {place}, {a} waited for {b}.",
        "Here at the {place} {a} and {b} eat lunch, and today",
    ),
    "unseen": (
        "During a walk around the {place}, {a} and {b} talked, and then",
        "{a} found {b} behind the {place}.",
        "Late in the evening {a} and {b} closed the {place}, so",
        "The {place} was empty when {a} called {b}.",
    ),
}
ACTIONS = {
    "seen": (
        "{s} gave a {object} to",
        "{s} handed the {object} to",
        "{s} passed a {object} to",
        "{s} wanted to give the {object} to",
        "{s} decided to lend a {object} to",
        "{s} sold the old {object} to",
        "{s} offered a {object} to",
        "{s} showed the new {object} to",
        "{s} brought a small {object} to",
        "{s} threw the {object} to",
        "{s} promised a {object} to",
        "{s} returned the {object} to",
        "{s} was glad to give the {object} to",
        "{s} sent a {object} to",
        "{s} left the {object} to",
        "{s} took the {object} from the table and gave it to",
        "{s} said that the old {object} was a gift to",
        "{s} carried a {object} to",
    ),
    "unseen": (
        "{s} carried the {object} over to",
        "{s} was happy to leave a {object} to",
        "{s} quickly sent the red {object} to",
        "{s} said that the {object} belongs to",
    ),
}
MIDDLES = (
    "It was a cold morning.",
    "The weather was very nice.",
    "There were many people around.",
    "It was almost time for dinner.",
    "Nobody else was there.",
    "The old {other} was still on the table.",
    "They talked for an hour about the {other}.",
    "A dog slept near the door.",
    "It had been a long week.",
)
LINKS = ("Then", "Later", "In the end,", "After that,", "A moment later", "Finally,")
# Sentences before the story, in training text only: they move the names to all distances from each other and the start.
BEFORE = 0.3
LOOSE_SHARE = 0.25  # of training stories: loose words instead of templates, see words.LOOSE
THREE = ("When {a}, {b} and {c} got to the {place},", "{a}, {b} and {c} spent the whole day at the {place}.")


def _opener(rng: random.Random, templates: str, index: int, names: tuple[str, ...], place: str, other: str) -> str:
    """The text before the action: one or two sentences or clauses, perhaps a link word."""
    text = (OPENERS[templates][index] if len(names) == 2 else THREE[index]).format(
        **dict(zip("abc", names, strict=False)), place=place
    )
    if not text.endswith("."):
        return text
    if rng.random() < 0.4:
        text += " " + rng.choice(MIDDLES).format(other=other)
    return text + (" " + rng.choice(LINKS) if rng.random() < 0.5 else "")


def sample(rng: random.Random, split: str, templates: str) -> TaskExample:
    """One prompt of `split`; `templates` is "seen" or "unseen"."""
    pair, (thing, place) = draw_pair(rng, split), rng.choice(object_places(split))
    giver, receiver = pair if rng.random() < 0.5 else pair[::-1]
    opener, action = rng.randrange(len(OPENERS[templates])), rng.randrange(len(ACTIONS[templates]))
    # "\0" holds the place of the names, so that the corrupt prompt differs from the clean one in nothing else.
    frame = _opener(rng, templates, opener, ("\0a", "\0b"), place, _other_object(rng, thing))
    frame += " " + ACTIONS[templates][action].format(s="\0s", object=thing)
    others = _unrelated(rng, split, pair)
    meta = {"family": FAMILY, "split": split, "template": f"{templates}-{opener}-{action}"}
    meta |= {"order": "ABBA" if giver == pair[1] else "BABA"}  # IO is A
    meta |= {"content": "|".join(sorted(pair)), "content_2": f"{thing}|{place}"}
    answers, distractors = (" " + receiver,), (" " + giver,)
    return TaskExample(_fill(frame, *pair, giver), answers, distractors, corrupt=_fill(frame, *others), meta=meta)


def corrupt(rng: random.Random, example: TaskExample) -> str:
    """The prompt of an example with three other unrelated names."""
    pair = example.meta["content"].split("|")
    others = iter(_unrelated(rng, example.meta["split"], (pair[0], pair[1])))  # in order: two, and the giver last
    return re.sub(rf"\b({'|'.join(pair)})\b", lambda _: next(others), example.prompt)


def variant(rng: random.Random, example: TaskExample) -> TaskExample:
    """The story of an example with another pair of names, the roles where they were."""
    receiver, giver = example.answers[0].strip(), example.distractors[0].strip()
    pair = draw_pair(rng, example.meta["split"])
    names = dict(zip((receiver, giver), pair, strict=True))
    prompt = re.sub(rf"\b({receiver}|{giver})\b", lambda name: names[name[0]], example.prompt)
    meta = {**example.meta, "content": "|".join(sorted(pair))}
    return TaskExample(prompt, (" " + pair[0],), (" " + pair[1],), None, meta)


def document(rng: random.Random, split: str) -> str:
    """A story of exchanges on seen templates, for training text; ambiguous receivers occur in three-name stories."""
    if split == "train" and rng.random() < LOOSE_SHARE:
        # Two names, one of them again, something given "to" the other; nothing else is as in a template.
        (a, b), (thing, _) = draw_pair(rng, split), rng.choice(object_places(split))
        giver, receiver = (a, b) if rng.random() < 0.5 else (b, a)
        opener = f"{loose_words(rng, 0, 6)}{a} {loose_words(rng, 1, 4)}{b} {loose_words(rng, 0, 6)}".rstrip()
        opener = opener[0].upper() + opener[1:] + rng.choice((",", ".", "", ". " + rng.choice(LINKS)))
        action = f"{loose_words(rng, 1, 3)}{rng.choice(('a', 'the'))} {thing} {loose_words(rng, 0, 2)}to"
        return f"{opener} {giver} {action} {receiver}."
    if rng.random() < 0.15:
        names, place, text = _three_names(rng, split)
    else:
        example = sample(rng, split, "seen")
        names = tuple(example.meta["content"].split("|"))
        place = example.meta["content_2"].split("|")[1]
        text = example.prompt + example.answers[0] + "."
    if rng.random() < BEFORE:
        text = f"{rng.choice(MIDDLES).format(other=_other_object(rng, ''))} {text}"
    things = objects_at(split, place)
    for _ in range(rng.choice((0, 0, 1, 2))):
        giver, receiver = rng.sample(names, 2)
        action = rng.choice(ACTIONS["seen"]).format(s=giver, object=rng.choice(things))
        text += f" {rng.choice(LINKS)} {action} {receiver}."
    return text


def _three_names(rng: random.Random, split: str) -> tuple[tuple[str, ...], str, str]:
    """Three people at a place and one exchange; training stories never put a held-out pair together."""
    thing, place = rng.choice(object_places(split))
    while True:
        names = (*draw_pair(rng, split), rng.choice(NAMES))
        owners = {split_of("names", *sorted((name, names[2]))) for name in names[:2]}
        if names[2] not in names[:2] and (split != "train" or owners == {"train"}):
            break
    giver, receiver = rng.sample(names, 2)
    text = _opener(rng, "seen", rng.randrange(len(THREE)), names, place, _other_object(rng, thing))
    return names, place, f"{text} {rng.choice(ACTIONS['seen']).format(s=giver, object=thing)} {receiver}."


def _unrelated(rng: random.Random, split: str, pair: tuple[str, str]) -> tuple[str, str, str]:
    """A pair of names of the split and a giver who is in neither pair."""
    others = draw_pair(rng, split)
    return (*others, rng.choice([name for name in NAMES if name not in (*pair, *others)]))


def _other_object(rng: random.Random, thing: str) -> str:
    return rng.choice([other for other in ("cake", "map", "clock", "painting") if other != thing])


def _fill(frame: str, a: str, b: str, s: str) -> str:
    return frame.replace("\0a", a).replace("\0b", b).replace("\0s", s)


FAMILIES = (Family(FAMILY, sample, corrupt, variant, document=document, trained=1),)
