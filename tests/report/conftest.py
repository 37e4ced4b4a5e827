"""A true Run of a small random model whose vocabulary is as hostile as a tokenizer's can be, and Runs made by hand from it."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swd_lens.analysis.graph import attention_paths, replays, unit_graph
from swd_lens.base.errors import TextWarning
from swd_lens.circuits import Comparison
from swd_lens.circuits.comparison import TaskComparison
from swd_lens.circuits.screen import Screen, TaskScreen
from swd_lens.study import Run, run_study
from swd_lens.study.section import ReportSection, SectionGraph
from swd_lens.tasks import Task, TaskExample
from swd_lens.train.baselines import svd

_FOLDER = TemporaryDirectory(prefix="swd-lens-")  # the tokenizer, which a host reads again; it goes with the process
HOSTILE = ("</script>", "<b>", '"onload="', "&amp;", "{{7*7}}", "\n", " ", "    ", "\t", "\u202e", "<!--", "$x$")
WORDS = ("a", " b", " c", " d", "e", " Mary", " John", "'s")
VOCABULARY = ("<|bos|>", "<|unk|>", *HOSTILE, *WORDS)
HOSTILE_TASK, HOSTILE_SURFACE = "<i>task</i> $\\bad$", "blocks & <script>alert(1)</script> $_$"


VOID = {"meta", "br", "link", "hr", "img", "input", "col", "path"}


class Page(HTMLParser):
    """Collects text, attributes and table rows; any element closed out of turn, or never, is an error."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: Counter[str] = Counter()
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.errors: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.errors.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if {"td", "th"} & set(self.open) and "tr" in self.open:
            self.rows[-1][-1] += data

    def values(self, *names: str) -> list[str]:
        """What attributes of these names hold."""
        return [value or "" for _, name, value in self.attributes if name in names]

    def handlers(self) -> list[str]:
        """Attributes that would run a script."""
        return [name for _, name, _ in self.attributes if name.startswith("on")]


@cache
def made_host() -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split("|", behavior="removed")
    backend.decoder = decoders.Fuse()
    special = {"bos_token": "<|bos|>", "unk_token": "<|unk|>", "eos_token": "<|bos|>", "pad_token": "<|bos|>"}
    from transformers import AutoTokenizer

    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(_FOLDER.name)
    torch.manual_seed(0)
    shape = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 32, "n_ctx": 24, "act_fn": "gelu_new"}
    config = HookedTransformerConfig(**shape, d_vocab=len(VOCABULARY), normalization_type="LN", model_name="tiny <model>", seed=0)
    return HookedTransformer(config, tokenizer=AutoTokenizer.from_pretrained(_FOLDER.name)).eval()


@pytest.fixture(scope="session")
def host() -> Any:
    return made_host()


def _task(name: str, model: Any, answer: str, distractor: str) -> Task:
    examples = [TaskExample(prompt, (answer,), (distractor,)) for prompt in ("a| b| c", "a| c| b| d", "e| b| d", "e| c| Mary")]
    return Task.from_examples(name, examples, examples, model, validation=examples, source="made by <hand>")


@cache
def made_run() -> Run:
    """Two surfaces, two tasks (which ask opposite things, so that one of them has no positive margin), three methods."""
    host = made_host()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=TextWarning)  # random words
        tasks = [_task(HOSTILE_TASK, host, " Mary", " John"), _task("other_way", host, " John", " Mary")]
    text = torch.randint(0, len(VOCABULARY), (24, 20), generator=torch.Generator().manual_seed(0))
    surfaces = {HOSTILE_SURFACE: "blocks.1.mlp_out", "attention": ["blocks.0.attn_qkv", "blocks.1.attn_o"]}
    options = {"sparsities": (0.5, 0.75), "controls": ("svd",), "outer_iterations": 4}
    options |= {"cards_per_task": 2, "contexts_per_card": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the mean margin of")  # of the second task
        warnings.filterwarnings("ignore", category=TextWarning)  # random words
        return run_study(host, surfaces, tasks, calibration_tokens=text, heldout_tokens=text.flip(0), **options)


@pytest.fixture(scope="session")
def run() -> Run:
    """Made once a process, for the tests of studies, too."""
    return made_run()


@pytest.fixture(scope="session")
def small(run: Run) -> Run:
    """One surface of the run and three methods, without cards and attention: a page takes as long to make as its pictures."""
    surface, comparison = next(iter(run.comparisons.items()))
    few = ("SWD s=0.5", "SWD s=0.75", "SVD")
    replacements = [r for r in run.replacements if r.surface == surface and r.method in few]
    comparison = of_tasks(comparison, lambda its: replace(its, curves={method: its.curves[method] for method in few}))
    comparison = replace(comparison, fidelities={method: comparison.fidelities[method] for method in few})
    return replace(run, replacements=replacements, comparisons={surface: comparison}, cards=[], attention=[])


@pytest.fixture(scope="session")
def carded(run: Run, small: Run) -> Run:
    """The small run with its cards."""
    return replace(small, cards=[card for card in run.cards if card.surface in small.comparisons])


def with_screen(run: Run) -> Run:
    """The run with a screen of three sites and a surface: a task that is done well, and one of which half is done."""
    names = ("blocks.0.attn_qkv", "blocks.1.attn_o", "blocks.1.mlp_out", f"all {HOSTILE_SURFACE}")
    tasks = {}
    for task, right in ((HOSTILE_TASK, 1.0), ("other_way", 0.5)):
        numbers = {name: 2.0 - 0.625 * i for i, name in enumerate(names)}
        tasks[task] = TaskScreen(task, 4, 2.0, right, numbers, dict.fromkeys(names, 0.125), dict.fromkeys(names, 0.25))
    return replace(run, screen=Screen(tasks, names[:3], {names[3]: names[1:3]}, {"positions": "scoring"}))


def with_cards(run: Run, tokens: tuple[str, ...]) -> Run:
    """The run with these tokens in every card, as contexts and as promoted and suppressed tokens."""
    from swd_lens.analysis.audit import Context, LogitEffect

    context = Context(tokens, tuple(float((-1) ** i * i) for i in range(len(tokens))), len(tokens) - 1)
    effect = LogitEffect(tuple((t, 0.5) for t in tokens), tuple((t, -0.25) for t in tokens))
    return replace(run, cards=[replace(card, contexts=(context,), logits=effect) for card in run.cards])


def with_attention(run: Run, tokens: tuple[str, ...]) -> Run:
    """The run with one signed view of these tokens, whose title, names and captions are as hostile as they."""
    from swd_lens.study.section import AttentionView

    n = len(tokens)
    values = torch.linspace(-1, 1, 2 * n * n).reshape(2, n, n).tril()
    names = (f"head {tokens[0]}", f"pair {tokens[-1]}")
    words = {"title": f"view of {tokens[0]}", "caption": f"as {tokens[0]} sees it"}
    view = AttentionView.of(values, tokens, names, kind="pairs", task="", signed=True, **words)
    return replace(run, attention=[replace(view, measures={f"KL of {tokens[0]}": {names[0]: 0.5}})])


def of_tasks(comparison: Comparison, change: Callable[[TaskComparison], TaskComparison]) -> Comparison:
    """The comparison with something else in place of every task's."""
    return replace(comparison, tasks={task: change(its) for task, its in comparison.items()})


def section_with_graph(host: Any) -> ReportSection:
    """A unit graph of hostile tokens, with its attention edges by head and true replays."""
    factors = svd(host, ["blocks.0.attn_qkv", "blocks.0.attn_o", "blocks.1.mlp_out"])
    units = [(site, unit) for site in factors for unit in range(4)]
    tokens = torch.tensor([VOCABULARY.index(word) for word in ("<|bos|>", *HOSTILE[:4], " Mary")])
    graph = unit_graph(host, factors, units, prompt=tokens, attention="frozen", keep=20)
    paths = attention_paths(host, factors, graph, pairs=2)
    page = SectionGraph.of(graph, paths, replays(host, factors, graph, progress=False))
    return ReportSection("Unit graph", ("Words.",), (), (), "Graph", page)
