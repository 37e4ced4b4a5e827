"""Progress of long loops: bars on a terminal, lines in a log; what they say, and when they say nothing."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import swd_lens as swd
from swd_lens.base import progress
from swd_lens.base.progress import Lines, Steps, duration, tqdm
from tests.micro import toy_model


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(progress, "_told", [0.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_terminals_and_notebooks_get_bars_and_logs_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(tqdm(range(3), desc="walk")) == [0, 1, 2]
    assert "walk" in sys.stderr.getvalue() and "\r" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(tqdm(range(3)), Lines) and list(tqdm(range(3), disable=True)) == [0, 1, 2]
    assert sys.stderr.getvalue() == ""
    IPython = pytest.importorskip("IPython")
    pytest.importorskip("ipykernel")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for config, lines in (({}, True), ({"IPKernelApp": {}}, False)):
        monkeypatch.setattr(IPython, "get_ipython", lambda config=config: SimpleNamespace(config=config))
        assert isinstance(tqdm(range(0)), Lines) == lines


def test_a_line_every_half_minute_with_what_is_left(clock, capsys):
    for _ in Lines(range(10), desc="fidelity", unit="batch"):
        clock[0] += 12.0
    assert capsys.readouterr().err.splitlines() == [
        "    fidelity 3/10 batch, 36 s so far, about 1:24 min left",
        "    fidelity 6/10 batch, 1:12 min so far, about 48 s left",
        "    fidelity 9/10 batch, 1:48 min so far, about 12 s left",
    ]
    assert [duration(s) for s in (0, 59.4, 60, 185, 3599, 7800)] == ["0 s", "59 s", "1:00 min", "3:05 min", "59:59 min", "2:10 h"]


def test_a_line_says_where_the_loops_around_are(clock, capsys):
    for _ in Lines("ab", desc="compare", unit="replacement"):
        with Lines(total=8e9, desc="factorize", unit="FLOP", unit_scale=True) as inner:
            clock[0] += 20.0
            inner.update(2e9)
            inner.set_postfix({"loss": "1.5"})
            clock[0] += 20.0
            inner.update(4e9)
    for _ in Lines("ab", desc="short loops in a long one", unit="step"):
        for _ in Lines("abc", desc="short"):
            clock[0] += 8.0
    assert capsys.readouterr().err.splitlines() == [
        "    compare 0/2 replacement > factorize 75%: loss=1.5, 40 s so far",
        "    compare 1/2 replacement > factorize 75%: loss=1.5, 1:20 min so far",
        "    short loops in a long one 1/2 step > short 1/3 it, 32 s so far, about 16 s left",
    ]
    for _ in Lines(range(10)):  # one that ends early is forgotten
        break
    with pytest.raises(KeyError), Lines(range(10)):
        raise KeyError
    assert not progress._open


def test_short_loops_say_nothing_and_nothing_is_reckoned_without_a_total_or_a_rate(clock, capsys):
    clock[0] = 100.0  # the last line was long ago
    assert list(Lines(range(1000), desc="short")) == list(range(1000))  # says nothing
    with Lines(desc="pairs", unit="unit", initial=5, total=9) as resumed, Lines(desc="rows", unit="row") as endless:
        clock[0] += 40.0
        resumed.update(0)
        clock[0] += 40.0
        endless.update(7)
    with Lines(desc="search", total=8, unit="step") as bar:  # a step that begins is said where a line is due
        bar.set_postfix_str("exact units")
        clock[0] += 40.0
        bar.set_postfix_str("SWD s=0.5")
    with Lines(desc="pairs", unit="pair", total=2) as bar:  # begins again
        clock[0] += 40.0
        bar.update(1)
        bar.reset(8)
        clock[0] += 40.0
        bar.update(2)
    assert capsys.readouterr().err.splitlines() == [
        "    pairs 5/9 unit, 40 s so far",
        "    pairs 5/9 unit > rows 7 row, 1:20 min so far",
        "    search 0/8 step: SWD s=0.5, 40 s so far",
        "    pairs 1/2 pair, 40 s so far, about 40 s left",
        "    pairs 2/8 pair, 40 s so far, about 2:00 min left",
    ]


def test_steps_are_numbered_and_timed_by_the_last_of_their_kind(clock):
    told = []
    step = Steps(told.append, ["load"], complete=False)
    step("load it")
    step.follow(["factorize", "exact", "measure", "factorize", "exact", "measure", "save"])
    seconds = {"factorize a": 40.0, "measure a": 60.0, "fidelity of a": 30.0, "factorize b": 0.0, "measure b": 1.0}
    for text in (*seconds, "save it"):
        step(text)
        clock[0] += seconds.get(text, 0.0)
    assert told == [
        "1 load it",
        "2/8 factorize a",
        "4/8 measure a",
        "  fidelity of a",
        "5/8 factorize b (about 40 s, as the last of these)",
        "7/8 measure b (about 1:30 min, as the last of these)",
        "8/8 save it",
    ]
    assert (step.at, step.text) == (8, "save it")


def test_a_long_call_is_heard_in_a_log(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    swd.factorize(toy_model(), "blocks.1.mlp_out", sparsity=0.5, outer_iterations=4, progress=True)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"    factorize s=0\.5 100%: blocks\.1\.mlp_out \(1/1\) 4/4( relMSE \S+)?, ", last)


def test_lines_do_whatever_the_package_asks_of_a_bar():
    """Where stderr is no terminal, every method that our loops call has to be there, too."""
    package = Path(__file__).resolve().parents[2] / "swd_lens"
    asked = {name for file in package.rglob("*.py") for name in re.findall(r"\bbar\.([a-z_]+)\(", file.read_text())}
    assert {"update", "reset"} <= asked
    assert not [name for name in asked if hasattr(progress.bars, name) and not hasattr(Lines, name)]
