"""Figures of circuits: the data that their lines and bands show."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from swd_lens import baselines
from swd_lens.circuits import compare
from swd_lens.circuits.comparison import Comparison, TaskComparison
from swd_lens.circuits.plots import compact, cost_axis
from swd_lens.circuits.seeds import mean_min_cost
from tests.circuits.worked import FEW, OTHER, ROWS, TOY, by_hand, curve


@pytest.fixture(scope="module")
def both(model, few):
    return compare(model, {"SWD": few, "SVD": baselines.svd(model, "*.mlp_out")}, [TOY, OTHER], evaluation=FEW)


def test_the_figure_shows_the_least_costs(both):
    cost = "units"
    figure = both.plot(cost)
    above, below = figure.axes[:2], figure.axes[2:4]
    assert [ax.get_title() for ax in above] == ["toy", "other"]
    for of, row in (("recovered", above), ("drop", below)):
        for task, ax in zip(both, row, strict=True):
            lines = [line for line in ax.lines if line.get_drawstyle() == "steps-pre"]
            for line, of_method in zip(lines, both[task].curves.values(), strict=True):
                least = of_method.min_cost(of, cost)
                assert list(line.get_xdata()) == least[of].tolist() and list(line.get_ydata()) == least[cost].tolist()
            assert ax.get_ylim()[0] <= 0  # the empty circuit is on the axis


def test_the_band_is_one_standard_deviation_over_the_seeds_that_reach(worked):
    ax = worked.plot().axes[0]
    (band,) = ax.collections
    table = mean_min_cost([worked["toy"].curves[name] for name in worked.groups["many"]], "recovered", "edges")
    corners = {(round(x, 6), round(y, 6)) for x, y in band.get_paths()[0].vertices}
    for row in table.fillna(0.0).itertuples():
        for y in (max(0.0, row.mean - row.sd), row.mean + row.sd):
            assert (round(row.recovered, 6), round(y, 6)) in corners
    assert list(ax.lines[1].get_ydata()) == table["mean"].tolist()


def test_odd_curves_are_drawn_too(worked):
    nothing = by_hand([0, 1], [0, 0], [np.nan, np.nan], [0.0, 0.0])
    comparison = Comparison({"$odd_": TaskComparison("$odd_", {"$a_": nothing}, {})}, {}, {}, "$a_")
    for cost in ("edges", "units"):
        figure = comparison.plot(cost)
        figure.draw_without_rendering()
        assert "do not\ncarry the task" in figure.axes[0].texts[0].get_text()
    with pytest.raises(ValueError, match="cost must be one of"):
        worked.plot("tokens")


def test_plots_draw_every_point_and_shade_the_interval():
    rows = ROWS.assign(**{"recovered low": ROWS["recovered"] - 0.1, "recovered high": ROWS["recovered"] + 0.2})
    above, below = replace(curve(), rows=rows).plot().axes
    for ax, column in ((above, "recovered"), (below, "drop")):
        assert ax.lines[0].get_xdata().tolist() == ROWS["edges"].tolist()
        np.testing.assert_array_equal(ax.lines[0].get_ydata(), ROWS[column])
    (band,) = above.collections
    heights, recovered = band.get_paths()[0].vertices[:, 1], ROWS["recovered"]
    assert (heights.min(), heights.max()) == pytest.approx((recovered.min() - 0.1, recovered.max() + 0.2))
    assert not below.collections  # it has no interval here


def test_the_cost_axis_shows_the_empty_circuit_and_the_powers_of_ten():
    ax = curve().plot().axes[0]
    cost_axis(ax.xaxis, pd.Series([0, 20, 3000]))
    assert ax.xaxis.get_ticklocs().tolist() == [0, 100, 1000] and ax.get_xlim()[0] < 0
    assert [compact(value) for value in (0, 500, 10_000, 2_000_000)] == ["0", "500", "10k", "2M"]
