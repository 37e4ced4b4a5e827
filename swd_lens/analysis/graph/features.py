"""Features: the numbers by which viewers know units, and the files that a viewer shows when one is hovered.

1. A viewer has one dictionary per layer and knows a unit as the Cantor pair of (layer, index). We may have several sites in a
   layer, so indices are interleaved: index = unit * sites of the layer + place of the site among them. They depend on the
   attached factors alone, not on what a graph draws of them: graphs of the same factors share their feature files. With one
   site per layer the index is the unit's own.
2. A feature file, {number}.json, has what an audit knows of the unit: the places where z is largest and where it is most
   negative, the tokens it promotes and suppresses, how often it is active, and a histogram.

Where z has both signs a viewer's one colour would paint the negative end white. So there are two groups of examples, the second
with its sign turned, which its name says; and the histogram, which has the colours' range, is left out.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from swd_lens.analysis.audit import Audit, UnitProfile
from swd_lens.analysis.graph.data import GraphData
from swd_lens.hosts.sites import kind_order, split_name

_ONE_SIDED = 0.05  # of the largest |z|: what may lie on the other side of zero


def plain_name(text: str) -> str:
    """The text with a hyphen for every character that a slug or scan cannot have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)


def cantor(first: int, second: int) -> int:
    """One number for two, neither of them negative (the Cantor pairing function)."""
    return (first + second) * (first + second + 1) // 2 + second


@dataclass(frozen=True)
class FeatureNumbers:
    """How the units of a set of factors are numbered."""

    kinds: Mapping[int, tuple[str, ...]]  # layer -> kinds of its attached sites, in execution order
    name: str  # of the folder of these factors' feature files

    @classmethod
    def of(cls, graph: GraphData) -> "FeatureNumbers":
        drawn = {site for site in graph.nodes["site"] if site is not None and site == site}
        factors = dict(graph.settings.get("factors") or {})
        kinds: dict[int, set[str]] = {}
        for site in {*factors, *drawn}:
            layer, kind = split_name(site)
            kinds.setdefault(layer, set()).add(kind)
        identity = hashlib.sha256(json.dumps(factors or sorted(drawn), sort_keys=True).encode()).hexdigest()[:8]
        model = plain_name(str(graph.settings["model"] or "unknown"))
        ordered = {layer: tuple(sorted(of_layer, key=kind_order)) for layer, of_layer in sorted(kinds.items())}
        return cls(ordered, f"{model}-{identity}")

    def index(self, site: str, unit: int) -> int:
        """The unit's index among all units of its layer."""
        layer, kind = split_name(site)
        kinds = self.kinds[layer]
        return unit * len(kinds) + kinds.index(kind)

    def number(self, site: str, unit: int) -> int:
        """The feature number, and the name of its file."""
        return cantor(split_name(site)[0], self.index(site, unit))


def feature_files(graph: GraphData, audit: Audit | None) -> dict[int, dict[str, Any]]:
    """Feature number -> file of every drawn unit; without examples where no audit knows it."""
    numbers = FeatureNumbers.of(graph)
    nodes = pd.DataFrame(graph.nodes[graph.nodes["kind"] == "unit"])
    drawn = list(dict.fromkeys((str(site), int(unit)) for site, unit in zip(nodes["site"], nodes["unit"], strict=True)))
    blank = {"examples_quantiles": [], "top_logits": [], "bottom_logits": []}
    files = {numbers.number(*unit): {"index": numbers.index(*unit), **blank} for unit in drawn}
    if audit is not None:
        known = [unit for unit in drawn if unit[0] in audit.sites and unit[1] in audit.sites[unit[0]].column]
        for unit, profile in zip(known, audit.profiles(known), strict=True):
            files[numbers.number(*unit)] |= _known(profile)
    return files


def _known(profile: UnitProfile) -> dict[str, Any]:
    """Examples, tokens and frequency of a unit; what its colours and histogram run over, from 0 to the largest |z|."""
    groups = []
    for name, sign in (("Largest z", 1), ("Most negative z, sign turned", -1)):
        examples = [
            {
                "tokens": list(context.tokens),
                "tokens_acts_list": [sign * z for z in context.z],
                "train_token_ind": context.peak,
                "is_repeated_datapoint": False,
            }
            for context in profile.contexts
            if sign * context.z[context.peak] > 0
        ]
        groups += [{"quantile_name": name, "examples": examples}] if examples else []
    effect = profile.logits
    known = {
        "examples_quantiles": groups,
        "top_logits": [] if effect is None else [token for token, _ in effect.promoted],
        "bottom_logits": [] if effect is None else [token for token, _ in effect.suppressed],
        "activation_frequency": profile.density,
        "act_min": 0.0,
    }
    if profile.smallest < -_ONE_SIDED * profile.peak or profile.largest <= 0:
        return known | {"act_max": profile.peak or 1.0}
    histogram, side = profile.histogram, len(profile.histogram.counts) // 2
    used = int(profile.largest // histogram.width) + 1
    counts = histogram.counts[side : side + used].tolist()
    return known | {"act_max": used * histogram.width, "histogram": counts}
