"""unit_graph: from a circuit, or a list of units, to its graph.

1. Look at the settings and the units: they fit together, the units exist, and their sites have read and write factors.
2. With a prompt: attach the factors and freeze one run (frozen.py). Without: look at the host's norms only.
3. Weights between all nodes (edges.py); one row per node, with its activation.
4. Influence, and which edges are kept (pruning.py).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from swd_lens.analysis.graph.data import NODES, table
from swd_lens.analysis.graph.edges import LOGIT, TOKEN, Layout, NodeGroup, layout_of, weights
from swd_lens.analysis.graph.frozen import FrozenRun, freeze, read_norms
from swd_lens.analysis.graph.pruning import pruned
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.base import __version__
from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import legible, visible_token
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits import Circuit, UnitScores
from swd_lens.hosts import require_gradients, require_no_dropout
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.tasks.prompt import Prompt, decoded
from swd_lens.tasks.split import Unusable
from swd_lens.tasks.tokenize import TaskTokenizer
from swd_lens.units import UnitSet, attach


@with_torch_defaults
def unit_graph(
    model: Any,
    factors: Any,
    units: Any = None,
    *,
    targets: Any = None,
    prompt: Any = None,
    attention: str = "none",
    answers: Sequence[str | int] | str | int | None = None,
    tokens: Any = None,
    normalize: str = "none",
    keep: int | None = 120,
    min_weight: float | int = 0.0,
    per_node: int | None = None,
    isolated: bool = False,
    labels: Mapping[str, str] | None = None,
) -> UnitGraph:
    """The direct weights between units, as a graph (ours, after circuit-tracer's direct weights).

    A weight w of an edge i -> j is what one unit of z_i adds to z_j (or to an answer's logit, less the mean logit of the
    vocabulary) along the direct path, everything else held: the residual stream for sites that read it; with
    attention="frozen" also from values to attn_o at later positions; with a prompt also through an MLP's activation function,
    by its slope at this run. Where an MLP's W_in (or the values' W_V) has no drawn units, the path runs through the matrix
    itself. q and k units end at the attention pattern, which is held, so nothing leaves them; see `swd_lens.analysis.qk`.

    With a prompt the run is that of the host with all `factors` attached; edges also carry their contribution z_i * w. Over
    all units, tokens and biases the contributions to a unit that reads the residual stream add up to its z. What a node's
    drawn and pruned edges do not explain (units that are not in the graph, dense matrices, biases, curvature of the
    activation function) is its `rest`.

    Args:
        factors: what to attach, see `swd_lens.attach`; the sites of `units` must be among them.
        units: a Circuit, or names ("blocks.2.mlp_out/17"), (site, index) pairs or a table of units, or one unit; also whole
            sites, by name or glob ("blocks.*.mlp_out"). None: with targets, all units of these factors.
        targets: units that the graph is to explain, in place of answers: edges that lead to none of them are left out, and the
            influence of a node is its share of these.
        prompt: text, or token ids. The graph is of its last position, with attention="frozen" of all positions.
        attention: "none": within one position. "frozen": patterns of this prompt carry values across positions.
        answers: tokens at the top, as text or ids, or how many of the likeliest. None: the 3 likeliest with a prompt, none
            without one or with targets.
        tokens: without a prompt, (rows, pos) ids: norms are applied with the average 1/scale over these tokens of the dense
            host. None: with scale 1, so that weights of different layers have different units.
        normalize: without a prompt, "cosine" divides by the lengths of both vectors (the reading one behind the norm).
        keep: edges that are kept, the strongest. Strength is |w| without a prompt; with one, the edge's share of what enters
            its target, times the target's influence. None: all, also those of no strength.
        min_weight: edges of smaller |w| are dropped.
        per_node: at most this many edges into a node, the strongest.
        isolated: leave units without a kept edge in the graph.
        labels: unit name -> what a reader should see, as from a semantic audit; those of units not drawn are not used.

    Raises:
        ValueError: a unit that is not there, a circuit of other factors, no path between any two nodes, too many nodes, a
            prompt that is too long, an answer named twice, settings that exclude each other.
        TypeError: units of a coder, which have no read and write vectors.
        UnsupportedHostError: see `swd_lens.analysis.graph.frozen.freeze`; AttachError: see `swd_lens.attach`.
    """
    _require_fitting(prompt, tokens, attention, normalize)
    kept = kept_edges(keep, per_node, min_weight, isolated)
    attached = UnitSet.of(model, factors)
    drawn, scores = drawn_units(attached, units, targets)
    require_no_dropout(model)
    with torch.no_grad():
        read, run = held_run(attached, drawn, prompt, tokens, drawn, across=attention == "frozen")
        ids = None if read is None else list(read.ids)
        answers = () if answers is None and targets is not None else answers
        answer_ids = _answer_ids(model, answers, None if ids is None else run.logits)
        layout = layout_of(attached, drawn, run, answers=answer_ids, static=ids is None, cosine=normalize == "cosine")
        weight, kinds = weights(layout)
    more = "" if ids else ", name answers=[...] so that their logits can be reached, or give a prompt"
    require_edges(kinds, drawn, more)
    norm = "of the run" if ids else "scale 1" if tokens is None else "average 1/scale over tokens"
    settings = made_with(attached, drawn, read) | {"norm": norm, "attention": attention, "answers": answer_ids} | kept
    settings |= {
        "targets": None if targets is None else ["{}/{}".format(*unit) for unit in attached.units_named(targets)],
        "normalize": normalize,
        "task": None if scores is None else scores.settings.get("task"),
    }
    return pruned(nodes_of(model, layout, ids, scores, labels or {}, attached.heads), weight, kinds, settings)


def _require_fitting(prompt: Any, tokens: Any, attention: str, normalize: str) -> None:
    """Raises ValueError where settings are unknown or exclude each other."""
    one_of("attention", attention, ("none", "frozen"))
    one_of("normalize", normalize, ("none", "cosine"))
    if prompt is None and attention == "frozen":
        raise ValueError("attention='frozen' holds the attention patterns of a prompt: give one, prompt='...'")
    if prompt is not None and normalize != "none":
        raise ValueError("with a prompt weights are contributions per unit of z; normalize='cosine' is for graphs without one")


def kept_edges(keep: int | None, per_node: int | None, min_weight: float | int, isolated: bool) -> dict[str, Any]:
    """Settings that say which edges are kept. Raises ValueError where nothing could be."""
    for name, most in (("keep", keep), ("per_node", per_node)):
        if most is not None:
            bounded(name, most, 1)
    bounded("min_weight", min_weight, 0, whole=False)
    return {"keep": keep, "min_weight": float(min_weight), "per_node": per_node, "isolated": isolated}


def require_edges(kinds: Tensor, drawn: Iterable[Site], more: str = "") -> None:
    """Raises ValueError where no edge is possible; `more` is what else to do."""
    if not bool(kinds.any()):
        raise ValueError(
            f"no unit of {', '.join(site.name for site in drawn)} can speak to another one directly: an edge needs a "
            "site that writes the residual stream (attn_o, mlp_out) before one that reads it (attn_q, attn_k, attn_v, "
            f"attn_qkv, mlp_in, mlp_gate). Add units of such sites{more}"
        )


def made_with(attached: UnitSet, drawn: Mapping[Site, Sequence[int]], read: Prompt | None) -> dict[str, Any]:
    """Settings of a graph: of what model, factors and prompt it is, and how many units are drawn."""
    model, cap = attached.host.model, facts_of(attached.host.model).logit_cap
    ids = None if read is None else list(read.ids)
    return {
        "model": str(getattr(model.cfg, "model_name", "")),
        **({} if cap is None else {"logits": f"before the soft cap of {cap:g}"}),
        "n_layers": len(model.blocks),
        "swd_lens": __version__,
        **standing_hooks(model),
        "factors": dict(attached.identities),
        "units": sum(len(indices) for indices in drawn.values()),
        "prompt": None if ids is None else decoded(model, ids),
        "tokens": [_label(model, token) for token in ids] if ids and model.tokenizer else ids,
        "token_ids": ids,
        "prepend_bos": None if read is None else read.prepend_bos,
        "mlp": "not followed" if read is None else "slope at the run",
    }


def units_of_run(model: Any, factors: Any, graph: UnitGraph) -> tuple[UnitSet, dict[str, Any]]:
    """The units that a graph's prompt ran with, and settings of what else is made of that run. Raises ValueError: other
    factors than the graph's."""
    attached = UnitSet.of(model, factors)
    if dict(graph.settings["factors"]) != dict(attached.identities):
        given = ", ".join(attached)
        raise ValueError(
            f"the graph was made with other factors: those of {', '.join(graph.settings['factors'])}; given were those of {given}"
        )
    return attached, {
        "model": graph.settings["model"],
        "swd_lens": __version__,
        **standing_hooks(model),
        "factors": dict(attached.identities),
        "prompt": graph.settings["prompt"],
        "token_ids": list(graph.settings["token_ids"]),
    }


def drawn_units(attached: UnitSet, units: Any, targets: Any = None) -> tuple[dict[Site, list[int]], UnitScores | None]:
    """The drawn units by site, in execution order, and the scores of a circuit."""
    if attached.coders:
        name, coder = next(iter(attached.coders.items()))
        raise TypeError(
            f"the units of {name} are a {type(coder).__name__}: an encode/decode pair has no read and write vectors whose "
            "products could be edges; take factors, or baselines"
        )
    scores = None
    if units is None:
        units = () if targets is None else "all"
    if isinstance(units, Circuit):
        attached.require_made_for(units.scores.settings, "this circuit")
        units, scores = units.units, units.scores
    drawn: dict[str, list[int]] = {}
    for name, index in attached.units_named(units):
        if name not in attached or not 0 <= index < attached[name].n_units:
            has = ", ".join(f"{site} (0 to {n_units - 1})" for site, n_units in attached.sizes.items())
            raise ValueError(f"unit {name}/{index} is not among these factors' units: {has}")
        if index in drawn.setdefault(name, []):
            raise ValueError(f"unit {name}/{index} is named twice; name it once")
        drawn[name].append(index)
    for name, index in [] if targets is None else attached.units_named(targets):
        if index not in drawn.setdefault(name, []):
            drawn[name].append(index)
    if not drawn:
        raise ValueError("there are no units: a graph needs some; take a larger circuit")
    return {site: sorted(drawn[site.name]) for site in attached.sites if site.name in drawn}, scores


# ---------------------------------------------------------------------------------------------- prompt and answers


def held_run(
    attached: UnitSet, drawn: Iterable[Site], given: Any, tokens: Any, into: Collection[Site], *, across: bool
) -> tuple[Prompt | None, FrozenRun]:
    """The prompt and its run with all factors attached, held; without a prompt the host's norms alone.

    Args:
        given: the prompt.
        tokens: without a prompt, for the scale of the norms.
        into: what edges lead into.
        across: at all positions, with attention patterns; else at the last position.

    Raises:
        ValueError: a prompt and tokens, several prompts, or one that cannot be run.
        UnsupportedHostError: see `freeze`.
    """
    model = attached.host.model
    if given is None:
        return None, read_norms(attached.host, tokens)
    if tokens is not None:
        raise ValueError("with a prompt the norms' scales are those of its run: leave `tokens` out")
    require_gradients(model)
    if isinstance(given, str) and model.tokenizer is None:
        raise ValueError("this host has no tokenizer, so a text cannot be its prompt; pass token ids")
    prompt = Prompt.of(model, given, "unit_graph")
    if prompt.n_rows != 1:
        raise ValueError(f"a graph is of one prompt, got {prompt.n_rows}; make one graph for each")
    if prompt.unusable is not None:
        raise ValueError(f"this prompt cannot be run: {legible(prompt.unusable)}; give a shorter one, or one that is not empty")
    with attach(model, attached):
        run = frozen_run(attached, drawn, list(prompt.ids), into if across else (), into)
    return prompt, run if across else run.last()


def frozen_run(
    attached: UnitSet, drawn: Iterable[Site], ids: list[int], into_heads: Iterable[Site], into_neurons: Iterable[Site]
) -> FrozenRun:
    """The run of the prompt, with what edges into these sites pass through; the caller has attached all factors."""
    patterns = [site.layer for site in into_heads if site.kind == "attn_o"]
    slopes = [site.layer for site in into_neurons if site.kind == "mlp_out"]
    return freeze(attached.host, torch.tensor([ids]), units=list(drawn), patterns=patterns, slopes=slopes)


def _answer_ids(model: Any, answers: Any, logits: Tensor | None) -> list[int]:
    """Token ids of the answers; the likeliest ones by the logits of a prompt, which a graph may not have."""
    if answers is None:
        answers = [] if logits is None else 3
    if isinstance(answers, int):
        if logits is None or isinstance(answers, bool) or answers < 0:
            raise ValueError(
                f"answers={legible(answers)}: the likeliest tokens are those of a prompt; name tokens, or give a prompt"
            )
        return logits.topk(min(answers, len(logits))).indices.tolist()
    ids: list[int] = []
    for answer in [answers] if isinstance(answers, str) else answers:
        if isinstance(answer, str):
            if model.tokenizer is None:
                raise ValueError("this host has no tokenizer; give answers as token ids")
            try:
                answer = TaskTokenizer("unit_graph", model, False).single(answer, "answer")
            except Unusable as cause:
                raise ValueError(f"{legible(cause)}; give a token id, or text that is one token") from None
        if not 0 <= int(answer) < model.cfg.d_vocab:
            raise ValueError(f"answer {legible(answer)} is no token id of this host; ids go from 0 to {model.cfg.d_vocab - 1}")
        if int(answer) in ids:
            raise ValueError(f"answer {legible(answer)} is named twice; name it once")
        ids.append(int(answer))
    return ids


# ---------------------------------------------------------------------------------------------- nodes


def _label(model: Any, token: int) -> str:
    return visible_token(model.tokenizer.decode([token])) if model.tokenizer else str(token)


def nodes_of(
    model: Any,
    layout: Layout,
    ids: list[int] | None,
    scores: UnitScores | None,
    labels: Mapping[str, str],
    heads: Mapping[str, Sequence[tuple[str, float]]],
) -> pd.DataFrame:
    """One row per node, in the order of the weights."""
    rows: list[dict[str, Any]] = []
    probabilities = layout.run.probabilities
    ranks = {} if scores is None else scores.ranks()
    for group in layout.groups:
        activations = activations_of(layout, group).tolist()
        for i in range(group.size):
            item = group.items[i % len(group.items)]
            position = None if ids is None else len(ids) - group.positions + i // len(group.items)
            row: dict[str, Any] = {"position": position, "kind": group.kind, "activation": activations[i]}
            if group.site is not None:
                name = f"{group.site.name}/{item}"
                row |= {"node": name if position is None else f"{name}@{position}", "layer": group.site.layer}
                row |= {"site": group.site.name, "unit": item, "label": labels.get(name, "")}
                row["head"] = heads[group.site.name][item][0] if group.site.name in heads else None
                if scores is not None:
                    row["score"] = float(scores.scores[group.site.name][item])
                    row["rank"] = int(ranks[group.site.name][item])
            elif group.kind == LOGIT:
                row |= {"node": f"logit {item}", "layer": len(model.blocks), "token": item, "label": _label(model, item)}
                row["probability"] = None if ids is None else float(probabilities[item])
            elif ids is not None and position is not None:
                row |= {"node": f"token@{position}", "layer": -1, "token": ids[position]}
                row["label"] = _label(model, ids[position])
            rows.append(row)
    return table(rows, NODES)


def activations_of(layout: Layout, group: NodeGroup) -> Tensor:
    """z of units, 1 of tokens, and an answer's logit less the mean over the vocabulary; NaN without a prompt."""
    if layout.static:
        return torch.full((group.size,), float("nan"), dtype=torch.float32)
    if group.kind == TOKEN:
        return torch.ones(group.size, dtype=torch.float32)
    if group.site is None:
        return torch.stack([contrast.of(layout.run.logits) for contrast in group.contrasts])
    return layout.run.z[group.site.name][:, list(group.items)].flatten()
