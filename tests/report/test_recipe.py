"""The code that a report offers: it parses, and it points to what the run really saved."""

import re
from dataclasses import fields, replace
from pathlib import Path

from swd_lens import FactorSet
from swd_lens.report.recipe import load_code, run_code
from swd_lens.report.wording import main_replacement
from swd_lens.solver import AnnealSpec
from swd_lens.study import Run
from tests.report.conftest import HOSTILE_TASK


def test_the_folder_is_the_one_that_was_saved(run: Run, tmp_path: Path) -> None:
    code = load_code(run)
    compile(code, "load", "exec")
    run.save(tmp_path)
    folder = re.search(r"FactorSet.load\('(.*)'\)", code)
    wanted = main_replacement(run)
    assert folder and wanted
    loaded = FactorSet.load(tmp_path / folder[1])
    assert list(loaded) == list(wanted.factors) and loaded.edges == wanted.factors.edges


def test_run_code_parses_and_names_every_choice(run: Run) -> None:
    """Every setting of the solver, of calibration and of interventions, so that a default that changes changes nothing."""
    code = run_code(run)
    compile(code, "run", "exec")
    written = {line.split("=")[0].strip() for line in code.splitlines() if "=" in line}
    assert {*(field.name for field in fields(AnnealSpec)), "calibration", "positions", "ablation", "controls"} <= written
    parts = [repr(HOSTILE_TASK), "outer_iterations=4", "sparsities=[0.5, 0.75]", "n_train=4, n_validation=4, n_test=4"]
    parts += ["'blocks.1.attn_o'", "preset='best'", "calibration='sequential'", "ablation='mean'", "shrinkage='auto'"]
    assert all(part in code for part in (*parts, "controls=['svd']"))


def test_a_bridge_is_loaded_as_one(run: Run) -> None:
    settings = {**run.settings, "host": "TransformerBridge"}
    code = run_code(replace(run, settings=settings))
    compile(code, "run", "exec")
    assert 'swd.load_host(name_or_folder, kind="bridge")' in code
    embedded = load_code(replace(run, settings={**settings, "model": "swd-lens-default"}))
    assert 'model = swd.load_default_model(kind="bridge")' in embedded


def test_calibration_in_float64_is_repeated(run: Run) -> None:
    assert run.settings["calibration dtype"] == "float32" and "calibration_model" not in run_code(run)
    settings = {**run.settings, "model": "swd-lens-default", "calibration dtype": "float64"}
    code = run_code(replace(run, settings=settings))
    compile(code, "run", "exec")
    assert "..." not in code and "swd.text_tokens(480, split='train')" in code  # the embedded model needs no blanks
    assert "import torch" in code and "calibration_model=swd.load_default_model(dtype=torch.float64)," in code


def test_only_exact_factors_offer_nothing_to_load(run: Run) -> None:
    assert load_code(replace(run, replacements=[r for r in run.replacements if r.exact])) == ""


def test_finished_factors_and_seeds_are_repeated(run: Run, tmp_path: Path) -> None:
    method = run.replacements[1].method
    asked = {"factors": [method], "ablation": ["mean", "zero"], "random_b_seeds": 10}
    code = run_code(replace(run, settings={**run.settings, **asked}))
    compile(code, "run", "exec")
    assert "random_b_seeds=10," in code and "ablation=['mean', 'zero']," in code
    run.save(tmp_path)
    folders = re.findall(rf"{method!r}: swd.FactorSet.load\('(.*)'\)", code)
    assert folders and FactorSet.load(tmp_path / folders[0]).edges
    assert "random_b_seeds" not in run_code(run) and "factors={" not in run_code(run)
