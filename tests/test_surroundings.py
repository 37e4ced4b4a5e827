"""Numbers do not depend on surroundings: every public call gives the same bits under every setting that a caller may have made.

1. Everything public that computes carries the mark of base/surroundings.py.
2. Real calls on a HookedTransformer and on a TransformerBridge, under each setting: the same bits, and nothing stays behind, in
   the process or in the host.
3. Within an attachment a user's own forwards see the user's settings.
4. A user's standing hooks are named in the settings of results; a hook that changes z's shape is refused.
5. A second thread that uses the same host, if only for a forward, is refused.
"""

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, cached_property, partial
from importlib import import_module, metadata
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import swd_lens as swd
from swd_lens.base import holding
from swd_lens.base.surroundings import is_marked
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from swd_lens.tasks.split import TaskExample
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units.factors import Factors
from tests import families
from tests.base.test_surroundings import SETTINGS as PLAIN_SETTINGS
from tests.base.test_surroundings import in_a_thread, state
from tests.hosts.test_interrupts import everything

SITE, SITES = "blocks.1.mlp_out", "blocks.*.mlp_out"
QUICK = {"outer_iterations": 3, "refine_rounds": 1, "progress": False}
HOSTS = ("hooked", "bridge") if int(metadata.version("transformer_lens").split(".")[0]) < 4 else ("bridge",)


def in_turns(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name with one kind of host."""
    return [(name, HOSTS[i % len(HOSTS)]) for i, name in enumerate(names)]


pytestmark = pytest.mark.filterwarnings("ignore:60 calibration tokens")  # few, for speed; shrinkage is one of the surroundings

# ---------------------------------------------------------------------------------------------- the mark

# No tensors in them, or nothing but fields.
_NOTHING_TO_COMPUTE = {
    *("Site", "TaskExample", "Estimate", "QKPair", "QKCase", "SparseSpec", "TranscoderSpec", "VpdSpec", "FinetuneSpec")
}


def public() -> dict[str, Any]:
    names = {n: getattr(swd, n) for table in (swd.PUBLIC, swd.ALIASES, swd.TYPES) for n in table}
    for namespace, home in swd.NAMESPACES.items():
        module = import_module(f"swd_lens.{home}")
        names |= {f"{namespace}.{name}": getattr(module, name) for name in module.__all__}
    return {name: value for name, value in names.items() if callable(value)}


def members(kind: type) -> dict[str, Any]:
    """Public methods and properties that a class of swd_lens has, those of its bases in swd_lens included; no generators."""
    made = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("swd_lens"):
            made |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    functions = {}
    for name, value in made.items():
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        elif isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if inspect.isfunction(value) and not inspect.isgeneratorfunction(inspect.unwrap(value)):
            functions[name] = value
    return functions


def test_everything_public_that_computes_is_marked():
    unmarked = []
    for name, value in public().items():
        if not inspect.isclass(value):
            unmarked += [] if is_marked(value) else [name]
        elif not issubclass(value, BaseException) and value.__name__ not in _NOTHING_TO_COMPUTE:
            unmarked += [f"{name}.{method}" for method, function in members(value).items() if not is_marked(function)]
    assert not unmarked


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS = {**PLAIN_SETTINGS, "deterministic": deterministic}
del SETTINGS["none"]


def split(model: Any, name: str, seed: int) -> TaskSplit:
    """Eight prompts of random tokens, to which the host prefers the answer to the distractors."""
    generator = torch.Generator().manual_seed(seed)
    prompts = tuple(torch.randint(8, 99, (3 + i % 2,), generator=generator) for i in range(8))
    examples = tuple(TaskExample(f"prompt {i}", ("right",), ("wrong",)) for i in range(8))
    with torch.no_grad():
        logits = [model(prompt[None])[0, -1] for prompt in prompts]
    answers = tuple((int(of_prompt.argmax()),) for of_prompt in logits)
    # Three of them: their weights in the margin, a third, are no numbers of bfloat16.
    wrong = tuple(tuple(of_prompt.argsort()[:3].tolist()) for of_prompt in logits)
    return TaskSplit(name, examples, prompts, answers, wrong, families.D_VOCAB, task="toy")


def load(kind: str) -> Any:
    return swd.load_host(str(families.checkpoint("gpt2")), kind=kind)


class Kit:
    """A host and what calls on it take, made in plain surroundings."""

    def __init__(self, kind: str):
        self.kind, self.model = kind, load(kind)
        self.tokens = families.some_tokens(6, 10)
        splits = [split(self.model, name, seed) for name, seed in (("train", 0), ("validation", 2), ("test", 1))]
        self.task = Task("toy", *splits, "random", False)
        self.factors = self.factorize()
        attention = swd.factorize(self.model, ["blocks.*.attn_qkv"], sparsity=0.5, **QUICK)
        self.attention, self.scores = attention, self.attribute()

    def factorize(self, calibration: str = "sequential") -> Any:
        return swd.factorize(self.model, SITES, sparsity=0.5, tokens=self.tokens, calibration=calibration, **QUICK)

    def attribute(self, **how: Any) -> Any:
        return swd.attribute(self.model, self.factors, self.task, **how)

    def edits(self) -> Any:
        edit = swd.edit_unit(self.model, self.factors, f"{SITE}/1", self.tokens[0], 9, 11, 1.5)
        with edit.applied(self.model):
            changed = host_of(self.model).weight(swd.find_sites(self.model, SITE)[0]).tolist()
        return edit, swd.side_effects(self.model, edit, [self.tokens[1]], self.tokens), changed

    def finetune(self, autocast: str | None) -> Any:
        how = {"steps": 2, "batch_size": 2, "learning_rate": 1e-3, "autocast": autocast, "progress": False}
        return swd.finetune(self.model, self.factors, self.tokens, heldout=self.tokens[:2], **how)

    def trained(self, method: Any) -> Any:
        return method(self.model, SITE, self.tokens, n_tokens=60, tokens_per_step=20, width=8, progress=False)

    def weights(self, method: Any) -> Any:
        units = self.trained(method)
        return {name: vars(of_site.coder) | dict(of_site.coder.state_dict()) for name, of_site in units.items()}

    def circuit(self) -> Any:
        curve = swd.evaluate(self.model, self.factors, self.task, self.scores, random_sets=20, kl=True)
        return curve, swd.evaluate_circuits(self.model, self.factors, self.task, curve.circuit(5))

    def qk(self) -> Any:
        screen = swd.qk_screen(self.model, self.attention, distance=2)
        pair = screen.pairs(1)[0]
        replay = swd.qk_replay(self.model, self.attention, pair, self.tokens[0])
        return screen, replay, swd.qk_scan(self.model, self.attention, [self.tokens[0]], pairs=[pair], progress=False)


CALLS = {
    "grams": lambda kit: collect_grams(kit.model, swd.find_sites(kit.model, SITES), kit.tokens),
    "factorize": Kit.factorize,
    "factorize corrected": lambda kit: kit.factorize("corrected"),
    "allocate": lambda kit: swd.allocate(kit.model, SITES, sparsity=0.5, tokens=kit.tokens, **QUICK),
    "attribute": Kit.attribute,
    "attribute by gradients": lambda kit: kit.attribute(score="integrated_gradients", steps=2, positions="all"),
    "attribute by ablation": lambda kit: kit.attribute(score="ablation"),
    "circuits": Kit.circuit,
    "refine": lambda kit: swd.refine(kit.model, kit.factors, kit.task.train, kit.scores, rounds=1),
    "fidelity": lambda kit: swd.fidelity(kit.model, kit.factors, kit.tokens),
    "compare": lambda kit: swd.compare(
        kit.model, {"SWD": kit.factors, "SVD": swd.baselines.svd(kit.model, SITES)}, kit.task, tokens=kit.tokens
    ),
    "qk": Kit.qk,
    "audit": lambda kit: vars(swd.audit(kit.model, kit.factors, kit.tokens, n=2, progress=False))["sites"],
    "edits": Kit.edits,
    "graph": lambda kit: swd.unit_graph(
        kit.model, kit.factors, [f"{site}/{i}" for site in kit.factors for i in range(3)], prompt=kit.tokens[0], keep=None
    ),
    "interactions": lambda kit: swd.unit_interactions(
        kit.model, swd.baselines.svd(kit.model, "blocks.1.mlp_in"), "blocks.1.mlp_in", kit.tokens, top=4, progress=False
    ),
    "overlap": lambda kit: swd.unit_overlap(kit.model, kit.factors, SITE, kit.tokens, progress=False),
    "finetune": lambda kit: kit.finetune(None),
    "finetune under its own autocast": lambda kit: kit.finetune("bfloat16"),
    "transcoder": lambda kit: kit.weights(swd.baselines.transcoder),
    "VPD": lambda kit: kit.weights(swd.baselines.vpd_kl),
    "generate": lambda kit: swd.generate(kit.model, kit.factors, ["a"], max_new_tokens=2, temperature=1.0, progress=False),
    "load": lambda kit: host_of(load(kit.kind)).weight(swd.find_sites(kit.model, SITE)[0]).tolist(),
}


@cache
def kit_of(kind: str) -> Kit:
    return Kit(kind)


@cache
def expected(kind: str, call: str) -> Any:
    return plain(CALLS[call](kit_of(kind)))


def plain(value: Any) -> Any:
    """A result as nested values that are equal only if every bit and every dtype is."""
    if isinstance(value, Tensor):
        whole = value.detach().contiguous()
        raw = whole.flatten().view(torch.uint8).numpy().tobytes()
        return value.is_inference(), str(whole.dtype), str(whole.device), tuple(whole.shape), raw
    if isinstance(value, pd.DataFrame):
        return {str(column): plain(value[column].tolist()) for column in value}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if key not in ("seconds", "host")}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        # The weight of factors is a view of their host's.
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.name != "weight"}
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


# All settings, in two stacks: a call that heeds one of a stack has other bits. Each stack on one kind of host.
STACKS = {
    "narrow": ("bfloat16", "meta", "autocast", "inference", "precision", "deterministic"),
    "wide": ("float64", "no_grad", "precision of a backend"),
}
PAIRED = [(call, HOSTS[(i + j) % len(HOSTS)], stack) for i, call in enumerate(CALLS) for j, stack in enumerate(STACKS)]


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(("call", "kind", "stack"), PAIRED)
def test_a_call_gives_the_same_bits_under_every_setting(call, kind, stack):
    assert {name for names in STACKS.values() for name in names} == set(SETTINGS)
    wanted, kit = expected(kind, call), kit_of(kind)
    with ExitStack() as made:
        for name in STACKS[stack]:
            made.enter_context(SETTINGS[name]())
        before, host = state(), everything(kit.model)
        got = CALLS[call](kit)
        assert state() == before and everything(kit.model) == host
    assert plain(got) == wanted


@pytest.mark.parametrize("kind", HOSTS)
def test_forwards_of_an_attached_host_see_the_users_settings(kind):
    kit = kit_of(kind)
    with torch.autocast("cpu", torch.bfloat16), swd.attach(kit.model, kit.factors), torch.no_grad():
        rounded = kit.model(kit.tokens)
        assert torch.is_autocast_enabled("cpu")
    with swd.attach(kit.model, kit.factors), torch.no_grad():
        exact = kit.model(kit.tokens)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(kit.model(kit.tokens), rounded)
    assert not torch.equal(rounded.float(), exact.float())
    with swd.attach(kit.model, {SITE: kit.factors[SITE]}):  # whose hooks are no standing hooks
        other = {"blocks.0.mlp_out": kit.factors["blocks.0.mlp_out"]}
        assert "standing_hooks" not in swd.attribute(kit.model, other, kit.task).settings


@pytest.mark.parametrize("kind", HOSTS)
def test_factors_and_tokens_made_under_inference_mode(kind):
    kit = kit_of(kind)
    with torch.inference_mode():
        tokens = kit.tokens.clone()
        by_hand = {SITE: Factors(*(t.clone() for t in (kit.factors[SITE].read, kit.factors[SITE].write)))}
    assert tokens.is_inference() and not by_hand[SITE].read.is_inference()
    scores = swd.attribute(kit.model, by_hand, kit.task).scores[SITE]
    assert torch.equal(scores, swd.attribute(kit.model, {SITE: kit.factors[SITE]}, kit.task).scores[SITE])
    assert plain(swd.fidelity(kit.model, kit.factors, tokens)) == expected(kind, "fidelity")
    how = {"steps": 1, "batch_size": 2, "learning_rate": 1e-3, "progress": False}
    tuned = [swd.finetune(kit.model, kit.factors, rows, **how)[SITE].read for rows in (tokens, kit.tokens)]
    assert torch.equal(*tuned)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("call", "kind"), in_turns(CALLS))
def test_a_host_made_under_inference_mode_gives_the_same_or_is_refused(call, kind):
    kit, other = copy(kit_of(kind)), copy(kit_of(kind))
    other.model = with_new_parameters(kind)  # where weights lie in memory decides a last bit, too
    with torch.inference_mode():
        kit.model = with_new_parameters(kind)
    assert all(p.is_inference() for p in kit.model.parameters())
    try:
        got = CALLS[call](kit)
    except swd.errors.UnsupportedHostError as error:
        assert "made under torch.inference_mode()" in str(error)
        assert call in ("attribute", "attribute by gradients", "compare", "graph", "VPD") or "finetune" in call
    else:
        assert plain(got) == plain(CALLS[call](other))


def with_new_parameters(kind: str) -> Any:
    """The kit's host, its parameters made now, by whoever calls."""
    made = load(kind)
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().clone())
    return made


def steer(resid: Tensor, hook: Any) -> Tensor:
    return resid * 1.5


def watch(module: Any, args: Any, output: Any = None) -> None:
    pass


_WITH_SETTINGS = ("attribute", "allocate", "graph", "overlap", "generate")
NAMED = {
    **{call: lambda kit, call=call: CALLS[call](kit).settings for call in _WITH_SETTINGS},
    "evaluate": lambda kit: swd.evaluate(kit.model, kit.factors, kit.task, kit.scores, random_sets=0).settings,
    "refine": lambda kit: swd.refine(kit.model, kit.factors, kit.task.train, kit.scores, rounds=0).refined.provenance,
    "fidelity": lambda kit: swd.fidelity(kit.model, kit.factors, kit.tokens).as_dict(),
    "factorize": lambda kit: kit.factorize().provenance,
    "finetune": lambda kit: kit.finetune(None).provenance["finetune"],
    "transcoder": lambda kit: kit.trained(swd.baselines.transcoder).provenance,
    "qk": lambda kit: kit.qk()[1].settings,
    "audit": lambda kit: swd.audit(kit.model, kit.factors, kit.tokens, n=2, progress=False).settings,
    "edit": lambda kit: kit.edits()[1].settings,
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("call", "kind"), in_turns(NAMED))
def test_standing_hooks_are_named_in_the_settings_of_results(call, kind):
    kit = kit_of(kind)
    assert "standing_hooks" not in NAMED[call](kit)
    handle = kit.model.blocks[0].register_forward_hook(watch)
    try:
        with kit.model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", partial(steer))]):
            named = NAMED[call](kit)["standing_hooks"]
    finally:
        handle.remove()
    assert len(named) == 2 and named[0] == "blocks.0: watch" and named[1].endswith(": steer")


@pytest.mark.parametrize("kind", HOSTS)
def test_a_hook_that_changes_the_shape_of_z_is_refused(kind):
    kit, name = kit_of(kind), "blocks.1.hook_mlp_out_unit"
    with swd.attach(kit.model, kit.factors), torch.no_grad():
        for change, left in (
            (lambda z, hook: z.mean(1, keepdim=True), r"\(6, 1, 64\) for a z of \(6, 10, 64\)"),
            (lambda z, hook: z[:1], r"\(1, 10, 64\) for a z of"),
            (lambda z, hook: z[0, 0], r"\(64,\) for a z of"),
            (lambda z, hook: 0.0, "float for a z of"),
        ):
            with pytest.raises(ValueError, match=rf"a hook on {name} \(.*lambda.*\) returned {left}"):
                kit.model.run_with_hooks(kit.tokens, fwd_hooks=[(name, change)])
        zeroed = kit.model.run_with_hooks(kit.tokens, fwd_hooks=[(name, lambda z, hook: z * 0)])
        assert zeroed.shape == kit.model(kit.tokens).shape


@pytest.mark.parametrize("kind", HOSTS)
def test_a_second_thread_on_an_attached_host_is_refused(kind):
    kit, calls = kit_of(kind), ("factorize", "attribute", "circuits", "fidelity", "qk", "audit", "edits", "graph", "overlap")
    with swd.attach(kit.model, {SITE: kit.factors[SITE]}):
        for call in [call for call, turn in in_turns(calls) if turn == kind]:
            refused = in_a_thread(lambda call=call: CALLS[call](kit))
            assert isinstance(refused, swd.errors.HostInUseError), (call, refused)
    assert "blocks.1.hook_mlp_out_unit" not in kit.model.hook_dict


def beside_each_other(run: Callable[[Any], None], arguments: tuple[Any, ...]) -> None:
    """Call a function in one thread for each argument, and wait for all."""
    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kind", HOSTS)
def test_threads_with_hosts_of_their_own_give_the_same_bits(kind):
    wanted, kits, outcome = expected(kind, "fidelity"), [kit_of(kind), Kit(kind)], {}

    def run(i: int) -> None:
        outcome[i] = [plain(CALLS["fidelity"](kits[i])) for _ in range(2)]

    torch.set_default_dtype(torch.bfloat16)
    try:
        beside_each_other(run, (0, 1))
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert outcome == {0: [wanted] * 2, 1: [wanted] * 2}


@pytest.mark.parametrize("kind", HOSTS)
def test_two_threads_on_one_host_are_right_or_refused(kind):
    calls = ("attribute", "fidelity")
    kit, wanted, outcome = kit_of(kind), {call: expected(kind, call) for call in calls}, []

    def run(call: str) -> None:
        for _ in range(4):
            try:
                outcome.append(plain(CALLS[call](kit)) == wanted[call])
            except swd.errors.HostInUseError:
                outcome.append(None)

    beside_each_other(run, calls)
    assert len(outcome) == 8 and outcome.count(True) >= 4 and False not in outcome
    assert plain(CALLS["fidelity"](kit)) == wanted["fidelity"]


USES = {
    "call": lambda kit: kit.model(kit.tokens),
    "forward": lambda kit: kit.model.forward(kit.tokens),
    "run_with_cache": lambda kit: kit.model.run_with_cache(kit.tokens),
    "run_with_hooks": lambda kit: kit.model.run_with_hooks(kit.tokens, fwd_hooks=[("blocks.0.hook_resid_post", watch)]),
    "hooks": lambda kit: kit.model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", watch)]).__enter__(),
    "add_hook": lambda kit: kit.model.add_hook("blocks.0.hook_resid_post", watch),
}


@pytest.mark.parametrize("kind", HOSTS)
def test_a_forward_of_a_second_thread_on_an_attached_host_is_refused(kind, monkeypatch):
    monkeypatch.setattr(holding, "WAIT_FOR_CALL", 0.01)
    kit = kit_of(kind)
    with torch.no_grad():
        wanted = kit.model(kit.tokens)
    before = everything(kit.model)
    for name, use in USES.items():
        with swd.attach(kit.model, kit.factors):
            refused = in_a_thread(lambda use=use: use(kit))
            assert isinstance(refused, swd.errors.HostInUseError), (name, refused)
        assert everything(kit.model) == before and not kit.model.hook_dict["blocks.0.hook_resid_post"].fwd_hooks, name
    with torch.no_grad():
        assert torch.equal(kit.model(kit.tokens), wanted)
