"""A run in its folder: saved whole, whoever reads or writes there meanwhile; what comes back is the run that was saved, as far as
a report shows it; nothing else passes for one."""

import io
import json
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from swd_lens.base.figures import new_figure
from swd_lens.base.files import plain
from swd_lens.base.sealed import seal
from swd_lens.circuits import Comparison
from swd_lens.report import render_report
from swd_lens.report.terminal import run_tables
from swd_lens.study import Run
from swd_lens.study.run import FORMAT, STAGED, FactorsRecord
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


def test_a_later_format_is_named_although_it_is_sealed_in_another_way(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "run.json").read_text(encoding="utf-8")) | {"format": FORMAT + 1, "sha256": "v2 0123"}
    (tmp_path / "run.json").write_text(json.dumps(values), encoding="utf-8")
    refuses(ValueError, rf"has format {FORMAT + 1}, newer than this swd_lens", Run.load, tmp_path)


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


def test_saving_a_loaded_run_again_changes_nothing(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run.save(folder)
    Run.load(folder).save(tmp_path / "again")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    assert all((folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)


def test_nothing_comes_back_as_nothing(tmp_path: Path) -> None:
    empty = Run({}, [], {"nowhere": Comparison({})}, [], 0.0)
    empty.save(tmp_path)
    assert render_report(Run.load(tmp_path)) == render_report(empty)


def test_odd_names_are_seen_in_the_report_the_terminal_and_reprs(run: Run) -> None:
    odd = "x\x1b[31m\x00\u202e\u2066"
    first = run.replacements[0]
    named = replace(run, settings={**run.settings, "model": odd, "shape": odd}, attention=[])
    named = replace(
        named, replacements=[replace(first, surface=odd, method=odd)], cards=[replace(run.cards[0], task=odd, method=odd)]
    )
    comparison = run.comparisons[first.surface]
    task = next(iter(comparison))
    named = replace(named, comparisons={odd: replace(comparison, tasks={odd: replace(comparison[task], task=odd)})})
    page = render_report(named)
    assert "x␛[31m␀⟨U+202E⟩⟨U+2066⟩" in page
    console = Console(file=io.StringIO(), width=200)
    for table in run_tables(named):
        console.print(table)
    for shown in (page, console.file.getvalue(), repr(named), named._repr_html_()):  # type: ignore[attr-defined]
        assert not [c for c in shown if not c.isprintable() and c not in "\n\t"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("after", [0, 3, 4, 7])
def test_a_run_saved_over_another_is_the_old_or_the_new_one_wherever_it_stops(run, tmp_path, monkeypatch, after):
    """after: how many folders of factors are written: four beside the old ones, then run.json, then four in their place."""
    old = replace(run, seconds=1.0, replacements=[replace(r, factors=_scaled(r.factors)) for r in run.replacements])
    old.save(tmp_path)
    save, count = FactorSet.save, 0

    def stopping(self, folder):
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        return save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(FactorSet, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            run.save(tmp_path)
    n_sparse = sum(isinstance(r.factors, FactorSet) and not r.exact for r in run.replacements)
    loaded, expected = Run.load(tmp_path), run if after >= n_sparse else old
    assert loaded.seconds == expected.seconds
    for one, other in zip(loaded.replacements, expected.replacements, strict=True):
        if not one.exact:
            assert all(torch.equal(one.factors[site].read, other.factors[site].read) for site in other.factors)
    run.save(tmp_path)
    assert Run.load(tmp_path).seconds == run.seconds and not list(tmp_path.rglob(f"*{STAGED}"))


def test_factors_that_wait_beside_a_run_are_no_other_ones_when_they_were_read(run, tmp_path, monkeypatch):
    """A second save may replace them between the look at their hash and their reading (seen in CI)."""
    sparse = next(r for r in run.replacements if isinstance(r.factors, FactorSet) and not r.exact)
    one, load = replace(run, replacements=[sparse], comparisons={}), FactorSet.load
    other = replace(one, replacements=[replace(sparse, factors=_scaled(sparse.factors))])
    one.save(tmp_path)
    (place,) = (tmp_path / "factors").iterdir()
    # As a save leaves it that is killed behind its run.json.
    staged = place.rename(place.with_name(place.name + STAGED))
    assert Run.load(tmp_path).replacements[0].factors.edges == sparse.factors.edges

    def replaced(folder):
        other.replacements[0].factors.save(staged)
        return load(folder)

    monkeypatch.setattr(FactorSet, "load", replaced)
    with pytest.raises(ValueError, match="not what was written"):
        Run.load(tmp_path)


def test_no_method_has_the_folder_in_which_another_waits(run: Run, tmp_path: Path) -> None:
    """A folder "mine.new" was where factors of "mine" wait while a run is saved over another one, and removed behind them."""
    sparse = next(r for r in run.replacements if isinstance(r.factors, FactorSet) and not r.exact)
    pair = [replace(sparse, method="mine"), replace(sparse, method="mine.new")]
    named = replace(run, replacements=pair, comparisons={})
    changed = replace(named, replacements=[replace(pair[0], factors=_scaled(sparse.factors)), pair[1]])
    for saved in (named, changed):
        saved.save(tmp_path)
        for made, loaded in zip(saved.replacements, Run.load(tmp_path).replacements, strict=True):
            assert all(torch.equal(loaded.factors[site].read, made.factors[site].read) for site in made.factors)


def _scaled(factors):
    if not isinstance(factors, FactorSet):
        return factors
    twice = {site: replace(f, read=2 * f.read, write=f.write / 2, probe=None) for site, f in factors.items()}
    return FactorSet(twice, factors.provenance)
