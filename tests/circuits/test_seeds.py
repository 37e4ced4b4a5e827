"""Seeds of a method: least costs and their spread, by hand."""

import numpy as np
import pytest

from swd_lens.circuits.seeds import SeedCosts, mean_min_cost, over_seeds


def test_mean_of_least_costs_by_hand(worked):
    curves = [worked["toy"].curves[name] for name in worked.groups["many"]]
    table = mean_min_cost(curves, "recovered", "edges")
    assert table["recovered"].tolist() == [0.1, 0.5, 0.6, 0.8, 0.9, 1.0, 1.1]
    #                         0.1  0.5  0.6     0.8             0.9 (0, 1)  1.0   1.1 (1 only)
    expected = [0.0, 20.0, (20 + 40 + 20) / 3, (20 + 40 + 40) / 3, 30.0, 40.0, 40.0]
    assert table["mean"].tolist() == pytest.approx(expected)
    assert table["reached"].tolist() == [3, 3, 3, 3, 2, 2, 1]
    assert table["sd"].iloc[4] == pytest.approx(200**0.5) and np.isnan(table["sd"].iloc[-1])
    curve = worked["toy"].curves["one"]
    for of in ("recovered", "drop"):
        alone, least = mean_min_cost([curve], of, "units"), curve.min_cost(of, "units")
        assert alone[of].tolist() == least[of].tolist() and alone["mean"].tolist() == least["units"].tolist()


def test_seeds_that_never_reach_a_threshold_are_not_counted():
    assert over_seeds([None, 4]) == SeedCosts(mean=4.0, sd=None, least=4, reached=1)
    assert over_seeds([2, None, 4]) == SeedCosts(mean=3.0, sd=2**0.5, least=2, reached=2)
    assert over_seeds([None]) == SeedCosts(None, None, None, 0)
