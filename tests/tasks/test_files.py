"""Task files: auto-circuit JSON, JSONL, Edge-Pruning folders, and how load_task tells them apart."""

import json
import random

import datasets
import pytest

from swd_lens.base.errors import TaskError
from swd_lens.tasks import load_task
from swd_lens.tasks.files import find_format, read_auto_circuit, read_edge_pruning, row_example
from tests.tasks.test_task import FakeHost

PROMPT = {"clean": "the cat", "corrupt": "the dog", "answers": ["sat"], "wrong_answers": ["ran"]}
OURS = {"prompt": "the cat", "answers": "sat", "distractors": ["ran"], "corrupt": "the dog"}
NOUNS = ["cat", "dog", "he", "she", "the"]
PHRASES = [f"{a} {b} {c}" for a in NOUNS for b in NOUNS for c in NOUNS]


def years_host():
    """Two digits are one token."""
    words = ["<unk>", "<bos>", "war", "of", "to", "A", "B", *(f"{i:02d}" for i in range(100))]
    return FakeHost(words, digits=r"\d\d", n_ctx=16)


def write_lines(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def prompts(split):
    return [example.prompt for example in split.examples]


# ------------------------------------------------------------------------------------------------------- auto-circuit


def write_prompts(path, texts):
    path.write_text(json.dumps({"prompts": [{**PROMPT, "clean": text} for text in texts]}))
    return path


def test_auto_circuit_files(tmp_path):
    texts = ["the cat", "the cat", "the dog", "cat", "dog", "he", "she", "the he"]
    path = write_prompts(tmp_path / "mine.json", texts)
    assert [example.prompt for example in read_auto_circuit(path)] == texts
    task = load_task(path, FakeHost())
    # Seven prompts: a quarter of them test, rounded up, as in the paper; of the others a quarter validation.
    assert tuple(map(len, task.splits)) == (4, 1, 2)
    assert (
        "(kept 7 of 8; dropped: 1 duplicate prompt); auto-circuit JSON file mine.json, seed 42 "
        "(asked for 600 train, 200 validation, 200 test)" in repr(task)
    )
    assert load_task(path, FakeHost()).train.examples == task.train.examples


def test_places_are_those_of_the_shuffle_and_gaps_are_filled_from_behind(tmp_path):
    texts = [*PHRASES[:100]]
    path = write_prompts(tmp_path / "mine.json", texts)
    sizes = {"n_train": 60, "n_validation": 10, "n_test": 20}
    whole = load_task(path, FakeHost(), **sizes)
    assert (*map(len, whole.splits), whole.unused) == (60, 10, 20, 10)
    assert "(kept 90 of 100, 10 not needed)" in repr(whole)
    order = [*texts]
    random.Random(42).shuffle(order)
    assert prompts(whole.train) + prompts(whole.test) + prompts(whole.validation) == order[:90]
    # One prompt of each split becomes unusable: every other one stays where it was.
    for i, text in enumerate(texts):
        if text in (prompts(whole.train)[7], prompts(whole.validation)[5], prompts(whole.test)[3]):
            texts[i] = "the " * 9
    write_prompts(path, texts)
    task = load_task(path, FakeHost(), **sizes)
    assert (*map(len, task.splits), task.unused) == (60, 10, 20, 7)
    common = [len({*prompts(a)} & {*prompts(b)}) for a, b in zip(whole.splits, task.splits, strict=True)]
    assert common == [59, 9, 19]
    assert "(kept 90 of 100, 7 not needed; dropped: 3 prompt longer than the context)" in repr(task)
    other = load_task(path, FakeHost(), **sizes, seed=1)
    assert prompts(other.train) != prompts(task.train)


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 11, 19])
def test_a_file_of_few_prompts_leaves_no_split_empty(tmp_path, n):
    path = write_prompts(tmp_path / "mine.json", PHRASES[:n] * 2)  # and a duplicate is in no split
    for asked in ((600, None, 200), (1, None, 100), (100, None, 1), (5, 5, 5), (1, 100, 1), (1, 1, n - 1), (n, 1, n)):
        task = load_task(path, FakeHost(), **dict(zip(("n_train", "n_validation", "n_test"), asked, strict=True)))
        wanted = (asked[0], asked[1] or asked[2], asked[2])
        sizes = tuple(map(len, task.splits))
        assert all(1 <= size <= most for size, most in zip(sizes, wanted, strict=True))
        assert sum(sizes) == min(n, sum(wanted)) and len({p for split in task.splits for p in prompts(split)}) == sum(sizes)
        assert task.unused == n - sum(sizes)


def test_bad_auto_circuit_files(tmp_path):
    for text, message in (
        ("no json", "not an auto-circuit task file"),
        ("", "is empty"),
        (bytes(range(256)) * 100, r"not an auto-circuit task file .*UnicodeDecodeError"),
        ("[" * 100_000, "not an auto-circuit task file .* RecursionError"),
        (json.dumps({"prompts": 3}), '"prompts" must be a list, got int'),
        (json.dumps({"prompts": [PROMPT, {"clean": "x"}]}), 'prompt 1 lacks "clean", "answers" or "wrong_answers"'),
        (json.dumps({"prompts": [{**PROMPT, "answers": [5]}]}), "prompt 0 holds token ids"),
        (json.dumps({"prompts": [{**PROMPT, "corrupt": [5]}]}), "prompt 0 holds token ids"),
        (json.dumps({"prompts": [{**PROMPT, "answers": "sat"}]}), "of prompt 0 must be lists of strings"),
        (json.dumps({"prompts": [PROMPT, PROMPT]}), "holds 1 different prompts; train, validation and test need"),
    ):
        path = tmp_path / "mine.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(TaskError, match=message) as found:
            load_task(path, FakeHost())
        assert len(str(found.value)) < 400  # never the whole file


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json", "auto.json"])
def test_windows_byte_order_mark(tmp_path, name):
    records = [{**OURS, "prompt": text} for text in PHRASES[:20]]
    path = tmp_path / name
    write_prompts(path, PHRASES[:20]) if name == "auto.json" else write_lines(path, records)
    plain = load_task(path, FakeHost())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_task(path, FakeHost()).train.examples == plain.train.examples


# -------------------------------------------------------------------------------------------------------------- JSONL


def test_jsonl_of_our_fields(tmp_path):
    records = [{**OURS, "prompt": text} for text in PHRASES[:50]]
    task = load_task(write_lines(tmp_path / "mine.jsonl", records), FakeHost(), n_train=20, n_test=10)
    assert (*map(len, task.splits), task.name) == (20, 10, 10, "mine")
    assert task.train.examples[0].answers == ("sat",) and task.train.corrupt[0].tolist() == [2, 4]
    same = load_task(write_lines(tmp_path / "mine.json", records), FakeHost(), n_train=20, n_test=10)
    assert prompts(same.train) == prompts(task.train)  # known by what it holds, whatever it is called


def test_jsonl_of_edge_prunings_fields(tmp_path):
    rows = [{"prefix": f"war of 17{y:02d} to 17", "corr_prefix": "war of 1701 to 17", "digits": y} for y in range(100)]
    path = write_lines(tmp_path / "gt.jsonl", rows)
    task = load_task(path, years_host(), n_train=50, n_test=15)
    assert task.dropped == {"no year on one side of the start year": 2} and task.unused == 18
    assert load_task(path, years_host(), inclusive=True).dropped == {"no year on one side of the start year": 1}


def test_bad_lines_are_named_by_their_number(tmp_path):
    path = tmp_path / "mine.jsonl"
    for line, message in (
        ("{'prompt'", r"line 3 is not JSON \(.*\): \"\{'prompt'\""),
        ("[1, 2]", r"line 3 must hold a JSON object, got '\[1, 2\]'"),
        ('{"prompt": "x", "answers": "y"}', r"line 3 lacks 'distractors'; it has prompt, answers\. A line needs prompt"),
        (json.dumps({**OURS, "answers": [3]}), r"line 3: 'answers' must be a string or a list of strings, got \[3\]"),
        (json.dumps({**OURS, "prompt": None}), r"line 3: 'prompt' and 'corrupt' must be text"),
        ('{"prefix": "a", "corr_prefix": "b", "digits": "12o"}', r"line 3: 'digits' must be .* got '12o'"),
        ('{"prefix": "a", "corr_prefix": "b", "digits": 41.9}', r"line 3: 'digits' must be .* got 41.9"),
        ('{"prefix": "a", "corr_prefix": "b", "digits": Infinity}', r"line 3: 'digits' must be .* got inf"),
        ('{"prefix": "a", "corr_prefix": "b", "digits": ' + "9" * 5000 + "}", r"line 3 is not JSON \(Exceeds the limit"),
        ("[" * 100_000, r"line 3 is not JSON \(.*recursion"),
        (b'{"prompt": "caf\xe9"}', r"line 3 is not UTF-8 text .* save the file as UTF-8"),
        ('{"prefix": "a", "corr_prefix": "b", "digits": 100}', r"line 3: 'digits' must be .* got 100"),
        ('{"prefix": 1, "corr_prefix": "b", "digits": 10}', r"line 3: 'prefix' must be text, got 1"),
    ):
        path.write_bytes(f"{json.dumps(OURS)}\n\n".encode() + (line if isinstance(line, bytes) else line.encode()))
        with pytest.raises(TaskError, match=message):
            load_task(path, FakeHost())
    path.write_text("\n".join(json.dumps({**OURS, "prompt": text}) for text in NOUNS))
    with pytest.raises(TaskError, match=r"inclusive=True is about Edge-Pruning's greater-than, but .* line 1 names"):
        load_task(path, FakeHost(), inclusive=True)


# ------------------------------------------------------------------------------------------------------- Edge-Pruning


def gt_rows(starts):
    starts = list(starts)
    return {
        "prefix": [f"war of {start} to {start // 100}" for start in starts],
        "corr_prefix": [f"war of {start // 100}01 to {start // 100}" for start in starts],
        "digits": [start % 100 for start in starts],
    }


def save(path, **splits):
    datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()}).save_to_disk(path)
    return path


def test_greater_than_folder(tmp_path):
    path = save(
        tmp_path / "gt",
        train=gt_rows(range(1702, 1712)),
        train_80k=gt_rows([*range(1100, 1150), 1101]),  # 1100 has no earlier year, 1101 comes twice
        test=gt_rows([1149, 1199, *range(1210, 1230)]),  # 1149 is in train_80k, 1199 has no later year
    )
    task = load_task(path, years_host())
    # A third of the 49 different training prompts is validation.
    assert (task.name, *map(len, task.splits)) == ("greater_than", 33, 16, 20)
    assert task.dropped == {"no year on one side of the start year": 2, "duplicate prompt": 2}
    assert "Edge-Pruning folder gt, splits train_80k and test, 16 of the first held back for validation by seed 42" in (
        task.source
    )
    years = [f"war of {start} to 11" for start in range(1101, 1150)]
    assert sorted(prompts(task.train) + prompts(task.validation)) == years
    assert prompts(task.train) == sorted(prompts(task.train))  # in the folder's order
    example = next(e for split in task.splits for e in split.examples if e.meta["content"] == "10")
    assert example.prompt == "war of 1110 to 11" and example.corrupt == "war of 1101 to 11"
    assert example.answers == tuple(str(year) for year in range(11, 100))
    assert example.distractors == tuple(f"{year:02d}" for year in range(10))
    inclusive = load_task(path, years_host(), inclusive=True)
    zero = next(e for split in inclusive.splits for e in split.examples if e.prompt == "war of 1100 to 11")
    assert zero.distractors == ("00",) and "inclusive" in inclusive.source  # the year itself makes it a wrong side
    few = load_task(path, years_host(), n_train=5, n_test=3)
    assert prompts(few.train) == years[:5] and "not needed" in repr(few) and len(few.validation) == 3
    assert prompts(load_task(path, years_host(), n_train=5, seed=0).train) != prompts(few.train)
    for splits in (("train_80k",), ("train_80k", "test", "test", "test")):
        with pytest.raises(TaskError, match=r"splits=.* must be two names, splits=\(train, test\), .* or three"):
            read_edge_pruning(path, splits=splits)
    with pytest.raises(TaskError, match=r"several tokens of two digits \('41' -> \['4', '<unk>'\]\)"):
        load_task(path, FakeHost(n_ctx=16))


def test_small_splits_stand_in_and_are_named(tmp_path):
    path = save(tmp_path / "gt", train=gt_rows(range(1102, 1110)), test=gt_rows(range(1120, 1124)), odd=gt_rows([1130]))
    task = load_task(path, years_host())
    assert tuple(map(len, task.splits)) == (6, 2, 4)
    assert "splits train and test (the paper's train_80k is not there)" in task.source
    assert tuple(map(len, load_task(path, years_host(), splits=("test", "odd")).splits)) == (3, 1, 1)
    three = load_task(path, years_host(), splits=("test", "train", "odd"))
    assert tuple(map(len, three.splits)) == (4, 8, 1) and "splits test, train and odd" in three.source
    with pytest.raises(TaskError, match="has one training prompt, which cannot be divided into train and validation"):
        load_task(path, years_host(), splits=("odd", "test"))
    with pytest.raises(TaskError, match="has no split 'valid'; it has train, test, odd"):
        load_task(path, years_host(), splits=("train", "valid"))


def test_a_folders_own_validation_split_is_taken(tmp_path):
    rows = {"train": gt_rows(range(1102, 1110)), "validation": gt_rows([1109, *range(1310, 1320)])}
    path = save(tmp_path / "gt", **rows, test=gt_rows(range(1220, 1230)))
    task = load_task(path, years_host())
    assert tuple(map(len, task.splits)) == (8, 10, 10) and "splits train, validation and test (the" in task.source
    assert task.validation.dropped == {"duplicate prompt": 1}  # a training prompt does not choose, too
    assert tuple(map(len, load_task(path, years_host(), n_test=4).splits)) == (8, 4, 4)
    assert tuple(map(len, load_task(path, years_host(), n_validation=6, n_test=4).splits)) == (8, 6, 4)
    assert tuple(map(len, load_task(path, years_host(), splits=("train", "test")).splits)) == (6, 2, 10)


def test_pronoun_folder(tmp_path):
    def rows(names):
        return {
            "prefix": [f"{name} sat" for name in names],
            "corr_prefix": ["dog sat" for _ in names],
            "pronoun": ["She" if name == "cat" else "he" for name in names],
            "corr_pronoun": ["he" for _ in names],
        }

    path = save(tmp_path / "gp", train_3k=rows(["cat", "dog", "the"]), test=rows(["ran", "dog"]))
    task = load_task(path, FakeHost())
    assert (task.name, *map(len, task.splits)) == ("gendered_pronoun", 2, 1, 1)
    sides = {e.prompt: (e.answers, e.distractors) for split in task.splits for e in split.examples}
    assert sides["cat sat"] == ((" she",), (" he",)) and sides["dog sat"] == ((" he",), (" she",))
    assert task.dropped == {"duplicate prompt": 1} and "splits train_3k and test" in task.source
    row = {"prefix": "x", "corr_prefix": "y", "pronoun": "they", "corr_pronoun": "he"}
    with pytest.raises(TaskError, match="row 4: 'pronoun' must be he or she, got 'they'"):
        row_example("gendered_pronoun", row, "row 4")
    with pytest.raises(TaskError, match="inclusive=True is about greater-than's start year, but row 4 is of gendered"):
        row_example("gendered_pronoun", row, "row 4", inclusive=True)


def test_ioi_folder(tmp_path):
    sentences = ["Then, A and B sat. B ran to A", "Then, B and A sat. B ran to A", "Then, A ran to B"]
    rows = {"ioi_sentences": sentences, "corr_ioi_sentences": ["Then, C and D sat. E ran to C"] * 3}
    test = {"ioi_sentences": ["While A and B sat, A ran to B"], "corr_ioi_sentences": ["Then, C and D ran to C"]}
    words = ["<unk>", "<bos>", "A", "B", "C", "D", "E", "Then", ",", ".", "and", "sat", "ran", "to", "While"]
    task = load_task(save(tmp_path / "ioi", train=rows, test=test), FakeHost(words, n_ctx=16))
    assert (task.name, *map(len, task.splits)) == ("ioi", 1, 1, 1)
    first = next(e for split in task.splits[:2] for e in split.examples if "A and B" in e.prompt)
    assert (first.prompt, first.corrupt) == ("Then, A and B sat. B ran to", "Then, C and D sat. E ran to")
    assert (first.answers, first.distractors) == ((" A",), (" B",))
    assert (task.test.examples[0].answers, task.test.examples[0].distractors) == ((" B",), (" A",))
    assert task.dropped == {"no name said twice beside one said once": 1}


def test_folders_that_are_something_else(tmp_path):
    save(tmp_path / "data" / "gt", train=gt_rows([1110]), test=gt_rows([1120]))
    with pytest.raises(TaskError, match=r"no dataset_dict.json. It holds .*gt: pass one of these"):
        load_task(tmp_path / "data", years_host())
    with pytest.raises(TaskError, match=r"It is one split; pass the folder that holds all of them, perhaps .*gt"):
        load_task(tmp_path / "data" / "gt" / "train", years_host())
    path = save(tmp_path / "odd", train={"text": ["x"]}, test={"text": ["x"]})
    assert find_format(path) == "Edge-Pruning folder"
    with pytest.raises(TaskError, match="has the fields text, which belong to none of Edge-Pruning's tasks"):
        load_task(path, years_host())
    (path / "dataset_dict.json").write_text("{")
    with pytest.raises(TaskError, match=r"cannot be read by datasets.load_from_disk"):
        load_task(path, years_host())
