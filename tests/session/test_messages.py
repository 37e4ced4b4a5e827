"""What a user reads after a slip: what was wrong, with the value, and what to do."""

import pytest

import swd_lens as swd
from tests.checked_types import EVERYTHING

SITE = "blocks.2.mlp_out"
UNIT = f"{SITE}/3"
PROMPT = "The man works because"


class Session:
    """Objects of a session, made once."""

    def __init__(self, model):
        self.model, self.factors = model, swd.baselines.svd(model, SITE)
        self.task = swd.load_task("gendered_pronoun", model, n_train=4, n_test=4)
        self.scores = swd.attribute(model, self.factors, self.task.train)
        self.curve = swd.evaluate(model, self.factors, self.task.test, self.scores)


@pytest.fixture(scope="module")
def session(default_model):
    return Session(default_model)


def own(s, answer):
    prompts = [PROMPT, "The girl works because", "The man works because"]
    return swd.Task.from_prompts("own", s.model, prompts, [answer] * 3, [" she"] * 3)


# What is typed -> what the message has in it, the call, and the class where it is no TypeError.
SLIPS = {
    "answers without the space": ("did you mean ' he', with the space", lambda s: own(s, "he"), swd.errors.TaskError),
    "a task in capitals": ("Did you mean 'ioi'?", lambda s: swd.load_task("IOI", s.model), swd.errors.TaskError),
    "load_task": ("load_task(name, model) takes its arguments in this", lambda s: swd.load_task(s.model, "ioi")),
    "generate": ("prompts was given factors", lambda s: swd.generate(s.model, PROMPT, s.factors)),
    "evaluate": ("prompts was given scores", lambda s: swd.evaluate(s.model, s.factors, s.scores, s.task)),
    "attribute, task first": ("factors was given a task", lambda s: swd.attribute(s.model, s.task, s.factors)),
    "fidelity": ("model was given factors", lambda s: swd.fidelity(s.factors, s.model, [[1, 2]])),
    "attach": ("attach(model, factors) takes its arguments in this", lambda s: swd.attach(s.factors, s.model)),
    "factorize": ("factorize(model, sites) takes its arguments in this", lambda s: swd.factorize(SITE, s.model)),
    "factorize, s by position": ("pass 0.5 by keyword: ", lambda s: swd.factorize(s.model, SITE, 0.5)),
    "cost_at by position": ("CostCurve.cost_at(recovered=, sufficiency=, necessity=, drop=", lambda s: s.curve.cost_at(0.9)),
    "find_sites of a layer": ("3 names no site: give a", lambda s: swd.find_sites(s.model, 3), swd.errors.UnknownSiteError),
    "labels in a list": ("got a list; UnitLabels.of(audit.identities", lambda s: swd.UnitLabels(["a"])),
    "labels that are texts": (f"the label of {UNIT} is a str", lambda s: swd.UnitLabels({UNIT: "he"})),
    "unit_hooks of a name": (
        "becomes of each unit first, got a str",
        lambda s: swd.unit_hooks(UNIT, s.factors),
        swd.errors.EditError,
    ),
}


# Of another type than the call's annotation says. Where all annotations are checked (SWD_LENS_TYPES=all) that check comes first.
OF_ANOTHER_TYPE = {"find_sites of a layer", "labels in a list", "labels that are texts", "unit_hooks of a name"}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_told(session, slip):
    if EVERYTHING and slip in OF_ANOTHER_TYPE:
        pytest.skip("the check of annotations comes first")
    says, call, *kind = SLIPS[slip]
    with pytest.raises(*(kind or [TypeError])) as told:
        call(session)
    assert says in str(told.value)


def test_hooks_on_units_that_are_not_attached_say_so(session):
    hooks = swd.unit_hooks({UNIT: ("clamp", 0.0)}, session.factors)
    with pytest.raises(KeyError, match=r"blocks\.2\.hook_mlp_out_unit' \(it is there while the units are attached: with swd\."):
        session.model.run_with_hooks(PROMPT, fwd_hooks=hooks)
    with swd.attach(session.model, session.factors):
        session.model.run_with_hooks(PROMPT, fwd_hooks=hooks)


def test_a_long_prompt_does_not_hide_the_reason(session):
    with pytest.raises(swd.errors.EditError) as told:
        swd.edit_unit(session.model, session.factors, UNIT, "The man works because." * 90, " she", " he", shift=1)
    message = str(told.value)
    assert message.startswith("prompt longer than the context: ") and len(message) < 320 and " … " in message


def test_the_package_lists_what_is_for_users():
    assert not {"os", "sys", "import_module", "ModuleType", "Any"} & {*dir(swd), *vars(swd)} and "integrity" not in dir(swd)
