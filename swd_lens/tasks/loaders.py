"""load_task: a task by family name (our generators) or from a file or folder, tokenized for a host.

1. A family name (`GENERATED`) generates prompts. Train, validation and test prompts come from three content splits that are
   disjoint from each other and from everything the embedded model was trained on (`content_of`). Prompts are drawn until the
   asked number is usable with this tokenizer, corrupt prompts until they are as long as theirs.
2. An auto-circuit JSON file or a JSONL file is shuffled once (seed 42, as auto-circuit does): train has the first n_train
   places, test the next n_test, validation the next n_validation. A place whose example is dropped is filled from the prompts
   behind all. Of a file with fewer prompts than that, see `_shares`.
3. An Edge-Pruning folder has its splits already; the paper's are taken, whole, and its "validation" where it has one. Else the
   training part is divided (`swd_lens.tasks.task.divided`).
4. Either way the examples are tokenized for the host, unusable ones are dropped and counted, and a prompt that was there
   before is dropped, so that none is in two splits.
"""

import dataclasses
import difflib
import functools
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swd_lens.base.checks import bounded
from swd_lens.base.errors import TaskError, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.files import AUTO_CIRCUIT, EDGE_PRUNING, find_format, read_auto_circuit, read_edge_pruning, read_jsonl
from swd_lens.tasks.generators import GENERATED, content_of, corrupts, stream
from swd_lens.tasks.generators.words import TASK_PARTS
from swd_lens.tasks.split import TaskExample
from swd_lens.tasks.task import Task, TaskBuilder, divided
from swd_lens.tasks.tokenize import DUPLICATE, TaskTokenizer

PAPER_SPLIT = (600, 200)  # IOI and docstring, app. A.4
FILE_SEED = 42  # auto-circuit's
# A generator whose prompts are nearly all unusable with a tokenizer is given up after this many draws per asked prompt.
_DRAWS = 20
_REDRAWS = 100  # of a corrupt prompt that is not as long as its prompt


@with_torch_defaults
def load_task(
    name: str | Path,
    model: Any,
    *,
    n_train: int | None = None,
    n_validation: int | None = None,
    n_test: int | None = None,
    seed: int | None = None,
    prepend_bos: bool | None = None,
    splits: tuple[str, str] | tuple[str, str, str] | None = None,
    inclusive: bool = False,
) -> Task:
    """Load a task for a host.

    Args:
        name: a family: "ioi", "docstring", "greater_than", "gendered_pronoun", and for models of real text "capital",
            "agreement", "succession" (days, months, numbers) and "greater_digit" (greater-than where digits are tokens); or a
            path: an auto-circuit JSON file, a JSONL file (prompt, answers, distractors; or Edge-Pruning's fields), or an
            Edge-Pruning folder.
        model: the host, with a tokenizer.
        n_train, n_test: prompts per split. None = the paper's: 600 and 200 of a generator or a file, everything of an
            Edge-Pruning folder's splits. A smaller file is split in the same proportion.
        n_validation: prompts to choose on. None = as many as n_test. Where a file has too few for all three, its training part is
            divided in the proportion of n_train and n_validation; a folder without a validation split gives at most a third
            of its training part, by a shuffle.
        seed: of the generator (default 0) or of a file's shuffle (default 42, auto-circuit's); a folder is shuffled only
            where a seed is given.
        prepend_bos: whether prompts begin with BOS; None = as the host does it, `cfg.default_prepend_bos`, which `load_host` sets
            by the tokenizer's files: with BOS for the embedded model, Llama and Gemma, without for GPT-2, Qwen and SmolLM2. It
            stands in every result.
        splits: an Edge-Pruning folder's train and test split by name, or train, validation and test; None = the paper's, and
            "validation" where the folder has one.
        inclusive: Edge-Pruning's greater-than: the start year itself is among the distractors.

    Raises:
        TaskError: unknown name, malformed file, n below 1 or not whole, an option that does not belong to this source, a
            tokenizer that cannot do the task, fewer than three different prompts, or no usable example.
    """
    for what, n in {"n_train": n_train, "n_validation": n_validation, "n_test": n_test}.items():
        bounded(what, 1 if n is None else n, 1, error=TaskError)
    path = Path(name)
    kind = "generator" if str(name) in GENERATED else find_format(path) if os.path.exists(path) else None
    if kind is None:
        near = difflib.get_close_matches(str(name).lower(), GENERATED, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"{quoted(str(name))} is neither a task family ({', '.join(GENERATED)}) nor a file or folder.{hint}")
    if splits is not None and kind != EDGE_PRUNING:
        raise TaskError(
            f"splits={splits} belongs to Edge-Pruning folders; {quoted(str(name))} is split by n_train, n_validation and n_test"
        )
    if inclusive and kind in ("generator", AUTO_CIRCUIT):
        raise TaskError(
            f"inclusive=True belongs to Edge-Pruning's greater-than; {quoted(str(name))} names its distractors itself"
        )
    build = TaskBuilder(path.stem if kind not in ("generator", EDGE_PRUNING) else path.name, model, prepend_bos)
    if kind == EDGE_PRUNING:
        return _from_folder(build, path, splits, inclusive, (n_train, n_validation, n_test), seed)
    n_test = n_test or PAPER_SPLIT[1]
    asked = (n_train or PAPER_SPLIT[0], n_validation or n_test, n_test)
    if kind == "generator":
        return _generated(build, str(name), asked, seed or 0)
    examples, dropped = (
        (read_auto_circuit(path), Counter[str]()) if kind == AUTO_CIRCUIT else read_jsonl(path, inclusive=inclusive)
    )
    return _shuffled(build, examples, dropped, f"{kind} file {path.name}", asked, FILE_SEED if seed is None else seed)


def _short_of(build: TaskBuilder, asked: tuple[int, int, int]) -> str:
    """A note for `source` where fewer examples were kept than were asked for; "" where the numbers were reached."""
    collectors = (build.train, build.validation, build.test)
    short = any(len(collector.kept) < n for collector, n in zip(collectors, asked, strict=True))
    return f" (asked for {asked[0]} train, {asked[1]} validation, {asked[2]} test)" if short else ""


def _generated(build: TaskBuilder, family: str, asked: tuple[int, int, int], seed: int) -> Task:
    content = content_of(family)
    for collector, n in zip((build.train, build.validation, build.test), asked, strict=True):
        # A bound, because a tokenizer may make every prompt unusable and there are millions of them.
        drawn = itertools.islice(stream(family, content[collector.split], seed), _DRAWS * n + 200)
        # Parts of few names, two of a gender at the least: a tokenizer may have none of equal length among them. There prompts
        # that can be resampled come first, the others where those are too few.
        uneven: list[TaskExample] | None = [] if content[collector.split] in (*TASK_PARTS, "validation") else None
        collector.fill(_with_even_corrupts(drawn, build.tokenizer, uneven), n)
        collector.fill(uneven or (), n)
    return build.task(f"swd_lens generator, seed {seed}{_short_of(build, asked)}")


def _with_even_corrupts(
    examples: Iterable[TaskExample], tokenizer: TaskTokenizer, uneven: list[TaskExample] | None
) -> Iterator[TaskExample]:
    """The examples with corrupt prompts of as many tokens as the prompts, which resampling at all positions needs: names differ
    in their number of tokens. Where no redraw fits, the corrupt prompt stays as it is; `uneven` takes these examples, None: they
    come with the others."""
    length = functools.cache(lambda text: len(tokenizer.ids(text)))  # few names make few corrupt prompts
    for example in examples:
        texts = itertools.chain([example.corrupt], itertools.islice(corrupts(example), _REDRAWS))
        even = next((text for text in texts if text is not None and length(text) == length(example.prompt)), None)
        if even is None and uneven is not None and next(corrupts(example), None) is not None:
            uneven.append(example)
        else:
            yield dataclasses.replace(example, corrupt=example.corrupt if even is None else even)


def _shuffled(
    build: TaskBuilder, examples: list[TaskExample], dropped: Counter[str], source: str, asked: tuple[int, int, int], seed: int
) -> Task:
    different = len({example.prompt for example in examples})
    if different < 3:
        raise TaskError(f"{source} holds {different} different prompts; train, validation and test need at least one each")
    random.Random(seed).shuffle(examples)
    before, n_train, n_validation, n_test = _shares(different, *asked)
    others = examples[:before] + examples[before + n_test :]
    rest = iter(others[n_train + n_validation :])
    build.fill(others[:n_train], others[n_train : n_train + n_validation], examples[before : before + n_test])
    # Only now: places are filled up from behind, so that every other example is in the split that the shuffle gave it.
    build.train.fill(rest, n_train)
    build.test.fill(rest, n_test)
    build.validation.fill(rest, n_validation)
    left = [example.prompt for example in rest]
    kept = (*build.train.kept, *build.validation.kept, *build.test.kept)
    unused = set(left) - {example.prompt for example, *_ in kept}
    dropped = dropped + Counter({DUPLICATE: len(left) - len(unused)})
    return build.task(f"{source}, seed {seed}{_short_of(build, asked)}", len(unused), {"train": dropped})


def _shares(different: int, n_train: int, n_validation: int, n_test: int) -> tuple[int, int, int, int]:
    """Divide a shuffled file with so many different prompts: the number of places before test's, and each split's size.

    A file that has too few keeps the asked proportion of train and test, and divides its training part in that of train and
    validation, rather than leave a split empty; so its test prompts do not depend on n_validation.
    """
    before = n_train
    if different < n_train + n_test:
        before = min(max(2, different * n_train // (n_train + n_test)), different - 1)
        n_test = different - before
    n_others = different - n_test
    if n_others < 2:
        n_test, n_others = different - 2, 2
    if n_others < n_train + n_validation:
        n_validation = min(max(1, n_others * n_validation // (n_train + n_validation)), n_others - 1)
        n_train = n_others - n_validation
    return before, n_train, n_validation, n_test


def _from_folder(
    build: TaskBuilder,
    path: Path,
    splits: tuple[str, str] | tuple[str, str, str] | None,
    inclusive: bool,
    asked: tuple[int | None, int | None, int | None],
    seed: int | None,
) -> Task:
    saved = read_edge_pruning(path, splits=splits, inclusive=inclusive)
    build.tokenizer.task = saved.task
    n_train, n_validation, n_test = asked
    n_validation = n_validation or n_test
    train, validation, note = saved.train, saved.validation, "" if seed is None else f", seed {seed}"
    if seed is not None:
        for examples in (train, validation or [], saved.test):
            random.Random(seed).shuffle(examples)
    if validation is None and len(train) > 0:
        n, by = n_validation or len(saved.test), FILE_SEED if seed is None else seed
        train, validation = divided(train, n, by, saved.source, kept=n_train or 0)
        note += f", {len(validation)} of the first held back for validation by seed {by}"
    unused, collectors = 0, (build.train, build.test, build.validation)
    parts = zip(collectors, (train, saved.test, validation or []), (n_train, n_test, n_validation), strict=True)
    for collector, examples, n in parts:
        rest = iter(examples)
        collector.fill(rest, n)
        unused += len(list(rest))
    return build.task(saved.source + note, unused, saved.dropped)
