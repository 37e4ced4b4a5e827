"""The semantic audit: what makes units fire, and what they push the output towards.

1. collect.py: `audit` runs a text once and hands z of every site to contexts.py (the places of largest |z|, with the text around
   them) and statistics.py (moments, histograms, co-activation).
2. result.py: `Audit`, whose `unit` puts together a `UnitProfile` (unit.py, drawn by drawing.py): edges by name, neighbours and
   the direct logit effect (vectors.py), tasks; its `export` writes the units as JSON for whoever finds labels.
3. labels.py: `UnitLabels` to put them back.
4. intruder.py: whether units' contexts belong together, judged by an encoder of text.
"""

from swd_lens.analysis.audit.collect import audit, top_contexts
from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.drawing import unit_html
from swd_lens.analysis.audit.intruder import IntruderTest, intruder, static_words
from swd_lens.analysis.audit.labels import UnitLabel, UnitLabels
from swd_lens.analysis.audit.result import Audit
from swd_lens.analysis.audit.statistics import Histogram
from swd_lens.analysis.audit.unit import TaskRank, UnitCard, UnitProfile
from swd_lens.analysis.audit.vectors import Edges, LogitEffect, logit_effect
from swd_lens.hosts.sites import WRITES_RESIDUAL

__all__ = [
    "WRITES_RESIDUAL",
    "Audit",
    "Context",
    "Edges",
    "Histogram",
    "IntruderTest",
    "LogitEffect",
    "TaskRank",
    "UnitCard",
    "UnitLabel",
    "UnitLabels",
    "UnitProfile",
    "audit",
    "intruder",
    "logit_effect",
    "static_words",
    "top_contexts",
    "unit_html",
]
