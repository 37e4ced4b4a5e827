"""A run in its folder: what comes back is the run that was saved, as far as a report shows it; nothing else passes for one."""

import json
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from swd_lens.base.figures import new_figure
from swd_lens.base.files import plain
from swd_lens.base.sealed import seal
from swd_lens.report import render_report
from swd_lens.study import Run
from swd_lens.study.run_file import FORMAT, FactorsRecord
from swd_lens.study.section import Picture, ReportSection, SectionTable
from swd_lens.units.factors import Factors, FactorSet
from tests.refusals import refuses
from tests.report.conftest import HOSTILE, with_attention, with_cards


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    run.save(path)
    return path


def _numbers(run: Run) -> dict[str, Any]:
    return json.loads(json.dumps(plain(run.as_dict())))


def test_a_loaded_run_has_the_same_numbers(run: Run, folder: Path) -> None:
    loaded = Run.load(folder)
    saved = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert list(saved)[-2:] == ["files", "sha256"]
    assert _numbers(loaded) == _numbers(run) == {k: v for k, v in saved.items() if k not in ("files", "sha256")}
    assert loaded.circuit_table().equals(run.circuit_table())
    assert loaded.fidelity_table().equals(run.fidelity_table())
    assert loaded.attention == run.attention


def test_sparse_factors_come_back_and_exact_ones_as_a_record(run: Run, folder: Path) -> None:
    for made, loaded in zip(run.replacements, Run.load(str(folder)).replacements, strict=True):
        assert isinstance(loaded.factors, FactorsRecord if made.exact else FactorSet)
        assert (loaded.factors.edges, loaded.factors.n_units) == (made.factors.edges, made.factors.n_units)
        assert loaded.factors.sparsity == made.factors.sparsity and list(loaded.factors) == list(made.factors)
        assert plain(loaded.factors.summary()) == plain(made.factors.summary())


def test_the_report_of_a_loaded_run_has_the_same_bytes(run: Run, tmp_path: Path) -> None:
    """With hostile tokens, seeds, a section, and numbers that are undefined."""
    figure, axes = new_figure()
    axes[0, 0].set_title("a\N{MINUS SIGN}b")
    section = ReportSection("S", ("p",), (Picture.of(figure, "t"),), (SectionTable("c", ("x",), ((1,), (None,))),))
    odd = with_attention(with_cards(run, (*HOSTILE, "\ud83d")), HOSTILE)
    first = {surface: next(iter(c.methods)) for surface, c in run.comparisons.items()}
    seeds = {s: replace(c, groups={"seeds": (first[s],)}, reference="seeds") for s, c in run.comparisons.items()}
    undefined = [replace(r.fidelity, kl=nan, relmse=dict.fromkeys(r.fidelity.relmse, nan)) for r in run.replacements]
    views = [replace(view, measures={"KL": dict.fromkeys(view.names, nan)}) for view in odd.attention]
    cards = [replace(card, tasks={card.task: replace(card.tasks[card.task], score=nan)}) for card in odd.cards]
    odd = replace(odd, extras=[section], comparisons=seeds, cards=cards, attention=views)
    odd = replace(odd, replacements=[replace(r, fidelity=f) for r, f in zip(run.replacements, undefined, strict=True)])
    odd.save(tmp_path)
    loaded = Run.load(tmp_path)
    assert render_report(loaded) == render_report(odd)
    assert loaded.extras == odd.extras and len(loaded.attention) == len(odd.attention)
    assert {s: c.methods for s, c in loaded.comparisons.items()} == {s: c.methods for s, c in seeds.items()}
    assert all(isnan(card.score) for card in loaded.cards) and isnan(loaded.replacements[0].fidelity.kl)


def test_surfaces_whose_folders_would_be_one(run: Run, tmp_path: Path) -> None:
    """Their factors once overwrote each other."""
    few, most = [r for r in run.replacements if not r.exact][:2]
    assert few.factors.edges != most.factors.edges
    clash = [replace(few, surface="a b"), replace(most, surface="a_b", method=few.method)]
    replace(run, replacements=clash).save(tmp_path)
    loaded = Run.load(tmp_path)
    assert [r.factors.edges for r in loaded.replacements] == [few.factors.edges, most.factors.edges]
    assert sorted(p.name for p in (tmp_path / "factors").iterdir()) == ["a_b-SWD_s=0.5", "a_b-SWD_s=0.5-2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format=FORMAT + 1), rf"has format {FORMAT + 1}, newer than this swd_lens"),
        (lambda values: values.update(format="x"), "is not a run, or damaged .*no format"),
        (lambda values: values.pop("circuits"), "is not a run, or damaged .*circuits"),
        (lambda values: values["fidelity"][0].update(edges=1), "of other factors than those in"),
        (lambda values: values["units"][0].update(new=1), "is not a run, or damaged"),
        (lambda values: values["extras"].append({}), "is not a run, or damaged"),
        (lambda values: values["units"][0]["contexts"][0].update(peak=99), "is not a run, or damaged .*its peak at 99"),
        (lambda values: values["units"][0]["contexts"][0]["z"].pop(), "is not a run, or damaged .*5 tokens has 4 z"),
        (lambda values: values["circuits"][0]["rows"][0].pop("edges"), r"run\.json is not a run, or damaged"),
        (lambda values: values["units"][0].update(unit="c380"), r"run\.json is not a run, or damaged"),
    ],
)
def test_what_is_no_run_is_refused(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    change(values)
    (tmp_path / "factors").symlink_to(folder / "factors")
    (tmp_path / "run.json").write_text(json.dumps(seal(values)), encoding="utf-8")
    refuses(ValueError, message, Run.load, tmp_path)


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    refuses(FileNotFoundError, r"there is no run.json in .*swd-lens demo", Run.load, tmp_path)
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    refuses(FileNotFoundError, "copy the whole folder", Run.load, tmp_path)
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes()[:1000])
    refuses(ValueError, r"run\.json is not a run, or damaged", Run.load, tmp_path)


def test_factors_of_another_run_are_refused_although_their_edges_are_as_many(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    name, values = next(iter(json.loads((tmp_path / "run.json").read_text())["files"].items()))
    place = (tmp_path / name).parent
    other = FactorSet.load(place)
    scaled = {site: Factors(f.read.clone(), f.write * 2) for site, f in other.items()}
    assert len(values) == 64 and FactorSet(scaled).edges == other.edges
    FactorSet(scaled).save(place)
    refuses(ValueError, r"factors\.json: not what was written there as a run", Run.load, tmp_path)
