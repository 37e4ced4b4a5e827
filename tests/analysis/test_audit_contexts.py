"""Contexts against looking at every position, whatever the batches."""

import pytest
import torch

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
    best, position = z[:, :, unit].abs().max(1)
    found = []
    for row in best.sort(descending=True, stable=True).indices[:n].tolist():
        pos = int(position[row])
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


@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_all_units_of_all_sites_at_once_equal_a_search_over_every_position(model, factors, batch_size):
    tokens = random_tokens(23, 9, seed=3)
    found = audit(model, factors, tokens, n=5, before=3, after=2, batch_size=batch_size, progress=False)
    z = activations(model, factors, tokens)
    assert len(found) == 24 and found.n_tokens == 23 * 9
    for profile in found.profiles():
        expected = brute_force(z[profile.site], tokens, profile.index, 5, 3, 2)
        dead = profile.index == 11  # never fires: no context is better than another
        assert as_tuples(profile.contexts) == ([] if dead else expected)


def test_fewer_rows_than_contexts_and_windows_wider_than_rows(model, factors):
    tokens = random_tokens(2, 3)
    found = audit(model, factors, tokens, n=20, before=30, after=30, per_row=1, progress=False)
    z = activations(model, factors, tokens)["blocks.1.mlp_out"]
    contexts = found.unit("blocks.1.mlp_out/4").contexts
    assert as_tuples(contexts) == brute_force(z, tokens, 4, 2, 30, 30) and len(contexts[0].tokens) == 3


@pytest.mark.parametrize(("per_row", "batch_size"), [(None, 2), (None, 3), (2, 1), (4, None)])
def test_a_text_of_few_rows_fills_the_list_from_each(model, factors, per_row, batch_size):
    # The paper's dashboard is 2,048 tokens, 20 contexts per unit: two rows of 1,024.
    tokens = random_tokens(3, 9, seed=5)
    found = audit(model, factors, tokens, n=8, before=2, after=1, per_row=per_row, batch_size=batch_size, progress=False)
    assert found.settings["contexts_per_row"] == (per_row or 3)
    z = activations(model, factors, tokens)
    for profile in found.profiles():
        size = z[profile.site][:, :, profile.index].abs()
        # Every position of every row by size, each row's largest only, equal ones in the order of the text.
        places = []
        for row in range(3):
            order = sorted(range(9), key=lambda pos, row=row: (-float(size[row, pos]), pos))[: per_row or 3]
            places += [(row, pos) for pos in order]
        places = sorted(places, key=lambda at: -float(size[at]))[:8]  # stable
        if profile.index != 11:  # never fires
            expected = [pytest.approx(float(z[profile.site][row, pos, profile.index]), abs=1e-5) for row, pos in places]
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
