"""Names that a docstring describes together, "read, write: the factors", as names of their own on the site's pages.

The Google style knows one name per entry; together, the first would be taken for the name and the second for its type.
"""

import re
from typing import Any

from griffe import Extension

_TOGETHER = re.compile(r"^( +)((?:\*{0,2}\w+, )+\*{0,2}\w+):(?= )(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
_SECTIONS = re.compile(r"^( *)(?:Args|Attributes):\n(?:\1 +\S.*\n?| *\n(?=\1 +\S))+", re.MULTILINE)


def apart(text: str) -> str:
    """The docstring with every name of its Args and Attributes in an entry of its own, with the same words."""

    def split(entry: re.Match[str]) -> str:
        indent, names, words = entry.groups()
        return "\n".join(f"{indent}{name}:{words}" for name in names.split(", "))

    return _SECTIONS.sub(lambda section: _TOGETHER.sub(split, section[0]), text)


class NamesApart(Extension):
    """Griffe's hook: every docstring that is read."""

    def on_object(self, *, obj: Any, **more: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)
