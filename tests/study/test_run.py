"""run_study on the embedded model, small: what it refuses, what it holds, and which units it shows."""

import json
from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens.base.files import plain

SURFACES = {"blocks.3.mlp_out": "blocks.3.mlp_out", "attn_o": "attn_o"}


@pytest.fixture(scope="module")
def tasks(default_model):
    return [swd.load_task(name, default_model, n_train=24, n_test=12) for name in ("ioi", "gendered_pronoun")]


@pytest.fixture(scope="module")
def run(default_model, tasks):
    calibration, heldout = swd.text_tokens(1024, split="train"), swd.text_tokens(1024, split="test")
    return swd.run_study(
        default_model,
        SURFACES,
        tasks,
        sparsities=(0.5, 0.75),
        calibration_tokens=calibration,
        heldout_tokens=heldout,
        outer_iterations=4,
    )


def test_every_surface_method_and_task_is_there(run):
    methods = ["SWD s=0.5", "SWD s=0.75", "neurons", "SVD"]
    assert [(r.surface, r.method) for r in run.replacements] == [(s, m) for s in SURFACES for m in methods]
    assert run.fidelity_table()["method"].tolist() == methods * 2
    assert len(run.circuit_table()) == 2 * 2 * 4
    as_json = json.loads(json.dumps(plain(run.as_dict()), allow_nan=False))
    assert len(as_json["circuits"]) == 16
    assert as_json["settings"]["tasks"]["ioi"]["example"].endswith("to")
    assert as_json["settings"]["solver"] == {"preset": "best", "outer_iterations": 4}


def test_calibration_from_a_stream(default_model, tasks, run):
    """The same rows, streamed: the same factors, and the number of tokens is known."""
    rows = swd.text_tokens(1024, split="train")
    streamed = swd.run_study(
        default_model,
        {"blocks.3.mlp_out": "blocks.3.mlp_out"},
        tasks[:1],
        sparsities=(0.5,),
        calibration_tokens=swd.TokenStream(lambda: iter(rows), len(rows)),
        heldout_tokens=swd.text_tokens(1024, split="test"),
        outer_iterations=4,
    )
    assert streamed.settings["calibration tokens"] == run.settings["calibration tokens"] == rows.numel()
    site = "blocks.3.mlp_out"
    assert torch.equal(streamed.replacements[0].factors[site].read, run.replacements[0].factors[site].read)


def test_fidelity_is_handed_on_and_matches_ce(run):
    for surface, comparison in run.comparisons.items():
        mine = {r.method: r.fidelity for r in run.replacements if r.surface == surface}
        assert comparison.fidelities == mine
        assert comparison.reference == "SWD s=0.5" and comparison.matched("SWD s=0.5") is True
        difference = mine["SWD s=0.75"].ce - mine["SWD s=0.5"].ce
        assert comparison.ce_difference("SWD s=0.75") == difference
        shown = run.circuit_table().query("surface == @surface and method == 'SWD s=0.75'")["CE difference"]
        assert shown.tolist() == [difference] * 2


def test_cards_show_the_surface_on_which_the_task_depends(run):
    for task in ("ioi", "gendered_pronoun"):
        kept = {
            surface: by_task[task].curves["SWD s=0.75"].rows["sufficiency"].iloc[0]
            for surface, by_task in run.comparisons.items()
        }
        cards = [card for card in run.cards if card.task == task]
        assert {card.surface for card in cards} == {min(kept, key=kept.__getitem__)}
        scores = run.comparisons[cards[0].surface][task].scores["SWD s=0.75"]
        assert [card.unit for card in cards] == scores.top(3)["unit"].tolist()
        assert [card.score for card in cards] == pytest.approx(scores.top(3)["score"].tolist())
        f = run.replacements[[r.surface for r in run.replacements].index(cards[0].surface) + 1].factors
        site, unit = cards[0].unit.rsplit("/", 1)
        assert cards[0].read_edges + cards[0].write_edges == int(f[site].edges_per_unit[int(unit)])


def test_factors_may_be_made_on_the_same_model_in_float64(default_model, tasks):
    calibration, heldout = swd.text_tokens(1024, split="train"), swd.text_tokens(1024, split="test")
    exact = swd.load_default_model(dtype=torch.float64)
    run = swd.run_study(
        default_model,
        {"attn_o": "blocks.[01].attn_o"},
        tasks[:1],
        sparsities=(0.5,),
        calibration_tokens=calibration,
        heldout_tokens=heldout,
        calibration_model=exact,
        outer_iterations=4,
    )
    assert run.settings["calibration dtype"] == "float64"
    made = run.replacements[0].factors
    alone = swd.factorize(
        exact, "blocks.[01].attn_o", sparsity=0.5, tokens=calibration, outer_iterations=4, progress=False
    )
    for site in alone:
        assert torch.equal(made[site].read, alone[site].read) and torch.equal(made[site].write, alone[site].write)
    # Measured on the model itself: what `fidelity` finds there, to the bit.
    assert run.replacements[0].fidelity == swd.fidelity(default_model, alone, heldout)


def test_finished_factors_are_a_method_of_their_surface(default_model, tasks, run, tmp_path):
    """Nothing is solved: the numbers are those of the run that made the factors. Factors of another surface bring it along."""
    heldout, made = swd.text_tokens(1024, split="test"), run.replacements[1].factors
    other = swd.factorize(default_model, "blocks.0.attn_o", sparsity=0.5, outer_iterations=4, progress=False)
    finished = swd.run_study(
        default_model,
        {"last": "blocks.3.mlp_out"},
        tasks,
        factors={"mine": made, "other": other},
        heldout_tokens=heldout,
        controls=("random_b",),
        random_b_seeds=2,
        ablation=("mean", "zero"),
        positions=["scoring", "all"],
    )
    assert [(r.surface, r.method) for r in finished.replacements] == [("last", "mine"), ("blocks.0.attn_o", "other")]
    assert finished.replacements[0].fidelity == run.replacements[1].fidelity
    comparison = finished.comparisons["last"]
    assert comparison.methods == {"mine": ("mine",), "Random-B": ("Random-B/0", "Random-B/1")}
    assert list(comparison.under_each()) == [("scoring", "mean"), ("scoring", "zero"), ("all", "mean"), ("all", "zero")]
    for positions, ablation in (("scoring", "zero"), ("all", "mean")):
        curve = comparison.under_each()[positions, ablation]["ioi"].curves["mine"]
        scores = swd.attribute(default_model, made, tasks[0], positions=positions)
        assert curve.rows.equals(swd.evaluate(default_model, made, tasks[0], scores, ablation=ablation).rows)
    assert (
        comparison["ioi"]
        .curves["mine"]
        .rows.equals(run.comparisons["blocks.3.mlp_out"]["ioi"].curves["SWD s=0.75"].rows)
    )
    assert finished.settings["ablation"] == ["mean", "zero"] and finished.settings["factors"] == ["mine", "other"]
    assert "solver spec" not in finished.settings
    finished.save(tmp_path)
    loaded = swd.study.Run.load(tmp_path)
    assert loaded.circuit_table().equals(finished.circuit_table()) and len(loaded.circuit_table()) == 2 * 2 * 2 * 4
    assert loaded.fidelity_table().equals(finished.fidelity_table())


def test_factors_that_do_not_fit_are_refused_before_any_work(default_model, tasks, run):
    made, steps = run.replacements[0].factors, []
    data = {"heldout_tokens": swd.text_tokens(256, split="test"), "on_step": steps.append}
    site = "blocks.3.mlp_out"
    with pytest.raises(ValueError, match="names of other methods of the study: 'SVD'"):
        swd.run_study(default_model, {}, tasks, factors={"SVD": made}, **data)
    with pytest.raises(ValueError, match=r"no factors were given for blocks\.0\.mlp_out"):
        swd.run_study(default_model, {"first": "blocks.0.mlp_out"}, tasks, factors={"mine": made}, **data)
    with pytest.raises(ValueError, match="random_b_seeds is 0"):
        swd.run_study(default_model, {}, tasks, factors={"mine": made}, random_b_seeds=0, **data)
    with pytest.raises(swd.AttachError):
        f = made[site]
        wrong = swd.FactorSet({site: replace(f, provenance={**f.provenance, "weight_sha256": "0" * 64})})
        swd.run_study(default_model, {}, tasks, factors={"mine": wrong}, **data)
    assert steps == []


def test_what_it_refuses(default_model, tasks):
    data = {"calibration_tokens": None, "heldout_tokens": swd.text_tokens(256, split="test")}
    for surfaces, chosen, sparsities in (({}, tasks, (0.5,)), (SURFACES, [], (0.5,)), (SURFACES, tasks, ())):
        with pytest.raises(ValueError, match="at least one surface, one task and one sparsity"):
            swd.run_study(default_model, surfaces, chosen, sparsities=sparsities, **data)
    with pytest.raises(ValueError, match="no control 'pca'; there are neurons, svd, random_b"):
        swd.run_study(default_model, SURFACES, tasks, sparsities=(0.5,), controls=["svd", "pca"], **data)
    steps = []
    with pytest.raises(swd.UnknownSiteError):
        wrong = {"good": "blocks.0.mlp_out", "bad": "blocks.7.mlp_out"}
        swd.run_study(default_model, wrong, tasks, sparsities=(0.5,), on_step=steps.append, **data)
    assert steps == []  # refused before any work
