"""Units that write or read a direction of the residual stream."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import UnitSourceError
from swd_lens.units.directions import direction_of
from swd_lens.units.factors import Factors
from tests.micro import toy_model


def test_writers_by_hand():
    # Along d = (3, 4), |d| = 5: unit 0 writes (1, 2), dot 11; unit 1 writes (-3, -4), dot -25 and cosine -1; unit 2 is dead.
    write = torch.tensor([[1.0, 2.0], [-3.0, -4.0], [0.0, 0.0]])
    f = Factors(torch.ones(2, 3), write, provenance={"site": "blocks.0.mlp_out"})
    table = f.writers(torch.tensor([3.0, 4.0]))
    assert table.columns.tolist() == ["rank", "unit", "cosine", "dot product"]
    assert table["rank"].tolist() == [1, 2] and table["unit"].tolist() == ["blocks.0.mlp_out/1", "blocks.0.mlp_out/0"]
    assert table["dot product"].tolist() == [-25.0, 11.0]
    assert table["cosine"].tolist() == pytest.approx([-1.0, 11 / (5 * 5**0.5)])
    assert f.writers(torch.tensor([3.0, 4.0]), n=1, by="dot product")["unit"].tolist() == ["blocks.0.mlp_out/1"]


def test_tokens_are_directions(default_model):
    """What a writer of one does to its logit: tests/session/test_questions.py."""
    factors = baselines.svd(default_model, ["blocks.2.mlp_out", "blocks.3.mlp_in"])
    table = factors.writers(" she", default_model)
    assert set(table["unit"].str.rpartition("/")[0]) == {"blocks.2.mlp_out"}  # mlp_in writes neurons
    pair, ids = direction_of((" he", " she"), default_model), default_model.to_tokens([" he", " she"], False)[:, 0]
    torch.testing.assert_close(pair, direction_of(tuple(ids.tolist()), default_model))
    torch.testing.assert_close(pair, direction_of(" he", default_model) - direction_of(" she", default_model))


def test_readers_pass_the_norm_s_weight():
    model = toy_model()  # its norms are not folded
    factors = swd.factorize(model, ["blocks.0.mlp_in", "blocks.0.mlp_out"], sparsity=0.5, preset="quick", progress=False)
    f, token = factors["blocks.0.mlp_in"], model.W_E[3].detach()
    table = factors.readers(3, model, n=None)
    scaled = f.read * model.blocks[0].ln2.w.detach()[:, None]
    expected = {f"blocks.0.mlp_in/{i}": float(token @ scaled[:, i]) for i in range(f.n_units)}
    assert set(table["unit"]) <= set(expected) and len(table) == int(f.valid_units.sum())
    for unit, dot in zip(table["unit"], table["dot product"], strict=True):
        assert dot == pytest.approx(expected[unit], abs=1e-4)
    assert table["cosine"].abs().is_monotonic_decreasing


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"direction": torch.ones(3)}, "the direction has 3 entries, the residual stream at blocks.0.mlp_out 16"),
        ({"direction": torch.zeros(16)}, r"a finite \(d_model,\) vector that is not zero, .* got shape \(16,\)"),
        ({"direction": (3, 3)}, r"two different tokens; got shape \(16,\)"),
        ({"direction": 3.5}, "3.5 is no direction"),
        ({"direction": 3, "model": None}, "the direction 3 names tokens; pass the model"),
        ({"direction": 10**6}, "id 1000000 is outside 0 to"),
        ({"direction": " he"}, "' he': this host has no tokenizer, give token ids"),
    ],
)
def test_what_is_no_direction_is_refused(how, message):
    model = toy_model()
    factors = baselines.svd(model, "blocks.0.mlp_out")
    with pytest.raises(UnitSourceError, match=message):
        factors.writers(**{"model": model, **how})


def test_sites_away_from_the_stream_write_nothing_to_it():
    factors = baselines.svd(toy_model(), "blocks.0.mlp_in")
    with pytest.raises(UnitSourceError, match=r"none of these sites writes to the residual stream: blocks\.0\.mlp_in"):
        factors.writers(torch.ones(16))
