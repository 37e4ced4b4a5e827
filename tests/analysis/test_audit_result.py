"""A unit's profile and the audit's tables: edges by name, neighbours, ranks, excerpts, figures; nothing depends on labels."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.audit import Context, audit, logit_effect
from swd_lens.analysis.audit.contexts import TokenNames
from swd_lens.analysis.audit.vectors import edges_of
from swd_lens.hosts.sites import Ends, Span
from tests.analysis.audit_models import lettered, made_scores, sparse_factors
from tests.micro import random_tokens


@pytest.fixture(scope="module")
def model():
    return lettered()


@pytest.fixture(scope="module")
def factors(model):
    return sparse_factors(model, "*_o*")  # attn_o and mlp_out


@pytest.fixture(scope="module")
def found(model, factors):
    scores = {"a task": made_scores(factors), "another": made_scores(factors, seed=1)}
    return audit(model, factors, random_tokens(9, 8), scores=scores, progress=False)


def test_edges_of_mlp_out_are_neurons_and_residual_dimensions(found, factors):
    profile, f = found.unit("blocks.1.mlp_out/5"), factors["blocks.1.mlp_out"]
    read, write = f.read[:, 5], f.write[5]
    assert profile.reads.n == int((read != 0).sum()) and profile.writes.n == int((write != 0).sum())
    order = read.abs().sort(descending=True, stable=True).indices[:10].tolist()
    assert profile.reads.strongest == tuple((f"neuron {i}", float(read[i])) for i in order)
    order = write.abs().sort(descending=True, stable=True).indices[: min(10, profile.writes.n)].tolist()
    assert profile.writes.strongest == tuple((f"residual {i}", float(write[i])) for i in order)
    assert profile.reads.heads == profile.writes.heads == {}


def test_edges_of_attn_o_are_read_head_by_head(found, factors):
    profile, read = found.unit("blocks.0.attn_o/3"), factors["blocks.0.attn_o"].read[:, 3]
    strongest = int(read.abs().argmax())
    assert profile.reads.strongest[0][0] == f"head {strongest // 8} / dim {strongest % 8}"
    share = float(read[:8].square().sum() / read.square().sum())
    assert profile.reads.heads == pytest.approx({"head 0": share, "head 1": 1 - share})


def test_a_unit_is_asked_for_by_name_pair_row_and_number(model, factors, found):
    whole = repr(found.unit("blocks.1.mlp_out/5"))
    row = found.table().query("unit == 'blocks.1.mlp_out/5'").iloc[0]
    for unit in (("blocks.1.mlp_out", 5), "blocks.1.mlp.W_out/5", row, found.unit("blocks.1.mlp_out/5")):
        assert repr(found.unit(unit)) == whole
    with pytest.raises(ValueError, match="unit 5 does not say of which site"):
        found.unit(5)
    one_site = audit(model, factors, random_tokens(9, 8), units="blocks.1.*mlp_out", progress=False)
    assert one_site.unit(5).unit == one_site.unit("mlp_out/5").unit == "blocks.1.mlp_out/5"
    two = audit(
        model, factors, random_tokens(9, 8), units=[("blocks.1.mlp_out", 5), "blocks.0.attn_o/3"], progress=False
    )
    assert two.units == ["blocks.0.attn_o/3", "blocks.1.mlp_out/5"]
    assert len(list(two.profiles(found.table().head(0)))) == 0
    assert two.with_labels({("blocks.1.mlp_out", 5): "a word"}).labels.text("blocks.1.mlp_out/5") == "a word"


def test_names_of_every_end():
    ends = Ends(n_heads=4, n_kv_heads=2, d_head=8, other_attention=frozenset({3}))
    spans = ends.written("blocks.0.attn_qkv", 64)
    assert [span.name for span in spans] == [
        *(f"Q head {i}" for i in range(4)), "K head 0", "K head 1", "V head 0", "V head 1"
    ]  # fmt: skip
    edges = edges_of(torch.eye(64)[43] * -2, spans)
    assert edges.strongest == (("K head 1 / dim 3", -2.0),) and edges.heads == {"K head 1": 1.0}
    assert [span.name for span in ends.written("blocks.0.attn_v", 16)] == ["V head 0", "V head 1"]
    assert ends.read("blocks.0.attn_qkv", 32) == [Span("residual", 0, 32)]
    assert ends.written("blocks.0.mlp_gate", 9) == [Span("neuron", 0, 9)]
    # Linear attention has heads of its own, and gated queries are twice as wide: no head is named there.
    assert ends.written("blocks.3.attn_qkv", 64) == [Span("output", 0, 64)]
    assert ends.written("blocks.0.attn_q", 64) == [Span("output", 0, 64)]
    assert ends.read("blocks.3.attn_o", 32) == [Span("input", 0, 32)]


def test_token_names_without_a_tokenizer_and_with_sentencepiece():
    class Pieces:
        def decode(self, ids):
            return ["Hi", "there"][ids[0]]

        def convert_ids_to_tokens(self, token):
            return ["Hi", "\u2581there"][token]

    class Host:
        tokenizer = Pieces()

    names = TokenNames(Host())
    assert (names(0), names(1)) == ("Hi", " there")
    assert TokenNames(object())(17) == "[17]"


def test_neighbours_by_write_cosine(found, factors):
    write = factors["blocks.0.mlp_out"].write
    cosine = torch.nn.functional.cosine_similarity(write[4][None], write)
    order = [i for i in cosine.abs().sort(descending=True, stable=True).indices.tolist() if i != 4][:6]
    expected = {f"blocks.0.mlp_out/{i}": float(cosine[i]) for i in order}
    similar = found.unit("blocks.0.mlp_out/4").similar
    assert [unit for unit, _ in similar] == list(expected) and dict(similar) == pytest.approx(expected)
    assert found.unit("blocks.0.mlp_out/11").coactive == ()  # a dead unit moves with nothing


def test_logit_effects_of_many_are_those_of_each(model, factors, found):
    for profile in found.profiles():
        alone = logit_effect(model, factors, (profile.site, profile.index), random_tokens(9, 8))
        assert [t for t, _ in profile.logits.promoted] == [t for t, _ in alone.promoted]
        assert dict(profile.logits.suppressed) == pytest.approx(dict(alone.suppressed), abs=1e-6)


def test_sites_without_a_direct_effect_say_so(model):
    factors = sparse_factors(model, "blocks.0.mlp_in")
    profile = audit(model, factors, random_tokens(4, 8), progress=False).unit("blocks.0.mlp_in/0")
    assert profile.logits is None and profile.writes.strongest[0][0].startswith("neuron ")
    assert "does not write to the residual stream" in profile._repr_html_()


def test_units_of_a_coder(model):
    class Coder:
        W_enc, W_dec = torch.eye(32)[:, :6], torch.eye(16)[:6]

        def encode(self, x):
            return (x @ self.W_enc).relu()

        def decode(self, z):
            return z @ self.W_dec

    found = audit(model, {"blocks.0.mlp_out": Coder()}, random_tokens(4, 8), progress=False)
    profile = found.unit("blocks.0.mlp_out/2")
    assert profile.reads.strongest == (("neuron 2", 1.0),) and profile.writes.strongest == (("residual 2", 1.0),)
    assert profile.logits is not None and profile.smallest >= 0


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


def test_marks_go_inside_the_leading_space():
    context = Context((" a", " b", " "), (0.0, 1.0, 0.0), 1)
    assert context.text(("<<", ">>")) == " a <<b>> "
    assert Context((" ",), (1.0,), 0).text(("<<", ">>")) == "<< >>"


def test_it_shows_itself(model, factors, found):
    assert "24 units" not in repr(found) and "48 units on 72 tokens" in repr(found)
    assert "best units for a task" in found._repr_html_()
    assert found.plot("a task").axes and found.unit("blocks.0.mlp_out/2").plot().axes
    without = audit(model, factors, random_tokens(3, 8), progress=False)
    assert "top token" in without._repr_html_()
    for ask in (without.rank_table, without.plot):
        with pytest.raises(ValueError, match="this audit knows no scores"):
            ask()


def test_dense_controls_are_audited_too(model):
    found = audit(model, baselines.svd(model, "blocks.0.mlp_out"), random_tokens(4, 8), progress=False)
    assert len(found) == 16 and isinstance(found.unit("blocks.0.mlp_out/0").contexts[0], Context)
    assert swd.Factors is type(found.factors["blocks.0.mlp_out"])
