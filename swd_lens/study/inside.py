"""look_inside: what stands behind the numbers of a run, for its report: a query-key pair, a graph of units, their paths.

1. Scan all heads' strongest query-key pairs on one test prompt per task; replay the pair whose removal changes a pattern most,
   among those whose head is rebuilt well and whose map foretells the change.
2. Score the units of the whole set on one task and draw the best of them as a graph on one prompt; the same graph as a page to
   look into, with its attention edges by head and the units clamped in true runs.
3. Draw the best mlp_out units of another task with what they read and write.

The result is plain data: attention views and report sections.
"""

from collections.abc import Sequence
from typing import Any

import torch

from swd_lens.analysis.graph import attention_paths, plot_unit_paths, replays, unit_graph
from swd_lens.analysis.qk import QKReplay, QKScan, QKScreen, qk_replay, qk_scan, qk_screen
from swd_lens.base.errors import legible, quoted, visible_token
from swd_lens.circuits import attribute
from swd_lens.study.section import AttentionView, Picture, ReportSection, SectionGraph, SectionTable
from swd_lens.tasks.task import Task
from swd_lens.units import UnitSet

# A map is worth showing where its head is rebuilt and where it says what the removal does.
MAX_DENSE_KL, MIN_AGREEMENT, MIN_SHARE = 0.05, 0.7, 0.3
UNITS_DRAWN, EDGES_DRAWN, PAIRS_LISTED, PAIRS_OF_A_SCORE = 24, 60, 8, 4


def look_inside(
    model: Any, factors: Any, tasks: Sequence[Task], *, graph_task: str | None = None, path_task: str | None = None
) -> tuple[list[AttentionView], list[ReportSection]]:
    """Views and sections for a `Run`: `dataclasses.replace(run, attention=[*run.attention, *views], extras=sections)`.

    Args:
        model: the host, with these sites not attached.
        factors: sites of queries and keys, and of what writes to the residual stream (attn_o, mlp_out), in one set.
        tasks: one test prompt of each is scanned.
        graph_task, path_task: names of the tasks whose best units are drawn; None = the first, the last.

    Raises:
        ValueError: no task of that name, or whatever the parts raise.
    """
    by_name = {task.name: task for task in tasks}
    graph_of, path_of = graph_task or tasks[0].name, path_task or tasks[-1].name
    if missing := [name for name in (graph_of, path_of) if name not in by_name]:
        raise ValueError(f"there is no task {quoted(missing[0])}; there are {legible(', '.join(by_name))}")
    units = UnitSet.of(model, factors)
    # 1. Query-key pairs.
    screen = qk_screen(model, units)
    prompts = [task.test.examples[0].prompt for task in tasks]
    scan = qk_scan(model, units, prompts, screen=screen, progress=False)
    telling = scan.best(1, max_dense_kl=MAX_DENSE_KL, min_agreement=MIN_AGREEMENT, min_share=MIN_SHARE)
    best = (telling or scan.best(1))[0]
    replay = qk_replay(model, units, best.pair, prompts[best.prompt])
    pairs = _pair_section(screen, scan, replay, bool(telling))
    # 2. and 3. The graph, and paths.
    sections = [pairs, _graph(model, units, by_name[graph_of]), _paths(model, units, by_name[path_of])]
    return [_pair_view(replay, tasks[best.prompt].name)], sections


# ---------------------------------------------------------------------------------------------- query-key pairs


def _pair_view(replay: QKReplay, task: str) -> AttentionView:
    largest = float(replay.contribution.abs().max()) or 1.0
    maps = torch.stack([replay.dense, replay.reconstructed, replay.removed, replay.contribution / largest])
    names = ["dense", "with units", f"without {replay.taken_out}", f"contribution ÷ {largest:.3g}"]
    caption = (
        f"Layer {replay.pair.layer}, head {replay.pair.head}: its pattern in the dense model, with units, and with query unit "
        f"{replay.taken_out} removed; and what the pair adds to each score. KL dense to units {replay.dense_kl:.2g} nats, units "
        f"to removed {replay.removed_kl:.2g} nats."
    )
    return AttentionView.of(
        maps, replay.tokens, names, kind="query-key pair", title=str(replay.pair), task=task, signed=True, caption=caption
    )


def _pair_section(screen: QKScreen, scan: QKScan, replay: QKReplay, telling: bool) -> ReportSection:
    pair = replay.pair
    outcome = (
        f"Among {len(scan.frame):,} cases (heads, pairs and prompts) the scan ranked pairs by what happens to the pattern when "
        f"the query unit is taken out of the head's queries. Shown: {pair}. Removal moves the head's pattern by "
        f"{replay.removed_kl:.3g} nats (largest change of a probability {replay.max_change:.2f}); the map alone foretells the "
        f"change with correlation {replay.agreement:.2f}."
    )
    if not telling:
        outcome += " No pair met the bars for a map that tells what its removal does; this is the strongest of all."
    tokens = [visible_token(token) for token in replay.tokens]
    strongest, heads = screen.strongest, screen.strongest.shape[1]
    entries = torch.nan_to_num(strongest, nan=-1.0).flatten().topk(min(3, strongest.numel())).indices.tolist()
    largest = [f"layer {i // heads} head {i % heads} {float(strongest[i // heads, i % heads]):.3g}" for i in entries]
    pictures = (
        Picture.of(
            screen.plot(),
            "Static query-key coefficients by layer and head",
            f"Largest absolute coefficient among the 16 by 16 strongest pairs of each head: {', '.join(largest)}",
            "Static screen, from the weights alone.",
        ),
        Picture.of(
            replay.plot(),
            f"{pair}: pattern before and after the removal",
            f"On the tokens {' '.join(tokens)}: mean KL {replay.removed_kl:.3g} nats, largest change {replay.max_change:.2f}.",
            "Above: dense and with units. Below: with units, before and after the removal.",
        ),
        Picture.of(
            replay.plot_contribution(),
            f"{pair}: contribution to every score",
            f"Mean over valid positions {replay.signed_mean:.3g}; largest {float(replay.contribution.abs().max()):.3g}.",
            "What the pair adds to each attention score; rows are destinations.",
        ),
    )
    columns = ["removed KL", "dense KL", "max change", "agreement", "share", "gamma"]
    cases = scan.table(PAIRS_LISTED).drop(columns="prompt").rename(columns={"text": "prompt"})
    cases["pair"] = [f"L{r['layer']} H{r['head']} q{r['q unit']} × k{r['k unit']}" for r in cases.to_dict("records")]
    table = SectionTable.of("Strongest cases of the scan (KL in nats)", cases.filter(["pair", "prompt", *columns]), 3)
    intro = (
        "An attention score is a sum over pairs of query units and key units: z of one, times z of the other, times a fixed "
        "coefficient between their write vectors. So a head can be screened from its weights, and a pair followed on a prompt.",
        outcome,
    )
    return ReportSection("Query-key pairs: what does a head compare?", intro, pictures, (table,), "Query-key pairs")


# ---------------------------------------------------------------------------------------------- graph and paths


def _graph(model: Any, units: UnitSet, task: Task) -> ReportSection:
    scores = attribute(model, units, task.train)
    example = task.test.examples[0]
    graph = unit_graph(
        model,
        units,
        scores.ranking()[:UNITS_DRAWN],
        prompt=example.prompt,
        attention="frozen",
        answers=[example.answers[0], example.distractors[0]],
        keep=EDGES_DRAWN,
    )
    intro = (
        f"The {UNITS_DRAWN} best units for {task.name.replace('_', ' ')} on the prompt “{example.prompt}”, in the columns of the "
        f"positions where they act. An edge is the direct path from one unit's write vector to the next one's read vector, with "
        f"this run's norms and attention patterns held; shown are the {EDGES_DRAWN} strongest. Orange and solid adds, blue and "
        "dashed takes away."
    )
    names = {row["node"]: row["label"] or row["node"] for row in graph.nodes.to_dict("records")}
    strongest = [f"{names[row['source']]} to {names[row['target']]}" for row in graph.edges.head(8).to_dict("records")]
    picture = Picture(
        graph.plot().svg,
        f"Units of {task.name.replace('_', ' ')} as a graph",
        f"Strongest edges: {'; '.join(strongest)}.",
        "Input at the bottom.",
    )
    paths = attention_paths(model, units, graph, pairs=PAIRS_OF_A_SCORE)
    page = SectionGraph.of(graph, paths, replays(model, units, graph, progress=False))
    return ReportSection("Unit graph: who feeds whom?", (intro,), (picture,), (), "Unit graph", page)


def _paths(model: Any, units: UnitSet, task: Task) -> ReportSection:
    kinds = {name: f for name, f in units.items() if name.endswith(".mlp_out")}
    scores = attribute(model, kinds, task.train)
    name = task.name.replace("_", " ")
    intro = (
        f"The best mlp_out units for {name}, two in each of the layers where they rank highest: each reads the layer's MLP "
        "activations and adds its write vector to the residual stream. Ranks are by attribution on training prompts."
    )
    best = ", ".join(f"{site}/{unit}" for site, unit in scores.ranking()[:6])
    picture = Picture.of(plot_unit_paths(model, kinds, scores), f"Paths of the best units for {name}", f"Best units: {best}.")
    return ReportSection(f"Paths of the best units: {name}", (intro,), (picture,), (), "Paths")
