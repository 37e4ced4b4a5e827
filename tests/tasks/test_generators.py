"""The four task families: content splits, determinism, answers that follow from the prompt, GPT-2's tokens."""

import itertools
import re
from itertools import pairwise
from pathlib import Path

import pytest

from swd_lens.tasks.generators import FAMILIES, GENERATED, TEMPLATES, content_of, corrupts, generate, greater_than, words
from swd_lens.tasks.generators.words import SPLITS

GPT2 = Path(__file__).parents[3] / "shared" / "tokenizers" / "gpt2"
EVERY = [(family, split, templates) for family in FAMILIES for split in SPLITS for templates in ("seen", "unseen")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["content", "content_2"])
def test_splits_share_no_content(family, key):
    keys = {
        split: {e.meta[key] for t in TEMPLATES for e in generate(family, split, 300, templates=t) if key in e.meta}
        for split in SPLITS
    }
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]
    if key == "content":
        assert min(map(len, keys.values())) >= 10


@pytest.mark.parametrize("family", GENERATED)
def test_the_splits_of_a_task_share_no_content_and_no_prompt_whatever_the_seeds(family):
    """Names, places, years, ...: whatever a generator divides, between any two splits of tasks of any two seeds."""
    content, keys = content_of(family), ("content", "content_2")
    drawn = {split: [e for seed in range(4) for e in generate(family, owner, 150, seed=seed)] for split, owner in content.items()}
    for one, other in itertools.combinations(drawn, 2):
        for key in keys:
            assert not {e.meta[key] for e in drawn[one] if key in e.meta} & {e.meta.get(key) for e in drawn[other]}
        assert not {e.prompt for e in drawn[one]} & {e.prompt for e in drawn[other]}
    for split, examples in drawn.items():
        assert len({e.meta["content"] for e in examples}) >= 4
        assert generate(family, content[split], 150, seed=3) == examples[-150:]
        if family == "docstring":  # every two neighbours, also those of the corrupt prompts
            for text in (text for e in examples for text in (e.prompt, e.corrupt)):
                arguments = re.search(r"def \w+\((?:self, |cls, )?(.*?)\)", text).group(1).split(", ")
                assert all(content[split] in words.owners_of("arguments", *pair) for pair in pairwise(arguments))
        if family == "gendered_pronoun":
            others = {name for s, owner in content.items() if s != split for name in names_of(owner)}
            assert not any(re.search(rf"\b({'|'.join(others)})\b", f"{e.prompt} {e.corrupt}") for e in examples)


def names_of(owner):
    return [name for gender in ("she", "he") for name in words.pronoun_names(owner, gender)]


def test_seen_and_unseen_templates_are_different_sentences():
    for family in FAMILIES:
        templates = {
            kind: {e.meta["template"] for e in generate(family, "test", 400, templates=kind)} for kind in ("seen", "unseen")
        }
        assert all(template.startswith("seen") for template in templates["seen"])
        assert all(template.startswith("unseen") for template in templates["unseen"])
        assert len(templates["unseen"]) >= 3
        both = {e.meta["template"].split("-")[0] for e in generate(family, "test", 40, templates="all")}
        assert both == {"seen", "unseen"}


@pytest.mark.parametrize(("family", "split", "templates"), EVERY)
def test_prompts_are_different_and_a_smaller_request_is_a_prefix(family, split, templates):
    many = generate(family, split, 600, seed=3, templates=templates)
    assert len({e.prompt for e in many}) == 600
    assert generate(family, split, 20, seed=3, templates=templates) == many[:20]
    assert generate(family, split, 20, seed=4, templates=templates) != many[:20]


def test_prompts_are_the_same_in_every_process_and_version():
    # Pinned: the embedded model's reported scores are about exactly these prompts.
    first = {family: generate(family, "test", 1)[0] for family in FAMILIES}
    assert first["ioi"].prompt == ("Here at the museum Mary and Rebecca eat lunch, and today Rebecca showed the new spoon to")
    assert first["docstring"].prompt == (
        'def load(self, batch, score, object, label, limit, matrix):\n    """open the gentle cup\n\n'
        "    :arg label: kind newspaper\n    :arg limit: funny park\n    :arg"
    )
    assert first["greater_than"].prompt == "Only one drought was so long: it opened in 1420, and the end came in 14"
    assert first["gendered_pronoun"].prompt == "Ronald isn't a nice judge, is"


@pytest.mark.parametrize("family", ["ioi", "gendered_pronoun"])
def test_further_corrupt_prompts_differ_in_the_names_alone(family):
    people = {*words.FEMALE, *words.MALE}

    def parts(text):
        said = [word.strip(".,") for word in text.split()]
        return [word for word in said if word in people], [word for word in said if word not in people]

    for split, templates in itertools.product(SPLITS, ("seen", "unseen")):
        for example in generate(family, split, 150, templates=templates):
            further = list(itertools.islice(corrupts(example), 3))
            assert further == list(itertools.islice(corrupts(example), 3))
            for text in (example.corrupt, *further):
                (names, rest), (clean, its_rest) = parts(text), parts(example.prompt)
                assert rest == its_rest and len(names) == len(clean)
                assert len({*names}) == 3 if family == "ioi" else not {*names} & {*clean}
    assert list(corrupts(generate("docstring", "train", 1)[0])) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("io", "test", 5), "family must be one of 'ioi', 'docstring', 'greater_than', 'gendered_pronoun', "),
        (("ioi", "dev", 5), "split must be one of 'train', 'validation', 'test', "),
        (("ioi", "test", 0), "n must be a whole number of at least 1, got 0"),
        (("ioi", "test", 5, 0, "new"), "templates must be one of 'seen', 'unseen', 'all', got 'new'"),
    ],
)
def test_bad_requests_say_what_is_valid(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(*arguments)


def test_asking_for_more_prompts_than_there_are_says_how_many(monkeypatch):
    monkeypatch.setattr(greater_than, "EVENTS", ("war",))
    with pytest.raises(ValueError, match=r"greater_than/test/unseen has about 4\d\d different prompts; n is 10000"):
        generate("greater_than", "test", 10_000, templates="unseen")
