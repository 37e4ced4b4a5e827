"""What edits do elsewhere, against plain forwards."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.edit import edit_unit, side_effects
from swd_lens.analysis.edit.effects import measure
from swd_lens.base.divergence import kl_per_prediction
from swd_lens.base.errors import EditError
from swd_lens.units import attach
from tests.analysis.edit_checks import OTHERS, PROMPT, TEXT
from tests.hosts.test_interrupts import everything


def kl(before, after):
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("base", ["dense", "replacement"])
@pytest.mark.parametrize("name", ["blocks.0.attn_o", "blocks.1.mlp_out"])
def test_side_effects_are_those_of_plain_forwards(model, exact, name, base):
    edit = edit_unit(model, exact, f"{name}/1", PROMPT, 3, 5, 2, base=base)
    before = everything(model)
    found = side_effects(model, edit, OTHERS, TEXT, batch_size=2)
    assert everything(model) == before
    runs = []
    for applied in (attach(model, exact) if base == "replacement" else torch.no_grad(), edit):
        with applied, torch.no_grad():
            runs.append(([model(p[None])[0, -1] for p in (PROMPT, *OTHERS)], model(TEXT)[:, :-1]))
    (prompts, text), (edited, edited_text) = runs
    assert found.margin_before == pytest.approx(float(prompts[0][3] - prompts[0][5]), abs=1e-5)
    assert found.margin_after == pytest.approx(float(edited[0][3] - edited[0][5]), abs=1e-5)
    expected = [float(kl(p, q)) for p, q in zip(prompts[1:], edited[1:], strict=True)]
    assert min(expected) > 1e-5 and found.kl_prompts == pytest.approx(expected, rel=1e-3)
    assert found.mean_kl == pytest.approx(sum(expected) / 5, rel=1e-3)
    assert found.kl_text == pytest.approx(float(kl(text, edited_text).mean()), rel=1e-3) and found.n_predictions == 56
    assert found.per_prompt()["KL"].is_monotonic_decreasing and found.table()["margin change"][0] == found.change
    assert found.settings["n_prompts"] == 5 and found.settings["unit"] == f"{name}/1"


def test_text_may_be_a_stream_and_batches_do_not_matter(model, exact):
    edit = edit_unit(model, exact, "blocks.0.mlp_out/1", PROMPT, 3, 5, 2)
    stream = swd.TokenStream(lambda: iter(TEXT), n_rows=7)
    ways = ((TEXT, 7), (TEXT, 2), (stream, 3))
    found = [side_effects(model, edit, tokens=tokens, batch_size=size).kl_text for tokens, size in ways]
    assert found[0] > 0 and found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)
    assert side_effects(model, edit, OTHERS).kl_text is None
    with pytest.raises(swd.TokenError, match="at least two tokens"):
        side_effects(model, edit, tokens=TEXT[:, :1])


def test_what_enters_the_edited_block_is_run_once_for_before_and_all_edits(model, exact):
    """Text of a batch: block 0 once, for an edit of block 1; and a few tokens twice, to see whether runs may start there."""
    edits = [edit_unit(model, exact, "blocks.1.mlp_out/1", PROMPT, 3, 5, shift) for shift in (1, 2, 3)]
    rows = {0: [], 1: []}
    with ExitStack() as stack:
        for layer, seen in rows.items():
            hook = model.blocks[layer].register_forward_hook(lambda *a, seen=seen: seen.append(len(a[1][0])))
            stack.callback(hook.remove)
        measured = measure(model, edits, (), TEXT, batch_size=7)
    assert [row.kl_text > 0 for row in measured] == [True] * 3
    of_text = {layer: seen.count(7) for layer, seen in rows.items()}
    assert of_text == {0: 1, 1: 4}


def test_the_figure_has_a_bar_for_every_prompt(model, exact):
    effects = side_effects(model, edit_unit(model, exact, "blocks.0.mlp_out/1", PROMPT, 3, 5, 2), OTHERS)
    (ax,) = effects.plot().axes
    assert [bar.get_width() for bar in ax.patches] == list(effects.per_prompt()["KL"])
    assert "Side effects of an edit" in effects._repr_html_()
    assert len(ax.get_yticklabels()) == len(OTHERS) and "margin" in ax.get_title(loc="left")
    assert f"KL on {len(OTHERS)} other prompts {effects.mean_kl:.2g})" in repr(effects)
    several_lines = replace(effects, prompts=("one\ntwo", *effects.prompts[1:]))
    names = {name.get_text() for name in several_lines.plot().axes[0].get_yticklabels()}
    assert "one↵two" in names and not any("\n" in name for name in names)


def test_an_applied_edit_cannot_be_measured(model, exact):
    edit = edit_unit(model, exact, "blocks.0.mlp_out/1", PROMPT, 3, 5, 1)
    with edit, pytest.raises(EditError, match=r"another W .* \(or this one\) is applied already"):
        side_effects(model, edit, OTHERS)
    with pytest.raises(EditError, match="prompts must be a list, got the one text 'ab'"):
        side_effects(model, edit, "ab")


def test_divergence_by_hand(monkeypatch):
    """KL((1/2, 1/2) || (1/4, 3/4)) = (ln 2 + ln (2/3)) / 2, and 0 of a distribution and itself."""
    p, q = torch.tensor([[1.0, 1.0], [5.0, 2.0]]).log(), torch.tensor([[1.0, 3.0], [5.0, 2.0]]).log()
    by_hand = float(torch.tensor([2.0, 2 / 3]).log().sum() / 2)
    assert kl_per_prediction(p, q).tolist() == pytest.approx([by_hand, 0.0], abs=1e-7)
    monkeypatch.setattr("swd_lens.base.divergence.CHUNK_BYTES", 8 * 5 * 256)  # three chunks
    many = torch.randn(600, 5, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(kl_per_prediction(many, many.flip(0)), kl(many, many.flip(0)), atol=1e-12)
