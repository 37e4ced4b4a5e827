"""Greater-than: later years are right, earlier ones wrong."""

import re

from swd_lens.tasks.generators import generate


def test_greater_than_sides_are_strict():
    for e in generate("greater_than", "test", 200, templates="all"):
        start, century = re.findall(r"\d+", e.prompt)
        assert start == e.meta["content"]
        assert e.prompt.endswith(century)
        assert start.startswith(century)
        year = int(start[2:])
        assert [int(a) for a in e.answers] == list(range(year + 1, 100))
        assert [int(d) for d in e.distractors] == list(range(year))
        assert f"{century}01" in e.corrupt
