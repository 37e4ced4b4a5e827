"""Interactions by their definitions: the paper's formulas written out in float64, on random sparse factors."""

import torch

from swd_lens.hosts import host_of
from swd_lens.units.factors import Factors
from tests.micro import random_tokens

TOKENS = random_tokens(5, 7)


def sparse_factors(model, site: str, n_units: int = 12, density: float = 0.4, seed: int = 0) -> Factors:
    """Random sparse factors of the right shape; how well they stand for W does not matter here."""
    d_in, d_out = next((s.d_in, s.d_out) for s in host_of(model).sites() if s.name == site)
    generator = torch.Generator().manual_seed(seed)
    read, write = (
        torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)
        for shape in ((d_in, n_units), (n_units, d_out))
    )
    return Factors(read, write * 0.4)


def by_definition(f, z, pre, write, weight, up=None):
    """R, RMS of q and RMS of m in float64, every token, channel and pair written out."""
    z, pre, write, weight = (t.detach().double() for t in (z, pre, write, weight))
    factor = torch.ones_like(pre) if up is None else up.double()
    c = z[:, :, None] * write  # (token, unit, d_mlp)
    n = len(write)
    q, m = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        m[i] = (((f(pre) - f(pre - c[:, i])) * factor) @ weight).square().sum()
        for j in range(n):
            if i != j:
                delta = f(pre) - f(pre - c[:, i]) - f(pre - c[:, j]) + f(pre - c[:, i] - c[:, j])
                q[i, j] = ((delta * factor) @ weight).square().sum()
    return (q.sqrt() / (m[:, None] * m).pow(0.25)).fill_diagonal_(torch.nan), (q / len(z)).sqrt(), (m / len(z)).sqrt()


def gelu_new(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "gelu_new": gelu_new,
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "relu": lambda x: x.clamp_min(0),
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu_fast": gelu_new,
    "relu2": lambda x: x.clamp_min(0) ** 2,
}


def check(found, f, cache, layer: int, factors: Factors, weight, site_kind: str, up=None):
    z = cache[f"blocks.{layer}.hook_{site_kind}_unit"].flatten(0, 1)
    pre = cache[f"blocks.{layer}.mlp.hook_pre"].flatten(0, 1)
    units = list(found.units)
    ratio, q, m = by_definition(f, z[:, units], pre, factors.write[units], weight, up)
    torch.testing.assert_close(found.interaction_rms, q, rtol=1e-4, atol=1e-5 * float(q.max()))
    torch.testing.assert_close(found.marginal_rms, m, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.ratio, ratio, rtol=1e-4, atol=1e-5, equal_nan=True)
    energy = z.double().square().mean(0) * (factors.write.double() @ weight.detach().double()).square().sum(1)
    assert units == energy.argsort(descending=True)[: len(units)].tolist()
    torch.testing.assert_close(found.energy, energy[units], rtol=1e-5, atol=0)
