"""How the report writes numbers and settings; plain strings in, plain strings out, escaping is the template's.

1. Numbers: digits that a reader can use (`fixed`, `signed`, `tiny`, `percent`, `count`), a dash for what is undefined.
2. Settings: a nested mapping becomes (depth, name, value) rows in its own order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

UNDEFINED = "–"
MINUS = "\u2212"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# What a circuit costs, as the axes and the switch between them say it.
COSTS = {"edges": "active edges", "units": "units"}
# What a family of tasks asks; tasks that are not listed speak for themselves by name.
TASK_QUESTIONS = {
    "ioi": "Indirect object identification: “When Mary and John went out, John gave a book to” – is it Mary?",
    "docstring": "Docstring completion: which argument name does the documentation describe next?",
    "greater_than": "Greater-than: “The war lasted from 1741 to 17” – is the year later than 41?",
    "gendered_pronoun": "Gendered pronoun: “So Mary is a doctor, isn't” – he or she?",
    "agreement": "Subject-verb agreement across a noun of the other number: “The keys to the cabinet” – are or is?",
    "capital": "Capital of a country: “The capital of France is” – Paris, or another capital?",
    "succession": "Succession: “Monday, Tuesday,” – does the next day, month or number follow?",
    "greater_digit": "Greater-than for digits: “from the year 1743 to the year 174” – is the last digit above 3?",
}


def missing(value: Any) -> bool:
    """None, NaN, NA or an infinity: nothing that can be shown as a number."""
    return value is None or value is pd.NA or not math.isfinite(value)


def count(value: Any) -> str:
    """1234 -> 1,234."""
    return UNDEFINED if missing(value) else f"{int(value):,}".replace("-", MINUS)


def fixed(value: Any, digits: int = 3) -> str:
    """A number with so many decimals and a true minus sign."""
    if missing(value):
        return UNDEFINED
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", MINUS)


def tiny(value: Any, digits: int = 5) -> str:
    """`fixed`, but a number that this would round to almost nothing keeps its first digit: 3×10⁻⁹."""
    if missing(value) or value == 0 or abs(value) >= 10.0 ** (1 - digits):
        return fixed(value, digits)
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}×10".replace("-", MINUS) + str(int(exponent)).translate(_SUPERSCRIPT)


def signed(value: Any, digits: int = 5) -> str:
    """`tiny` with a plus sign for what is above zero."""
    text = tiny(value, digits)
    return f"+{text}" if not missing(value) and value > 0 else text


def percent(value: Any, digits: int = 1) -> str:
    """0.4213 -> 42.1%."""
    return UNDEFINED if missing(value) else f"{fixed(100 * value, digits)}%"


def duration(seconds: Any) -> str:
    """Seconds as a person says them."""
    if missing(seconds):
        return UNDEFINED
    if seconds < 100:
        return f"{seconds:.{1 if seconds >= 1 else 2}f} s"
    return f"{seconds / 60:.1f} min"


def readable(name: str) -> str:
    """greater_than -> greater than."""
    return name.replace("_", " ")


def intervention_words(positions: str, ablation: str) -> str:
    """What was done to units, and where: "mean ablation at the scoring position"."""
    return f"{ablation} ablation at {'the scoring position' if positions == 'scoring' else f'{positions} positions'}"


def conjunction(items: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([*([", ".join(items[:-1])] if len(items) > 1 else []), *items[-1:]])


def plural(n: int, noun: str, nouns: str = "") -> str:
    """1 site, 4 sites."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def settings_rows(settings: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """(depth, name, value) of every setting; a mapping's own row has an empty value and its entries follow, deeper."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield depth, str(name), ""
            yield from settings_rows(value, depth + 1)
        else:
            yield depth, str(name), _value(value)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(_value(item) for item in value) or "none"
    return "none" if value is None or value == {} else str(value)
