"""QK: which pairs of units make a head attend where it does (paper, app. attention units).

scores.py builds a head's scores from write vectors and z, and holds them against the host's own. screen.py finds candidates in
the weights, scan.py replays them on prompts and ranks them by what their removal does, replay.py shows one of them in full, and
parts.py takes a head's scores apart to the last bias.
"""

from swd_lens.analysis.qk.parts import ScoreParts, score_parts
from swd_lens.analysis.qk.replay import QKReplay, qk_replay
from swd_lens.analysis.qk.scan import QKCase, QKScan, qk_scan
from swd_lens.analysis.qk.screen import QKPair, QKScreen, plot_attention_fidelity, qk_screen
from swd_lens.base.errors import QKError

__all__ = [
    "QKCase",
    "QKError",
    "QKPair",
    "QKReplay",
    "QKScan",
    "QKScreen",
    "ScoreParts",
    "plot_attention_fidelity",
    "qk_replay",
    "qk_scan",
    "qk_screen",
    "score_parts",
]
