"""An audit's tables and units; nothing depends on labels."""

import pytest

from swd_lens.analysis.audit import logit_effect
from tests.micro import random_tokens


def test_logit_effects_of_many_are_those_of_each(model, factors, found):
    for profile in found.profiles():
        alone = logit_effect(model, factors, (profile.site, profile.index), random_tokens(9, 8))
        assert [t for t, _ in profile.logits.promoted] == [t for t, _ in alone.promoted]
        assert dict(profile.logits.suppressed) == pytest.approx(dict(alone.suppressed), abs=1e-6)


def test_rank_table_by_hand(found):
    scores = found.scores["a task"]
    table = found.rank_table("a task", per_layer=2)
    assert list(table.columns) == ["layer", "unit", "layer order", "global rank", "score", "label"]
    assert list(table["layer"]) == [0, 0, 1, 1] and list(table["layer order"]) == [1, 2, 1, 2]
    ranking = [f"{site}/{unit}" for site, unit in scores.ranking()]
    for layer in (0, 1):
        of_layer = [unit for unit in ranking if unit.startswith(f"blocks.{layer}.")][:2]
        rows = table[table["layer"] == layer]
        assert list(rows["unit"]) == of_layer
        assert list(rows["global rank"]) == [ranking.index(unit) + 1 for unit in of_layer]
    assert list(found.rank_table("a task", per_layer=1, layers=[1])["layer"]) == [1]
    profile = found.unit(table["unit"][0])
    assert (profile.tasks["a task"].rank, profile.tasks["a task"].of) == (table["global rank"][0], scores.n_units)
    assert profile.tasks["a task"].score == table["score"][0]
    with pytest.raises(ValueError, match="name one of the audit's tasks, a task, another; got None"):
        found.rank_table()


def test_labels_change_no_ranking(found):
    best = found.rank_table("a task")["unit"]
    labelled = found.with_labels({unit: f"label {i}" for i, unit in enumerate(best)})
    before, after = found.rank_table("a task"), labelled.rank_table("a task")
    assert before.drop(columns="label").equals(after.drop(columns="label"))
    assert list(after["label"]) == [f"label {i}" for i in range(len(best))]
    assert "label 0" in repr(labelled.unit(best[0])) and "label 0" in labelled.unit(best[0])._repr_html_()


def test_tables_and_excerpts(found):
    table = found.table()
    assert len(table) == len(found) == 48 and {"a task rank", "another rank", "top token"} <= set(table.columns)
    excerpts = found.excerpts(["blocks.0.mlp_out/2"], n=2, around=1)
    first = found.unit("blocks.0.mlp_out/2").contexts[0]
    part = "".join(first.tokens[max(0, first.peak - 1) : first.peak])
    expected = f"“{part}«{first.tokens[first.peak]}»" + "".join(first.tokens[first.peak + 1 : first.peak + 2])
    assert excerpts["excerpts"][0].startswith(expected) and excerpts["excerpts"][0].count("«") == 2
    assert len(found.excerpts(task="another", per_layer=1)) == 2
