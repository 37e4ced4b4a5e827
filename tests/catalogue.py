"""swd_lens/ERRORS.md, made of the declarations in swd_lens/*/errors.toml: `python -m tests.catalogue [--check]`.

Listed is what has a remedy; a message without one says all there is to say.
"""

import string
import sys
from pathlib import Path

import swd_lens
from swd_lens.base.errors import declarations, section_texts

PAGE = Path(swd_lens.__file__).parent / "ERRORS.md"
# In the order of the flow; a section that is not named here comes last.
ORDER = [
    *("naming-sites", "attaching", "another-w", "while-attached", "hosts", "circuits", "unit-sources", "files"),
    *(
        "whole-models",
        "best-circuits",
        "settings",
        "learned-baselines",
        "queries-and-keys",
        "graphs",
        "pairs",
        "audits",
        "edits",
        "runs-and-pictures",
        "records",
    ),
]
HEAD = """# What swd_lens refuses, and what to do

Made by `python -m tests.catalogue` from the errors.toml of every room; do not edit it by hand. Listed is what swd_lens refuses or
warns of around hosts, sites, units, whole models, learned baselines, studies and files, where there is more to say than the
message does; `tests/test_errors.py` triggers every row. Every message names what was wrong, with the value, and what to do; the
last column adds why.

`{site}` and the like stand for the parts that vary: a site, a shape, a path, the reason of a library below. A refused call
changes nothing: the host computes as before, and a folder loads as before. The classes are in `swd_lens.errors`, but for
Python's own and `LocalEntryNotFoundError` (in `huggingface_hub.errors`).
"""


def page() -> str:
    """The whole catalogue."""
    titles = section_texts()
    rows: dict[str, list[str]] = {}
    for name, entry in declarations().items():
        if "remedy" in entry:
            kinds = entry["raises"] if isinstance(entry["raises"], list) else [entry["raises"]]
            cells = (
                name,
                ", ".join(kind.rpartition(".")[2] for kind in kinds),
                _code(entry["message"]),
                entry["remedy"],
            )
            rows.setdefault(entry["section"], []).append(
                f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
            )
    sections = [name for name in ORDER if name in rows] + sorted(set(rows) - set(ORDER))
    parts = [HEAD]
    for name in sections:
        about = titles[name].get("about")
        parts.append(f"## {titles[name]['title']}\n" + (f"\n{about}\n" if about else ""))
        parts.append(
            "| id | raised as | message | why, and what to do |\n|---|---|---|---|\n" + "\n".join(rows[name]) + "\n"
        )
    return "\n".join(parts)


def _code(message: str) -> str:
    """A message as Markdown code: fields without their formats, on one line."""
    text = "".join(
        literal + ("" if name is None else f"{{{name}}}") for literal, name, _, _ in string.Formatter().parse(message)
    )
    marks = "``" if "`" in text else "`"
    return f"{marks}{' '.join(text.split())}{marks}"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("swd_lens/ERRORS.md is stale: python -m tests.catalogue")
