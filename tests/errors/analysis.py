"""Triggers of the section "Looking inside" of swd_lens/ERRORS.md, but for edits and files.

1. Hosts are small bridges, which every transformer_lens has; factors are random and stand for no matrix.
2. Short ones stand in tables (id -> call); a trigger that needs more than one line is a function.
"""

import json
from functools import cache
from typing import Any

import torch

import swd_lens as swd
from swd_lens.analysis import qk
from swd_lens.analysis.audit import logit_effect
from swd_lens.analysis.graph import edges as graph_edges
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.units.coder import CoderUnits
from tests import families
from tests.analysis.audit_models import made_scores, sparse_factors
from tests.analysis.graph_checks import all_units
from tests.analysis.graph_checks import random_factors as unit_factors
from tests.analysis.qk_checks import random_factors
from tests.errors.triggers import TRIGGERS, on_hooked, trigger

ROW = [9, 11, 8, 12, 10]
SITE, WRITES = "blocks.0.mlp_in", "blocks.0.mlp_out"


@cache
def loaded(name):
    return families.bridge(name)


def model(name="gpt2"):
    return loaded(name)


def tokens(rows=2, pos=6):
    return families.some_tokens(rows, pos)


class Pair:
    """Units of an encode/decode pair: z is what is read, and nothing is written."""

    def __init__(self, d_out):
        self.d_out = d_out

    def encode(self, h):
        return h

    def decode(self, z):
        return z.new_zeros(*z.shape[:-1], self.d_out)


# ---------------------------------------------------------------------------------------------- queries and keys


@cache
def qk_factors(name="gpt2", packed=True):
    return random_factors(model(name), packed)


def replayed(pair=(0, 0, 1, 2), prompt=ROW, factors=None, **settings):
    return swd.qk_replay(model(), factors or qk_factors(), swd.QKPair(*pair), prompt, **settings)


def scanned(prompts=(ROW,), **settings):
    return swd.qk_scan(model(), qk_factors(), prompts, progress=False, **settings)


@cache
def parts():
    return qk.score_parts(model(), qk_factors(), 0, 0, ROW)


def screened(name="gpt2", factors=None, packed=True, **settings):
    return swd.qk_screen(model(name), factors or qk_factors(name, packed), **settings)


def half():
    return {"blocks.0.attn_qkv": qk_factors()["blocks.0.attn_qkv"]}


TRIGGERS |= {
    "qk-no-such-pair": lambda *_: replayed((0, 0, 9, 0)),
    "qk-no-such-layer": lambda *_: replayed((1, 0, 0, 0), factors=half()),
    "qk-no-such-head": lambda *_: replayed((0, 2, 0, 0)),
    "qk-unknown-removal": lambda *_: replayed(remove="both"),
    "qk-prompt-of-several-rows": lambda *_: replayed(prompt=[ROW, ROW]),
    "qk-prompt-of-one-token": lambda *_: replayed(prompt=[9]),
    "qk-empty-prompt": lambda *_: replayed(prompt=""),
    "qk-no-prompts": lambda *_: scanned(()),
    "qk-pairs-and-a-screen": lambda *_: scanned(screen=screened(), pairs=screened().pairs(1)),
    "qk-no-pairs": lambda *_: scanned(pairs=[]),
    "qk-no-such-unit-of-parts": lambda *_: parts().contribution(0, 9),
    "qk-masked-position": lambda *_: parts().strongest(1, 3),
    "qk-screen-of-nothing": lambda *_: screened(top=0),
    "qk-screen-too-far": lambda *_: screened(distance=64),
    "qk-none-per-head": lambda *_: screened().pairs(0),
    "qk-without-both-sides": lambda *_: screened(factors=unit_factors(model(), "mlp_in")),
    "qk-of-a-coder": lambda *_: screened(factors={"blocks.0.attn_qkv": Pair(48)}),
    "qk-fidelity-of-other-sites": lambda *_: qk.plot_attention_fidelity(Fidelity(1.0, 1.0, 0.0, 1.0, {SITE: 0.5}, 10)),
    "qk-both-ways": lambda *_: screened("bert"),
    "qk-gated-queries": lambda *_: screened(
        "qwen3_5", {k: f for k, f in qk_factors("qwen3_5", False).items() if k.startswith("blocks.3.")}
    ),
    "qk-linear-attention": lambda *_: screened(
        "qwen3_5", {"blocks.0.attn_qkv": swd.Factors(torch.randn(16, 9), torch.randn(9, 16))}
    ),
}


@trigger
def qk_text_without_tokenizer(_, monkeypatch):
    monkeypatch.setattr(model(), "tokenizer", None)
    replayed(prompt="Once upon")


@trigger
def qk_unknown_positions(_, monkeypatch):
    monkeypatch.setattr(model().cfg, "positional_embedding_type", "relative_positional_bias")
    screened()


@trigger
def qk_unknown_attention(_, monkeypatch):
    monkeypatch.setattr(model().cfg, "positional_embedding_type", "alibi")
    screened()


@trigger
def qk_scores_changed(*_):
    with model().hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", lambda scores, hook: 2 * scores)]):
        replayed()


@trigger
def qk_scores_never_shown(*_):
    with model().hooks(fwd_hooks=[("hook_embed", lambda x, hook: model().reset_hooks())]):
        replayed()


# ---------------------------------------------------------------------------------------------- graphs and paths


@cache
def graph_factors():
    return unit_factors(model(), "attn_v", "attn_o", "mlp_in", "mlp_out")


def graphed(units=None, factors=None, name="gpt2", **settings):
    factors = factors or graph_factors()
    return swd.unit_graph(model(name), factors, all_units(factors) if units is None else units, **settings)


def paths(factors=None, **settings):
    factors = swd.FactorSet(unit_factors(model(), "mlp_in", "mlp_out")) if factors is None else factors
    return swd.plot_unit_paths(model(), factors, made_scores(factors), **settings)


TRIGGERS |= {
    "graph-unknown-setting": lambda *_: graphed(attention="full"),
    "graph-frozen-without-a-prompt": lambda *_: graphed(attention="frozen"),
    "graph-of-a-prompt-and-tokens": lambda *_: graphed(prompt=ROW, tokens=tokens()),
    "graph-of-a-prompt-as-cosines": lambda *_: graphed(prompt=ROW, normalize="cosine"),
    "graph-keeps-nothing": lambda *_: graphed(keep=0),
    "graph-negative-weight": lambda *_: graphed(min_weight=-1),
    "graph-of-a-coder": lambda *_: graphed([f"{SITE}/1"], {SITE: Pair(64)}),
    "graph-no-such-unit": lambda *_: graphed([f"{SITE}/9"]),
    "graph-unit-twice": lambda *_: graphed([f"{SITE}/1", f"{SITE}/1"]),
    "graph-without-feeders": lambda *_: swd.graph.feeders(
        model(), unit_factors(model(), "mlp_in"), "blocks.1.mlp_in/1"
    ),
    "graph-without-units": lambda *_: graphed([]),
    "graph-of-several-prompts": lambda *_: graphed(prompt=[ROW, ROW]),
    "graph-prompt-cannot-be-run": lambda *_: graphed(prompt="the " * 65),
    "graph-likeliest-without-a-prompt": lambda *_: graphed(answers=3),
    "graph-answer-of-several-tokens": lambda *_: graphed(prompt=ROW, answers=[" Mary John"]),
    "graph-answer-outside": lambda *_: graphed(prompt=ROW, answers=[families.D_VOCAB]),
    "graph-answer-twice": lambda *_: graphed(prompt=ROW, answers=[9, 9]),
    "graph-without-a-path": lambda *_: graphed([f"{SITE}/1"]),
    "graph-of-a-normed-stream": lambda *_: graphed(factors=unit_factors(model("bert"), "mlp_out"), name="bert"),
    "graph-file-missing": lambda folder, _: swd.UnitGraph.load(folder / "graph.json"),
    "paths-of-a-reader": lambda *_: paths(kind="mlp_in"),
    "paths-of-no-units": lambda *_: paths(per_layer=0),
    "paths-without-such-a-site": lambda *_: paths(kind="attn_o"),
    "paths-without-such-a-layer": lambda *_: paths(layers=[7]),
    "paths-without-layers": lambda *_: paths(layers=[]),
    "paths-label-of-nothing": lambda *_: paths(labels={f"{WRITES}/99": "years"}),
}


@trigger
def graph_text_without_tokenizer(_, monkeypatch):
    monkeypatch.setattr(model(), "tokenizer", None)
    graphed(prompt="Once upon")


@trigger
def graph_answer_without_tokenizer(_, monkeypatch):
    monkeypatch.setattr(model(), "tokenizer", None)
    graphed(prompt=ROW, answers=[" Mary"])


@trigger
def graph_too_large(_, monkeypatch):
    monkeypatch.setattr(graph_edges, "_MOST_NODES", 10)
    graphed(prompt=ROW)


@on_hooked
def graph_through_mixed_neurons(*_):
    from tests.micro import toy_model

    host = toy_model(act_fn="solu_ln")
    factors = unit_factors(host, "mlp_out")
    swd.unit_graph(host, factors, all_units(factors), prompt=ROW)


@trigger
def graph_of_an_unknown_reader(*_):
    host = families.loaded("Mixtral")
    factors = unit_factors(host, "attn_o")
    swd.unit_graph(host, factors, all_units(factors))


@trigger
def graph_of_a_changed_reading(*_):
    with model().hooks(fwd_hooks=[("blocks.0.ln2.hook_out", lambda h, hook: h + torch.arange(h.shape[-1]))]):
        graphed(prompt=ROW)


@trigger
def graph_of_changed_values(*_):
    with model().hooks(fwd_hooks=[("blocks.0.attn.o.hook_in", lambda z, hook: 2 * z)]):
        graphed(prompt=ROW, attention="frozen")


@trigger
def graph_file_of_another_tool(folder, _):
    (folder / "graph.json").write_text('{"metadata": {"slug": "of another tool"}}')
    swd.UnitGraph.load(folder / "graph.json")


@trigger
def graph_file_of_the_future(folder, _):
    path = folder / "graph.json"
    graphed().to_json(path)
    written = json.loads(path.read_text())
    written["metadata"]["swd_lens"]["version"] = 99
    path.write_text(json.dumps(written))
    swd.UnitGraph.load(path)


def exported(folder, **how):
    graphed(prompt=ROW).export(folder, **how)


def audit_of_others():
    others = {name: swd.Factors(f.read, 2.0 * f.write) for name, f in graph_factors().items()}
    return swd.audit(model(), others, tokens(), progress=False)


TRIGGERS |= {
    "graph-name-not-plain": lambda folder, _: exported(folder, slug="of a/b"),
    "graph-of-other-factors": lambda folder, _: exported(folder, audit=audit_of_others()),
    "graph-pinned-of-nothing": lambda folder, _: exported(folder, pinned=["blocks.0.mlp_in/999"]),
    "graph-group-of-nothing": lambda folder, _: exported(folder, groups={"mine": ["nowhere"]}),
    "graph-groups-without-factors": lambda *_: swd.graph.groups(graphed(prompt=ROW), "writes"),
}


@trigger
def paths_of_a_coder(*_):
    paths({WRITES: CoderUnits(Pair(16), 64, 16, 64)})


# ---------------------------------------------------------------------------------------------- pairs of units


@cache
def pair_factors():
    return sparse_factors(model(), ["mlp_in", "mlp_out"])


def interacting(site=SITE, factors=None, text=None, name="gpt2", **settings):
    text = tokens() if text is None else text
    return swd.unit_interactions(model(name), factors or pair_factors(), site, text, progress=False, **settings)


def overlapping(site=WRITES, factors=None, text=None, **settings):
    text = tokens() if text is None else text
    return swd.unit_overlap(model(), factors or pair_factors(), site, text, progress=False, **settings)


def one_unit():
    """Of two units the second writes nothing."""
    return {SITE: swd.Factors(torch.randn(16, 2), torch.eye(2, 64) * torch.tensor([[1.0], [0.0]]))}


TRIGGERS |= {
    "pairs-of-several-sites": lambda *_: interacting("mlp_in"),
    "pairs-of-a-site-without-factors": lambda *_: overlapping(WRITES, {SITE: pair_factors()[SITE]}),
    "pairs-of-a-coder": lambda *_: overlapping(WRITES, {WRITES: Pair(16)}),
    "pairs-without-two-units": lambda *_: interacting(factors=one_unit()),
    "pairs-without-enough-tokens": lambda *_: overlapping(text=tokens(1, 1)),
    "pairs-not-finite": lambda *_: overlapping(
        factors={WRITES: swd.Factors(torch.full((64, 2), 3e38), torch.ones(2, 16))}
    ),
    "pairs-no-rows-per-forward": lambda *_: overlapping(batch_size=0),
    "overlap-of-one": lambda *_: overlapping(shown=1),
    "overlap-of-constants": lambda *_: overlapping(text=[[9], [9]]),
    "interactions-of-one": lambda *_: interacting(top=1),
    "interactions-of-the-ungated-branch": lambda *_: interacting(
        factors=sparse_factors(model("llama"), SITE), name="llama"
    ),
    "interactions-behind-the-activation": lambda *_: interacting(WRITES),
}


@on_hooked
def interactions_of_mixed_channels(*_):
    from tests.micro import random_tokens, toy_model

    host = toy_model(act_fn="solu_ln")
    swd.unit_interactions(host, sparse_factors(host, SITE), SITE, random_tokens(2, 5), progress=False)


# ---------------------------------------------------------------------------------------------- audits, labels, dashboards


@cache
def audited_factors(seed=0):
    return sparse_factors(model(), "blocks.0.mlp_out", seed=seed)


def audited(**settings):
    return swd.audit(model(), settings.pop("factors", audited_factors()), tokens(), progress=False, **settings)


@cache
def found():
    return audited()


def labelled(unit, label: Any = "years"):
    return found().with_labels({unit: label})


def labels_of(seed, unit=f"{WRITES}/0"):
    return swd.UnitLabels.of({WRITES: "identity of seed " + str(seed)}, {unit: "years"})


def loaded_labels(folder, *lines):
    (folder / "labels.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return swd.UnitLabels.load(folder / "labels.jsonl")


def without_a_line(folder):
    path = found().export(folder / "units.jsonl", units=[f"{WRITES}/0", f"{WRITES}/1"])
    path.write_text(path.read_text().splitlines()[0])
    swd.UnitLabels.load(path)


TRIGGERS |= {
    "audit-of-no-units": lambda *_: audited(units=[]),
    "audit-no-such-unit": lambda *_: audited(units=f"{WRITES}/12"),
    "audit-of-no-contexts": lambda *_: audited(n=0),
    "audit-of-no-places": lambda *_: audited(per_row=0),
    "audit-not-finite": lambda *_: audited(factors={WRITES: swd.Factors(torch.full((64, 2), 3e38), torch.ones(2, 16))}),
    "audit-with-other-scores": lambda *_: audited(scores=made_scores(audited_factors(1))),
    "audit-without-scores": lambda *_: found().rank_table(),
    "audit-of-which-task": lambda *_: audited(scores=made_scores(audited_factors())).rank_table("another"),
    "unit-not-audited": lambda *_: found().unit(f"{WRITES}/99"),
    "logit-effect-of-a-reader": lambda *_: logit_effect(model(), pair_factors(), (SITE, 0), [[1, 2]]),
    "labels-of-other-sites": lambda *_: labelled("blocks.7.mlp_out/0"),
    "labels-of-other-factors": lambda *_: found().with_labels(labels_of(1)),
    "labels-of-units-that-are-not-there": lambda *_: labelled(f"{WRITES}/12"),
    "label-without-text": lambda *_: labelled(f"{WRITES}/0", 3),
    "labels-of-two-sets": lambda *_: labels_of(1) | labels_of(2),
    "labels-file-with-another-line": lambda folder, _: loaded_labels(folder, {"label": "years"}),
    "labels-file-names-a-unit-twice": lambda folder, _: loaded_labels(
        folder, *[{"unit": f"{WRITES}/0", "label": "years"}] * 2
    ),
    "labels-file-of-two-sets": lambda folder, _: loaded_labels(
        folder, *({"unit": f"{WRITES}/{i}", "label": "years", "factors": f"{i}"} for i in range(2))
    ),
    "labels-file-changed": lambda folder, _: loaded_labels(
        folder, {"unit": f"{WRITES}/0", "label": "years", "sha256": "of something else"}
    ),
    "labels-file-without-lines": lambda folder, _: without_a_line(folder),
    "dashboard-of-nothing": lambda *_: swd.dashboard([]),
    "dashboard-of-a-unit-twice": lambda *_: swd.dashboard([found().unit(f"{WRITES}/0")] * 2),
    "dashboard-without-that-unit": lambda *_: swd.dashboard([found().unit(f"{WRITES}/0")], only=[f"{WRITES}/1"]),
}


@trigger
def dashboard_too_long(folder, monkeypatch):
    monkeypatch.setattr("swd_lens.report.dashboard._PAGE_LIMIT", 11)
    swd.dashboard(found(), folder / "units.html")


# ---------------------------------------------------------------------------------------------- graphs shown and replayed


def replayed_graph(graph=None, factors=None, **settings):
    graph = graphed(prompt=ROW) if graph is None else graph
    return swd.graph.replays(model(), graph_factors() if factors is None else factors, graph, **settings)


TRIGGERS |= {
    "graph-page-of-other-nodes": lambda *_: graphed(prompt=ROW).show(groups={"verbs": ["blocks.0.mlp_out/1@99"]}),
    "graph-page-of-another-audit": lambda *_: graphed(prompt=ROW).show(audit=[3]),
    "graph-page-of-another-label": lambda *_: graphed(prompt=ROW).show(labels={"blocks.0.mlp_out/1": 3}),
    "graph-page-beside-another-thing": lambda *_: graphed(prompt=ROW).show(beside=graphed().nodes),
    "replays-without-a-prompt": lambda *_: replayed_graph(graphed(answers=[3])),
    "replays-at-no-strength": lambda *_: replayed_graph(strengths=(float("inf"),)),
    "graph-run-with-other-factors": lambda *_: replayed_graph(factors=unit_factors(model(), "mlp_out")),
    "replays-of-another-unit": lambda *_: replayed_graph(units=["blocks.0.mlp_out/1@99"]),
}


@trigger
def replays_of_several_prompts(*_):
    graph = graphed(prompt=ROW)
    replayed_graph(swd.UnitGraph(graph.nodes, graph.edges, {**graph.settings, "task_prompts": 4}))


@trigger
def replays_of_another_run(*_):
    graph = graphed(prompt=ROW)
    graph.nodes["activation"] *= 2
    replayed_graph(graph)
