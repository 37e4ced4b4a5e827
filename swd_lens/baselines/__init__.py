"""Other ways to turn a matrix into units, for comparison with SWD; each exposes the same `Factors`.

exact.py: dense exact factorizations of a tensor, SVD and Random-B. surface.py: the same for a host's sites.
"""

from swd_lens.baselines.exact import random_b_factors, svd_factors
from swd_lens.baselines.surface import random_b, random_b_seeds, svd

__all__ = ["random_b", "random_b_factors", "random_b_seeds", "svd", "svd_factors"]
