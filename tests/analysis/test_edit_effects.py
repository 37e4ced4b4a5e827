"""What edits do elsewhere, methods against each other, and the choice of a unit; on the toy model, against plain forwards."""

from contextlib import ExitStack
from dataclasses import replace

import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.edit import EditComparison, compare_edits, edit_unit, select_edit_unit, side_effects
from swd_lens.analysis.edit.effects import measure
from swd_lens.analysis.edit.target import find_target
from swd_lens.base.divergence import kl_per_prediction
from swd_lens.base.errors import AttachError, EditError
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import parse_unit
from swd_lens.units import attach
from swd_lens.units.factors import Factors, FactorSet
from tests.hosts.test_interrupts import everything
from tests.micro import identity_factors, micro_model, random_split, random_tokens, toy_model

PROMPT, OTHERS, TEXT = random_tokens(1, 6)[0], list(random_tokens(5, 7, seed=3)), random_tokens(7, 9, seed=4)
OTHERS = [*OTHERS[:3], OTHERS[3][:4], OTHERS[4][:4]]  # of two lengths


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def factors(model):
    return baselines.svd(model, ["mlp_out", "attn_o"])


def kl(before, after):
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("base", ["dense", "replacement"])
@pytest.mark.parametrize("name", ["blocks.0.attn_o", "blocks.1.mlp_out"])
def test_side_effects_are_those_of_plain_forwards(model, factors, name, base):
    edit = edit_unit(model, factors, f"{name}/1", PROMPT, 3, 5, 2, base=base)
    before = everything(model)
    found = side_effects(model, edit, OTHERS, TEXT, batch_size=2)
    assert everything(model) == before
    runs = []
    for applied in (attach(model, factors) if base == "replacement" else torch.no_grad(), edit):
        with applied, torch.no_grad():
            runs.append(([model(p[None])[0, -1] for p in (PROMPT, *OTHERS)], model(TEXT)[:, :-1]))
    (prompts, text), (edited, edited_text) = runs
    assert found.margin_before == pytest.approx(float(prompts[0][3] - prompts[0][5]), abs=1e-5)
    assert found.margin_after == pytest.approx(float(edited[0][3] - edited[0][5]), abs=1e-5)
    expected = [float(kl(p, q)) for p, q in zip(prompts[1:], edited[1:], strict=True)]
    assert min(expected) > 1e-5 and found.kl_prompts == pytest.approx(expected, rel=1e-3)
    assert found.mean_kl == pytest.approx(sum(expected) / 5, rel=1e-3)
    assert found.kl_text == pytest.approx(float(kl(text, edited_text).mean()), rel=1e-3) and found.n_predictions == 56
    assert found.per_prompt()["KL"].is_monotonic_decreasing and found.table()["margin change"][0] == found.change
    assert found.settings["n_prompts"] == 5 and found.settings["unit"] == f"{name}/1"


def test_text_may_be_a_stream_and_batches_do_not_matter(model, factors):
    edit = edit_unit(model, factors, "blocks.0.mlp_out/1", PROMPT, 3, 5, 2)
    stream = swd.TokenStream(lambda: iter(TEXT), n_rows=7)
    found = [
        side_effects(model, edit, tokens=tokens, batch_size=size).kl_text
        for tokens, size in ((TEXT, 7), (TEXT, 2), (stream, 3))
    ]
    assert found[0] > 0 and found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)
    assert side_effects(model, edit, OTHERS).kl_text is None
    with pytest.raises(swd.TokenError, match="at least two tokens"):
        side_effects(model, edit, tokens=TEXT[:, :1])


def test_what_enters_the_edited_block_is_run_once_for_before_and_all_edits(model, factors):
    """Text of a batch: block 0 once, for an edit of block 1; and a few tokens twice, to see whether runs may start there."""
    edits = [edit_unit(model, factors, "blocks.1.mlp_out/1", PROMPT, 3, 5, shift) for shift in (1, 2, 3)]
    rows = {0: [], 1: []}
    with ExitStack() as stack:
        for layer, seen in rows.items():
            hook = model.blocks[layer].register_forward_hook(lambda *a, seen=seen: seen.append(len(a[1][0])))
            stack.callback(hook.remove)
        measured = measure(model, edits, (), TEXT, batch_size=7)
    assert [row.kl_text > 0 for row in measured] == [True] * 3
    of_text = {layer: seen.count(7) for layer, seen in rows.items()}
    assert of_text == {0: 1, 1: 4}


def test_no_shift_changes_nothing(model, factors):
    edit = edit_unit(model, factors, "blocks.0.mlp_out/1", PROMPT, 3, 5, 0)
    found = side_effects(model, edit, OTHERS, TEXT)
    assert found.change == 0 and set(found.kl_prompts) == {0.0} and found.kl_text == 0


def test_the_figure_has_a_bar_for_every_prompt(model, factors):
    effects = side_effects(model, edit_unit(model, factors, "blocks.0.mlp_out/1", PROMPT, 3, 5, 2), OTHERS)
    (ax,) = effects.plot().axes
    assert [bar.get_width() for bar in ax.patches] == list(effects.per_prompt()["KL"])
    assert len(ax.get_yticklabels()) == len(OTHERS) and "margin" in ax.get_title(loc="left")
    assert f"KL on {len(OTHERS)} other prompts {effects.mean_kl:.2g})" in repr(effects)
    several_lines = replace(effects, prompts=("one\ntwo", *effects.prompts[1:]))
    names = {name.get_text() for name in several_lines.plot().axes[0].get_yticklabels()}
    assert "one↵two" in names and not any("\n" in name for name in names)


def test_an_applied_edit_cannot_be_measured(model, factors):
    edit = edit_unit(model, factors, "blocks.0.mlp_out/1", PROMPT, 3, 5, 1)
    with edit, pytest.raises(EditError, match=r"another W .* \(or this one\) is applied already"):
        side_effects(model, edit, OTHERS)
    with pytest.raises(EditError, match="prompts must be a list, got the one text 'ab'"):
        side_effects(model, edit, "ab")


def test_divergence_by_hand(monkeypatch):
    """KL((1/2, 1/2) || (1/4, 3/4)) = (ln 2 + ln (2/3)) / 2, and 0 of a distribution and itself."""
    p, q = torch.tensor([[1.0, 1.0], [5.0, 2.0]]).log(), torch.tensor([[1.0, 3.0], [5.0, 2.0]]).log()
    by_hand = float(torch.tensor([2.0, 2 / 3]).log().sum() / 2)
    assert kl_per_prediction(p, q).tolist() == pytest.approx([by_hand, 0.0], abs=1e-7)
    monkeypatch.setattr("swd_lens.base.divergence.CHUNK_BYTES", 8 * 5 * 256)  # three chunks
    many = torch.randn(600, 5, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(kl_per_prediction(many, many.flip(0)), kl(many, many.flip(0)), atol=1e-12)


# ---------------------------------------------------------------------------------------------- comparison


@pytest.fixture(scope="module")
def comparison(model, factors):
    return compare_edits(
        model, factors, "blocks.1.mlp_out/1", PROMPT, 3, 5, other_prompts=OTHERS, tokens=TEXT, shifts=(-1, 0, 1),
        progress=False,
    )  # fmt: skip


def test_every_method_at_every_shift(model, comparison):
    rows = comparison.table()
    assert rows["method"].tolist() == [m for m in ("unit", "random", "oracle", "lora") for _ in range(3)]
    assert rows["requested shift"].tolist() == [-1, 0, 1] * 4 and next(iter(comparison.edits)) == ("unit", -1.0)
    calibrated = rows[rows["method"] != "lora"]
    assert calibrated["h* dW d"].tolist() == pytest.approx([-1, 0, 1] * 3, abs=1e-6)
    trained = rows[rows["method"] == "lora"]
    assert trained["margin change"].tolist() == pytest.approx([-1, 0, 1], abs=0.02)
    # Behind the last block only h* matters: equal calibration, equal change of the final margin.
    assert calibrated["margin change"].tolist() == pytest.approx(calibrated["margin change"].tolist()[:3] * 3, abs=1e-4)
    assert rows["unit"].nunique() == 3 and (rows[rows["requested shift"] == 0]["KL other prompts"] == 0).all()
    edit = comparison.edits["oracle", 1.0]
    alone = side_effects(model, edit, OTHERS, TEXT)
    row = rows[(rows["method"] == "oracle") & (rows["requested shift"] == 1)].iloc[0]
    assert row["KL other prompts"] == pytest.approx(alone.mean_kl, rel=1e-6)
    assert row["KL text"] == pytest.approx(alone.kl_text, rel=1e-6)
    assert comparison.settings["random_seed"] == 17 and comparison.settings["n_text_predictions"] == 56


def test_cost_at_interpolates_the_root_of_kl(comparison):
    """KL 0.04 at a change of 2 and 0.16 at 4: the root is 0.3 at 3, so KL 0.09; below 2 it goes to 0 as the square."""
    rows = pd.DataFrame(
        {
            "method": ["a", "a", "b"],
            "unit": ["", "", ""],
            "margin change": [4.0, 2.0, -2.0],
            "KL other prompts": [0.16, 0.04, 0.01],
        }
    )
    by_hand = EditComparison(rows, {}, comparison.target, (), {})
    for change, a, b in ((3, 0.09, None), (1, 0.01, None), (-1, None, 0.0025), (5, None, None)):
        costs = by_hand.cost_at(change).set_index("method")["KL other prompts"]
        for method, cost in (("a", a), ("b", b)):
            assert pd.isna(costs[method]) if cost is None else costs[method] == pytest.approx(cost)
    with pytest.raises(EditError, match="a change other than 0"):
        comparison.cost_at(0)
    with pytest.raises(EditError, match="'KL'"):
        comparison.cost_at(1, of="KL")


def test_the_pareto_figure(comparison):
    figure = comparison.plot()
    ax = figure.axes[0]
    lines = {line.get_label(): line for line in ax.get_lines() if line.get_marker() != "None"}
    assert list(lines) == [
        "unit blocks.1.mlp_out/1",
        f"random unit {comparison.rows['unit'][3]}",
        "oracle (dense, rank one)",
        "LoRA, rank 4",
    ]
    line = lines["unit blocks.1.mlp_out/1"]
    assert list(line.get_ydata()) == comparison.rows["margin change"].tolist()[:3]
    assert list(line.get_xdata()) == comparison.rows["KL other prompts"].tolist()[:3]
    assert ax.get_xscale() == "symlog" and ax.get_xticks()[0] == 0 and ax.get_xlim()[0] < 0
    assert {text.get_text() for text in ax.texts} == {"-1", "+1"}
    assert "<svg" in comparison._repr_html_() and comparison.plot("KL text").axes[0].get_xlabel().endswith("(nats)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"other_prompts": []}, "at least one prompt"),
        ({"methods": ("unit", "magic")}, "methods must be some of"),
        ({"shifts": ()}, "shifts must be different numbers"),
        ({"shifts": (1, 1.0)}, "shifts must be different numbers"),
        ({"shifts": (1, float("inf"))}, "a shift must be a finite number"),
        ({"unit": "blocks.1.mlp_out/77"}, "has 16 units"),
    ],
)
def test_comparison_errors(model, factors, changes, message):
    given = {"unit": "blocks.1.mlp_out/1", "other_prompts": OTHERS, "progress": False} | changes
    with pytest.raises(EditError, match=message):
        compare_edits(model, factors, given.pop("unit"), PROMPT, 3, 5, **given)


def test_one_sites_units_attached(model, factors):
    with attach(model, {"blocks.1.mlp_out": factors["blocks.1.mlp_out"]}), pytest.raises(AttachError, match="attached"):
        compare_edits(model, factors, "blocks.1.mlp_out/1", PROMPT, 3, 5, other_prompts=OTHERS)


# ---------------------------------------------------------------------------------------------- choosing a unit


def test_selection_by_hand():
    """z = h* = (4, 6), d = (-1, 1): B . d is 1 for both rows of W, so unit 1 contributes 6 and unit 0 contributes 4."""
    found = select_edit_unit(micro_model(), identity_factors(), [(torch.tensor([0, 2]), 1, 0)])
    rows = found.table()
    assert rows["unit"].tolist() == ["blocks.0.mlp_out/1", "blocks.0.mlp_out/0"]
    assert rows["contribution"].tolist() == [6, 4] and rows["alignment"].tolist() == [1, 1]
    assert rows["selection"].tolist() == pytest.approx([1, 2 / 3])
    # The other way round nothing writes towards the answer.
    with pytest.raises(EditError, match="no unit is active and writes towards the answer"):
        select_edit_unit(micro_model(), identity_factors(), [(torch.tensor([0, 2]), 0, 1)])


def test_selection_with_scores_and_text(model, factors):
    cases = [(PROMPT, 3, 5), (OTHERS[0], 7, 2)]
    surface = FactorSet({name: f for name, f in factors.items() if name.endswith("mlp_out")}, factors.provenance)
    scores = swd.attribute(model, surface, random_split())
    found = select_edit_unit(model, surface, cases, scores=scores, tokens=TEXT, top=5)
    rows = found.table()
    assert len(rows) == 10 and (rows[["z", "alignment"]] > 0).all(axis=None)
    with torch.no_grad():
        _, cache = model.run_with_cache(TEXT)
    for _, row in rows.iterrows():
        site, index = parse_unit(row["unit"])
        case = next(case for case in cases if torch.equal(case[0], row["prompt"]))
        target = find_target(model, find_sites(model, site)[0], *case)
        f = surface[site]
        assert row["z"] == pytest.approx(float(target.input @ f.read[:, index]), rel=1e-4)
        assert row["alignment"] == pytest.approx(float(f.write[index] @ target.direction), rel=1e-4)
        z = cache[f"blocks.{site[7]}.mlp.hook_post"] @ f.read[:, index]
        assert row["rms z"] == pytest.approx(float(z.square().mean().sqrt()), rel=1e-4)
        importance = float(scores.scores[site][index]) / max(float(s.max()) for s in scores.scores.values())
        importance = (importance + 1 - (int(scores.ranks()[site][index]) - 1) / 32) / 2
        wanted = (
            row["strength"] * importance * (row["z"] / row["rms z"]) ** 2 / ((rows["z"] / rows["rms z"]) ** 2).max()
        )
        assert row["selection"] == pytest.approx(wanted, rel=1e-5)
    assert rows["selection"].is_monotonic_decreasing
    edit = edit_unit(model, surface, **found.best, shift=1)
    assert edit.settings["unit"] == rows["unit"][0] and edit.target.answer_id in (3, 7)
    assert len(found.plot().axes[0].collections) == 3  # two prompts, and a ring around the best


def test_cases_that_share_a_prompt_or_come_as_lists(model, factors):
    """The largest contribution of each case has strength 1, and each case has its own colour."""
    ids = PROMPT.tolist()
    found = select_edit_unit(model, factors, [(ids, 3, 5), (ids, 7, 5), (ids[:4], 3, 5)], top=4)
    rows = found.table()
    cases = rows.groupby([rows["prompt"].map(len), rows["answer"]])
    assert cases["strength"].max().tolist() == [1.0, 1.0, 1.0] and len(rows) == 12
    assert len(set(cases["contribution"].max().tolist())) == 3
    assert len(found.plot().axes[0].collections) == 4  # three cases, and a ring


def test_scores_below_zero_count_for_nothing(model, factors):
    scores = swd.attribute(model, factors, random_split())
    below = replace(scores, scores={site: -s.abs() - 1 for site, s in scores.scores.items()})
    rows = select_edit_unit(model, factors, [(PROMPT, 3, 5)], scores=below).table()
    assert rows["importance"].tolist() == pytest.approx(((1 - (rows["rank"] - 1) / below.n_units) / 2).tolist())


def test_scores_of_other_factors_are_refused(model, factors):
    other = FactorSet({name: replace(f, read=f.read * 2, write=f.write / 2) for name, f in factors.items()})
    scores = swd.attribute(model, other, random_split())
    with pytest.raises(
        EditError, match=r"the scores were made with other factors of blocks\.0\.attn_o, .* attribute these"
    ):
        select_edit_unit(model, factors, [(PROMPT, 3, 5)], scores=scores)


def test_selection_errors(model, factors):
    with pytest.raises(EditError, match=r"these factors hold blocks\.0\.mlp_in: no site writes to the residual stream"):
        select_edit_unit(model, baselines.svd(model, "blocks.0.mlp_in"), [(PROMPT, 3, 5)])
    for cases in ([], [(PROMPT, 3)]):
        with pytest.raises(EditError, match=r"a list of \(prompt, answer, foil\) triples"):
            select_edit_unit(model, factors, cases)
    scores = swd.attribute(model, {"blocks.0.mlp_out": factors["blocks.0.mlp_out"]}, random_split())
    with pytest.raises(EditError, match=r"the scores cover 0 units of blocks\.0\.attn_o, these factors have 16"):
        select_edit_unit(model, factors, [(PROMPT, 3, 5)], scores=scores)


def test_only_factors_can_be_edited(model):
    class Coder:
        def encode(self, h):
            return h

        def decode(self, z):
            return z

    with pytest.raises(EditError, match=r"an edit takes Factors; blocks\.0\.mlp_out holds a Coder"):
        edit_unit(model, {"blocks.0.mlp_out": Coder()}, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1)
    alone = Factors(torch.eye(32), torch.randn(32, 16))
    with pytest.raises(AttachError, match="does not know its site"):
        edit_unit(model, alone, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1)
