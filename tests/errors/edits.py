"""Triggers of the section "Looking inside" of swd_lens/ERRORS.md: edits, saved runs, pictures.

Host and helpers are those of analysis.py; an edit asks whose its factors are, so these are of the host. What is edited,
saved or patched comes from a call of its own, so that triggers do not see each other.
"""

import json
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.edit import side_effects
from swd_lens.base.panels import attention_heads, library
from swd_lens.base.sealed import seal
from swd_lens.circuits.comparison import Comparison
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.study.inside import look_inside
from swd_lens.study.run_file import Replacement
from swd_lens.study.section import Picture
from tests import families
from tests.analysis.audit_models import made_scores
from tests.errors.analysis import ROW, SITE, WRITES, Pair, audited_factors, model, tokens
from tests.errors.triggers import TRIGGERS, trigger

# ---------------------------------------------------------------------------------------------- edits


@cache
def svd():
    return baselines.svd(model(), ["blocks.0.mlp_out", "blocks.0.attn_o"])


def edited(unit=f"{WRITES}/1", factors=None, **settings: Any):
    settings = {"prompt": ROW, "answer": 100, "foil": 200, "shift": 1} | settings
    if isinstance(settings["prompt"], list):
        settings["prompt"] = torch.tensor(settings["prompt"])
    return swd.edit_unit(model(), factors or svd(), unit, **settings)


def compared(**settings):
    settings = {"other_prompts": [tokens(1)[0]], "methods": ["unit"], "shifts": [1], "progress": False} | settings
    return swd.compare_edits(model(), svd(), f"{WRITES}/1", torch.tensor(ROW), 100, 200, **settings)


def selected(cases=((ROW, 100, 200),), factors=None, **settings):
    cases = [(torch.tensor(case[0]), *case[1:]) for case in cases]
    return swd.select_edit_unit(model(), factors or svd(), cases, **settings)


def hooks(change, unit=f"{WRITES}/1", **settings):
    return swd.unit_hooks({unit: change}, svd(), **settings)


def with_unit(**factors):
    """The replacement with another read or write vector of unit 1."""
    f = svd()[WRITES]
    tensors = {"read": f.read.clone(), "write": f.write.clone()}
    for name, value in factors.items():
        (tensors["read"].T if name == "read" else tensors["write"])[1] = value
    return {WRITES: replace(f, **tensors)}


def reads_nothing():
    """Unit 1 reads nothing of what enters the site at the prompt's end."""
    h, r = edited().target.input.double(), svd()[WRITES].read[:, 1].double()
    return with_unit(read=(r - h * (h @ r) / (h @ h)).float())


TRIGGERS |= {
    "edit-of-a-reader": lambda *_: edited(f"{SITE}/1"),
    "edit-of-another-site": lambda *_: edited("blocks.1.mlp_out/1"),
    "edit-no-such-unit": lambda *_: edited(f"{WRITES}/99"),
    "edit-of-an-invalid-unit": lambda *_: edited(factors=with_unit(write=0.0)),
    "edit-of-a-silent-unit": lambda *_: edited(factors=reads_nothing()),
    "edit-of-a-coder": lambda *_: edited(factors={WRITES: Pair(16)}),
    "edit-without-a-number": lambda *_: edited(shift=float("nan")),
    "edit-unknown-base": lambda *_: edited(base="sparse"),
    "edit-unknown-direction": lambda *_: edited(direction="up"),
    "edit-of-several-prompts": lambda *_: edited(prompt=[ROW, ROW]),
    "edit-of-an-empty-prompt": lambda *_: edited(prompt=""),
    "edit-answer-outside": lambda *_: edited(answer=families.D_VOCAB),
    "edit-answer-of-several-tokens": lambda *_: edited(answer=" Mary John"),
    "edit-without-a-margin": lambda *_: edited(foil=100),
    "edit-not-applied": lambda *_: edited().undo(),
    "edit-of-a-replacement-as-weights": lambda *_: edited(base="replacement").state_dict(),
    "edit-of-a-replacement-saved": lambda folder, _: edited(base="replacement").save(folder / "edit"),
    "edit-measured-on-one-text": lambda *_: side_effects(model(), edited(), "Once upon"),
    "edit-measured-on-single-tokens": lambda *_: side_effects(model(), edited(), tokens=tokens(2, 1)),
    "edits-at-no-shifts": lambda *_: compared(shifts=[1, 1]),
    "edits-by-unknown-methods": lambda *_: compared(methods=["prune"]),
    "edits-without-other-prompts": lambda *_: compared(other_prompts=[]),
    "edits-cost-of-no-change": lambda *_: compared().cost_at(0),
    "edits-of-no-writer": lambda *_: selected(factors=baselines.svd(model(), SITE)),
    "edits-without-cases": lambda *_: selected(()),
    "edits-with-other-scores": lambda *_: selected(scores=made_scores(audited_factors())),
    "hooks-without-units": lambda *_: swd.unit_hooks({}),
    "hooks-unknown-change": lambda *_: hooks(("double", 2)),
    "hooks-no-such-unit": lambda *_: hooks(("scale", 2), f"{WRITES}/99"),
    "hooks-of-another-site": lambda *_: hooks(("scale", 2), "blocks.1.mlp_out/1"),
    "hooks-unknown-positions": lambda *_: hooks(("scale", 2), positions="last"),
    "edit-file-missing": lambda folder, _: swd.Edit.load(folder / "edit"),
}


@trigger
def edits_no_unit_towards_the_answer(*_):
    f = svd()[WRITES]
    selected(factors={WRITES: replace(f, write=torch.zeros_like(f.write))})


@trigger
def edits_without_a_control(*_):
    """Of the replacement's units one is valid, the edited one."""
    f = svd()[WRITES]
    alone = replace(f, write=f.write * (torch.arange(16) == 1)[:, None])
    swd.compare_edits(model(), {WRITES: alone}, f"{WRITES}/1", torch.tensor(ROW), 100, 200, other_prompts=[ROW],
                      methods=["random"], shifts=[1], progress=False)  # fmt: skip


@trigger
def edit_applied_twice(*_):
    edit = edited()
    with edit:
        edit.apply()


@trigger
def edit_of_another_model(*_):
    edit = edited()
    replace(edit, delta=replace(edit.delta, read=edit.delta.read[:-1])).apply()


@trigger
def edits_undone_out_of_order(*_):
    first = edited()
    with first, swd.edit_unit(model(), baselines.svd(model(), WRITES), f"{WRITES}/2", torch.tensor(ROW), 100, 200, 1):
        first.undo()


@trigger
def edit_without_a_model(folder, _):
    swd.Edit.load(edited().save(folder / "edit")).apply()


@trigger
def edit_file_of_another_kind(folder, _):
    save_file({"read": torch.ones(2)}, folder / "edit")
    swd.Edit.load(folder / "edit")


@trigger
def edit_file_not_finite(folder, _):
    edit = edited()
    broken = replace(edit, delta=replace(edit.delta, write=edit.delta.write * float("nan")))
    swd.Edit.load(broken.save(folder / "edit"))


# ---------------------------------------------------------------------------------------------- saved runs and their pictures


def svg(inside="", box="0 0 1 1"):
    return f'<svg viewBox="{box}">{inside}</svg>'


def task():
    examples = [swd.TaskExample("Then John and", (" Mary",), (" John",))]
    return swd.Task.from_examples("ioi", examples, examples, model(), validation=examples)


def run_with(folder, change=None):
    """A saved run of one replacement, with its file changed by `change(values)`, loaded."""
    factors = swd.FactorSet({WRITES: swd.Factors(torch.eye(2), torch.eye(2))})
    one = Replacement("mlp", "SWD", factors, Fidelity(1.0, 1.0, 0.0, 1.0, {WRITES: 0.5}, 10), 0.0)
    swd.Run({}, [one], {"mlp": Comparison({})}, [], 0.0).save(folder)
    values = json.loads((folder / "run.json").read_text())
    if change is not None:
        change(values)
    (folder / "run.json").write_text(json.dumps(seal(values)))
    return swd.Run.load(folder)


TRIGGERS |= {
    "run-file-missing": lambda folder, _: swd.Run.load(folder),
    "run-file-without-a-part": lambda folder, _: run_with(folder, lambda values: values.pop("circuits")),
    "run-file-of-the-future": lambda folder, _: run_with(folder, lambda values: values.update(format=99)),
    "run-of-other-factors": lambda folder, _: run_with(folder, lambda values: values["fidelity"][0].update(edges=1)),
    "picture-of-another-kind": lambda *_: Picture("<html></html>", "a title"),
    "picture-broken": lambda *_: Picture("<svg><g></svg>", "a title"),
    "picture-without-a-box": lambda *_: Picture(svg(box="1 1 2 2"), "a title"),
    "picture-with-another-element": lambda *_: Picture(svg("<script/>"), "a title"),
    "picture-with-a-drawn-title": lambda *_: Picture(svg("<title><g/></title>"), "a title"),
    "picture-that-acts": lambda *_: Picture(svg('<g onclick="go()"/>'), "a title"),
    "picture-that-loads": lambda *_: Picture(svg('<image href="https://example.org/a.png"/>'), "a title"),
    "picture-with-a-loading-style": lambda *_: Picture(svg('<g fill="url(https://example.org)"/>'), "a title"),
    "inside-without-that-task": lambda *_: look_inside(model(), {}, [task()], graph_task="docstring"),
    "panel-does-not-fit": lambda *_: attention_heads(["a", "b"], torch.zeros(1, 3, 3)),
    "panel-not-finite": lambda *_: attention_heads(["a"], torch.full((1, 1, 1), -torch.inf)),
}


@trigger
def run_without_its_factors(folder, _):
    run_with(folder)
    next(folder.glob("factors/*/factors.json")).unlink()
    swd.Run.load(folder)


@trigger
def panel_without_circuitsvis(_, monkeypatch):
    monkeypatch.setitem(sys.modules, "circuitsvis", None)  # import then fails as if it were not installed
    library.__wrapped__()


@trigger
def panel_without_its_script(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "circuitsvis", SimpleNamespace(__file__=str(folder / "__init__.py")))
    library.__wrapped__()
