"""QK: which pairs of units make a head attend where it does (paper, app. attention units).

screen.py finds candidates in the weights, scan.py replays them on prompts and ranks them by what their removal does, replay.py
shows one of them in full, and parts.py takes a head's scores apart to the last bias. vectors.py cuts write vectors into heads,
scores.py builds scores from them and holds them against the host's own.
"""

from swd_lens.analysis.qk.parts import ScoreParts, score_parts
from swd_lens.analysis.qk.plots import plot_attention_fidelity
from swd_lens.analysis.qk.replay import QKReplay, qk_replay
from swd_lens.analysis.qk.scan import QKCase, QKScan, qk_scan
from swd_lens.analysis.qk.screen import QKPair, QKScreen, qk_screen
from swd_lens.analysis.qk.vectors import QKError

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
