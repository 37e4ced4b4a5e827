"""Tables for the terminal: 80 columns, whole numbers, nothing invisible."""

import io

import pandas as pd
from rich.console import Console

from swd_lens.cli import options
from swd_lens.report import terminal


def test_long_names_leave_the_numbers_whole():
    name = "SWD s=0.685, tuned (" + "a-very-long-folder-" * 4 + ")"
    frame = pd.DataFrame({"method": [name, "SVD"], "edges": [1234567, 7654321], "half": ["1,234 / 5,678,901", ""]})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal.table("Factors", frame))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert "1,234,567" in shown and "1,234 / 5,678,901" in shown
    words = "".join(line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│"))
    assert words.replace(" ", "") == f"{name}SVD".replace(" ", "")


def test_odd_names_are_seen_in_the_terminal(capsys):
    odd = "a\x1b[31m\x00\u202e"
    options.say(odd)
    options.show(False, {}, odd, terminal.table(odd, pd.DataFrame({odd: [odd]})))
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert "a␛[31m␀⟨U+202E⟩" in shown.replace("\n", "") and not [c for c in shown if not c.isprintable() and c != "\n"]
