"""What `compare` runs: every replacement made in its turn, the dense host once for all."""

import pytest

import swd_lens.circuits.protocol
from swd_lens.circuits import compare, fidelity
from tests.circuits.worked import FEW, OTHER, TOY
from tests.forwards import block_runs
from tests.micro import random_tokens

SITE = "blocks.1.mlp_out"


@pytest.fixture(scope="module")
def one(every):
    return {SITE: every[SITE]}


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(9, 8)


def test_what_makes_factors_is_called_once_and_when_its_turn_comes(model, one, tokens):
    called = []

    def maker(name):
        def make():
            called.append(name)
            return one

        return make

    methods = {"lazy": maker("lazy"), "plain": one, "seeds": [maker("first"), maker("second")]}
    comparison = compare(model, methods, [TOY, OTHER], tokens=tokens, evaluation=FEW)
    assert called == ["lazy", "first", "second"]
    assert list(comparison["toy"].curves) == ["lazy", "plain", "seeds/0", "seeds/1"]
    assert comparison.groups == {"seeds": ("seeds/0", "seeds/1")}
    assert comparison.methods == {"lazy": ("lazy",), "plain": ("plain",), "seeds": ("seeds/0", "seeds/1")}
    assert comparison["toy"].curves["seeds/1"].rows.equals(comparison["toy"].curves["plain"].rows)


@pytest.mark.slow
def test_blocks_before_the_replaced_ones_run_once_for_all_methods(model, one, tokens):
    """Beside them the dense host's margins; of each further method a few prompts only, by which its shortcuts are verified."""
    # Four of the longest prompts at most: plainly once (on the test split thrice), then with a kept prefix, in two parts.
    rows, checked = [], 4 * (1 + 2) + 4 * (3 + 2)
    for n in (1, 2, 4):
        methods = {f"{i}": (lambda: one) if i % 2 else one for i in range(n)}
        with block_runs(model, 0) as runs:
            comparison = compare(model, methods, [TOY, OTHER], tokens=tokens, evaluation=FEW)
        rows.append(runs.rows)
        assert len({str(curve.rows) for curve in (t.curves[name] for t in [comparison["toy"]] for name in methods)}) == 1
    once = 2 * (len(TOY.train) + 2 * len(TOY.test)) + len(tokens)
    assert once <= rows[0] and rows[1] - rows[0] <= 2 * checked and rows[2] - rows[1] <= 2 * 2 * checked


def test_seeds_of_more_than_a_bound_are_made_one_after_the_other(model, one, tokens, monkeypatch):
    alive: list[int] = []
    most = []

    def seed(number):
        def made():
            alive.append(number)
            most.append(len(alive))
            return one

        return made

    measure = swd_lens.circuits.protocol.fidelities

    def measured(model, group, *rest, **how):
        alive.clear()
        return measure(model, group, *rest, **how)

    monkeypatch.setattr(swd_lens.circuits.protocol, "fidelities", measured)
    for n_bytes, together in ((1, 1), (2**29, 3)):
        monkeypatch.setattr(swd_lens.circuits.protocol, "_MADE_BYTES", n_bytes)
        most.clear()
        compare(model, {"seeds": [seed(i) for i in range(3)]}, TOY, tokens=tokens, evaluation=FEW)
        assert max(most) == together and len(most) == 3


def test_fidelity_that_was_measured_already_is_not_measured_again(model, one, tokens, monkeypatch):
    found = fidelity(model, one, tokens)
    calls = []
    monkeypatch.setattr(swd_lens.circuits.protocol, "fidelities", lambda *given, **how: calls.append(given) or {"b": found})
    comparison = compare(model, {"a": one, "b": one}, TOY, tokens=tokens, fidelities={"a": found}, evaluation=FEW)
    assert len(calls) == 1 and list(calls[0][1]) == ["b"] and calls[0][1]["b"][SITE] is one[SITE]
    assert comparison.fidelities == {"a": found, "b": found} and comparison.matched("b") is True
