"""write_export: profiles as lines of JSON; `Audit.export` documents the schema."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.edges import Edges
from swd_lens.analysis.audit.unit import UnitProfile
from swd_lens.base.files import atomic, plain

MARK = ("<<", ">>")
_DIGITS = 5  # significant ones of z


def write_export(path: Path, profiles: Iterable[UnitProfile], identities: Mapping[str, str], model: str) -> None:
    """Write one line per profile, atomically; profiles are taken one at a time."""
    with (
        atomic(path) as temporary,
        # A lone surrogate (half of an emoji, cut by a byte-level tokenizer) cannot be written as UTF-8.
        open(temporary, "w", encoding="utf-8", errors="replace", newline="\n") as file,
    ):
        for profile in profiles:
            line = {**_line(profile), "factors": identities.get(profile.site, ""), "model": model}
            file.write(json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n")


def _line(p: UnitProfile) -> dict[str, Any]:
    return {
        "unit": p.unit,
        "site": p.site,
        "index": p.index,
        "label": "" if p.label is None else p.label.label,
        "note": "" if p.label is None else p.label.note,
        "author": "" if p.label is None else p.label.author,
        "contexts": [_context(context) for context in p.contexts],
        "promoted": None if p.logits is None else p.logits.promoted,
        "suppressed": None if p.logits is None else p.logits.suppressed,
        "statistics": {
            "mean": p.mean,
            "sd": p.sd,
            "smallest": p.smallest,
            "largest": p.largest,
            "density": p.density,
            "n_tokens": p.n_tokens,
        },
        "reads": _edges(p.reads),
        "writes": _edges(p.writes),
    }


def _context(context: Context) -> dict[str, Any]:
    z = [float(f"{value:.{_DIGITS}g}") for value in context.z]
    return {"text": context.text(MARK), "tokens": context.tokens, "z": z, "peak": context.peak}


def _edges(edges: Edges | None) -> dict[str, Any] | None:
    return None if edges is None else {"n": edges.n, "strongest": edges.strongest, "heads": edges.heads}
