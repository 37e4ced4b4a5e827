"""Exceptions and warnings: when each class is raised, what users meet of refusals, and that text from outside is seen in them.

1. CASES, by room: a call, the class that it raises, words of its message. Every class of swd_lens/base/errors.py has one at
   least. Refusals that a room's own tests cover are not repeated here.
2. The classes themselves: visible messages, pickling, `legible`, `quoted`, `callers_level`.
"""

import inspect
import json
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base import errors
from swd_lens.base.errors import callers_level, legible, quoted
from swd_lens.base.panels import library
from swd_lens.base.sealed import read_sealed
from swd_lens.base.writer import writing
from swd_lens.hosts import agreement, find_sites, host_of
from swd_lens.hosts.sites import Site
from swd_lens.study import paper
from swd_lens.tasks.prompt import Prompt
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.folders import load_coders
from swd_lens.units.unit_set import as_units
from tests import families
from tests.checked_types import EVERYTHING
from tests.micro import random_split, random_tokens, toy_model

READS, SITE, OTHER, QKV = "blocks.0.mlp_in", "blocks.0.mlp_out", "blocks.1.mlp_out", "blocks.0.attn_qkv"
ROW, EYE = [9, 11, 8, 12, 10], torch.eye(8)
SOLVER = {"preset": "paper", "outer_iterations": 4, "progress": False}


@cache
def host(name: str = "gpt2") -> Any:
    """A small bridge, which cases leave as they found it."""
    return families.bridge(name)


@cache
def toy() -> Any:
    return toy_model()


@cache
def svd(*sites: str) -> FactorSet:
    return baselines.svd(host(), list(sites or [SITE]))


@cache
def toy_svd(site: str = SITE) -> FactorSet:
    return baselines.svd(toy(), site)


def changed(model: Any, change: Callable[[Any], Any]) -> Any:
    with torch.no_grad():
        change(model)
    return model


def tokens(rows: int = 4, pos: int = 8) -> torch.Tensor:
    return families.some_tokens(rows, pos)


# ---------------------------------------------------------------------------------------------- calls of several lines


def written_by_another(folder: Path) -> None:
    with writing(folder, "factorize"), ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        threads.submit(stack.enter_context, writing(folder, "finetune")).result()


def by_two_threads(_: Path) -> None:
    with swd.attach(host(), svd()), ThreadPoolExecutor(1) as threads:
        threads.submit(find_sites, host()).result()


def checkpoint(folder: Path, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    swd.load_host(str(folder))


def factorized(sites: Any = SITE, model: Any = None, **settings: Any) -> FactorSet:
    return swd.factorize(model or host(), sites, **{**SOLVER, "sparsity": 0.5, **settings})


def with_goal(kl: float, rows: int = 4, **settings: Any) -> None:
    swd.factorize(host(), SITE, tokens=tokens(rows), kl=kl, **SOLVER, **settings)


def gone_round(_: Path) -> None:
    model = toy_model()
    swd.attach(model, toy_svd())
    model.blocks[0].mlp.__dict__["forward"] = lambda x: x
    model(random_tokens(1, 4))


def with_probe(change: Callable[[Any], Any] = lambda model: None, **provenance: Any) -> None:
    """A set with a probe, attached where something before its site differs, or after its provenance was edited."""
    model = toy_model()
    made = factorized(model=model, tokens=random_tokens(4, 16))
    swd.attach(changed(model, change), FactorSet(dict(made), {**made.provenance, **provenance}))


def stacked(model: Any, attached: Any, given: Any, **how: Any) -> None:
    """Results of a run with something attached, stacked with those of something else."""
    with swd.attach(model, attached):
        _, kept = model.run_with_cache(tokens(1, 3), **how)
    swd.stack_unit_results(kept, given)


def writers(direction: Any, model: Any = None, site: str = SITE) -> None:
    FactorSet({site: Factors(torch.eye(2), torch.eye(2))}).writers(direction, model)


def trained(**settings: Any) -> Any:
    settings = {"n_tokens": 96, "tokens_per_step": 48, "width": 4, "progress": False, **settings}
    return baselines.transcoder(host(), SITE, tokens(8, 12), **settings)


def tuned(given: Any = None, **settings: Any) -> None:
    swd.finetune(host(), given or svd(), tokens(), **{"steps": 1, "progress": False, **settings})


@cache
def scores() -> Any:
    return swd.attribute(toy(), toy_svd(), replace(random_split(12), prepend_bos=True))


def evaluated(bos: bool = True, **settings: Any) -> Any:
    test = replace(random_split(12, seed=5, name="test"), prepend_bos=bos)
    return swd.evaluate(toy(), toy_svd(), test, scores(), **settings)


def curve_of(q_full: float) -> swd.CostCurve:
    """A curve whose surface carries q_full - 1 logits of the dense model's 3, give or take a tenth."""
    rows = {"units": [0, 1], "edges": [0, 4], "recovered": [0.0, 1.0], "sufficiency": [0.5, 1.0], "drop": [0.0, 1.0]}
    about = {"task": "t", "q_dense": 3.0, "q_full": q_full, "q_empty": 1.0, "carried_se": 0.1}
    about |= {"accuracy_dense": 1.0, "accuracy_full": 1.0, "settings": {"units": {SITE: 1}}}
    return swd.CostCurve(pd.DataFrame(rows), **about)


def edited(factors: Any = None, **settings: Any) -> Any:
    given = {"prompt": torch.tensor(ROW), "answer": 100, "foil": 200, "shift": 1, **settings}
    return swd.edit_unit(host(), factors or svd(), f"{SITE}/1", **given)


def hooked(name: str, change: Any, call: Callable[[], Any]) -> None:
    with host().hooks(fwd_hooks=[(name, change)]):
        call()


def replayed(prompt: Any = ROW, **settings: Any) -> None:
    swd.qk_replay(host(), svd(QKV), PQ, prompt, **settings)


def graphed(**settings: Any) -> swd.UnitGraph:
    factors = svd("blocks.0.attn_v", "blocks.0.attn_o", READS, SITE, "blocks.1.mlp_in")
    return swd.unit_graph(host(), factors, [f"{site}/{unit}" for site in factors for unit in (1, 2)], **settings)


def overlapping(units: Any) -> None:
    swd.unit_overlap(host(), {SITE: units}, SITE, tokens(), progress=False)


def efficiency(method: Any, site: str = SITE) -> Any:
    return swd.data_efficiency(host(), site, {"method": method}, heldout=tokens())


# ---------------------------------------------------------------------------------------------- the cases

NAN, FRESH = float("nan"), lambda change: changed(families.bridge("gpt2"), change)
PAIR = SimpleNamespace(encode=lambda x: x @ torch.ones(64, 16), decode=lambda z: z @ torch.ones(16, 16))
HUGE = Factors(torch.full((64, 2), 3e38), torch.ones(2, 16))
INFINITE = SimpleNamespace(read=torch.ones(3, 4) / 0, write=torch.ones(4, 2))
PQ = swd.QKPair(0, 0, 1, 2)
HOST, TOKEN, UNIT, QK = errors.UnsupportedHostError, errors.TokenError, errors.UnitSourceError, errors.QKError
CASES: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    # base
    (lambda f: [(f / "x").write_text("{}"), read_sealed(f / "x", "a circuit")], errors.UnsealedFileWarning, "carries no hash"),
    (written_by_another, errors.FolderInUseError, "is written by factorize"),
    # tasks
    (lambda _: Prompt.of(FRESH(lambda m: setattr(m.tokenizer, "chat_template", "{{ raise_exception('no system') }}")),
                         [{"role": "system", "content": "Be brief."}], "graph"), TOKEN, "no system"),
    (lambda _: Prompt.of(FRESH(lambda m: setattr(m.cfg, "default_prepend_bos", True)), "<|bos|> Then Mary", "graph"),
     errors.TextWarning, "begin with '<|bos|>'"),
    (lambda _: Prompt.of(swd.load_default_model(), "The queen", "g"), errors.UnknownWordsWarning, "does not know 'queen'"),
    (lambda _: swd.attribute(toy(), toy_svd(), replace(random_split(4), d_vocab=999)), errors.TaskError, "host with 999 tokens"),
    # hosts
    (lambda _: find_sites(host(), "blocks.9.mlp_out"), errors.UnknownSiteError, "no site matches 'blocks.9.mlp_out'"),
    (lambda _: find_sites(FRESH(lambda m: m._modules.update(blocks=nn.Identity()))), HOST, "has no list of blocks"),
    (lambda _: find_sites(changed(toy_model(), lambda m: setattr(m.cfg, "load_in_4bit", True))), HOST, "quantized weights"),
    (by_two_threads, errors.HostInUseError, "thread"),
    (lambda f: checkpoint(f), HOST, 'give it "architectures"'),
    (lambda f: checkpoint(f, quantization_config={"quant_method": "gptq"}), HOST, "is quantized"),
    (lambda _: host_of(host("bert")).readout(), HOST, "does not read next-token logits"),
    (lambda _: swd.collect_grams(m := changed(toy_model(), lambda m: m.blocks[0].mlp.W_in.fill_(NAN)), find_sites(m, SITE),
                                 random_tokens(2, 8)), ValueError, "not finite on these"),
    # solver and factorization
    (lambda _: swd.solve(torch.full((4, 4), NAN), sparsity=0.5), errors.WeightError, "finite"),
    (lambda _: swd.solve(EYE, torch.eye(3), sparsity=0.5), errors.GramError, "gram has size 3 but weight has d_in=8"),
    (lambda _: swd.solve(EYE, sparsity=1.5), errors.SparsityError, "1.5"),
    (lambda _: swd.solve(EYE, sparsity=0.99), errors.BudgetError, "edges"),
    (lambda _: swd.solve(EYE, sparsity=0.5, units=0), errors.UnitsError, "units"),
    (lambda _: swd.solve(EYE, sparsity=0.5, preset="bets"), errors.SpecError, "best"),
    (lambda _: factorized("mlp_out", sparsity={SITE: 0.5}), errors.SparsityError, "no sparsity is given for blocks.1.mlp_out"),
    (lambda _: factorized("mlp_out", sparsity={"mlp_out": 0.5, SITE: 0.6}), errors.SparsityError, "sparsities, 0.5 and 0.6"),
    (lambda _: swd.estimate({"up": (8, 16)}, sparsity={"down": 0.5}), errors.UnknownSiteError, "no matrix matches 'down'"),
    (lambda _: factorized(gram_dtype="bfloat16"), ValueError, "gram_dtype"),
    (lambda _: factorized(device="moon"), ValueError, "moon"),
    (lambda _: factorized(threads=0), ValueError, "threads"),
    (lambda _: swd.allocate(host(), by="ce"), ValueError, "by"),
    (lambda _: factorized(tokens=tokens(), heldout_tokens=tokens()), TypeError, "heldout_tokens= is for a goal"),
    (lambda _: with_goal(0.0), ValueError, "kl"),
    (lambda _: with_goal(1e-3, rows=1), TOKEN, "nothing is left to judge"),
    (lambda _: with_goal(1e-12), errors.GoalError, "1e-12"),
    (lambda f: [factorized(out=f, tokens=tokens()), with_goal(1e-3, out=f)], errors.ResumeError, "made without a goal"),
    (lambda f: factorized(shard="second", out=f), errors.ShardError, "as in '2/8'"),
    (lambda _: factorized(model=FRESH(lambda m: m.unembed.b_U.fill_(NAN)), tokens=tokens(), weigh_outputs=True),
     errors.GradientError, "gradients at blocks.0.mlp_out are not finite"),
    # units
    (lambda _: svd()[OTHER], KeyError, "no factors for site 'blocks.1.mlp_out'"),
    (lambda _: svd()[3], KeyError, "3 is no key of a FactorSet"),  # type: ignore[call-overload]
    (lambda f: [svd().save(f), next(f.glob("*.safetensors")).unlink(), FactorSet.load(f)], errors.FactorFileError, "is missing"),
    (lambda _: [swd.attach(m := families.bridge("gpt2"), svd()), swd.attach(m, svd())], errors.AttachError, "attached already"),
    (lambda _: as_units(INFINITE, Site(1, "mlp_out", 3, 2)), UNIT, "hold values that are not finite"),
    (lambda f: load_coders(f / "nothing"), FileNotFoundError, "there is no"),
    (gone_round, errors.SiteDidNotRunWarning, "attached, but did not run"),
    (lambda _: with_probe(lambda m: m.pos_embed.W_pos.mul_(3)), errors.AttachError, "the probe of blocks.0.mlp_out fails"),
    (lambda _: with_probe(probe_tokens=[1.5]), errors.AttachError, "tokens that this host cannot run: [1.5]"),
    (lambda _: stacked(host(), svd(), {SITE: Factors(torch.eye(64), torch.ones(64, 16))}), ValueError, "these factors 64"),
    (lambda _: stacked(host("gemma2"), b := baselines.svd(host("gemma2"), SITE), b, names_filter=lambda name: "unit" in name),
     UNIT, "writes to the residual stream through a norm"),
    (lambda _: swd.stack_unit_results({}, svd()), ValueError, "not a dict"),
    (lambda _: writers(torch.zeros(2)), UNIT, "a direction is a finite (d_model,) vector that is not zero"),
    (lambda _: writers(torch.ones(7)), UNIT, "the direction has 7 entries"),
    (lambda _: writers(" she"), UNIT, "factors.writers(' she', model)"),
    # training
    (lambda f: [trained(out=f), trained(out=f, l1=1.0)], errors.ResumeError, "l1 5e-05 then, 1.0 now"),
    (lambda f: [trained().save(f), next((f / "weights").iterdir()).unlink(), baselines.LearnedUnits.load(f)],
     errors.TrainError, "is missing"),
    (lambda _: tuned({SITE: Factors(torch.zeros(64, 2), torch.zeros(2, 16))}), errors.FinetuneError, "no nonzero entry"),
    # circuits
    (lambda _: swd.attribute(toy(), toy_svd(READS), random_split(4), score="direct_logit"), ValueError, "direct_logit"),
    (lambda _: evaluated(grid=[0]), errors.UndefinedSufficiencyWarning, "not positive"),
    (lambda _: evaluated().mib(), ValueError, 'evaluate(..., grid="mib")'),
    (lambda _: curve_of(2.0).circuit_at(sufficiency=9.0), ValueError, "no prefix of 't' reaches 9.0"),
    (lambda _: curve_of(1.1).cost_at(recovered=0.9), errors.NotCarriedWarning, "No circuit of these units has a cost"),
    # analysis
    (lambda _: swd.edit.side_effects(host(), edited(), "Once upon"), errors.EditError, "put it in brackets"),
    (lambda _: replayed(prompt=""), QK, "the prompt has no tokens"),
    (lambda _: replayed(remove="both"), QK, "remove"),
    (lambda _: swd.qk_scan(host(), svd(QKV), (), progress=False), QK, "there are no prompts"),
    (lambda _: swd.qk_scan(host(), svd(QKV), [ROW], screen=swd.qk_screen(host(), svd(QKV)), pairs=[PQ]), QK, "not both"),
    (lambda _: swd.qk.score_parts(host(), svd(QKV), 0, 0, ROW).strongest(1, 3), QK, "does not look at source 3"),
    (lambda _: swd.qk.score_parts(host(), svd(QKV), 0, 0, ROW).contribution(0, 99), QK, "k_unit is 99"),
    (lambda _: swd.qk_screen(host(), svd(QKV), distance=64), QK, "distance"),
    (lambda _: graphed(keep=0), ValueError, "keep"),
    (lambda _: graphed(prompt=ROW, answers=[" Mary John"]), ValueError, "is not one token"),
    (lambda _: hooked("blocks.0.ln2.hook_out", lambda h, hook: h + torch.arange(h.shape[-1]), lambda: graphed(prompt=ROW)),
     HOST, "no LayerNorm or RMSNorm"),
    (lambda f: graphed(prompt=ROW).export(f, slug="of a/b"), ValueError, "slug"),
    (lambda _: graphed(prompt=ROW).show(groups={"g": [f"{SITE}/1@99"]}), ValueError, "of another graph"),
    (lambda _: swd.plot_unit_paths(host(), {SITE: PAIR}, swd.UnitScores({SITE: torch.ones(16)}, {}, {"task": "t"})),
     TypeError, "no read and write edges to draw"),
    (lambda _: overlapping(HUGE), ValueError, "not finite on these tokens"),
    (lambda _: overlapping(Factors(torch.ones(64, 1), torch.ones(1, 16))), ValueError, "a pair needs two"),
    # study
    (lambda _: paper.settings_of("audit", "large"), ValueError, "there is no profile 'large'"),
    (lambda _: paper.plan("edit", "qwen2.5-3b"), ValueError, "edit has no profile 'qwen2.5-3b'"),
    (lambda _: paper.settings_of("audit", "tiny").changed(layer=3), ValueError, "audit has no setting 'layer'"),
    (lambda _: efficiency(trained(), OTHER), ValueError, "replaces blocks.0.mlp_out, not blocks.1.mlp_out"),
    (lambda _: efficiency(trained()).tokens_to_reach(0.1, "CE"), ValueError, "metric"),
    (lambda _: swd.replace_model(host(), SITE, heldout=tokens(), budgets="equal"), ValueError, "budgets"),
    (lambda _: swd.generate(host(), svd(), []), TOKEN, "no prompts to continue"),
    (lambda f: swd.study.save_checkpoint(host(), {SITE: PAIR}, f), UNIT, "a checkpoint holds matrices"),
    (lambda f: swd.study.save_checkpoint(toy(), toy_svd(), f), HOST, "give source="),
]  # fmt: skip


def refused(call: Callable[..., Any], kind: type[Exception], words: str, *given: Any) -> None:
    """Make a call: it raises, or warns with, this class (none below it), with a message that holds the words."""
    if issubclass(kind, Warning):
        with pytest.warns(kind, match=re.escape(words)):
            call(*given)
        return
    with warnings.catch_warnings(), pytest.raises(kind, match=re.escape(words)) as raised:
        warnings.simplefilter("ignore")
        call(*given)
    assert raised.type is kind


@pytest.mark.parametrize(("call", "kind", "words"), CASES, ids=[words[:50] for _, _, words in CASES])
def test_a_call_is_refused(call, kind, words, tmp_path):
    refused(call, kind, words, tmp_path)


# ---------------------------------------------------------------------------------------------- of surroundings


def test_hosts_that_differ_from_their_checkpoint(monkeypatch):
    see = agreement.Reference.see

    def see_other_logits(self, network):
        see(self, network)
        self.logits = self.logits * 1.01

    monkeypatch.setattr(agreement.Reference, "see", see_other_logits)
    refused(swd.load_host, errors.HostDiffersError, "gives other logits", str(families.checkpoint("gpt2")))


@pytest.mark.parametrize(("reader", "kind", "words"), [(0, ImportError, "pip install gguf"), (1, ValueError, "cannot read")])
def test_gguf_files_that_transformers_cannot_read(reader, kind, words, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF of another world")
    monkeypatch.setenv("SWD_LENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.is_gguf_available", lambda: reader)
    refused(swd.load_host, kind, words, str(tmp_path / "model.gguf"))


def test_memory_workers_and_ray(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("swd_lens.factorization.factorize.available_bytes", lambda device: 1)
        refused(factorized, errors.DoesNotFitError, "1 matrix needs")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "ray", None)  # import then fails as if it were not installed
        refused(lambda: factorized(workers="ray"), errors.RayMissingError, "pip install 'swd-lens[ray]'")
    monkeypatch.setattr("swd_lens.factorization.workers.pool.BOOTSTRAP", "raise SystemExit(3)")
    refused(lambda: factorized([SITE, OTHER], workers=2), errors.WorkerLostError, "its worker died")


def test_a_launcher_s_processes_do_not_overwrite(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(lambda: trained(out=tmp_path, overwrite=True), errors.TrainError, "was started by a launcher")


@pytest.mark.parametrize(("found", "words"), [(None, "pip install circuitsvis"), (ModuleType("circuitsvis"), "is missing")])
def test_panels_without_their_script(found, words, monkeypatch):
    if found is not None:
        found.__file__ = "/nowhere/__init__.py"
    monkeypatch.setitem(sys.modules, "circuitsvis", found)
    refused(library.__wrapped__, ImportError, words)


# ---------------------------------------------------------------------------------------------- the classes

CLASSES = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}
OWN = sorted(CLASSES - {errors._Shown}, key=lambda kind: kind.__name__)
PATCHED = {errors.HostDiffersError, errors.DoesNotFitError, errors.RayMissingError, errors.WorkerLostError}


def test_every_class_has_a_case():
    assert {kind for _, kind, _ in CASES} | PATCHED | {errors.SolveInputError} >= set(OWN)  # the last is a base
    assert all(getattr(swd.errors, kind.__name__) is kind for kind in OWN)


@pytest.mark.parametrize("kind", OWN)
def test_a_class_shows_its_message_and_can_be_pickled(kind):
    raised = kind("no a\x1b[31mb\u202e\nnor c", 3)
    assert raised.args == ("no a␛[31mb⟨U+202E⟩\nnor c", 3)
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is kind and again.args == raised.args and str(again) == str(raised)
    assert kind(3).args == (3,)


def test_legible_and_quoted():
    class Named:
        def __repr__(self):
            return "a\x1b[31mb"

    assert legible(Path("a\x1b\u202e\nb")) == "a␛⟨U+202E⟩\nb" and legible(3) == "3"
    assert quoted(Named()) == "a␛[31mb" and quoted("it's\x1b") == repr("it's\x1b")
    assert quoted("x" * 180) == repr("x" * 180)
    assert quoted("a" * 100 + "b" * 100) == f"'{'a' * 60} … {'b' * 60}'"


def test_warnings_name_the_first_line_outside_of_the_package():
    with pytest.warns(UserWarning, match="zero-data") as caught:
        factorized()
    assert caught[0].filename == __file__ or EVERYTHING  # what checks all annotations stands where callers do
    assert callers_level() == 1  # no frame of the package is above this one
