"""Methods of the tables: shapes, budgets, and that learned ones learn."""

import sys

import pytest
import torch

from swd_lens.base.errors import SolveInputError
from swd_lens.truth import methods
from swd_lens.truth.methods import METHODS, Problem, answer
from swd_lens.truth.planted import Plant, planted
from swd_lens.truth.scores import mmcs, relative_error

CHEAP = [name for name in METHODS if name not in ("SWD deep", "dictionary learning", "transcoder", "VPD")]


@pytest.fixture(scope="module")
def drawn():
    return planted(Plant(10, 8, 4, 2, 2), 0)


@pytest.fixture(scope="module")
def problem(drawn):
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, 10, generator=g) * (torch.rand(2048, 10, generator=g) < 0.1)
    return Problem(drawn.weight, None, drawn.edges, 4, inputs)


@pytest.mark.parametrize("method", CHEAP)
def test_every_method_answers_or_refuses(problem, method):
    if method == "SWD paper":  # 16 edges for 8 units and a square factor of a quarter of its entries
        with pytest.raises(SolveInputError):
            answer(method, problem)
        return
    found = answer(method, problem)
    assert found.read.shape[0] == 10 and found.write.shape[1] == 8 and found.read.shape[1] == found.write.shape[0]
    assert relative_error(problem.weight, found.read, found.write) < (1e-5 if method in ("neurons", "SVD") else 0.9)


def test_dictionary_learning(problem, drawn):
    pytest.importorskip("sklearn")
    found = answer("dictionary learning", problem)
    assert found.read.shape == (10, 4) and relative_error(problem.weight, found.read, found.write) < 0.5
    assert mmcs(drawn, found.read, found.write) > mmcs(drawn, torch.randn(10, 4), torch.randn(4, 8))


def test_without_scikit_learn_it_says_so(problem, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        answer("dictionary learning", problem)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["transcoder", "VPD"])
def test_learned_methods_learn(problem, method, monkeypatch):
    errors = {}
    for steps in (5, 150):
        monkeypatch.setattr(methods, "_STEPS", steps)
        coder = answer(method, problem).coder
        y = problem.inputs @ problem.weight
        with torch.no_grad():
            errors[steps] = float((coder.decode(coder.encode(problem.inputs)) - y).norm() / y.norm())
    assert errors[150] < 0.8 * errors[5]
