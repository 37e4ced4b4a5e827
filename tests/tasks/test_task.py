"""Task: splits of examples, of a user's own prompts, of token ids, and of one prompt."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swd_lens.base.errors import TaskError
from swd_lens.tasks import Task, TaskExample
from swd_lens.tasks.task import _examples
from tests.micro import toy_model

WORDS = ["<unk>", "<bos>", "the", "cat", "dog", "sat", "ran", "he", "she", "4", "2"]


class FakeHost:
    """Only what tokenizing needs: a tokenizer and a few numbers."""

    def __init__(self, words=tuple(WORDS), digits=r"\d", n_ctx=8):
        vocabulary = {word: i for i, word in enumerate(words)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        # Words, and every digit by itself: a tokenizer like Qwen's, as far as greater-than is concerned. With
        # digits=r"\d\d" they come in pairs.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex(digits), "isolated")]
        )
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>")
        self.cfg = type("Cfg", (), {"d_vocab": len(words), "n_ctx": n_ctx, "model_name": "fake"})()


GOOD = TaskExample("the cat", ("sat",), ("ran",))


def test_empty_tasks_and_duplicates_are_refused():
    with pytest.raises(TaskError, match="has no train examples"):
        Task.from_examples("mine", [], [GOOD], FakeHost())
    digits = TaskExample("the cat", ("42",), ("ran",))
    with pytest.raises(TaskError, match=r"no usable test example .*an answer is not one token \(1\).*single tokens"):
        Task.from_examples("years", [GOOD], [digits], FakeHost(), validation=[GOOD], on_bad="drop")
    with pytest.raises(TaskError, match="has no validation examples"):
        Task.from_examples("mine", [GOOD], [GOOD], FakeHost(), validation=[])
    host = FakeHost()
    host.tokenizer = None
    with pytest.raises(TaskError, match="needs a host with a tokenizer"):
        Task.from_examples("mine", [GOOD], [GOOD], host)
    with pytest.raises(ValueError, match="on_bad must be"):
        Task.from_examples("mine", [GOOD], [GOOD], FakeHost(), on_bad="ignore")
    with pytest.raises(TaskError, match=r"prompt 'he': duplicate prompt"):
        Task.from_prompts("mine", FakeHost(), ["he"] * 3, ["sat"] * 3, ["ran"] * 3)
    task = Task.from_prompts("mine", FakeHost(), ["he", "she", "he", "cat"], ["sat"] * 4, ["ran"] * 4, on_bad="drop")
    assert "(kept 3 of 4; dropped: 1 duplicate prompt)" in repr(task)


@pytest.mark.filterwarnings("ignore:.*an answer stands:swd_lens.base.errors.TextWarning")
def test_a_training_part_is_divided_by_prompts():
    """Examples given in two splits: validation is a part of the training examples, and no prompt is on both sides."""
    words = ("the", "cat", "dog", "sat", "ran")
    texts = [f"{first} {second}" for first in words for second in words]
    train = [TaskExample(text, ("sat",), (wrong,)) for text in texts[:18] for wrong in ("ran", "he")]
    test = [TaskExample(text, ("sat",), ("ran",)) for text in texts[18:]]
    task = Task.from_examples("mine", train, test[:4], FakeHost())
    assert tuple(map(len, task.splits)) == (28, 8, 4)  # four prompts of two examples each
    of_train, of_validation = ([e for e in split.examples] for split in task.splits[:2])
    assert sorted([*of_train, *of_validation], key=train.index) == train
    assert of_train == sorted(of_train, key=train.index) and of_validation == sorted(of_validation, key=train.index)
    assert not {e.prompt for e in of_train} & {e.prompt for e in of_validation}
    assert len(Task.from_examples("mine", train, test, FakeHost()).validation) == 12  # a third of 18 prompts, not seven
    again, other = (Task.from_examples("mine", train, test[:4], FakeHost(), seed=seed) for seed in (0, 1))
    assert again.validation.examples == task.validation.examples != other.validation.examples
    assert tuple(map(len, Task.from_examples("mine", train[1:3], test, FakeHost()).splits)) == (1, 1, 7)
    with pytest.raises(TaskError, match=r"task 'mine' has one training prompt, which cannot be divided .* give a valid"):
        Task.from_examples("mine", train[:2], test, FakeHost())


NOUNS = ["cat", "dog", "he", "she", "the"]
PROMPTS = [f"{first} {second}" for first in NOUNS for second in NOUNS]
LISTS = {"answers": ["sat"] * 25, "distractors": [["ran", "the"]] * 25}


def test_five_lines():
    task = Task.from_prompts(
        "mine",
        FakeHost(),
        prompts=iter(["the cat", "the dog", "he", "she"]),  # any iterable
        answers=({text} if text == "sat" else text for text in ("sat", "ran", "sat", ["ran", "sat"])),
        distractors=[["ran"], ["sat"], ["ran"], "dog"],
        corrupt=iter(["the dog", "the cat", "she", "he"]),
        prepend_bos=True,
    )
    assert tuple(map(len, task.splits)) == (2, 1, 1) and "(kept all 4)" in repr(task)
    assert task.splits == (task.train, task.validation, task.test) and task.test.task == "mine"
    assert [split.name for split in task.splits] == ["train", "validation", "test"]
    examples = {e.prompt: (e, *ids) for s in task.splits for e, *ids in zip(s.examples, s.tokens, s.answer_ids, strict=True)}
    she, ids, answer_ids = examples["she"]
    assert (she.answers, she.distractors, she.corrupt) == (("ran", "sat"), ("dog",), "he")
    assert ids.tolist() == [1, 8] and answer_ids == (6, 5)
    assert examples["the dog"][0].answers == ("ran",) and examples["the cat"][1].tolist() == [1, 2, 3]


def test_splits_are_those_of_the_seed():
    def prompts(**options):
        task = Task.from_prompts("mine", FakeHost(), PROMPTS, **LISTS, **options)
        return tuple([e.prompt for e in split.examples] for split in task.splits)

    parts = prompts()
    assert [len(part) for part in parts] == [13, 6, 6] and len({prompt for part in parts for prompt in part}) == 25
    assert prompts() == parts and prompts(seed=1) != parts
    few = prompts(validation_fraction=0.1)
    assert [len(part) for part in few] == [17, 2, 6] and few[2] == parts[2] and set(few[1]) < set(parts[1])
    sizes = {(None, 0.001): [23, 1, 1], (None, 0.999): [1, 1, 23], (None, 0.5): [7, 6, 12], (None, 0.25): [13, 6, 6]}
    sizes |= {(0.001, 0.001): [23, 1, 1], (0.99, 0.001): [1, 23, 1], (0.4, 0.5): [3, 10, 12]}
    for (validation, test), expected in sizes.items():
        found = prompts(validation_fraction=validation, test_fraction=test)
        assert [len(part) for part in found] == expected
    for seed in range(4):  # three prompts are enough
        task = Task.from_prompts("mine", FakeHost(), PROMPTS[:3], ["sat"] * 3, ["ran"] * 3, seed=seed)
        assert tuple(map(len, task.splits)) == (1, 1, 1)


def test_bad_input_is_named():
    for changes, message in (
        ({"answers": ["sat"] * 24}, "has 25 prompts but 24 entries in answers"),
        ({"answers": "sat"}, "answers must be a list with one entry per prompt, got the string 'sat'"),
        ({"corrupt": ["he"]}, "25 prompts but 1 entries in corrupt"),
        ({"answers": None}, "needs answers and distractors for every prompt, or a metric function"),
        ({"answers": ["42"] * 25}, "an answer is not one token: '42' is 2 tokens .* did you mean ' 42'"),
        ({"distractors": [[]] * 25}, "no answers or no distractors: 1 answers, 0 distractors"),
        ({"test_fraction": 1}, "test_fraction must lie between 0 and 1, got 1"),
        ({"prompts": ["a", "b"], "answers": ["sat"] * 2, "distractors": ["ran"] * 2}, "has 2 prompts; .* need at least one each"),
        ({"validation_fraction": 0}, "validation_fraction must lie between 0 and 1 .* beside test_fraction=0.25, got 0"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "and leave something to train on .*=0.5, got 0.5"),
    ):
        with pytest.raises(TaskError, match=message):
            Task.from_prompts("mine", FakeHost(), **{"prompts": PROMPTS, **LISTS, **changes})


def test_what_is_no_text_is_named():
    for changes, message in (
        ({"prompts": [None, *PROMPTS[1:]]}, "prompt 0 must be a string, got None"),
        ({"prompts": 3}, "prompts must be a list with one entry per prompt, got 3"),
        ({"answers": ["sat", None, *["he"] * 23]}, "answers of prompt 1 .* got None"),
        ({"distractors": [[41]] * 25}, r"distractors of prompt 0 must be a string or a list of strings, got \[41\]"),
        ({"corrupt": [5] * 25}, "corrupt prompt 0 must be a string, got 5"),
    ):
        with pytest.raises(TaskError, match=message):  # beartype, here alone, lets little of the kind reach from_prompts
            _examples("mine", **{"prompts": PROMPTS, **LISTS, "corrupt": None, "metric": None, **changes})


def test_a_task_of_token_ids_needs_no_tokenizer():
    model = toy_model()
    prompts = [[1, 2, 3], [4, 5], torch.tensor([6, 7, 8]), [9]]
    task = Task.from_tokens("ids", model, prompts, [3, [4, 5], 6, 7], [[0], 1, [1, 2], 0])
    assert (*map(len, task.splits), task.prepend_bos) == (2, 1, 1, False) and "token ids" in task.source
    found = {
        tuple(tokens.tolist()): (answers, distractors)
        for split in task.splits
        for tokens, answers, distractors in zip(split.tokens, split.answer_ids, split.distractor_ids, strict=True)
    }
    assert found == {
        (1, 2, 3): ((3,), (0,)), (4, 5): ((4, 5), (1,)), (6, 7, 8): ((6,), (1, 2)), (9,): ((7,), (0,))
    }  # fmt: skip
    assert {example.prompt for example in task.train.examples} <= {"1 2 3", "4 5", "6 7 8", "9"}


def test_ids_that_make_no_task_are_refused():
    for prompts, answers, distractors, message in (
        ([[1], [1]], [2, 2], [3, 3], "prompt 1: .*the same ids"),
        ([[1], [2]], [2, 99], [3, 3], "prompt 1: an answer is not in the vocabulary.*id 99, ids are 0 to 19$"),
        ([[1], [2]], [2, 3], [3, [3, 4]], "an answer is also a distractor"),
        ([[1], [2]], [2, []], [3, 4], "no answers or no distractors"),
        ([[1], [2]], [2, 2.5], [3, 4], "an answer is no token"),
        ([[1], [2]], [2, 3], [3, 4], "2 prompts; train, validation and test"),
        ([[1], [2]], [2], [3, 4], "answers"),
        ([[1], [20]], [2, 3], [3, 4], "20"),
    ):
        with pytest.raises(ValueError, match=message):
            Task.from_tokens("ids", toy_model(), prompts, answers, distractors)


def test_one_prompt_is_a_split_of_its_own(default_model):
    split = Task.of_prompt(default_model, "The list is", " she", [" he"])
    ids = default_model.to_tokens([" she", " he"], prepend_bos=False)[:, 0].tolist()
    assert split.answer_ids == ((ids[0],),) and split.distractor_ids == ((ids[1],),) and len(split) == 1
    again = Task.of_prompt(default_model, split.tokens[0], *ids)
    assert torch.equal(again.tokens[0], split.tokens[0]) and again.answer_ids == split.answer_ids
    with pytest.raises(ValueError, match="one token"):
        Task.of_prompt(default_model, "The list is", " she said", " he")
