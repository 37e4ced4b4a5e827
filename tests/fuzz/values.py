"""What an object holds, as a flat mapping name -> text or hash, so that two of them can be compared to the bit.

Tensors are dtype, shape and the SHA-256 of their bytes; tables are their columns and rows; floats are their repr (NaN is NaN).
Objects without a way of their own are read through `as_dict`, or as mappings.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from swd_lens.circuits import Circuit
from swd_lens.study import Run
from swd_lens.train.baselines import LearnedUnits
from swd_lens.units.factors import Factors, FactorSet

Values = dict[str, str]


def values_of(held: Any) -> Values:
    """Everything in it, by dotted names."""
    flat: Values = {}
    _add(flat, "", held)
    return flat


def difference(original: Values, other: Values) -> str:
    """The first name whose value is another, in words; "" where all are the same."""
    for name in sorted({*original, *other}):
        if original.get(name) != other.get(name):
            return f"{name}: {_short(original.get(name))} became {_short(other.get(name))}"
    return ""


def _short(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) < 60 else value[:57] + "..."


def _add(flat: Values, name: str, held: Any) -> None:
    if isinstance(held, Tensor):
        data = held.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        flat[name] = f"{held.dtype} {tuple(held.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    elif isinstance(held, pd.DataFrame):
        _add(flat, name, {"columns": list(map(str, held.columns)), "rows": held.astype(object).values.tolist()})
    elif isinstance(held, pd.Series):
        _add(flat, name, held.tolist())
    elif isinstance(held, FactorSet):
        _add(flat, name, {"provenance": held.provenance, "order": list(held), "sites": {s: held[s] for s in held}})
    elif isinstance(held, Factors):
        parts = {each.name: getattr(held, each.name) for each in fields(held) if each.name not in ("weight", "mark")}
        _add(flat, name, {**parts, "edges": held.edges})
    elif isinstance(held, LearnedUnits):
        about = {"provenance": held.provenance, "log": held.log, "tokens": held.tokens}
        _add(flat, name, {**about, "weights": {n: held.checkpoints[n] for n in held.checkpoints}})
    elif isinstance(held, Run):
        _add(flat, name, {k: v for k, v in held.as_dict().items() if k != "seconds"})
        _add(flat, f"{name}.factors", {str(i): r.factors for i, r in enumerate(held.replacements) if not r.exact})
    elif isinstance(held, Circuit):
        _add(flat, name, {each.name: getattr(held, each.name) for each in fields(held)})
    elif isinstance(held, Path):
        flat[name] = "a path"
    elif hasattr(held, "as_dict"):
        _add(flat, name, held.as_dict())
    elif isinstance(held, Mapping):
        flat[f"{name}.n"] = str(len(held))
        for key, value in held.items():
            _add(flat, f"{name}.{key}", value)
    elif is_dataclass(held) and not isinstance(held, type):
        for each in fields(held):
            _add(flat, f"{name}.{each.name}", getattr(held, each.name))
    elif isinstance(held, list | tuple):
        flat[f"{name}.n"] = str(len(held))
        for i, value in enumerate(held):
            _add(flat, f"{name}.{i}", value)
    else:
        flat[name] = repr(held)
