"""Triggers of declared errors: calls that raise them. tests/test_errors.py runs every one; the modules beside this hold them.

A trigger is given a folder and a patcher, like pytest's fixtures; most need neither. It stands under the name of its declaration
(its own name with hyphens), or under a name of its own that `ALSO` leads to one, where several calls raise the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trigger = Callable[[Path, pytest.MonkeyPatch], Any]
TRIGGERS: dict[str, Trigger] = {}
NEEDS_HOOKED: set[str] = set()

# Name of a trigger -> the declaration that it triggers.
ALSO = {
    "shared-weights-attached": "attached-already",
    "learned-site-attached": "attached-already",
    "value-biases-folded": "other-processing",
    "transport-without-origin": "not-transportable",
    "transport-without-norm": "not-transportable",
    "weights-loaded-while-attached": "weights-processed-while-attached",
    "head-setting-switched-on-bridge": "attached-weight-read",
    "attn-result-on": "head-setting-on",
    "split-inputs-on": "head-setting-on",
    "input-never-shown": "never-shown",
    "output-never-shown": "never-shown",
    "units-never-shown": "never-shown",
    "ranking-of-other-factors": "made-with-other-factors",
    "circuit-of-other-factors": "made-with-other-factors",
    "audit-with-other-scores": "made-with-other-factors",
    "newer-format": "unknown-format",
    "no-format": "unknown-format",
    "device-map-of-a-hooked-transformer": "device-map-misplaced",
    "device-map-and-device": "device-map-misplaced",
    "samples-without-tokenizer": "prompt-without-tokenizer",
    "qk-text-without-tokenizer": "prompt-without-tokenizer",
    "pairs-no-rows-per-forward": "no-rows-per-forward",
    "hooks-of-another-site": "edit-of-another-site",
    "finetune-damaged-folder": "file-unreadable",
    "finetune-damaged-checkpoint": "file-unreadable",
    "learned-damaged-index": "file-unreadable",
    "learned-weights-changed": "file-changed",
    "sparse-model-gone": "file-gone",
    "sparse-model-changed": "file-changed",
    "learned-another-run": "finetune-another-run",
    "hooks-no-such-unit": "edit-no-such-unit",
    "graph-unknown-setting": "unknown-choice",
    "finetune-unknown-choice": "setting-unknown-choice",
    "learned-unknown-choice": "setting-unknown-choice",
    "finetune-count-out-of-range": "setting-out-of-range",
    "finetune-setting-out-of-range": "setting-out-of-range",
    "learned-count-out-of-range": "setting-out-of-range",
    "learned-setting-out-of-range": "setting-out-of-range",
    "finetune-unknown-preset": "unknown-preset",
    "learned-unknown-preset": "unknown-preset",
    "finetune-unknown-setting": "unknown-setting",
    "learned-unknown-setting": "unknown-setting",
    "efficiency-file-of-something-else": "file-unreadable",
    "efficiency-newer-format": "record-of-the-future",
    "learned-mlp-of-another-host": "other-checkpoint",
}


def trigger(function: Trigger) -> Trigger:
    """Registers a function under its name with hyphens."""
    name = function.__name__.replace("_", "-")
    assert name not in TRIGGERS, f"two triggers are called {name}"
    TRIGGERS[name] = function
    return function


def on_hooked(function: Trigger) -> Trigger:
    """A trigger on a HookedTransformer, which transformer_lens 4 does not have."""
    NEEDS_HOOKED.add(function.__name__.replace("_", "-"))
    return trigger(function)
