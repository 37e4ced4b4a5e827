"""run_study with a folder: whatever interrupts it, the same call goes on, runs nothing twice, and gives the same run."""

import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch

import swd_lens as swd
import swd_lens.circuits.protocol
from swd_lens.base.errors import BudgetError
from swd_lens.base.fingerprints import splits_fingerprint
from swd_lens.base.sealed import read_tensors, write_tensors
from swd_lens.base.step_cache import FOLDER
from swd_lens.study import Run, run_study
from swd_lens.study.run import STAGED
from tests.analysis.audit_models import lettered
from tests.circuits.slow import able_split
from tests.forwards import block_runs
from tests.micro import random_tokens
from tests.refusals import refuses

# Where units are random the study still has to hold together; whether the model does the task is no matter here.
pytestmark = pytest.mark.filterwarnings("ignore::swd_lens.base.errors.UndefinedSufficiencyWarning")

MLP, SITE = "mlp_out", "blocks.1.mlp_out"
TEXT, HELD = random_tokens(12, 10), random_tokens(6, 10, seed=1)


def task(name, seed):
    splits = [able_split(8, seed=seed + more, name=of, length=5) for of, more in (("train", 0), ("validation", 2), ("test", 1))]
    return swd.Task(name, *splits, source="random", prepend_bos=False)


TOY, OTHER = task("toy", 3), task("other", 13)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_task_of_other_prompts_is_another_task(split):
    assert splits_fingerprint(task("toy", 3).splits) == splits_fingerprint(TOY.splits)
    assert splits_fingerprint(replace(TOY, **{split: getattr(OTHER, split)}).splits) != splits_fingerprint(TOY.splits)


@pytest.fixture(scope="module")
def model():
    return lettered()


def study(model, out=None, **changed):
    how = {"sparsities": (0.5,), "calibration_tokens": TEXT, "heldout_tokens": HELD, "outer_iterations": 2}
    how |= {"preset": "quick", "cards_per_task": 1, "contexts_per_card": 1, "controls": ("svd", "random_b")}
    how |= {"random_b_seeds": 1, "surfaces": {"one": SITE, "all": MLP}, "tasks": [TOY]}
    return run_study(model, out=out, **{**how, **changed})


def numbers(run):
    """What a run says, but how long it took, and where its factors' files say how they were made."""
    values = run if isinstance(run, dict) else json.loads(json.dumps(run.as_dict(), default=str))
    return without_seconds({key: value for key, value in values.items() if key not in ("sha256", "files")})


def without_seconds(value):
    if isinstance(value, dict):
        return {key: without_seconds(each) for key, each in value.items() if key != "seconds"}
    if isinstance(value, float) and math.isnan(value):
        return None  # as in files
    return [without_seconds(each) for each in value] if isinstance(value, list) else value


def saved(folder):
    return numbers(json.loads((folder / "run.json").read_text()))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A folder that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run = study(model, folder)
    assert numbers(run) == numbers(study(model)) and saved(folder) == json.loads(json.dumps(numbers(run)))
    return folder


def test_interrupted_anywhere_it_goes_on_and_gives_the_same_run(model, whole, tmp_path, monkeypatch):
    """Every third call of a step is interrupted (of two, the second); what was finished before it is not run again."""
    finished = {"attribute": 0, "evaluate": 0, "fidelities": 0}
    interrupted = dict.fromkeys(finished, 0)

    def stopping(step, function):
        def called(*given, **how):
            if (finished[step] + interrupted[step]) % (2 if step == "fidelities" else 3) == 1:
                interrupted[step] += 1
                raise KeyboardInterrupt
            result = function(*given, **how)
            finished[step] += 1
            return result

        return called

    for step in finished:
        function = getattr(swd_lens.circuits.protocol, step)
        monkeypatch.setattr(swd_lens.circuits.protocol, step, stopping(step, function))
    while True:
        try:
            study(model, tmp_path)
            break
        except KeyboardInterrupt:
            assert sum(interrupted.values()) < 20
    assert saved(tmp_path) == saved(whole) and min(interrupted.values()) > 0
    # 2 surfaces of 3 replacements; the fidelities of a surface are one call.
    assert finished == {"attribute": 6, "evaluate": 6, "fidelities": 2}


def test_a_finished_folder_is_read_and_nothing_is_run(model, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    with block_runs(model) as runs:
        run = study(model, whole)
    assert runs.rows == 0 and saved(whole) == numbers(json.loads(json.dumps(run.as_dict(), default=str)))
    after = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    assert {path for path in after if after[path] != before.get(path)} == {whole / "run.json"}
    # With scores and margins, which a loaded run has not.
    comparison, loaded = run.comparisons["one"], Run.load(whole).comparisons["one"]
    curve = comparison["toy"].curves["SWD s=0.5"]
    assert curve.circuit(0).n_units == 0 and curve.margins["dense"].dtype == torch.float64
    assert comparison["toy"].scores["SVD"].ranking() and not loaded["toy"].scores


@pytest.mark.slow
def test_what_is_added_is_run_and_nothing_else(model, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    run = study(model, tmp_path, tasks=[TOY, OTHER], sparsities=(0.5, 0.6), random_b_seeds=2)
    assert numbers(run) == numbers(study(model, tasks=[TOY, OTHER], sparsities=(0.5, 0.6), random_b_seeds=2))
    assert Run.load(tmp_path).settings["sparsities"] == [0.5, 0.6]
    refuses(swd.ResumeError, r"tasks: other .* then, None now", study, model, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heldout_tokens": random_tokens(6, 10, seed=2)}, "held-out tokens .* then, .* now"),
        ({"calibration_tokens": random_tokens(6, 10, seed=2)}, "calibration tokens .* then, .* now"),
        ({"outer_iterations": 3}, "solver .*'outer_iterations': 2.* then, .*'outer_iterations': 3.* now"),
        ({"tasks": [task("toy", 20)]}, "tasks: toy .* then, .* now"),
        ({"surfaces": {"one": SITE}}, "surfaces: all .* then, None now"),
        ({"sparsities": (0.75,)}, "sparsities: SWD s=0.5 True then, None now"),
        ({"positions": "all"}, "positions: scoring True then, None now"),
    ],
)
def test_another_study_is_refused_and_nothing_is_lost(model, whole, changed, message):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with block_runs(model) as runs, pytest.raises(swd.ResumeError, match=message):
        study(model, whole, **changed)
    assert runs.rows == 0
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}


def test_another_host_is_refused(model, whole):
    other = lettered()
    with torch.no_grad():
        other.blocks[0].mlp.W_out.mul_(1.5)
    refuses(swd.ResumeError, r"the host .* then, .* now", study, other, whole)


@pytest.mark.slow
def test_overwrite_starts_again_and_interrupted_goes_on(model, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(swd_lens.circuits.protocol, "attribute", lambda *given, **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            study(model, tmp_path, heldout_tokens=TEXT, overwrite=True)
    assert not (tmp_path / "run.json").exists()
    run = study(model, tmp_path, heldout_tokens=TEXT)
    assert numbers(run) == numbers(study(model, heldout_tokens=TEXT)) and saved(tmp_path) != saved(whole)


def test_a_run_without_its_parts_is_refused(model, whole, tmp_path):
    Run.load(whole).save(tmp_path)
    refuses(swd.ResumeError, r"run\.json of a run without its parts", study, model, tmp_path)
    study(model, tmp_path, overwrite=True)
    assert saved(tmp_path) == saved(whole) and not list(tmp_path.rglob(f"*{STAGED}"))


def test_a_goal_is_kept_by_every_solved_method_and_goes_on(model, whole, tmp_path, monkeypatch):
    """In place of a sparsity, and beside one in a study that is there; controls that the solver makes keep the same goal."""
    monkeypatch.setattr("swd_lens.factorization.goal.STEPS", 2)
    goal = 2 * next(r.fidelity.kl for r in Run.load(whole).replacements if r.method == "SWD s=0.5")
    how = {"surfaces": {"one": SITE}, "controls": ("pruned", "svd"), "kl": goal}
    run = study(model, tmp_path / "goal", sparsities=(), **how)
    assert [r.method for r in run.replacements] == [f"SWD kl={goal:g}", f"Neurons pruned kl={goal:g}", "SVD"]
    assert run.settings["kl"] == goal and run.settings["sparsities"] == []
    for made in run.replacements[:2]:
        kept = made.factors.provenance["goal"]["chosen"]
        assert 0 < kept["KL"] <= goal and made.factors.edges == kept["edges"]
        assert made.factors.tried["method"].unique().tolist() == ["as given"]
    with block_runs(model) as runs:
        assert numbers(study(model, tmp_path / "goal", sparsities=(), **how)) == numbers(run)
    assert runs.rows == 0
    both = study(model, tmp_path / "goal", **how)
    assert [r.method for r in both.replacements if not r.control] == ["SWD s=0.5", f"SWD kl={goal:g}"]
    refuses(swd.TokenError, r"a goal .* needs tokens", study, model, **how, calibration_tokens=None)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("failure", [BudgetError("too few edges"), swd.GoalError("nothing keeps it")])
def test_a_usual_control_that_cannot_keep_a_goal_is_left_out(model, monkeypatch, failure):
    module = sys.modules["swd_lens.study.run_study"]  # which the package's function of the same name hides
    factorize = module.factorize

    def without_pruned(*given, **how):
        if how.get("preset") == "pruned":
            raise failure
        return factorize(*given, **how)

    monkeypatch.setattr(module, "factorize", without_pruned)
    monkeypatch.setattr("swd_lens.factorization.goal.STEPS", 2)
    how = {"surfaces": {"one": SITE}, "sparsities": (), "kl": 0.5, "preset": "quick"}
    run = study(model, **how, controls=None)
    assert [r.method for r in run.replacements if r.role == "control" and not r.exact] == []
    assert run.settings["controls left out"] == [f"Neurons pruned kl=0.5 of one: {failure}"]
    with pytest.raises(type(failure)):
        study(model, **how, controls=("pruned",))


def _scores_of_other_factors(tensors, values):
    """Seen by tests.fuzz where a factor was changed: case 23321 of seed 9001."""
    values["settings"]["factors"] = dict.fromkeys(values["settings"]["factors"], "0" * 64)


def _cut(of):
    def cut(tensors, values):
        name = next(name for name in tensors if name.startswith(of))
        tensors[name] = tensors[name][..., :-1].contiguous()

    return cut


@pytest.mark.parametrize(
    ("of", "change", "message"),
    [
        ("scores", lambda tensors, values: values.update(sites=[]), "sites"),
        ("scores", _cut("scores/"), "shape"),
        ("scores", _cut("means/"), "shape"),
        ("scores", _scores_of_other_factors, "made with other factors"),
        ("curve", _cut("edges/"), "shape"),
    ],
)
def test_parts_of_other_values_under_a_right_hash_are_refused(model, whole, tmp_path, of, change, message):
    folder = shutil.copytree(whole, tmp_path / "changed")
    (folder / "run.json").unlink()
    parts = {kind: list((folder / FOLDER).glob(f"*{kind}*")) for kind in ("scores", "curve")}
    tensors, metadata = read_tensors(parts[of][0], "part")
    about = json.loads(metadata["swd_lens"])
    change(tensors, about.get("values"))
    write_tensors(parts[of][0], tensors, metadata | {"swd_lens": json.dumps(about)})
    for curve in parts["curve"] if of == "scores" else ():
        curve.unlink()
    refuses(swd.ResumeError, message, study, model, folder)


# ---------------------------------------------------------------------------------------------- nothing twice


def test_forwards_of_a_study(model):
    """Rows that enter the first block, before the replaced one: nothing but checks of shortcuts for each further sparsity."""

    def rows(sparsities):
        with block_runs(model, 0) as runs:
            study(model, surfaces={"one": SITE}, sparsities=sparsities, controls=(), cards_per_task=0)
        return runs.rows

    two, four = rows((0.5, 0.75)), rows((0.4, 0.5, 0.6, 0.75))
    # Of each: probe, check of its fidelity, and of its shortcuts by four prompts at most (test_compare.py).
    assert len(TEXT) + len(HELD) + len(TOY.train) + len(TOY.test) <= two and four - two <= 2 * (2 + 32)
