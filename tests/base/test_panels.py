"""Panels: tokens cannot break out of them, what cannot be drawn is refused, the same stands beside them in words."""

import json
import re

import pandas as pd
import pytest
import torch

from swd_lens.analysis.audit.drawing import running_token
from swd_lens.base.display import card
from swd_lens.base.errors import UnknownSiteError, visible, visible_lines, visible_token
from swd_lens.base.figures import literal
from swd_lens.base.panels import Panel, attention_heads, library
from swd_lens.circuits import UnitScores
from swd_lens.units.factors import Factors, FactorSet

TOKENS = ["<|bos|>", "</script>", "<!--", "\n", " Mary", ""]
PATTERN = torch.eye(6).repeat(2, 1, 1)


def props(panel: Panel) -> dict:
    return json.loads(re.findall(r'<script type="application/json">(.*?)</script>', panel.html, re.DOTALL)[0])


def test_tokens_and_names_stay_text():
    panel = attention_heads(TOKENS, PATTERN, names=["<b>0</b>", "1"], title='<i>"title"</i>')
    assert props(panel)["tokens"] == ["<|bos|>", "</script>", "<!--", "↵", "·Mary", "∅"]
    inside = panel.html.split('<script type="application/json">')[1]
    assert inside.index("</script>") == inside.index("</script><script>")  # the first end of a script is our own
    outside = re.sub(r"<script.*?</script>", "", panel.html, flags=re.DOTALL)
    assert "<b>0" not in outside and "<i>" not in outside and "<!--" not in panel.html


def test_data_is_what_was_given_and_the_strongest_entries_are_said():
    pattern = torch.softmax(torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)).tril(), -1).tril()
    got = props(attention_heads(TOKENS, pattern))
    torch.testing.assert_close(torch.tensor(got["attention"]), pattern, atol=5.1e-5, rtol=0)
    assert got["maskUpperTri"] and got["maxValue"] == pytest.approx(float(pattern.max()))
    both_ways = props(attention_heads(TOKENS, PATTERN.flip(1)))
    assert not both_ways["maskUpperTri"]
    signed = torch.zeros(1, 6, 6)
    signed[0, 4, 0], signed[0, 5, 4] = -0.75, 0.5
    html = attention_heads(TOKENS, signed, names=["L1H2"], strongest=2).html
    assert "L1H2: ·Mary (4) from &lt;|bos|&gt; (0): -0.75; ∅ (5) from ·Mary (4): 0.5" in html
    assert "head 0: nothing" in attention_heads(TOKENS, torch.zeros(1, 6, 6)).html


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"attention is \(2, 6, 6\).* 5 tokens and 2 names"):
        attention_heads(TOKENS[:5], PATTERN)
    with pytest.raises(ValueError, match="1 names"):
        attention_heads(TOKENS, PATTERN, names=["one"])
    with pytest.raises(ValueError, match="not finite"):
        attention_heads(TOKENS, PATTERN.masked_fill(PATTERN == 0, -torch.inf))


def test_the_library_is_whole_and_closed():
    script = library()
    assert script.startswith("<style>") and script.count("</script>") == 1
    assert script.endswith("</script>")
    assert len(script) < 1.5e6 and "sourceMappingURL" not in script
    assert attention_heads(TOKENS, PATTERN)._repr_html_().startswith(script)
    # On a page it may be drawn later.
    assert " data-drawn " not in attention_heads(TOKENS, PATTERN).html
    assert attention_heads(TOKENS, PATTERN, later=True).html.startswith("<div data-drawn data-swd-panel=")


def test_tokens_show_what_is_invisible():
    for raw, alone, running in (
        (" Mary", "·Mary", " Mary"),
        ("Mary", "Mary", "Mary"),
        (" ", "·", "·"),
        ("    ", "····", "····"),
        ("\n\n", "↵↵", "↵↵"),
        ("\x1b", "␛", "␛"),
        ("\u200b", "⟨U+200B⟩", "⟨U+200B⟩"),
        ("\u0301", "\u0301", "\u0301"),
        ("é漢", "é漢", "é漢"),
        ("", "∅", "∅"),
        (" a ", "·a·", " a·"),
        ("\t", "⇥", "⇥"),
        ("\r\n", "␍↵", "␍↵"),
        ("\u202e", "⟨U+202E⟩", "⟨U+202E⟩"),
    ):
        assert (visible_token(raw), "".join(running_token(raw))) == (alone, running)


def test_text_is_seen_as_it_is_in_errors_cards_figures_and_reprs_too():
    odd = "a b\x1b[31m\x00\u202e\u2066\ud83d\x7f\x9b\t"
    assert visible(odd) == "a b␛[31m␀⟨U+202E⟩⟨U+2066⟩⟨U+D83D⟩␡⟨U+009B⟩⇥" == visible(visible(odd))
    assert visible("naïve 漢 😀") == "naïve 漢 😀" and visible("a\r\nb") == "a␍↵b"
    assert visible_lines("a\x1b\nb\u2028") == "a␛\nb⟨U+2028⟩"
    assert "x␛⟨U+202E⟩" in str(UnknownSiteError("no such site; nearest: x\x1b\u202e"))
    shown = card("t\x1b", "p\x00", pd.DataFrame({"c\x1b": ["v\u202e"]}))
    assert all(text in shown for text in ("t␛", "p␀", "c␛", "v⟨U+202E⟩")) and "\x1b" not in shown
    assert literal("$\x00") == r"\$␀"
    odd = "x\x1b[31m\x00\u202e"
    f = Factors(torch.eye(2), torch.eye(2), {}, {"site": odd})
    scores = UnitScores({"blocks.0.mlp_out": torch.ones(2)}, {}, {"task": odd})
    for shown in (repr(f), repr(FactorSet({odd: f})), FactorSet({odd: f})._repr_html_(), repr(scores)):
        assert "x␛[31m␀⟨U+202E⟩" in shown and not [c for c in shown if not c.isprintable() and c != "\n"]
