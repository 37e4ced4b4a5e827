"""The benchmark's protocol: f of the host's own margin, signed and absolute rankings, scores of nodes, its loader's rules."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import TaskError, UnsupportedHostError
from swd_lens.circuits.curve import MIB_FRACTIONS
from swd_lens.circuits.mib import node_scores
from tests.circuits.worked import kept
from tests.contract import swd_zero_data
from tests.micro import toy_model


@pytest.fixture(scope="module")
def embedded():
    model = swd.load_default_model()
    task = swd.load_task("gendered_pronoun", model, n_train=16, n_validation=4, n_test=8)
    sites = ["blocks.2.attn_o", "blocks.3.mlp_out"]
    factors = swd.factorize(
        model, sites, sparsity=0.5, tokens=swd.text_tokens(1_024), preset="quick", outer_iterations=4, progress=False
    )
    return model, factors, task, swd.mib(model, factors, task, random=2)


def test_areas_are_those_of_plain_runs(embedded):
    """CPR by running each circuit by hand: resampled units at every position, over the dense margin."""
    model, factors, task, found = embedded
    scores = swd.attribute(model, factors, task, score="attribution_patching", sign="signed", positions="all")
    ranking = scores.ranking()
    f = {"f signed": [], "f absolute": []}
    by_magnitude = sorted(ranking, key=lambda unit: -abs(float(scores.scores[unit[0]][unit[1]])))
    empty = swd.evaluate(model, factors, task.test, scores, grid=[0], ablation="resample", random_sets=0)
    for name, order in (("f signed", ranking), ("f absolute", by_magnitude)):
        lengths = {str(part): int(part * len(order)) for part in MIB_FRACTIONS}
        named = {part: swd.Circuit.of(factors, scores, order[:n]) for part, n in lengths.items() if n}
        rows = swd.evaluate_circuits(model, factors, task.test, named, ablation="resample").set_index("circuit")
        q = [float(rows.loc[str(part), "q keep"]) if str(part) in named else empty.q_empty for part in MIB_FRACTIONS]
        f[name] = [(value - empty.q_empty) / (empty.q_dense - empty.q_empty) for value in q]
        assert found.rows[name].tolist() == pytest.approx(f[name], abs=2e-4), name
    assert found.cpr == pytest.approx(float(np.trapezoid(f["f signed"], MIB_FRACTIONS)), abs=2e-4)
    assert found.cmd == pytest.approx(float(np.trapezoid(np.abs(1 - np.array(f["f absolute"])), MIB_FRACTIONS)), abs=2e-4)
    # The replacement's own loss counts: all units recover what it keeps of the dense margin.
    share = (empty.q_full - empty.q_empty) / (empty.q_dense - empty.q_empty)
    assert found.rows["f signed"].iloc[-1] == pytest.approx(share, abs=2e-4)
    assert {"sign": "signed", "ablation": "resample", "positions": "all"}.items() <= found.settings.items()


def test_better_than_random_rankings_and_shown(embedded, tmp_path):
    *_, found = embedded
    assert found.cpr > found.random["CPR"].max() and found.cmd < found.random["CMD"].min()
    best = found.table().set_index("area")["random best"]
    assert (best["CPR"], best["CMD"]) == (found.random["CPR"].max(), found.random["CMD"].min())
    assert f"CPR {found.cpr:.3f}" in found.in_words()
    again = kept(found, tmp_path)
    assert again.nodes == pytest.approx(found.nodes) and again.in_words() == found.in_words()
    pd.testing.assert_frame_equal(again.rows, found.rows)


def loaded(path) -> dict[str, float]:
    """What the benchmark's loader takes: its keys, every name one of the graph's, a score where there is one."""
    file = json.loads(path.read_text())
    assert {"cfg", "nodes", "edges"} <= file.keys()
    cfg = file["cfg"]
    heads = [f"a{layer}.h{head}" for layer in range(cfg["n_layers"]) for head in range(cfg["n_heads"])]
    graph = {"input", "logits", *heads, *(f"m{layer}" for layer in range(cfg["n_layers"]))}
    assert isinstance(cfg["parallel_attn_mlp"], bool) and isinstance(cfg["d_model"], int)
    assert set(file["nodes"]) == graph
    scores = {}
    for name, node in file["nodes"].items():
        assert isinstance(node["in_graph"], bool)
        if "score" in node:
            assert math.isfinite(node["score"])
            scores[name] = node["score"]
    for name, edge in file["edges"].items():
        assert "->" in name and isinstance(edge["in_graph"], bool) and math.isfinite(edge["score"])
    return scores


def test_its_file_holds_the_scores_of_heads_and_mlps(embedded, tmp_path):
    model, factors, task, found = embedded
    found.save_graph(tmp_path / "importances.json")
    scores = loaded(tmp_path / "importances.json")
    assert set(scores) == {"m3", *(f"a2.h{head}" for head in range(4))}
    of_units = swd.attribute(model, factors, task, score="attribution_patching", sign="signed", positions="all").scores
    assert scores["m3"] == pytest.approx(float(of_units["blocks.3.mlp_out"].sum()), rel=1e-5)
    assert sum(scores[f"a2.h{head}"] for head in range(4)) == pytest.approx(float(of_units["blocks.2.attn_o"].sum()), rel=1e-5)


def test_a_units_score_goes_to_the_heads_that_it_reads_by_their_share():
    """A unit that reads 3 in head 0 and 4 in head 1 gives them 9 and 16 of 25."""
    model = toy_model()
    factors = swd_zero_data(model, "blocks.1.attn_o")
    f = factors["blocks.1.attn_o"]
    read = torch.zeros_like(f.read)
    read[0, 0], read[8, 0] = 3.0, 4.0
    scores = swd.types.UnitScores(
        {"blocks.1.attn_o": torch.eye(f.n_units)[0] * 5}, {"blocks.1.attn_o": torch.zeros(f.n_units)}, {}
    )
    made = {"blocks.1.attn_o": type(f)(read, f.write)}
    assert node_scores(model, made, scores) == pytest.approx({"a1.h0": 5 * 9 / 25, "a1.h1": 5 * 16 / 25})


def test_units_that_write_something_else_have_no_file(embedded):
    *_, found = embedded
    model = toy_model()
    factors = swd_zero_data(model, "blocks.1.mlp_in")
    scores = swd.types.UnitScores(
        {"blocks.1.mlp_in": torch.ones(factors.n_units)}, {"blocks.1.mlp_in": torch.zeros(factors.n_units)}, {}
    )
    assert node_scores(model, factors, scores) == {}
    with pytest.raises(UnsupportedHostError, match="what heads and MLPs write"):
        replace(found, nodes={}).graph_json()


def test_units_that_do_not_carry_the_task_have_no_areas(embedded):
    model, _, task, _ = embedded
    factors = swd.factorize(
        model, "blocks.3.attn_o", sparsity=0.5, tokens=swd.text_tokens(1_024), preset="quick", outer_iterations=4, progress=False
    )
    found = swd.mib(model, factors, task, positions="scoring", random=1)
    if not found.carries:
        assert math.isnan(found.cpr) and "do not carry the task" in found.in_words() and len(found.parts()) == 1
    assert found.carries == (not math.isnan(found.cpr))
    bare = replace(task, test=replace(task.test, corrupt=()))
    with pytest.raises(TaskError, match="corrupt"):
        swd.mib(model, factors, bare)
