"""A run in its folder: what comes back is the run that was saved, as far as a report shows it; nothing else passes for one."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from swd_lens.base.figures import new_figure
from swd_lens.base.files import plain
from swd_lens.circuits import Comparison
from swd_lens.report import render_report
from swd_lens.study import Run
from swd_lens.study.run_file import FORMAT, FactorsRecord
from swd_lens.study.section import Picture, ReportSection, SectionTable
from swd_lens.units.factors import FactorSet
from tests.report.conftest import HOSTILE, with_attention, with_cards


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    run.save(path)
    return path


def _numbers(run: Run) -> dict[str, Any]:
    return json.loads(json.dumps(plain(run.as_dict())))


def test_the_report_of_a_loaded_run_has_the_same_bytes(run: Run, folder: Path) -> None:
    loaded = Run.load(folder)
    assert _numbers(loaded) == _numbers(run) == json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert render_report(loaded) == render_report(run)
    assert loaded.circuit_table().equals(run.circuit_table())
    assert loaded.fidelity_table().equals(run.fidelity_table())
    assert loaded.attention == run.attention


def test_sparse_factors_come_back_and_exact_ones_as_a_record(run: Run, folder: Path) -> None:
    for made, loaded in zip(run.replacements, Run.load(str(folder)).replacements, strict=True):
        assert isinstance(loaded.factors, FactorsRecord if made.method == "SVD" else FactorSet)
        assert (loaded.factors.edges, loaded.factors.n_units) == (made.factors.edges, made.factors.n_units)
        assert loaded.factors.sparsity == made.factors.sparsity and list(loaded.factors) == list(made.factors)
        assert plain(loaded.factors.summary()) == plain(made.factors.summary())


def test_saving_a_loaded_run_again_changes_nothing(folder: Path, tmp_path: Path) -> None:
    Run.load(folder).save(tmp_path / "again")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    assert all((folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)


def test_hostile_tokens_seeds_and_sections_come_back(run: Run, tmp_path: Path) -> None:
    figure, axes = new_figure()
    axes[0, 0].set_title("a\N{MINUS SIGN}b")
    section = ReportSection("S", ("p",), (Picture.of(figure, "t"),), (SectionTable("c", ("x",), ((1,), (None,))),))
    odd = with_attention(with_cards(run, (*HOSTILE, "\ud83d")), HOSTILE)
    first = {surface: next(iter(c.methods)) for surface, c in run.comparisons.items()}
    seeds = {s: replace(c, groups={"seeds": (first[s],)}, reference="seeds") for s, c in run.comparisons.items()}
    odd = replace(odd, extras=[section], comparisons=seeds)
    odd.save(tmp_path)
    loaded = Run.load(tmp_path)
    assert render_report(loaded) == render_report(odd)
    assert loaded.extras == odd.extras and list(loaded.attention) == list(odd.attention)
    assert {s: c.methods for s, c in loaded.comparisons.items()} == {s: c.methods for s, c in seeds.items()}


def test_what_is_undefined_comes_back_undefined(run: Run, tmp_path: Path) -> None:
    undefined = [replace(r.fidelity, kl=nan, relmse=dict.fromkeys(r.fidelity.relmse, nan)) for r in run.replacements]
    views = [replace(view, measures={"KL": dict.fromkeys(view.names, nan)}) for view in run.attention]
    cards = [replace(card, tasks={card.task: replace(card.tasks[card.task], score=nan)}) for card in run.cards]
    odd = replace(run, cards=cards, attention=views)
    odd = replace(odd, replacements=[replace(r, fidelity=f) for r, f in zip(run.replacements, undefined, strict=True)])
    odd.save(tmp_path)
    loaded = Run.load(tmp_path)
    assert all(isnan(card.score) for card in loaded.cards) and isnan(loaded.replacements[0].fidelity.kl)
    assert render_report(loaded) == render_report(odd)


def test_surfaces_whose_folders_would_be_one(run: Run, tmp_path: Path) -> None:
    """Their factors once overwrote each other."""
    few, most = [r for r in run.replacements if not r.exact][:2]
    assert few.factors.edges != most.factors.edges
    clash = [replace(few, surface="a b"), replace(most, surface="a_b", method=few.method)]
    replace(run, replacements=clash).save(tmp_path)
    loaded = Run.load(tmp_path)
    assert [r.factors.edges for r in loaded.replacements] == [few.factors.edges, most.factors.edges]
    assert sorted(p.name for p in (tmp_path / "factors").iterdir()) == ["a_b-SWD_s=0.5", "a_b-SWD_s=0.5-2"]


def test_nothing_comes_back_as_nothing(tmp_path: Path) -> None:
    empty = Run({}, [], {"nowhere": Comparison({})}, [], 0.0)
    empty.save(tmp_path)
    assert render_report(Run.load(tmp_path)) == render_report(empty)


def test_format_1_is_read_with_what_it_knew(run: Run, folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    old = {key: values[key] for key in ("settings", "seconds", "fidelity", "circuits", "units")}
    old["fidelity"] = [{k: v for k, v in r.items() if k not in ("folder", "factors")} for r in values["fidelity"]]
    (tmp_path / "factors").symlink_to(folder / "factors")
    (tmp_path / "run.json").write_text(json.dumps(old), encoding="utf-8")
    loaded = Run.load(tmp_path)
    assert loaded.attention == []
    assert loaded.circuit_table().equals(run.circuit_table())  # the CE differences, too
    assert loaded.fidelity_table().equals(run.fidelity_table())
    assert "Fidelity" in render_report(loaded)


def _dropped(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values.pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format=FORMAT + 1), rf"run format {FORMAT + 1} .*reads up to {FORMAT}; update"),
        (lambda values: values.update(format="x"), "run format 'x'"),
        (_dropped("circuits"), "lacks circuits"),
        (_dropped("comparisons"), "not what Run.save writes"),
        (lambda values: values["fidelity"][0].update(edges=1), "of other factors than those in"),
        (lambda values: values["fidelity"][0].pop("ce"), "not what Run.save writes"),
        (lambda values: values["units"][0].update(new=1), "not what Run.save writes"),
        (lambda values: values["attention"][0]["names"].pop(), "names"),
        (lambda values: values["extras"].append(_SCRIPT), "may not hold <script>"),
        (lambda values: values["extras"].append(_RAGGED), "not what Run.save writes .*rows of other lengths"),
        (lambda values: values["units"][0]["contexts"][0].update(peak=99), "not what Run.save writes .*its peak at 99"),
        (lambda values: values["units"][0]["contexts"][0]["z"].pop(), "not what Run.save writes .*3 tokens has 2 z"),
    ],
)
def test_what_is_no_run_is_refused(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    change(values)
    (tmp_path / "factors").symlink_to(folder / "factors")
    (tmp_path / "run.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Run.load(tmp_path)


_SCRIPT = {"title": "t", "intro": [], "tables": [], "short": ""}
_SCRIPT["pictures"] = [{"svg": '<svg viewBox="0 0 1 1"><script/></svg>', "title": "", "description": "", "caption": ""}]


_RAGGED = {**_SCRIPT, "pictures": [], "tables": [{"caption": "c", "columns": ["a", "b"], "rows": [[1]]}]}


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no run.json in .*swd-lens demo"):
        Run.load(tmp_path)
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="copy the whole folder"):
        Run.load(tmp_path)
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes()[:1000])
    with pytest.raises(ValueError, match="is broken: no JSON"):
        Run.load(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="lacks settings, seconds"):
        Run.load(tmp_path)
