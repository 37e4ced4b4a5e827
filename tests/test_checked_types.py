"""Annotations are checked in the tests: shapes against each other, results, dataclasses, and the package's own functions."""

from dataclasses import dataclass

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from swd_lens.base import divergence
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
    with pytest.raises(TypeCheckError):
        product(torch.zeros(3, 4), torch.zeros(4, 5))
    assert product(torch.zeros(2, 4), torch.zeros(4, 5)).shape == (2, 5)  # a failed call leaves no sizes behind


def test_fields_of_a_dataclass_are_checked_together():
    assert Pair(torch.zeros(2, 3), torch.zeros(3, 4))
    with pytest.raises(TypeCheckError):
        Pair(torch.zeros(2, 3), torch.zeros(4, 4))


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


def test_the_packages_own_functions_are_checked():
    with pytest.raises(TypeCheckError):
        divergence.kl(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(TypeCheckError):
        divergence.DensePredictions(torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.int64))
