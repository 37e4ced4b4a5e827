"""Annotations are checked in the tests: shapes against each other, results, dataclasses, and the package's own functions."""

import ast
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import AnnotationError, Float, TypeCheckError, _storage
from torch import Tensor

import swd_lens
from swd_lens.base import divergence
from swd_lens.units.coder import Units
from tests import checked_types
from tests.checked_types import checked


def product(a: Float[Tensor, "row inner"], b: Float[Tensor, "inner column"]) -> Float[Tensor, "row column"]:
    return a @ b if len(a) != 3 else (a @ b)[:2]


product = checked(product, typechecker=beartype)


@checked(typechecker=beartype)
@dataclass(frozen=True)
class Pair:
    read: Float[Tensor, "d_in unit"]
    write: Float[Tensor, "unit d_out"]


def test_axes_of_one_name_have_one_size_in_a_call_and_any_size_in_the_next():
    assert product(torch.zeros(2, 4), torch.zeros(4, 5)).shape == (2, 5)
    assert product(torch.zeros(1, 6), torch.zeros(6, 2)).shape == (1, 2)
    with pytest.raises(TypeCheckError):
        product(torch.zeros(2, 4), torch.zeros(5, 5))
    with pytest.raises(TypeCheckError):
        product(torch.zeros(2, 4), torch.zeros(4, 5, dtype=torch.int64))


def test_a_result_is_held_to_the_arguments_axes():
    """A test of its own: of one test's calls the first four are checked."""
    with pytest.raises(TypeCheckError):
        product(torch.zeros(3, 4), torch.zeros(4, 5))
    assert product(torch.zeros(2, 4), torch.zeros(4, 5)).shape == (2, 5)  # a failed call leaves no sizes behind


def test_fields_of_a_dataclass_and_the_packages_own_functions_are_checked():
    assert Pair(torch.zeros(2, 3), torch.zeros(3, 4))
    with pytest.raises(TypeCheckError):
        Pair(torch.zeros(2, 3), torch.zeros(4, 4))
    with pytest.raises(TypeCheckError):
        divergence.kl(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(TypeCheckError):
        divergence.DensePredictions(torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.int64))


def test_a_function_made_anew_is_checked_with_its_own_values():
    def scaled(factor: int):
        @checked(typechecker=beartype)
        def scale(x: Float[Tensor, " n"], power: int = factor) -> Float[Tensor, " n"]:
            return factor * x**power

        return scale

    x = torch.tensor([2.0])
    assert [float(scaled(n)(x)) for n in (2, 3)] == [8.0, 24.0]
    with pytest.raises(TypeCheckError):
        scaled(2)(torch.zeros(2, 2))


@pytest.mark.parametrize("axes", ["a b", "a a", "3 b", "_ b", "a", "... b", "*a b", "#a b", "", "a b a+1"])
def test_an_array_fits_where_jaxtyping_says_so(axes):
    """Two arrays in one scope, each tried twice: the second time the shorter way is gone, where there is one."""
    arrays = [torch.zeros(shape) for shape in ((), (3,), (2, 3), (3, 3), (3, 2), (1, 3), (3, 3, 4))]
    arrays += [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.int64)]
    annotation = Float[Tensor, axes]

    def answers(fits, first, second):
        _storage.push_shape_memo({})
        try:
            return [fits(annotation, array) for array in (first, second)], _storage.get_shape_memo()
        except AnnotationError as error:
            return str(error)
        finally:
            _storage.pop_shape_memo()

    for _ in range(2):
        for first, second in itertools.product(arrays, repeat=2):
            assert answers(checked_types.fits, first, second) == answers(checked_types._fits, first, second)


def test_isinstance_of_a_protocol_asks_for_no_value():
    class Counted:
        d_in = d_out = n_units = edges = sparsity = provenance = valid_units = 0

        @property
        def edges_per_unit(self) -> Any:
            raise AssertionError("asked for")

    assert isinstance(Counted(), Units) and not isinstance(object(), Units)


def test_no_behaviour_hangs_on_isinstance_of_a_protocol_with_properties():
    """Up to Python 3.11 it asks for the properties' values, from 3.12 on it does not."""
    files = sorted(Path(swd_lens.__file__).parent.rglob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    kinds = [node for node in nodes if isinstance(node, ast.ClassDef)]
    protocols = {kind.name for kind in kinds if any(ast.unparse(base).startswith("Protocol") for base in kind.bases)}
    asking = {kind.name for kind in kinds if kind.name in protocols and "@property" in ast.unparse(kind)}
    assert {"Units", "Backend"} <= asking and "Host" in protocols - asking
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    asked = [call for call in calls if call.func.id in ("isinstance", "issubclass")]
    assert len(asked) > 100
    assert not [call for call in asked if asking & {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}]
