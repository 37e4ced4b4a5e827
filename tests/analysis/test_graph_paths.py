"""The figure of high-attribution paths."""

import io
import re

import pytest

from swd_lens.analysis.graph import plot_unit_paths
from swd_lens.circuits import attribute
from tests.analysis.graph_checks import random_factors
from tests.micro import random_split, toy_model


def test_paths_of_the_best_units():
    model = toy_model()
    factors = random_factors(model, "mlp_out")
    scores = attribute(model, factors, random_split())
    best = scores.ranking()[0]
    figure = plot_unit_paths(model, factors, scores, labels={f"{best[0]}/{best[1]}": "cost in $ and $"})
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert any(rf"$z_{{{best[1]}}}$  cost in \$ and \$" == text for text in shown)
    assert sum(text.startswith("rank 1 of 10") for text in shown) == 1
    assert sum(bool(re.match(r"rank \d+ of 10", text)) for text in shown) == 4  # two layers, two units each
    figure.savefig(io.BytesIO(), format="png")  # the formulas in it are ones
    only = plot_unit_paths(model, factors, scores, layers=[1], per_layer=3)
    assert sum(bool(re.match(r"rank \d+ of 10", t.get_text())) for t in only.axes[0].texts) == 3


def test_paths_that_cannot_be_drawn():
    model = toy_model()
    factors = random_factors(model, "mlp_out")
    scores = attribute(model, factors, random_split())
    for match, settings in {
        "no units of mlp_out in layer 7": {"layers": [7]},
        "layers is empty": {"layers": []},
        "do not write to the residual stream": {"kind": "mlp_in"},
        "none of these scores is of a site attn_o": {"kind": "attn_o"},
        "no such unit": {"labels": {"blocks.0.mlp_out/99": "x"}},
    }.items():
        with pytest.raises(ValueError, match=match):
            plot_unit_paths(model, factors, scores, **settings)
    with pytest.raises(ValueError, match="attribute these factors first"):
        plot_unit_paths(model, random_factors(model, "mlp_out", n_units=6), scores)
