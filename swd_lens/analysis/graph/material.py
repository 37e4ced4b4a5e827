"""material: from units and a run to what edges are made of (edges.py).

1. Without a prompt the host's norms alone; with one a frozen run (frozen.py), cut to the drawn positions.
2. Nodes in groups, in execution order; the vectors of the chosen units; the matrices that a path runs through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.analysis.graph.edges import LOGIT, TOKEN, Group, Parts
from swd_lens.analysis.graph.frozen import Frozen, Reading, final_reading, freeze, read_norms
from swd_lens.hosts import Host, UnsupportedHostError, sites_of
from swd_lens.hosts.sites import RESIDUAL_MATRICES, Site
from swd_lens.tasks.text import as_rows
from swd_lens.units.factors import Factors

# A dense table of weights: 6,000 nodes are 144 MB each for weights, contributions and shares.
_MOST_NODES = 6_000
_PROBE_TOKENS = 8
_ROWS_AT_ONCE = 64


def norms_alone(host: Host, model: Any, tokens: Any) -> Frozen:
    """The host's norms; their scale 1, or the average of 1/scale over tokens."""
    probe = torch.arange(min(_PROBE_TOKENS, int(model.cfg.n_ctx), int(model.cfg.d_vocab)))[None]
    rows = probe if tokens is None else as_rows(tokens, model)
    return read_norms(host, tqdm(rows.split(_ROWS_AT_ONCE), desc="norms", disable=len(rows) <= _ROWS_AT_ONCE, leave=False),
                      average=tokens is not None)  # fmt: skip


def frozen_run(
    host: Host, found: Mapping[str, Factors], chosen: Mapping[Site, list[int]], ids: list[int], attention: str
) -> Frozen:
    layers = {kind: sorted({site.layer for site in chosen if site.kind == kind}) for kind in RESIDUAL_MATRICES}
    run = freeze(
        host,
        torch.tensor(ids)[None],
        units=list(chosen),
        patterns=layers["attn_o"] if attention == "frozen" else (),
        slopes=layers["mlp_out"],
    )
    return run if attention == "frozen" else _last(run)


def _last(run: Frozen) -> Frozen:
    """The last position alone."""

    def cut(readings: list[Reading | None]) -> list[Reading | None]:
        return [None if one is None else replace(one, inverse=one.inverse[-1:]) for one in readings]

    return replace(
        run,
        embedded=run.embedded[-1:],
        leaving=run.leaving[-1:],
        attn=cut(run.attn),
        mlp=cut(run.mlp),
        z={site: z[-1:] for site, z in run.z.items()},
        slopes={site: slope[-1:] for site, slope in run.slopes.items()},
    )


def parts_of(
    host: Host,
    found: Mapping[str, Factors],
    chosen: Mapping[Site, list[int]],
    run: Frozen,
    ids: list[int] | None,
    answers: list[int],
    attention: str,
    normalize: str,
) -> Parts:
    positions = 1 if ids is None or attention == "none" else len(ids)
    groups: list[Group] = []

    def add(name: str, positions: int, items: Sequence[int], site: Site | None = None) -> None:
        start = groups[-1].start + groups[-1].size if groups else 0
        groups.append(Group(name, start, positions, tuple(items), site))

    if ids is not None:
        add(TOKEN, positions, [0])
    for site, indices in chosen.items():
        add(site.name, positions, indices, site)
    if answers:
        add(LOGIT, 1, answers)
    n_nodes = groups[-1].start + groups[-1].size
    if n_nodes > _MOST_NODES:
        raise ValueError(
            f"this graph would have {n_nodes:,} nodes ({positions} positions), and can have {_MOST_NODES:,}; take fewer units, a "
            "shorter prompt, or attention='none'"
        )
    cpu = {name: (f.read.detach().float().cpu(), f.write.detach().float().cpu()) for name, f in found.items()}
    return Parts(
        groups,
        {site.name: cpu[site.name][0][:, indices] for site, indices in chosen.items()},
        {site.name: cpu[site.name][1][indices] for site, indices in chosen.items()},
        _on_cpu(run),
        ids is None,
        int(host.model.cfg.n_heads),
        _matrices(host, cpu, chosen, run),
        _answer_vectors(host, run, answers, ids is None) if answers else None,
        normalize == "cosine",
    )


def _on_cpu(run: Frozen) -> Frozen:
    def moved(readings: list[Reading | None]) -> list[Reading | None]:
        return [
            None
            if one is None
            else Reading(one.centred, None if one.weight is None else one.weight.cpu(), one.inverse.cpu())
            for one in readings
        ]

    return replace(
        run,
        embedded=run.embedded.cpu(),
        leaving=run.leaving.cpu(),
        attn=moved(run.attn),
        mlp=moved(run.mlp),
        logits=run.logits.cpu(),
        z={name: t.cpu() for name, t in run.z.items()},
        patterns={layer: t.cpu() for layer, t in run.patterns.items()},
        slopes={name: t.cpu() for name, t in run.slopes.items()},
    )


def _matrices(
    host: Host, cpu: Mapping[str, tuple[Tensor, Tensor]], chosen: Mapping[Site, list[int]], run: Frozen
) -> dict[str, Tensor]:
    """Matrices that a path runs through: as they are in the run, that is the product where a site is replaced."""
    drawn = {site.name for site in chosen}
    wanted = [site for name in run.slopes for site in sites_of(host, name) if name not in drawn]
    for layer in run.patterns:
        if not {f"blocks.{layer}.attn_v", f"blocks.{layer}.attn_qkv"} & drawn:
            wanted += sites_of(host, f"blocks.{layer}.attn_v")
    matrices: dict[str, Tensor] = {}
    for site in wanted:
        packed = f"blocks.{site.layer}.attn_qkv"
        if site.name in cpu:
            matrices[site.name] = cpu[site.name][0] @ cpu[site.name][1]
        elif site.kind == "attn_v" and packed in cpu:
            matrices[site.name] = cpu[packed][0] @ cpu[packed][1][:, -site.d_out :]
        else:
            matrices[site.name] = host.weight(site).cpu()
    return matrices


def _answer_vectors(host: Host, run: Frozen, answers: list[int], static: bool) -> Tensor:
    """(answer, d_model): what the answers' logits, less the mean over the vocabulary, read of the residual stream."""
    cap = float(getattr(host.model.cfg, "output_logits_soft_cap", None) or 0)
    if cap > 0:
        raise UnsupportedHostError(
            f"a unit graph needs logits that are linear in the residual stream, and this host caps them (at {cap}); take "
            "answers=0 with a prompt, and none without"
        )
    _, unembedding = host.readout()
    columns = unembedding[:, answers] - unembedding.mean(1, keepdim=True)
    reading = final_reading(host, run.leaving[-1:])
    pulled = reading.pull(columns.T.float())
    return (pulled if static else pulled * reading.inverse[:, None]).cpu()
