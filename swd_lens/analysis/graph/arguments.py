"""The arguments of a unit graph: settings that fit together, units that exist, a prompt and answers as token ids."""

from typing import Any

from swd_lens.analysis.graph.frozen import Frozen
from swd_lens.circuits import Circuit
from swd_lens.circuits.scores import require_same_units
from swd_lens.hosts import Host, sites_of
from swd_lens.hosts.sites import Site, execution_key, parse_unit
from swd_lens.tasks.example import Unusable
from swd_lens.tasks.text import as_rows
from swd_lens.tasks.tokenize import TaskTokenizer
from swd_lens.units.attach import by_site
from swd_lens.units.factors import Factors
from swd_lens.units.sources import as_units


def check_settings(
    prompt: Any,
    attention: str,
    tokens: Any,
    normalize: str,
    keep: int | None,
    min_weight: float | int,
    per_node: int | None,
) -> None:
    for what, value, valid in (
        ("attention", attention, ("none", "frozen")),
        ("normalize", normalize, ("none", "cosine")),
    ):
        if value not in valid:
            raise ValueError(f"{what} must be one of {valid}, got {value!r}")
    if prompt is None and attention == "frozen":
        raise ValueError("attention='frozen' holds the attention patterns of a prompt: give one, prompt='...'")
    if prompt is not None and tokens is not None:
        raise ValueError("with a prompt the norms' scales are those of its run: leave `tokens` out")
    if prompt is not None and normalize != "none":
        raise ValueError(
            "with a prompt weights are contributions per unit of z; normalize='cosine' is for graphs without one"
        )
    for what, value in (("keep", keep), ("per_node", per_node)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{what}={value}: give a whole number of at least 1, or None for all edges")
    if not min_weight >= 0:
        raise ValueError(f"min_weight={min_weight}: give a number of at least 0")


def units_of(host: Host, factors: Any, units: Any) -> tuple[dict[str, Factors], dict[Site, list[int]], Any]:
    """All factors by site name, the chosen units by site in execution order, and the scores of a circuit."""
    given = by_site(factors)
    sites = sites_of(host, given)
    named = dict(zip((site.name for site in sites_of(host, given)), sites, strict=True))
    found: dict[str, Factors] = {}
    for name, source in given.items():
        site = sites_of(host, name)[0]
        one = as_units(source, site)
        if not isinstance(one, Factors):
            raise TypeError(
                f"the units of {site.name} are a {type(one).__name__}: an encode/decode pair has no read and write vectors "
                "whose products could be edges; take factors, or baselines"
            )
        found[site.name] = one
    score = None
    if isinstance(units, Circuit):
        require_same_units(units.scores.settings, found, "this circuit")
        units, score = units.units, units.scores
    chosen: dict[str, list[int]] = {}
    for unit in [units] if isinstance(units, str) else units:
        name, index = parse_unit(unit) if isinstance(unit, str) else (unit[0], int(unit[1]))
        if name not in found or not 0 <= index < found[name].n_units:
            has = ", ".join(f"{site} (0 to {f.n_units - 1})" for site, f in found.items())
            raise ValueError(f"unit {name}/{index} is not among these factors' units: {has}")
        if index in chosen.setdefault(name, []):
            raise ValueError(f"unit {name}/{index} is named twice; name it once")
        chosen[name].append(index)
    if not chosen:
        raise ValueError("there are no units: a graph needs some; take a larger circuit")
    ordered = sorted(chosen, key=execution_key)
    return found, {named[name]: sorted(chosen[name]) for name in ordered}, score


def prompt_ids(model: Any, prompt: Any) -> tuple[list[int], bool | None]:
    """Token ids, and whether a text got a BOS."""
    if not isinstance(prompt, str):
        rows = as_rows(prompt, model)
        if len(rows) != 1:
            raise ValueError(f"a graph is of one prompt, got {len(rows)}; make one graph for each")
        return rows[0].tolist(), None
    if model.tokenizer is None:
        raise ValueError("this host has no tokenizer, so a text cannot be its prompt; pass token ids")
    tokenizer = TaskTokenizer("unit_graph", model)
    try:
        return tokenizer.prompt(prompt).tolist(), tokenizer.prepend_bos
    except Unusable as error:
        raise ValueError(f"this prompt cannot be run: {error}; give a shorter one, or one that is not empty") from None


def answer_ids(model: Any, answers: Any, run: Frozen, with_prompt: bool) -> list[int]:
    if answers is None:
        answers = 3 if with_prompt else []
    if isinstance(answers, int):
        if not with_prompt or isinstance(answers, bool) or answers < 0:
            raise ValueError(
                f"answers={answers}: the likeliest tokens are those of a prompt; name tokens, or give a prompt"
            )
        return run.logits.topk(min(answers, len(run.logits))).indices.tolist()
    ids = []
    for one in [answers] if isinstance(answers, str) else answers:
        if isinstance(one, str):
            if model.tokenizer is None:
                raise ValueError("this host has no tokenizer; give answers as token ids")
            try:
                one = TaskTokenizer("unit_graph", model, False).single(one, "answer")
            except Unusable as error:
                raise ValueError(f"{error}; give a token id, or text that is one token") from None
        if not 0 <= int(one) < model.cfg.d_vocab:
            raise ValueError(f"answer {one} is no token id of this host; ids go from 0 to {model.cfg.d_vocab - 1}")
        if int(one) in ids:
            raise ValueError(f"answer {one} is named twice; name it once")
        ids.append(int(one))
    return ids
