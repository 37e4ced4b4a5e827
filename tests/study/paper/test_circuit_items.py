"""Items that compare circuits: sentences say the tables' numbers, and sites are judged apart."""

import shutil

import pandas as pd
import pytest

from swd_lens.study import paper
from tests.study.paper.conftest import SMALL, table


def test_the_sentences_say_the_tables_numbers(finished):
    _, result = finished
    costs = table(result, 1)
    reached = costs.dropna(subset=["edges at recovered 0.9"])
    best = reached.loc[reached["edges at recovered 0.9"].idxmin()]
    (sentence,) = (finding for finding in result.findings if finding.startswith("Fewest edges"))
    assert f"{best['method']} {int(best['edges at recovered 0.9']):,}" in sentence
    # The neurons are exact, and stand beside the paper's solver, ours, and pruned ones.
    fidelity = table(result, 0).set_index("method")
    assert abs(fidelity.loc["Neurons", "CE delta"]) < 1e-6
    solved = {f"{name} s=0.5" for name in ("SWD (paper)", "SWD", "SWD from the short side", "Neurons pruned")}
    assert {*solved, "SVD"} <= set(fidelity.index)


@pytest.mark.slow
def test_sites_of_an_item_are_judged_apart_and_adjusted_together(finished, model, tmp_path):
    folder, alone = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    how = {"profile": "tiny", "model": model, "out": copy, "progress": False, "random_b_seeds": 1, **SMALL}
    result = paper.run_item("controls", further_sites=["blocks.2.mlp_out"], **how)
    surfaces = result.numbers["surfaces"]
    assert list(surfaces) == ["blocks.3.mlp_out", "blocks.2.mlp_out"]
    assert surfaces["blocks.3.mlp_out"] == alone.numbers["surfaces"]["blocks.3.mlp_out"]
    ratios = pd.DataFrame(result.numbers["ratios"])
    assert set(ratios["surface"]) == set(surfaces)
    tests = result.numbers["tests"]
    assert tests and all(test["p"] != test["p"] or test["p"] is None or test["p_holm"] >= test["p"] for test in tests)
    assert any(finding.startswith("blocks.2.mlp_out: Fewest edges") for finding in result.findings)
    # Another number of random circuits draws them anew.
    fewer = paper.run_item("controls", **{**how, "random_circuits": 3})
    assert {null["p of recovered"] for null in fewer.numbers["surfaces"]["blocks.3.mlp_out"]["nulls"]} <= {0.25, 0.5, 0.75, 1.0}
