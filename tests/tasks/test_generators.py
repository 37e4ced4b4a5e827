"""The four task families: content splits, determinism, answers that follow from the prompt, GPT-2's tokens."""

import itertools
import re
from itertools import pairwise
from pathlib import Path

import pytest

from swd_lens.tasks.generators import FAMILIES, GENERATED, content_of, corrupts, generate, greater_than, words
from swd_lens.tasks.generators.words import SPLITS

GPT2 = Path(__file__).parents[3] / "shared" / "tokenizers" / "gpt2"


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


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_different_smaller_requests_are_prefixes_and_splits_share_no_content(family):
    many = {
        (split, templates): generate(family, split, 600, seed=3, templates=templates)
        for split, templates in itertools.product(SPLITS, ("seen", "unseen"))
    }
    for (split, templates), drawn in many.items():
        assert len({e.prompt for e in drawn}) == 600
        assert generate(family, split, 20, seed=3, templates=templates) == drawn[:20]
        assert generate(family, split, 20, seed=4, templates=templates) != drawn[:20]
        assert all(e.meta["template"].startswith(templates) for e in drawn)
    assert len({e.meta["template"] for e in many["test", "unseen"]}) >= 3
    both = {e.meta["template"].split("-")[0] for e in generate(family, "test", 40, templates="all")}
    assert both == {"seen", "unseen"}
    for key in ("content", "content_2"):
        train, validation, test = ({e.meta[key] for t in ("seen", "unseen") for e in many[s, t] if key in e.meta} for s in SPLITS)
        assert not train & test and not train & validation and not validation & test
        assert key == "content_2" or min(map(len, (train, validation, test))) >= 10


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


def test_bad_requests_say_what_is_valid_and_how_many_prompts_there_are(monkeypatch):
    for arguments, message in (
        (("io", "test", 5), "family must be one of 'ioi', 'docstring', 'greater_than', 'gendered_pronoun', "),
        (("ioi", "dev", 5), "split must be one of 'train', 'validation', 'test', "),
        (("ioi", "test", 0), "n must be a whole number of at least 1, got 0"),
        (("ioi", "test", 5, 0, "new"), "templates must be one of 'seen', 'unseen', 'all', got 'new'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            generate(*arguments)
    monkeypatch.setattr(greater_than, "EVENTS", ("war",))
    with pytest.raises(ValueError, match=r"greater_than/test/unseen has about 4\d\d different prompts; n is 10000"):
        generate("greater_than", "test", 10_000, templates="unseen")
