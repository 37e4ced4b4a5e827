"""Cards: every kind of part, text escaped. Heat maps: colours mean what the bar says."""

import pandas as pd

from swd_lens.base.display import card
from swd_lens.base.figures import new_figure


def test_card_holds_its_parts_in_order_escapes_text_and_cuts_long_tables():
    figure, axes = new_figure()
    axes[0, 0].plot([0, 1])
    html = card("<title>", "a < b", None, pd.DataFrame({"<x>": ["<y>"], "n": [1.23456789]}), figure)
    assert "&lt;title&gt;" in html and "a &lt; b" in html and "&lt;x&gt;" in html and "&lt;y&gt;" in html
    assert "1.235" in html and "<y>" not in html
    assert html.index("a &lt; b") < html.index("<table") < html.index("<svg")
    html = card("t", pd.DataFrame({"n": range(23), "text": ["x" * 100] * 23}))
    assert html.count("<tr>") == 21 and "and 3 more rows" in html and "x" * 100 in html  # with the head's
    assert "and 1 more row<" in card("t", pd.DataFrame({"n": range(21)}))
    assert "more row" not in card("t", pd.DataFrame({"n": range(20)}))
