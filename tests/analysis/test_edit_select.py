"""The choice of a unit to edit through."""

from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.edit import edit_unit, select_edit_unit
from swd_lens.analysis.edit.target import find_target
from swd_lens.base.errors import EditError
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import parse_unit
from swd_lens.units.factors import FactorSet
from tests.analysis.edit_checks import OTHERS, PROMPT, TEXT
from tests.micro import identity_factors, micro_model, random_split
from tests.refusals import refuses


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


def test_selection_with_scores_and_text(model, exact):
    cases = [(PROMPT, 3, 5), (OTHERS[0], 7, 2)]
    surface = FactorSet({name: f for name, f in exact.items() if name.endswith("mlp_out")}, exact.provenance)
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
        wanted = row["strength"] * importance * (row["z"] / row["rms z"]) ** 2 / ((rows["z"] / rows["rms z"]) ** 2).max()
        assert row["selection"] == pytest.approx(wanted, rel=1e-5)
    assert rows["selection"].is_monotonic_decreasing
    edit = edit_unit(model, surface, **found.best, shift=1)
    assert edit.settings["unit"] == rows["unit"][0] and edit.target.answer_id in (3, 7)
    assert len(found.plot().axes[0].collections) == 3  # two prompts, and a ring around the best


def test_cases_that_share_a_prompt_or_come_as_lists(model, exact):
    """The largest contribution of each case has strength 1, and each case has its own colour."""
    ids = PROMPT.tolist()
    found = select_edit_unit(model, exact, [(ids, 3, 5), (ids, 7, 5), (ids[:4], 3, 5)], top=4)
    rows = found.table()
    cases = rows.groupby([rows["prompt"].map(len), rows["answer"]])
    assert cases["strength"].max().tolist() == [1.0, 1.0, 1.0] and len(rows) == 12
    assert len(set(cases["contribution"].max().tolist())) == 3
    assert len(found.plot().axes[0].collections) == 4  # three cases, and a ring


def test_scores_below_zero_count_for_nothing(model, exact):
    scores = swd.attribute(model, exact, random_split())
    below = replace(scores, scores={site: -s.abs() - 1 for site, s in scores.scores.items()})
    rows = select_edit_unit(model, exact, [(PROMPT, 3, 5)], scores=below).table()
    assert rows["importance"].tolist() == pytest.approx(((1 - (rows["rank"] - 1) / below.n_units) / 2).tolist())


def test_selection_errors(model, exact):
    with pytest.raises(EditError, match=r"these factors hold blocks\.0\.mlp_in: no site writes to the residual stream"):
        select_edit_unit(model, baselines.svd(model, "blocks.0.mlp_in"), [(PROMPT, 3, 5)])
    for cases in ([], [(PROMPT, 3)]):
        refuses(EditError, r"a list of \(prompt, answer, foil\) triples", select_edit_unit, model, exact, cases)
    other = FactorSet({name: replace(f, read=f.read * 2, write=f.write / 2) for name, f in exact.items()})
    scores = swd.attribute(model, other, random_split())
    fewer = replace(scores, scores={"blocks.0.mlp_out": scores.scores["blocks.0.mlp_out"]})
    for wrong, said in (
        (scores, r"the scores were made with other factors of blocks\.0\.attn_o, .* attribute these"),
        (fewer, r"the scores cover 0 units of blocks\.0\.attn_o, these factors have 16"),
    ):
        refuses(EditError, said, select_edit_unit, model, exact, [(PROMPT, 3, 5)], scores=wrong)
