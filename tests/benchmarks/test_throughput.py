"""The benchmark of throughput: what its table says, by hand, and the process that it asks."""

import io
import json
import sys

import pytest
import torch

from tests.benchmarks import solving
from tests.benchmarks.throughput import OLDER, throughput_rows


def test_all_together_and_the_median_may_differ_and_errors_are_a_geometric_mean():
    rows = {
        OLDER: {"a": (1.0, 0.2), "b": (10.0, 0.1), "c": (3.0, 0.1)},
        "faster": {"a": (2.0, 0.1), "b": (4.0, 0.2), "c": (1.0, 0.8)},
        "of one matrix": {"b": (5.0, 0.1)},
    }
    assert list(throughput_rows(rows)) == [
        ["faster", "3", "2.00", "2.50", "2.000"],
        ["of one matrix", "1", "2.00", "2.00", "1.000"],
    ]


def test_a_process_answers_each_line_with_seconds_and_heldout_error(tmp_path, monkeypatch, capsys):
    """relMSE is under the held-out Gram: where that knows the first input only, the error of its row counts alone."""
    torch.manual_seed(0)
    weight, heldout = torch.randn(12, 8), torch.zeros(12, 12)
    heldout[0, 0] = 1.0
    torch.save((weight, torch.eye(12), heldout), tmp_path / "matrix.pt")
    asked = [[str(tmp_path / "matrix.pt"), {"preset": preset}] for preset in ("quick", "pruned")]
    monkeypatch.setattr(sys, "argv", ["solving.py", str(torch.get_num_threads()), "1000"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in asked)))
    solving.main()
    (quick_seconds, _), (seconds, pruned) = map(json.loads, capsys.readouterr().out.splitlines())
    assert quick_seconds > 0 and seconds > 0
    kept = solving.swd.solve(weight, torch.eye(12), 0.5, tokens=1000, preset="pruned")
    missed = (weight - kept.read @ kept.write)[0]
    assert pruned == pytest.approx(float(missed.square().sum() / weight[0].square().sum()), rel=1e-5)
