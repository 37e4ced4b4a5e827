"""A run is saved whole, whoever reads or writes its folder meanwhile, and its names are seen."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from swd_lens.circuits import Comparison
from swd_lens.report import render_report
from swd_lens.report.terminal import run_tables
from swd_lens.study import Run
from swd_lens.study.run_file import STAGED
from swd_lens.units.factors import FactorSet


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
