"""Items that look at units themselves: an audit, an edit, query-key pairs, interactions of an MLP's units.

Each makes its factors (or takes over those of other items), calls a study of swd_lens/analysis, and says in numbers what came
out.
"""

from typing import Any

import pandas as pd

from swd_lens.analysis.audit import audit
from swd_lens.analysis.edit import compare_edits, select_edit_unit
from swd_lens.analysis.interactions import UnitInteractions, unit_interactions, unit_overlap
from swd_lens.analysis.qk import plot_attention_fidelity, qk_replay, qk_scan, qk_screen
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import split_name
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.result import ItemResult, result_of
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.section import Picture, SectionTable
from swd_lens.units.factors import FactorSet

_PAIRS = 30
# Where a head is rebuilt well enough for its pairs to be read (nats).
_REBUILT = 0.05


def semantic_audit(materials: Materials, settings: ItemSettings) -> ItemResult:
    """A task's best units in some layers, and what they respond to in text that has nothing to do with it."""
    factors = materials.swd(settings["sites"], settings["sparsity"])
    task = materials.task(settings["task"])
    scores = materials.scores(settings["sites"], f"SWD s={settings['sparsity']:g}", factors, task)
    materials.on_step(f"audit the best units of {task.name}")
    text = materials.heldout[: -(-settings["audit_tokens"] // materials.heldout.shape[1])]
    layers = [layer for layer in settings["layers"] if layer < materials.model.cfg.n_layers]
    n_valid = sum(int(f.valid_units.sum()) for f in factors.values())
    of_layers = [name for name in factors if split_name(name)[0] in layers]
    ranking = scores.ranking()
    shown = [unit for site in of_layers for unit in [each for each in ranking if each[0] == site][: settings["per_layer"]]]
    audited = audit(
        materials.model,
        factors,
        text,
        units=shown,
        n=settings["contexts"],
        scores=scores,
        coactivation=False,
        progress=materials.progress,
    )
    ranks = audited.rank_table(per_layer=settings["per_layer"], layers=layers)
    contexts = audited.excerpts(ranks["unit"].tolist(), n=3)
    best = ranks.iloc[0] if len(ranks) else None
    findings = [
        f"Units of {len(factors)} matrices are candidates, {n_valid:,} of them with a read and a write edge; scores are "
        f"attributions to {task.name} in logits, contexts the {settings['contexts']} of largest |z| among {text.numel():,} "
        "tokens of text that the ranking did not see.",
        "No label is given here: what a unit responds to is for the reader to say.",
    ]
    if best is not None:
        ranked = ranks.sort_values(by="global rank")
        words = [f"{row['unit']} rank {row['global rank']:,} ({row['score']:.3g})" for row in ranked.head(3).to_dict("records")]
        findings.insert(1, f"Best of layers {', '.join(map(str, layers))}: {'; '.join(words)}.")
    tables = [
        SectionTable.of("Best units of each layer", ranks.drop(columns="label")),
        SectionTable.of("Their strongest contexts", contexts.drop(columns="label")),
    ]
    picture = Picture.of(audited.plot(per_layer=2, layers=layers), f"Best units of {task.name} by layer", findings[1])
    return result_of(settings, materials, findings, tables, [picture], {"ranks": ranks.to_dict("records")})


# ---------------------------------------------------------------------------------------------- edit


def edit(materials: Materials, settings: ItemSettings) -> ItemResult:
    """One unit's read vector for a directional edit, beside a random unit, an oracle, and LoRA at several rates."""
    model = materials.model
    factors = materials.swd(settings["site"], settings["sparsity"], tokens=settings["edit_tokens"])
    cases = [tuple(case) for case in settings["cases"]]
    if not cases:  # the first test prompt of each task, then the second, ...
        each_task = zip(*(task.test.examples[:4] for task in materials.tasks), strict=True)
        cases = [(each.prompt, each.answers[0], each.distractors[0]) for same in each_task for each in same]
    materials.on_step(f"edit {settings['site']}: choose a unit, compare with its controls")
    selected = select_edit_unit(model, factors, cases)
    unit = selected.best["unit"]
    prompt, answer, foil = cases[0]
    others = [case[0] for case in cases[1:]]
    text = materials.heldout[:, : max(2, settings["other_tokens"] // 8)][:8]
    how: dict[str, Any] = {
        "other_prompts": others,
        "tokens": text,
        "shifts": settings["shifts"],
        "random_seed": settings["random_seed"],
        "progress": materials.progress,
    }
    first, *more = settings["lora_rates"]
    compared = compare_edits(model, factors, unit, prompt, answer, foil, lora_learning_rate=first, **how)
    rows = [compared.table().replace({"method": {"lora": f"LoRA, rate {first:g}"}})]
    for rate in more:
        slower = compare_edits(model, factors, unit, prompt, answer, foil, methods=("lora",), lora_learning_rate=rate, **how)
        rows.append(slower.table().replace({"method": {"lora": f"LoRA, rate {rate:g}"}}))
    table = pd.concat(rows, ignore_index=True)
    largest = max(settings["shifts"])
    at_largest: Any = table[table["requested shift"] == largest]
    words = [
        f"{row['method']} {row['margin change']:+.4f} logits for {row['KL other prompts']:.3g} nats"
        for row in at_largest.to_dict("records")
    ]
    findings = [
        f"Edited: {unit}, for {answer!r} over {foil!r} after {prompt!r} (dense margin "
        f"{compared.target.margin:.4f} logits); it scored best of {len(selected.table())} candidates over {len(cases)} cases.",
        f"At a requested shift of {largest:g}: {'; '.join(words)} (mean KL on {len(others)} other prompts).",
    ]
    tables = [SectionTable.of("Every edit", table), SectionTable.of("Candidates", selected.table(10))]
    pictures = [
        Picture.of(compared.plot(), "Change of the margin against KL on other prompts", findings[1]),
        Picture.of(selected.plot(), "Candidates for the edit", findings[0]),
    ]
    return result_of(settings, materials, findings, tables, pictures, {"edits": table.to_dict("records")})


# ---------------------------------------------------------------------------------------------- query-key pairs


def query_key(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Attention's reconstruction by layer, the static screen of pairs, their replay on prompts, and the strongest case."""
    model = materials.model
    sites = [site.name for pattern in settings["sites"] for site in find_sites(model, pattern)]
    factors = materials.swd(sites, settings["sparsity"])
    measured = materials.local_fidelity("attention", f"SWD s={settings['sparsity']:g}", factors)
    materials.on_step("screen and replay query-key pairs")
    screen = qk_screen(model, factors, top=settings["top"])
    prompts = settings["prompts"] or [task.test.examples[0].prompt for task in materials.tasks]
    scan = qk_scan(model, factors, prompts, screen=screen, per_head=settings["per_head"], progress=materials.progress)
    # Its pattern changes most among well rebuilt heads; among all heads where none is.
    case = (scan.best(1, max_dense_kl=_REBUILT) or scan.best(1))[0]
    replay = qk_replay(model, factors, case.pair, prompts[case.prompt])
    # The largest error of each kind of matrix.
    by_kind: dict[str, dict[int, float]] = {}
    for name, value in measured.local_relmse.items():
        layer, kind = split_name(name)
        by_kind.setdefault(kind, {})[layer] = value
    words = [
        f"{kind} at most {max(of_kind.values()):.2%} (layer {max(of_kind, key=lambda layer, of=of_kind: of[layer])})"
        for kind, of_kind in by_kind.items()
    ]
    findings = [
        f"Relative squared error of the attention matrices, each on the dense model's inputs: {', '.join(words)}.",
        f"Of {len(scan.frame):,} cases (heads, pairs, prompts) the clearest is {case.pair} (gamma {case.pair.gamma:.3g}) on "
        f"{prompts[case.prompt]!r}: the pattern rebuilt from the factors is {case.dense_kl:.3g} nats from the dense one; without "
        f"query unit q{case.pair.q_unit} it moves by {case.removed_kl:.3g} nats, by at most {case.max_change:.2f} in one "
        f"probability. What the pair's map foretells correlates with that change by {case.agreement:.2f}; the map's signed mean "
        f"over valid positions is {case.signed_mean:+.3g}.",
        "The static ranking by write norms and gamma depends on how units are scaled; the contributions to scores, and the "
        "column size (|gamma| times the root mean squares of both activations), do not.",
    ]
    tables = [
        SectionTable.of("Error by matrix", _errors(measured)),
        SectionTable.of("Strongest cases", scan.table(20)),
        SectionTable.of("Strongest pairs by weights alone", screen.table().head(20)),
    ]
    pictures = [
        Picture.of(plot_attention_fidelity(measured), "Attention matrices: error by layer", findings[0]),
        Picture.of(screen.plot(), "Largest static coefficient of each head"),
        Picture.of(scan.plot(), "What taking out a query unit does"),
        Picture.of(replay.plot(), f"{case.pair}: pattern before and after", findings[1]),
        Picture.of(replay.plot_contribution(), f"{case.pair}: what the pair adds to each score"),
    ]
    numbers = {"fidelity": measured.as_dict(), "cases": scan.frame.to_dict("records")}
    return result_of(settings, materials, findings, tables, pictures, numbers)


def _errors(measured: Fidelity) -> pd.DataFrame:
    """Tabulate each matrix's error on the dense model's inputs, and in the replaced model, where what lies before it drifts."""
    local, within = measured.local_relmse, measured.relmse
    return pd.DataFrame(
        {"site": list(within), "local": [local.get(site) for site in within], "in the model": list(within.values())}
    )


# ---------------------------------------------------------------------------------------------- interactions


def interactions(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Correlation of contributions behind the activation, finite differences in front of it."""
    model, overlap_site, site = materials.model, settings["overlap_site"], settings["interaction_site"]
    behind = materials.swd(overlap_site, settings["sparsity"])
    materials.on_step(f"overlap of the units of {overlap_site}")
    heldout, length = materials.heldout, materials.heldout.shape[1]
    overlap = unit_overlap(
        model,
        behind,
        overlap_site,
        heldout[: -(-settings["overlap_tokens"] // length)],
        shown=settings["shown"],
        progress=materials.progress,
    )
    layer, kind = split_name(site)
    # In every layer up to the site's, one after the other: those below stay installed.
    up_to = [f"blocks.{below}.{kind}" for below in range(layer + 1)]
    before = materials.swd(up_to, settings["sparsity"], units=settings["interaction_units"])
    materials.on_step(f"pairwise finite differences of the units of {site}")
    differences = unit_interactions(
        model,
        before,
        site,
        heldout[: -(-settings["interaction_tokens"] // length)],
        top=settings["top"],
        progress=materials.progress,
    )
    crossed = _gate_by_up(materials, settings, before, site, heldout[: -(-settings["interaction_tokens"] // length)])
    row, correlations = differences.table().iloc[0], overlap.table()
    contribution = correlations[correlations["|measure|"].str.contains("contribution")].iloc[0]
    strongest = differences.pairs(1).iloc[0]
    findings = [
        f"Behind the activation ({overlap_site}, {overlap.n_pairs:,} pairs): absolute correlation of contributions has its 95th "
        f"percentile at {contribution['95th']:.4f} and its largest at {contribution['max']:.3f}.",
        f"In front of it ({site}, {differences.n_pairs:,} pairs of the {settings['top']} units of largest energy): R has mean "
        f"{row['mean R']:.3f}, 95th percentile {row['95th']:.3f}, largest {row['max']:.3f} ({strongest['unit']} with "
        f"{strongest['other unit']}).",
    ]
    if crossed is not None:
        both = crossed.table().iloc[0]
        findings.append(
            f"Gate units with units of the up branch ({both['pairs']:,} pairs): mean {both['mean R']:.3f}, 95th percentile "
            f"{both['95th']:.3f}, largest {both['max']:.3f}; two units of the up branch do not interact."
        )
    tables: list[SectionTable] = [
        SectionTable.of("Overlap behind the activation, absolute values over all pairs", correlations),
        SectionTable.of("Interactions in front of it", differences.table()),
        SectionTable.of("Strongest pairs in front of it", differences.pairs(_PAIRS)),
        SectionTable.of("Strongest pairs behind it", overlap.pairs(_PAIRS)),
        *([] if crossed is None else [SectionTable.of("Gate x up", crossed.table())]),
    ]
    pictures = [
        Picture.of(overlap.plot(), "Read correlation, write cosine, contribution correlation", findings[0]),
        Picture.of(overlap.plot_tail(_PAIRS), "Distribution, and the strongest pairs", findings[0]),
        Picture.of(differences.plot(), "Interaction ratios of pairs", findings[1]),
        Picture.of(differences.plot_pairs(_PAIRS), "Strongest interactions", findings[1]),
    ]
    numbers = {"overlap": correlations.to_dict("records"), "interactions": differences.table().to_dict("records")}
    return result_of(settings, materials, findings, tables, pictures, numbers)


def _gate_by_up(materials: Materials, settings: ItemSettings, before: FactorSet, site: str, text: Any) -> UnitInteractions | None:
    """Measure units of a gated MLP's gate with those of the up branch; None where there is no gate."""
    layer, kind = split_name(site)
    if kind != "mlp_gate":
        return None
    up = f"blocks.{layer}.mlp_in"
    factors = {**before, **materials.swd(up, settings["sparsity"], units=settings["interaction_units"])}
    how = {"top": settings["top"], "progress": materials.progress}
    return unit_interactions(materials.model, factors, [site, up], text, **how)
