"""swd-lens truth."""

import json
import re

from tests.cli.commands import run

FEW = ["truth", "--part", "planted", "--case", "plain", "--method", "SVD", "--method", "neurons", "--seeds", "1"]


def test_the_table_and_its_folder(tmp_path):
    result = run(*FEW, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Known units: planted" in result.stdout
    assert re.search(r"│ plain\s+│ neurons\s+│   384 │ 0.\d+ │", result.stdout)  # whole at 80 columns
    assert (tmp_path / "out" / "truth.json").is_file()
    values = json.loads(run(*FEW, "--out", tmp_path / "out", "--json").stdout)
    assert {row["method"] for row in values["rows"]} == {"SVD", "neurons"}


def test_a_wrong_name_is_one_line():
    result = run("truth", "--case", "odd")
    assert result.exit_code == 1 and "case must be one of" in result.output
