"""Births (births.py): pieces of the residual take the place of useless units."""

from swd_lens.solver import resolve
from swd_lens.solver.anneal import births_at
from swd_lens.solver.births import reinit_unused_units
from swd_lens.solver.metric import Metric
from tests.benchmarks.planted import Row, error, planted, support_f1


def test_a_piece_of_the_residual_is_found_and_takes_the_place_of_a_useless_unit():
    truth = planted(Row(30, 20, 6, 5, 4), 0)
    read, write = truth.read.clone(), truth.write.clone()
    read[:, 2], write[4] = 0.0, 0.0  # two units do nothing
    metric = Metric.of(None, truth.weight, 0.0)
    born = reinit_unused_units(read, write, truth.weight, metric, (5, 4))
    assert born == [2, 4]
    assert support_f1(truth, read, write) > 0.95 and error(truth, read, write) < 0.05  # units overlap in a few entries
    assert reinit_unused_units(read, write, truth.weight, metric, (5, 4)) == []


def test_births_are_spread_over_the_alternations():
    spec = resolve("best", {"outer_iterations": 100, "births": 3})
    assert sorted(births_at(spec)) == [10, 36, 62] and births_at(resolve("best", {})) == frozenset()
