"""The tensors that every solver takes and gives, with their shapes."""

from jaxtyping import Float
from torch import Tensor

Dense = Float[Tensor, "d_in d_out"]  # a matrix W that is factorized, or as large as one
Read = Float[Tensor, "d_in unit"]  # a read factor A
Write = Float[Tensor, "unit d_out"]  # a write factor B
InputGram = Float[Tensor, "d_in d_in"]  # E[h^T h] of what W reads
