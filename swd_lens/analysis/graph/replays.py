"""replays: set a drawn unit to other values, in true forwards of the host, beside what the frozen run predicts.

1. The graph's prompt is run once with all factors attached and everything held (frozen.py); that it is the run of the graph is
   checked.
2. Frozen: what one unit of z changes at every other node, through all paths (`responses`); a unit at strength s has moved by
   (s - 1) z. With the norms' scales, attention patterns and slopes of the activation functions held, a host is linear. So one
   change per source is sent through it, many sources side by side:

   a. Where it begins, the source's z is changed by 1 at its position.
   b. Block by block the change of the residual stream is read through the norms; through the values and the pattern; through
      both sides of the MLP and the slopes. A site with units hands it on by all its units, drawn or not; a dense one by its
      matrix.
   c. On the way the drawn units' changes of z are read off, at the end those of the answers' centred logits.

   Nothing is left out but what the held parts do when they move: the change of a true run less this is theirs.
3. True: the host runs the prompt with the unit's z set to s z at its position, one row for each unit and strength, the first row
   of every batch untouched. What a row's nodes are less those of the first is the true change. A batch takes up at the block of
   its earliest unit: what comes before is the untouched run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.graph.build import frozen_run, units_of_run
from swd_lens.analysis.graph.data import records
from swd_lens.analysis.graph.edges import layout_of, value_columns
from swd_lens.analysis.graph.frozen import PRE_ACTIVATION, FrozenRun, before_cap, by_head
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.base.errors import quoted
from swd_lens.base.machine import available_bytes
from swd_lens.base.progress import tqdm
from swd_lens.base.record import SavedRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import Start, require_gradients, require_no_dropout, sites_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.recording import record
from swd_lens.hosts.sites import hook_name, split_name
from swd_lens.units import UnitSet, attach
from swd_lens.units.keys import read_unit, single_units

_TOLERANCE = 1e-3  # by which z of this run and of the graph may differ, relative to the largest of the graph
_SHOWN = 12  # rows of the card
_MOST_BYTES = 2**28  # of one batch; more is no faster on a CPU
_SHARE = 0.25  # of the free memory


class ResponseSlot(NamedTuple):
    """A unit at a position of the prompt."""

    site: str
    unit: int
    position: int


@dataclass(frozen=True, repr=False, eq=False)
class Replays(SavedRecord):
    """Units of a graph clamped one at a time.

    Attributes:
        nodes: the clamped ones, by their names in the graph.
        strengths: what their z was multiplied by.
        targets: the nodes whose changes are known: units, then answers.
        z: of the clamped nodes, in the untouched run.
        effects: what one unit of z of a clamped node changes at each target in the frozen run; 1 at itself.
        changes: what the true runs changed.
        settings: model, fingerprints of the factors, the prompt.
    """

    FORMAT: ClassVar[int] = 1
    WHAT: ClassVar[str] = "replays of a graph"

    nodes: tuple[str, ...]
    strengths: tuple[float, ...]
    targets: tuple[str, ...]
    z: Float[Tensor, " node"]
    effects: Float[Tensor, "node target"]
    changes: Float[Tensor, "node strength target"]
    settings: Mapping[str, Any]

    @property
    def frozen(self) -> Float[Tensor, "node strength target"]:
        """The changes that the frozen run predicts."""
        moved = (torch.tensor(self.strengths, dtype=torch.float32) - 1.0)[None, :] * self.z[:, None]
        return moved[..., None] * self.effects[:, None, :]

    def table(self) -> pd.DataFrame:
        """One row per clamped node, strength and target: node, strength, target, frozen (the predicted change), true."""
        n, s, t = self.changes.shape
        return pd.DataFrame(
            {
                "node": [name for name in self.nodes for _ in range(s * t)],
                "strength": [strength for _ in range(n) for strength in self.strengths for _ in range(t)],
                "target": list(self.targets) * (n * s),
                "frozen": self.frozen.flatten().double().numpy(),
                "true": self.changes.flatten().double().numpy(),
            }
        )

    def parts(self) -> tuple[Any, ...]:
        table = self.table()
        others = table["node"] != table["target"]
        of_answers = others & table["target"].str.startswith("logit ")
        shown = pd.DataFrame(table[of_answers if bool(of_answers.any()) else others])
        strongest = shown.sort_values("true", key=lambda change: -change.abs(), kind="stable", ignore_index=True)
        return (strongest.head(_SHOWN), "table() gives all; UnitGraph.show(replays=...) is the live clamp.")

    def __repr__(self) -> str:
        strengths = ", ".join(f"{strength:g}" for strength in self.strengths)
        return f"Replays({len(self.nodes)} units at {strengths} times z, {len(self.targets)} nodes watched)"


@with_torch_defaults
def replays(
    model: Any,
    factors: Any,
    graph: UnitGraph,
    units: Any = None,
    strengths: Sequence[float | int] = (0.0, 0.5, 2.0),
    *,
    progress: bool = True,
) -> Replays:
    """Clamp units of a graph, each by itself: true runs of the host, beside what its frozen, linear run predicts (ours).

        graph = swd.unit_graph(model, factors, circuit, prompt=prompt, attention="frozen")
        graph.show(replays=swd.graph.replays(model, factors, graph))

    A unit is clamped at the position of its node, to strength times its z there. The frozen prediction runs through all paths
    with norms, attention patterns and slopes held: also those through units that are not drawn and through dense matrices.

    Args:
        model: the host, with these sites not attached; left as it was.
        factors: those of the graph, all of them.
        graph: of one prompt.
        units: names of nodes ("blocks.2.mlp_out/17@5"), or of units, at all their positions in the graph. None: every unit.
        strengths: () for the prediction alone.
        progress: show bars where it takes long.

    Raises:
        ValueError: a graph without a prompt or of several, other factors or another run than the graph's, a unit that it does not
            draw, or a strength that is no number.
        UnsupportedHostError: see `unit_graph`; AttachError: see `swd_lens.attach`.
    """
    if not graph.has_prompt:
        raise ValueError("replays run a prompt, and this graph has none: make it with unit_graph(..., prompt=...)")
    if n_prompts := graph.settings.get("task_prompts"):
        raise ValueError(f"this graph is the mean of {n_prompts} prompts; replays need the unit_graph of one")
    for strength in strengths:
        if isinstance(strength, bool) or not abs(float(strength)) < float("inf"):
            raise ValueError(f"strengths are numbers that z is multiplied by, got {quoted(strength)}")
    attached, settings = units_of_run(model, factors, graph)
    clamped = _clamped(graph, units, attached)
    rows = {row["node"]: row for row in records(graph.nodes)}
    watched = {
        name: ResponseSlot(str(row["site"]), int(row["unit"]), int(row["position"]))
        for name, row in rows.items()
        if row["kind"] == "unit"
    }
    answers = {name: int(row["token"]) for name, row in rows.items() if row["kind"] == "logit"}
    require_no_dropout(model)
    require_gradients(model)
    ids, places = list(graph.settings["token_ids"]), [watched[name] for name in clamped]
    with torch.no_grad():
        drawn = [site for site in attached.sites if site.name in {place.site for place in watched.values()}]
        everywhere = attached.host.sites()  # responses pass through all patterns and slopes
        with attach(model, attached):
            run = frozen_run(attached, drawn, ids, everywhere, everywhere)
        z = torch.tensor([float(run.z[p.site][p.position, p.unit]) for p in places], dtype=torch.float32)
        _require_the_graphs_run(run, watched, rows)
        effects = responses(attached, run, places, list(watched.values()), list(answers.values()), progress)
        wanted = [(i, float(strength)) for i in range(len(places)) for strength in strengths]
        values = [(places[i], strength * float(z[i])) for i, strength in wanted]
        true = _true_changes(attached, ids, values, list(watched.values()), list(answers.values()), progress)
    return Replays(
        tuple(clamped),
        tuple(map(float, strengths)),
        (*watched, *answers),
        z,
        effects,
        true.view(len(clamped), len(strengths), -1) if len(true) else true.new_zeros(len(clamped), 0, effects.shape[1]),
        settings,
    )


def _clamped(graph: UnitGraph, units: Any, attached: UnitSet) -> list[str]:
    """The names of the nodes to clamp, each once, in the graph's order where all are."""
    nodes = graph.nodes[graph.nodes["kind"] == "unit"]
    if units is None:
        return list(nodes["node"])
    names = set(nodes["node"])
    by_unit: dict[tuple[str, int], list[str]] = {}
    for name, site, unit in zip(nodes["node"], nodes["site"], nodes["unit"], strict=True):
        by_unit.setdefault((str(site), int(unit)), []).append(str(name))
    clamped: list[str] = []
    for unit in single_units(units):
        is_node = isinstance(unit, str) and "@" in unit
        of_unit = [unit] if is_node and unit in names else [] if is_node else by_unit.get(read_unit(unit, attached), [])
        if not of_unit:
            raise ValueError(
                f'the graph does not draw {quoted(unit)}; name a node of it ("blocks.2.mlp_out/17@5") or one of its units'
            )
        clamped += of_unit
    return list(dict.fromkeys(clamped))


def _require_the_graphs_run(run: FrozenRun, watched: Mapping[str, ResponseSlot], rows: Mapping[str, Any]) -> None:
    """Raises ValueError where z of this run are not those of the graph."""
    pairs = [(float(run.z[p.site][p.position, p.unit]), float(rows[name]["activation"])) for name, p in watched.items()]
    largest = max((abs(z) for _, z in pairs), default=1.0)
    difference = max((abs(now - then) for now, then in pairs), default=0.0)
    if difference > _TOLERANCE * max(largest, 1e-6):
        raise ValueError(
            f"z of this run and of the graph differ by {difference:.2g} where the largest is {largest:.2g}: it is another "
            "model, or other hooks are on it"
        )


# ---------------------------------------------------------------------------------------------- the frozen prediction


def room(device: torch.device) -> int:
    """The bytes that one batch of changes, or of runs, may take."""
    free = available_bytes(device)
    return _MOST_BYTES if free is None else min(_MOST_BYTES, int(_SHARE * free))


def responses(
    units: UnitSet,
    run: FrozenRun,
    sources: Sequence[ResponseSlot],
    targets: Sequence[ResponseSlot],
    answers: Sequence[int],
    progress: bool,
) -> Float[Tensor, "source target_and_answer"]:
    """The change of every target's z, then of every answer's logit less the vocabulary's mean, per unit of each source's z.

    Args:
        run: of one prompt with all of `units` attached, at every position, with the patterns and slopes of every layer.
        sources, targets: of the attached sites.
        answers: token ids; their logits are those before a soft cap.
        progress: show a bar.
    """
    bare = replace(run, slopes={}, patterns={})  # with them the layout would multiply out matrices
    vectors = layout_of(units, {}, bare, answers=answers, static=False, bounded=False).groups[-1].read if answers else None
    place_of = {site.name: place for place, site in enumerate(units.sites)}  # in the order of execution
    order = sorted(range(len(sources)), key=lambda i: (place_of[sources[i].site], sources[i].position, sources[i].unit))
    response = torch.zeros(len(sources), len(targets) + len(answers), dtype=torch.float32)
    widest = max(site.d_in + site.d_out for site in units.host.sites())
    at_once = max(1, room(torch.device("cpu")) // (len(run.embedded) * widest * 4 * 4))
    batches = [order[i : i + at_once] for i in range(0, len(order), at_once)]
    for batch in tqdm(batches, desc="frozen paths", disable=not progress or len(batches) == 1, leave=False):
        change = _Change(units, run, [sources[i] for i in batch], targets)
        response[batch, : len(targets)] = change.of_targets
        if vectors is not None:
            response[batch, len(targets) :] = change.stream[:, -1] @ vectors
    return response


class _Change:
    """The changes that some sources make, row by row; to make one sends them through all blocks.

    Attributes:
        stream: (source, pos, d_model) of the residual stream.
        of_targets: (source, target) of the targets' z.
    """

    def __init__(self, units: UnitSet, run: FrozenRun, sources: Sequence[ResponseSlot], targets: Sequence[ResponseSlot]):
        self.units, self.run = units, run
        self.by_name = {site.name: site for site in units.host.sites()}
        self.sources = _by_site(sources)
        self.targets = _by_site(targets)
        n_positions, d_model = run.embedded.shape
        self.stream = torch.zeros(len(sources), n_positions, d_model, dtype=torch.float32)
        self.of_targets = torch.zeros(len(sources), len(targets), dtype=torch.float32)
        first = min((split_name(place.site)[0] for place in sources), default=0)
        for layer in range(first, 1 + max(site.layer for site in self.by_name.values())):
            entering, site = self.stream, self.by_name.get(f"blocks.{layer}.attn_o")
            if site is not None and (layer, "attn") in run.readings:
                h = run.readings[layer, "attn"].push(entering)
                for kind in ("attn_q", "attn_k"):  # they end at the pattern
                    self._units(f"blocks.{layer}.{kind}", h)
                packed = f"blocks.{layer}.attn_qkv"
                if packed in units.factors:
                    values = self._units(packed, h) @ value_columns(units.factors[packed].write, site.d_in).detach().float().cpu()
                else:
                    values = self._out(f"blocks.{layer}.attn_v", h)
                v = by_head(values, int(units.host.model.cfg.n_heads), site.d_in)
                self.stream = entering + self._write(site.name, torch.einsum("hds,bshe->bdhe", run.patterns[layer], v).flatten(2))
            site, reading = self.by_name.get(f"blocks.{layer}.mlp_out"), run.readings.get((layer, "mlp"))
            if site is not None and reading is not None:
                h = reading.push(self.stream if reading.behind_attention else entering)
                post = torch.zeros(*h.shape[:2], site.d_in, dtype=torch.float32)
                for name in (f"blocks.{layer}.{kind}" for kind in PRE_ACTIVATION):
                    if name in run.slopes:
                        post += run.slopes[name] * self._out(name, h)
                self.stream = self.stream + self._write(site.name, post)

    def _write(self, name: str, h: Tensor) -> Tensor:
        """The change of the residual stream by a change of a site's input."""
        output, norm = self._out(name, h), self.run.writings.get(name)
        return output if norm is None else norm.push(output)

    def _out(self, name: str, h: Tensor) -> Tensor:
        """The change of a site's output by one of its input: by its units, or by its matrix where it has none."""
        if name in self.units.factors:
            return self._units(name, h) @ self.units.factors[name].write.detach().float().cpu()
        (site,) = sites_of(self.units.host, [name])
        return h @ self.units.host.weight(site).cpu()

    def _units(self, name: str, h: Tensor) -> Tensor:
        """The change of all z of a site, its sources' own put in; those of targets are kept."""
        if name not in self.units.factors:
            return h
        z = h @ self.units.factors[name].read.detach().float().cpu()
        rows, places = self.sources.get(name, ([], []))
        if rows:
            z[rows, [place.position for place in places], [place.unit for place in places]] += 1.0
        columns, places = self.targets.get(name, ([], []))
        if columns:
            self.of_targets[:, columns] = z[:, [place.position for place in places], [place.unit for place in places]]
        return z


def _by_site(places: Sequence[ResponseSlot]) -> Mapping[str, tuple[list[int], list[ResponseSlot]]]:
    """Site -> the numbers of its places, and these."""
    by_site: dict[str, tuple[list[int], list[ResponseSlot]]] = {}
    for i, place in enumerate(places):
        numbers, of_site = by_site.setdefault(place.site, ([], []))
        numbers.append(i)
        of_site.append(place)
    return by_site


# ---------------------------------------------------------------------------------------------- true runs


def _true_changes(
    units: UnitSet,
    ids: Sequence[int],
    values: Sequence[tuple[ResponseSlot, float]],
    watched: Sequence[ResponseSlot],
    answers: Sequence[int],
    progress: bool,
) -> Float[Tensor, "row target"]:
    """The changes by setting a unit to a value, row by row, at the watched units and the answers' centred logits."""
    changes = torch.zeros(len(values), len(watched) + len(answers), dtype=torch.float32)
    layer_of, host = {site.name: site.layer for site in units.sites}, units.host
    seen = {place.site for place in watched}
    order = sorted(range(len(values)), key=lambda i: layer_of[values[i][0].site])
    with attach(host.model, units):
        # As many rows at once as there is room for: z and products of every site, and the logits.
        per_position = sum(of_site.n_units for of_site in units.values())
        per_position += 4 * max(site.d_in + site.d_out for site in host.sites())
        per_row = 4 * (len(ids) * per_position + 2 * int(host.model.cfg.d_vocab))
        at_once = max(1, room(next(host.model.parameters()).device) // per_row - 1)
        batches = [order[start : start + at_once] for start in range(0, len(order), at_once)]
        for batch in tqdm(batches, desc="true runs", disable=not progress or len(batches) < 3, leave=False):
            # From the block of the earliest unit on: an untouched row, then one for each value.
            tokens, layer = torch.tensor([list(ids)] * (1 + len(batch))), min(layer_of[values[i][0].site] for i in batch)
            start = Start(layer, host.residual(tokens[:1], layer).expand(len(tokens), -1, -1)) if layer else None
            by_site: dict[str, list[tuple[int, ResponseSlot, float]]] = {}
            for row, (place, value) in enumerate((values[i] for i in batch), 1):
                by_site.setdefault(place.site, []).append((row, place, value))
            hooks = [(hook_name(site), _clamp(of_site)) for site, of_site in by_site.items()]
            sites = [site for site in units.sites if site.name in seen and site.layer >= layer]
            with host.model.hooks(fwd_hooks=hooks):
                shown = record(host, tokens, units=sites, run="last", start=start)
            columns = torch.zeros(len(tokens), len(watched), dtype=torch.float32)
            for i, place in enumerate(watched):
                if place.site in shown.units:
                    columns[:, i] = shown.units[place.site][:, place.position, place.unit].float().cpu()
            assert shown.logits is not None
            logits = before_cap(shown.logits.float().cpu(), facts_of(host.model).logit_cap)
            whole = torch.cat([columns, logits[:, list(answers)] - logits.mean(-1, keepdim=True)], 1)
            changes[batch] = whole[1:] - whole[:1]
            del shown, logits, whole, start  # not beside the next batch's run, for which there is just room
    return changes


def _clamp(values: Sequence[tuple[int, ResponseSlot, float]]) -> Any:
    """A hook that sets units, each in a row of its own."""
    rows, places, targets = zip(*values, strict=True)

    def clamp(z: Float[Tensor, "batch pos unit"], hook: Any) -> Float[Tensor, "batch pos unit"]:
        changed = z.clone()
        changed[list(rows), [p.position for p in places], [p.unit for p in places]] = torch.tensor(targets).to(z)
        return changed

    return clamp
