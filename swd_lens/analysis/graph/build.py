"""unit_graph: from a circuit, or a list of units, to its graph.

1. Look at the units: they exist, their sites have read and write factors, and some path between them can be drawn.
2. With a prompt: attach the factors and freeze one run (frozen.py). Without: look at the host's norms only.
3. Weights between all nodes (edges.py), contributions z_i * weight, and what is left of each z (`rest`).
4. Influence: what share of the answers each node holds, by shares of shares. Keep the strongest edges.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from swd_lens.analysis.graph.arguments import answer_ids, check_settings, prompt_ids, units_of
from swd_lens.analysis.graph.edges import weights
from swd_lens.analysis.graph.material import frozen_run, norms_alone, parts_of
from swd_lens.analysis.graph.pruning import node_rows, pruned, require_edges, text_of
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.base._version import __version__
from swd_lens.base.machine import plain_float32
from swd_lens.base.panels import visible
from swd_lens.circuits import Circuit
from swd_lens.circuits.scores import identities
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.units import attach


def unit_graph(
    model: Any,
    factors: Any,
    units: Circuit | Iterable[str | tuple[str, int]] | str,
    *,
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
    """The direct weights between units, as a graph.

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
        units: a Circuit, or names ("blocks.2.mlp_out/17") or (site, index) pairs, or one name.
        prompt: text, or token ids. The graph is of its last position, with attention="frozen" of all positions.
        attention: "none": within one position. "frozen": patterns of this prompt carry values across positions.
        answers: tokens at the top, as text or ids, or how many of the likeliest. None: the 3 likeliest with a prompt, none
            without.
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
        UnsupportedHostError: see `swd_lens.analysis.graph.frozen.freeze`; answers of a host that caps its logits.
        AttachError: see `swd_lens.attach`.
    """
    check_settings(prompt, attention, tokens, normalize, keep, min_weight, per_node)
    host = host_of(model)
    found, chosen, score = units_of(host, factors, units)
    require_no_dropout(model)
    device = next(iter(found.values())).read.device
    # A caller's inference mode is left: slopes are gradients.
    with torch.inference_mode(False), torch.no_grad(), plain_float32(device):
        if prompt is None:
            ids, prepend_bos, run = None, None, norms_alone(host, model, tokens)
        else:
            ids, prepend_bos = prompt_ids(model, prompt)
            with attach(model, found):
                run = frozen_run(host, found, chosen, ids, attention)
        wanted = answer_ids(model, answers, run, prompt is not None)
        parts = parts_of(host, found, chosen, run, ids, wanted, attention, normalize)
        weight, kinds = weights(parts)
    require_edges(kinds, chosen, prompt is not None)
    rows, z = node_rows(model, parts, ids, score, labels or {})
    settings = {
        "model": str(getattr(model.cfg, "model_name", "")),
        "n_layers": len(model.blocks),
        "swd_lens": __version__,
        "factors": identities(found),
        "units": sum(len(indices) for indices in chosen.values()),
        "prompt": None if ids is None else text_of(model, ids),
        "tokens": None
        if ids is None
        else [visible(model.tokenizer.decode([i])) for i in ids]
        if model.tokenizer
        else ids,
        "token_ids": ids,
        "prepend_bos": prepend_bos,
        "attention": attention,
        "answers": list(wanted),
        "norm": "of the run" if ids is not None else "scale 1" if tokens is None else "average 1/scale over tokens",
        "mlp": "slope at the run" if ids is not None else "not followed",
        "normalize": normalize,
        "keep": keep,
        "min_weight": float(min_weight),
        "per_node": per_node,
        "isolated": isolated,
        "task": None if score is None else score.settings.get("task"),
    }
    return pruned(rows, z, weight, kinds, parts, settings)
