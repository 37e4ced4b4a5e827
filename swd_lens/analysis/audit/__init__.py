"""The semantic audit: what makes units fire, and what they push the output towards.

1. collect.py: `audit` runs a text once; watching.py hands z of every site to contexts.py (the places of largest |z|, with the
   text around them) and statistics.py (moments, histograms, co-activation).
2. result.py: `Audit`, whose `unit` puts together a `UnitProfile` (unit.py): edges by name (edges.py, names.py),
   the direct logit effect (logits.py), tasks, neighbours.
3. export.py and labels.py: the units as JSON for whoever finds labels, and `UnitLabels` to put them back.
"""

from swd_lens.analysis.audit.collect import audit
from swd_lens.analysis.audit.contexts import Context, top_contexts
from swd_lens.analysis.audit.edges import Edges
from swd_lens.analysis.audit.labels import UnitLabel, UnitLabels
from swd_lens.analysis.audit.logits import LogitEffect, logit_effect
from swd_lens.analysis.audit.result import Audit
from swd_lens.analysis.audit.statistics import Histogram
from swd_lens.analysis.audit.unit import TaskRank, UnitCard, UnitProfile, unit_html
from swd_lens.hosts.sites import WRITES_RESIDUAL

__all__ = [
    "WRITES_RESIDUAL",
    "Audit",
    "Context",
    "Edges",
    "Histogram",
    "LogitEffect",
    "TaskRank",
    "UnitCard",
    "UnitLabel",
    "UnitLabels",
    "UnitProfile",
    "audit",
    "logit_effect",
    "top_contexts",
    "unit_html",
]
