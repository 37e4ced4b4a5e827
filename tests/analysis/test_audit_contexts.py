"""Contexts against looking at every position, whatever the batches."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.audit import Context, audit, top_contexts
from swd_lens.analysis.audit.contexts import TokenNames, TopPlaces
from tests.analysis.audit_models import activations, sparse_factors
from tests.micro import random_tokens


@pytest.fixture(scope="module")
def factors(model):
    return sparse_factors(model, "mlp_out")


def brute_force(z, tokens, unit, n, before, after):
    """(tokens, z, peak) of the n rows of largest |z|, from activations of the whole text."""
    found = []
    for row, pos in by_hand(tokens, z[:, :, unit, None], n, 1, ())[0]:
        start, stop = max(0, pos - before), min(tokens.shape[1], pos + after + 1)
        letters = tuple(chr(ord("a") + token) for token in tokens[row, start:stop].tolist())
        found.append((letters, pytest.approx(z[row, start:stop, unit].tolist(), abs=1e-5), pos - start))
    return found


def as_tuples(contexts):
    return [(context.tokens, context.z, context.peak) for context in contexts]


def test_the_top_contexts_are_the_largest_z_of_each_row(model):
    factors, tokens = baselines.svd(model, "mlp_out"), random_tokens(11, 9)
    units = [("blocks.1.mlp_out", 3), ("blocks.0.mlp_out", 5), ("blocks.1.mlp_out", 0), ("blocks.1.mlp_out", 3)]
    found = top_contexts(model, factors, units, tokens, n=4, before=2, after=1, batch_size=3)
    z = activations(model, factors, tokens)
    assert set(found) == set(units)
    for site, unit in units:
        assert as_tuples(found[site, unit]) == brute_force(z[site], tokens, unit, 4, 2, 1)


@pytest.mark.parametrize(("rows", "pos", "n", "window", "batch_size"), [(23, 9, 5, 3, 4), (2, 3, 20, 30, None)])
def test_all_units_of_all_sites_at_once_equal_a_search_over_every_position(model, factors, rows, pos, n, window, batch_size):
    """Also where there are fewer rows than contexts, and windows are wider than rows."""
    tokens = random_tokens(rows, pos, seed=3)
    how = {"n": n, "before": window, "after": window - 1, "per_row": 1, "batch_size": batch_size}
    found = audit(model, factors, tokens, **how, progress=False)
    z = activations(model, factors, tokens)
    assert len(found) == 24 and found.n_tokens == rows * pos
    for profile in found.profiles():
        expected = brute_force(z[profile.site], tokens, profile.index, n, window, window - 1)
        dead = profile.index == 11  # never fires: no context is better than another
        assert as_tuples(profile.contexts) == ([] if dead else expected)


@pytest.mark.parametrize(("per_row", "batch_size"), [(None, 2), (2, 1), (4, None)])
def test_a_text_of_few_rows_fills_the_list_from_each(model, factors, per_row, batch_size):
    # The paper's dashboard is 2,048 tokens, 20 contexts per unit: two rows of 1,024.
    tokens = random_tokens(3, 9, seed=5)
    found = audit(model, factors, tokens, n=8, before=2, after=1, per_row=per_row, batch_size=batch_size, progress=False)
    assert found.settings["contexts_per_row"] == (per_row or 3)
    z = activations(model, factors, tokens)
    for profile in found.profiles():
        own = z[profile.site][:, :, profile.index]
        if profile.index != 11:  # never fires
            places = by_hand(tokens, own[..., None], 8, per_row or 3, ())[0]
            expected = [pytest.approx(float(own[place]), abs=1e-5) for place in places]
            assert [context.z[context.peak] for context in profile.contexts] == expected
    units = [("blocks.1.mlp_out", 4)]
    assert len(top_contexts(model, factors, units, tokens, n=8, per_row=per_row)[units[0]]) == min(8, 3 * (per_row or 3))


def test_of_equal_peaks_the_earlier_row_stays_ahead():
    places = TopPlaces(2, 0, 0)
    for row in range(4):
        places.add(row, torch.tensor([[row]]), torch.tensor([[[1.0, -float(row)]]]))
    assert places.row.tolist() == [[0, 1], [3, 2]]


def test_token_names_without_a_tokenizer_and_with_sentencepiece():
    class Pieces:
        def decode(self, ids):
            return ["Hi", "there"][ids[0]]

        def convert_ids_to_tokens(self, token):
            return ["Hi", "\u2581there"][token]

    class Host:
        tokenizer = Pieces()

    names = TokenNames(Host())
    assert (names(0), names(1)) == ("Hi", " there")
    assert TokenNames(object())(17) == "[17]"


def test_marks_go_inside_the_leading_space():
    context = Context((" a", " b", " "), (0.0, 1.0, 0.0), 1)
    assert context.text(("<<", ">>")) == " a <<b>> "
    assert Context((" ",), (1.0,), 0).text(("<<", ">>")) == "<< >>"


# ---------------------------------------------------------------------------------------------- documents

END = 0


def places_of(rows, z, *, n, batch_size, per_row=1, ends=(END,)):
    """(row, pos) of the places in every unit's list, and the number of documents."""
    places = TopPlaces(n, 0, 0, per_row, ends)
    for first in range(0, len(rows), batch_size):
        places.add(first, rows[first : first + batch_size], z[first : first + batch_size])
    kept = (places.value >= 0).tolist()
    listed = [
        [place for place, there in zip(zip(*unit, strict=True), of_unit, strict=True) if there]
        for unit, of_unit in zip(zip(places.row.tolist(), places.pos.tolist(), strict=True), kept, strict=True)
    ]
    return listed, places.documents


def by_hand(rows, z, n, per_row, ends):
    """The same by plain loops: each row's largest, then each document's largest first, then the others."""
    number, document = 0, {}
    for row, tokens in enumerate(rows.tolist()):
        for pos, token in enumerate(tokens):
            document[row, pos] = number
            number += token in ends
    listed = []
    for unit in range(z.shape[-1]):
        size = z[:, :, unit].abs().tolist()
        candidates = []
        for row in range(len(rows)):
            order = sorted(range(rows.shape[1]), key=lambda pos, row=row: -size[row][pos])
            candidates += [(row, pos) for pos in order[:per_row]]
        candidates.sort(key=lambda at: -size[at[0]][at[1]])
        best = {}
        for at in candidates if ends else ():
            best.setdefault(document[at], at)
        firsts = list(best.values())
        listed.append((firsts + [at for at in candidates if at not in firsts])[:n])
    return listed


@pytest.mark.parametrize("batch_size", [3, 40])
@pytest.mark.parametrize(("n", "per_row", "share"), [(4, 1, 0.15), (12, 2, 0.02), (5, 3, 0.3), (6, 1, 0.0)])
def test_contexts_of_a_unit_are_of_different_documents(batch_size, n, per_row, share):
    """Documents of all lengths, some over several rows, whatever the batches; of 0.02 fewer than places, of 0 none is known."""
    random = torch.Generator().manual_seed(n)
    rows = torch.randint(1, 9, (40, 7), generator=random)
    rows[torch.rand(40, 7, generator=random) < share] = END
    z = torch.randn(40, 7, 6, generator=random)
    listed, documents = places_of(rows, z, n=n, batch_size=batch_size, per_row=per_row)
    assert listed == by_hand(rows, z, n, per_row, {END})
    ended = int((rows == END).sum())
    assert documents == (ended + int(rows[-1, -1] != END) if ended else None)


def test_a_token_that_begins_every_row_ends_no_document():
    """GPT-2's BOS is its end of text."""
    rows = torch.tensor([[0, 5, 6], [0, 5, 7], [0, 8, 6]])
    z = torch.tensor([1.0, 3.0, 2.0])[:, None, None].expand(3, 3, 1)
    listed, documents = places_of(rows, z, n=3, batch_size=2)
    assert documents is None and [row for row, _ in listed[0]] == [1, 2, 0]


def test_an_audit_says_how_its_contexts_are_kept_apart(default_model):
    factors = baselines.svd(default_model, "blocks.0.mlp_out")
    rows, unit = swd.text_tokens(2_048, split="test"), "blocks.0.mlp_out/3"
    found = audit(default_model, factors, rows, units=[unit], n=10, progress=False)
    ends = int((rows == default_model.tokenizer.eos_token_id).sum())
    assert found.settings["documents"] == ends + int(rows[-1, -1] != default_model.tokenizer.eos_token_id)
    assert f"at most one per document ({found.settings['documents']} documents)" in str(found)
    few = audit(default_model, factors, rows[:, :12], units=[unit], n=10, progress=False)
    known = few.settings["documents"]
    assert ("each document's largest first" in str(few)) == (known is not None and known < 10)
    alone = audit(default_model, factors, rows.masked_fill(rows == 1, 5), units=[unit], n=10, progress=False)
    assert alone.settings["documents"] is None
    assert "documents are not known" in str(alone) and "documents are not known" in alone._repr_html_()
