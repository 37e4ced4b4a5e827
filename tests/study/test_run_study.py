"""run_study on the embedded model, small: what it refuses, what it holds, and which units it shows."""

import json
from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens.base.files import plain
from swd_lens.report.page import render_report
from swd_lens.report.plots import looks_of
from swd_lens.report.wording import headline

pytestmark = pytest.mark.usefixtures("few_alternations")

SURFACES = {"blocks.3.mlp_out": "blocks.3.mlp_out", "attn_o": "blocks.3.attn_o"}


def studied(model, surfaces, tasks, **changed):
    """A small study, calibrated on a thousand tokens and judged on half of that."""
    texts = {"calibration_tokens": swd.text_tokens(1024, split="train"), "heldout_tokens": swd.text_tokens(512, split="test")}
    return swd.run_study(model, surfaces, tasks, **{"outer_iterations": 4, **texts, **changed})


@pytest.fixture(scope="module")
def run(default_model, few_alternations, tasks):
    return studied(default_model, SURFACES, tasks, sparsities=(0.5, 0.75))


def test_every_surface_method_and_task_is_there(run):
    solved = [f"{name} s={s}" for name in ("SWD", "SWD (paper)", "Neurons pruned") for s in (0.5, 0.75)]
    methods = [*solved, "neurons", "SVD"]
    assert [(r.surface, r.method) for r in run.replacements] == [(s, m) for s in SURFACES for m in methods]
    assert run.fidelity_table()["method"].tolist() == methods * 2
    assert len(run.circuit_table()) == 2 * 2 * 8
    as_json = json.loads(json.dumps(plain(run.as_dict()), allow_nan=False))
    assert len(as_json["circuits"]) == 32
    assert as_json["settings"]["controls"] == ["neurons", "svd", "pruned", "paper"]
    assert as_json["settings"]["tasks"]["ioi"]["example"].endswith("to")
    assert as_json["settings"]["solver"] == {"preset": "best", "outer_iterations": 4}


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


@pytest.mark.slow
def test_factors_may_be_made_on_the_same_model_in_float64_from_a_stream(default_model, tasks):
    """The same factors as of the rows at once, and the number of tokens is known."""
    rows, site = swd.text_tokens(1024, split="train"), "blocks.[01].attn_o"
    exact = swd.load_default_model(dtype=torch.float64)
    how = {"sparsities": (0.5,), "controls": (), "cards_per_task": 0, "calibration_model": exact}
    stream = swd.TokenStream(lambda: iter(rows), len(rows))
    run = studied(default_model, {"attn_o": site}, tasks[:1], calibration_tokens=stream, **how)
    assert run.settings["calibration dtype"] == "float64" and run.settings["calibration tokens"] == rows.numel()
    made = run.replacements[0].factors
    alone = swd.factorize(exact, site, sparsity=0.5, tokens=rows, outer_iterations=4, progress=False)
    for site in alone:
        assert torch.equal(made[site].read, alone[site].read) and torch.equal(made[site].write, alone[site].write)
    # Measured on the model itself: what `fidelity` finds there, to the bit.
    assert run.replacements[0].fidelity == swd.fidelity(default_model, alone, swd.text_tokens(512, split="test"))


@pytest.mark.slow
def test_finished_factors_are_a_method_of_their_surface(default_model, tasks, run, tmp_path):
    """Nothing is solved: the numbers are those of the run that made the factors. Factors of another surface bring it along."""
    made = run.replacements[1].factors
    other = swd.factorize(default_model, "blocks.0.attn_o", sparsity=0.5, outer_iterations=4, progress=False)
    how = {"controls": ("random_b",), "random_b_seeds": 2, "ablation": ("mean", "zero"), "positions": ["scoring", "all"]}
    how |= {"factors": {"mine": made, "other": other}, "heldout_tokens": swd.text_tokens(512, split="test")}
    finished = swd.run_study(default_model, {"last": "blocks.3.mlp_out"}, tasks[:1], **how)
    assert [(r.surface, r.method) for r in finished.replacements] == [("last", "mine"), ("blocks.0.attn_o", "other")]
    assert finished.replacements[0].fidelity == run.replacements[1].fidelity
    comparison = finished.comparisons["last"]
    assert comparison.methods == {"mine": ("mine",), "Random-B": ("Random-B/0", "Random-B/1")}
    assert list(comparison.under_each()) == [("scoring", "mean"), ("scoring", "zero"), ("all", "mean"), ("all", "zero")]
    for positions, ablation in (("scoring", "zero"), ("all", "mean")):
        curve = comparison.under_each()[positions, ablation]["ioi"].curves["mine"]
        scores = swd.attribute(default_model, made, tasks[0], positions=positions)
        assert curve.rows.equals(swd.evaluate(default_model, made, tasks[0], scores, ablation=ablation).rows)
    assert comparison["ioi"].curves["mine"].rows.equals(run.comparisons["blocks.3.mlp_out"]["ioi"].curves["SWD s=0.75"].rows)
    assert finished.settings["ablation"] == ["mean", "zero"] and finished.settings["factors"] == ["mine", "other"]
    assert "solver spec" not in finished.settings
    finished.save(tmp_path)
    loaded = swd.study.Run.load(tmp_path)
    assert loaded.circuit_table().equals(finished.circuit_table()) and len(loaded.circuit_table()) == 2 * 2 * 4


@pytest.mark.slow
def test_pruned_controls_are_made_at_every_sparsity(default_model, tasks, run, tmp_path):
    """The same calibration, the same budget, and none of the solver's own options; SWD stays what the run is about."""
    site, rows = "blocks.3.mlp_out", swd.text_tokens(1024, split="train")
    how = {"sparsities": (0.5, 0.75), "controls": ("svd_pruned", "pruned", "neurons"), "batch_size": 8}
    with_pruned = studied(default_model, {site: site}, tasks[1:], **how)
    by_method = {r.method: r for r in with_pruned.replacements}
    pruned = [f"{name} s={s}" for name in ("Neurons pruned", "SVD pruned") for s in (0.5, 0.75)]
    assert list(by_method) == ["SWD s=0.5", "SWD s=0.75", *pruned, "neurons"]
    assert [m for m, r in by_method.items() if r.control] == [*pruned, "neurons"]
    makers = {"Neurons pruned": swd.baselines.pruned, "SVD pruned": swd.baselines.svd_pruned}
    for name, make in makers.items():
        alone = make(default_model, site, sparsity=0.75, tokens=rows, batch_size=8, progress=False)[site]
        made = by_method[f"{name} s=0.75"].factors[site]
        assert torch.equal(made.read, alone.read) and torch.equal(made.write, alone.write)
        k = int(0.25 * alone.d_in * alone.d_out)
        assert k - 1 <= made.edges <= k and made.settings["preset"] == alone.settings["preset"]
    assert with_pruned.sparsest(site).method == "SWD s=0.75"
    # What is beside SWD changes nothing of it.
    assert by_method["SWD s=0.5"].fidelity.ce == pytest.approx(run.replacements[0].fidelity.ce, abs=1e-6)
    assert list(with_pruned.comparisons[site]["gendered_pronoun"].curves) == list(by_method)
    assert with_pruned.comparisons[site].reference == "SWD s=0.5"
    # Of the headline's controls those of the subject's own sparsity.
    sentences = " ".join(headline(with_pruned))
    assert "SVD pruned s=0.75" in sentences and "Neurons pruned s=0.75" in sentences and "pruned s=0.5" not in sentences
    page = render_report(with_pruned)
    assert "singular vectors" in page and "SVD pruned s=0.5" in page

    with_pruned.save(tmp_path)
    loaded = swd.study.Run.load(tmp_path)
    assert [(r.role, r.exact) for r in loaded.replacements] == [(r.role, r.exact) for r in with_pruned.replacements]
    assert headline(loaded) == headline(with_pruned) and looks_of(loaded) == looks_of(with_pruned)


@pytest.mark.slow
def test_the_papers_swd_is_a_control(default_model, run):
    """By the paper's solver with the paper's settings, whatever the study's are, from the same text; SWD stays the subject."""
    for surface in SURFACES:
        sites = run.settings["surfaces"][surface]
        how = {"tokens": swd.text_tokens(1024, split="train"), "precision": "auto", "progress": False}
        alone = swd.factorize(default_model, sites, sparsity=0.75, preset="paper", **how)
        (made,) = (r for r in run.replacements if (r.surface, r.method) == (surface, "SWD (paper) s=0.75"))
        assert made.role == "paper" and made.control and not made.exact
        for site in sites:
            assert torch.equal(made.factors[site].read, alone[site].read)
            assert torch.equal(made.factors[site].write, alone[site].write)
            # The same supports on any machine, as SWD's; a number of iterations for SWD is none for the paper's.
            settings = made.factors[site].settings
            assert (settings["preset"], settings["precision"], settings["outer_iterations"]) == ("paper", "float64", 5)
        assert run.sparsest(surface).method == "SWD s=0.75"
        assert run.comparisons[surface].reference == "SWD s=0.5"
    assert [r.method for r in run.replacements if r.role == "paper"] == ["SWD (paper) s=0.5", "SWD (paper) s=0.75"] * 2
    sentences = " ".join(headline(run))
    assert "SWD s=0.75 needs" in sentences and "than SWD (paper) s=0.75" in sentences
    assert "(paper) s=0.5" not in sentences
    page = render_report(run)
    assert "By the paper&#39;s own solver" in page or "By the paper's own solver" in page


def test_controls_that_need_a_sparsity_are_left_out_where_there_is_none(default_model, tasks, run):
    how = {"heldout_tokens": swd.text_tokens(512, split="test"), "cards_per_task": 0}
    finished = swd.run_study(default_model, {}, tasks[1:], factors={"mine": run.replacements[0].factors}, **how)
    assert [r.method for r in finished.replacements] == ["mine", "neurons", "SVD"]
    assert finished.settings["controls"] == ["neurons", "svd"]


def test_factors_that_do_not_fit_are_refused_before_any_work(default_model, tasks, run):
    made, steps = run.replacements[0].factors, []
    data = {"heldout_tokens": swd.text_tokens(256, split="test"), "on_step": steps.append}
    site = "blocks.3.mlp_out"
    with pytest.raises(ValueError, match="names of other methods of the study: 'SVD'"):
        swd.run_study(default_model, {}, tasks, factors={"SVD": made}, **data)
    with pytest.raises(ValueError, match=r"names of other methods of the study: 'SVD pruned s=0\.5'"):
        taken = {"SVD pruned s=0.5": made}
        swd.run_study(default_model, {}, tasks, factors=taken, sparsities=(0.5,), calibration_tokens=None, **data)
    with pytest.raises(ValueError, match="controls svd_pruned are made at the sparsities of the study, which has none"):
        swd.run_study(default_model, {}, tasks, factors={"mine": made}, controls=("svd", "svd_pruned"), **data)
    with pytest.raises(ValueError, match=r"no factors were given for blocks\.0\.mlp_out"):
        swd.run_study(default_model, {"first": "blocks.0.mlp_out"}, tasks, factors={"mine": made}, **data)
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
    known = "neurons, svd, svd_whitened, svd_causal, pruned, svd_pruned, paper, random_b"
    with pytest.raises(ValueError, match=f"no control 'pca'; there are {known}"):
        swd.run_study(default_model, SURFACES, tasks, sparsities=(0.5,), controls=["svd", "pca"], **data)
    steps = []
    with pytest.raises(swd.UnknownSiteError):
        wrong = {"good": "blocks.0.mlp_out", "bad": "blocks.7.mlp_out"}
        swd.run_study(default_model, wrong, tasks, sparsities=(0.5,), on_step=steps.append, **data)
    assert steps == []  # refused before any work
