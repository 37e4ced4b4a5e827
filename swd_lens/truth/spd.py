"""A toy model of superposition taken apart on the model's own loss, as SPD publishes it (Bushnaq et al., 2025).

The model x -> relu(x W W^T + b) has two matrices, W (features, hidden) and its transpose.

1. Each has C rank-one components (`Vpd`), and for each component a small network that sees its inner activation (`ScalarMlp`).
   Component c of W^T is the transpose of component c of W. As in the public code the two share memory: each has Adam's moments of
   its own, and a step moves the shared numbers by both.
2. A step's loss: squared error of the model's output with masks g + (1 - g) u in both matrices, u uniform; plus the same with
   masks in one of them, averaged; plus ||W - VU||^2 of both over the number of entries; plus minimality of importances.
   Importances are those of the unmasked model's activations.
3. Data are those that the toy was trained on: features uniform on [0, 1], each present with probability .05; new ones each step.
4. After every tenth of the steps the decomposition is measured (`Decomposition.curve`), and kept where there is a cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.fingerprints import sha256
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.train.baselines.spec import VpdSpec
from swd_lens.train.baselines.vpd import Vpd, lower_leaky, reconstruct, total_loss, unfaithfulness
from swd_lens.truth.scores import column_mmcs
from swd_lens.truth.toys import sparse_features

# Components, weight and power of the minimality, of the published toys: (features, hidden) -> settings; and our samples per step.
RECIPES: Mapping[tuple[int, int], Mapping[str, float]] = {
    (5, 2): {"width": 20, "minimality": 3e-3, "p": 1.0, "batch": 1024},
    (40, 10): {"width": 200, "minimality": 1e-4, "p": 2.0, "batch": 512},
}
STEPS = 10_000  # published: 40,000 of 4,096 samples each
MARKS = 10
_AT_WORK = 0.1  # least importance of a component that counts as at work, as in the public code
_SAMPLE = 8192


@dataclass(frozen=True)
class Decomposition:
    """Components of W (features, hidden); those of W^T are their transposes.

    Attributes:
        read: V (features, unit). write: U (unit, hidden).
        vpd: the same with the networks of their importance.
        curve: a row per tenth of the steps: step, MMCS and ML2R, mean number of components at work in W and in W^T, squared
            error under stochastic masks (both matrices) and ||W - VU|| / ||W||.
    """

    read: Float[Tensor, "features unit"]
    write: Float[Tensor, "unit hidden"]
    vpd: Vpd
    curve: list[dict[str, float]]


def recipe(features: int, hidden: int, *, steps: int = STEPS, batch: int | None = None, seed: int = 0, **changes: Any) -> VpdSpec:
    """The published settings of a toy of this size, with fewer and smaller steps; other sizes: those of 40 in 10, with five times
    as many components as features."""
    known = RECIPES.get((features, hidden), {**RECIPES[40, 10], "width": 5 * features})
    batch = int(known["batch"]) if batch is None else batch
    spec = VpdSpec(
        width=int(known["width"]),
        minimality=known["minimality"],
        p_start=known["p"],
        p_end=known["p"],
        importance="scalar_mlp",
        hidden=16,
        faithfulness=1.0,
        delta=False,
        learning_rate=1e-3,
        final=0.0,
        warmup_steps=0,
        n_tokens=steps * batch,
        tokens_per_step=batch,
        seed=seed,
    )
    return replace(spec, **changes)


@with_torch_defaults
def decompose(
    weight: Float[Tensor, "features hidden"],
    bias: Float[Tensor, " features"],
    spec: VpdSpec | None = None,
    *,
    cache: StepCache | None = None,
    tenths: int = MARKS,
) -> Decomposition:
    """Take the model relu(x W W^T + b) apart by stochastic parameter decomposition.

    Args:
        weight: W, which stays as it is. bias: b.
        spec: see `recipe`, the default.
        cache: where every tenth of the training is kept; the same call goes on after the last one.
        tenths: stop after so many; the rate has not come to zero then.

    Raises:
        ValueError: tenths is not between 1 and 10.
        ResumeError: a kept part is damaged.

    Source: Bushnaq, Braun and Sharkey, Stochastic Parameter Decomposition, 2025 (appendix: settings); ties after the public code.
    """
    bounded("tenths", tenths, 1, MARKS)
    spec = recipe(*weight.shape) if spec is None else spec
    cache = StepCache(None) if cache is None else cache
    run = _Run(weight.detach().float(), bias.detach().float(), spec)
    name = sha256([weight, bias])[:12]
    ends = [round(spec.steps * mark / MARKS) for mark in range(1, tenths + 1)]
    curve: list[dict[str, float]] = []
    for begin, end in zip([0, *ends], ends, strict=False):
        key = ("SPD", f"{weight.shape[0]}-{weight.shape[1]}", name, repr(spec), str(end))
        curve.append(cache.tensors(key, partial(run.train, begin, end), run.load))
    first = run.parts[0].requires_grad_(False)
    return Decomposition(first.W_enc.detach().clone(), first.W_dec.detach().clone(), first, curve)


class _Run:
    """The components of both matrices in training."""

    def __init__(self, weight: Tensor, bias: Tensor, spec: VpdSpec):
        self.weight, self.bias, self.spec = weight, bias, spec
        (n_in, n_out) = weight.shape
        self.parts = [Vpd(n_in, n_out, spec), Vpd(n_out, n_in, spec)]
        generator = torch.Generator().manual_seed(spec.seed)
        for part in self.parts:
            part.draw(generator)
        first, second = self.parts
        second.W_enc.data, second.W_dec.data = first.W_dec.data.T, first.W_enc.data.T
        first.stand_for(weight, torch.zeros(weight.shape[1]))
        second.stand_for(weight.T, bias)
        reconstruct(self.parts)
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        self.adam = torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=0.0, foreach=False)

    def train(self, begin: int, end: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Steps begin + 1 to end; the state after them, and a row of the curve."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.spec.seed + 1) + begin)
        with torch.enable_grad():
            for step in range(begin + 1, end + 1):
                x = sparse_features(self.spec.tokens_per_step, len(self.weight), generator)
                self.adam.param_groups[0]["lr"] = self.spec.rate(step)
                self.adam.zero_grad()
                error, raws = self.error(x, generator)
                total_loss(error, raws, self.parts, step)[0].backward()
                self.adam.step()
        # Parameters and Adam's moments, as plain tensors.
        state = {f"parameter.{i}": p.detach() for i, p in enumerate(self.adam.param_groups[0]["params"])}
        for i, moments in self.adam.state_dict()["state"].items():
            state |= {f"moment.{i}.{name}": value for name, value in moments.items()}
        return {name: value.contiguous().clone() for name, value in state.items()}, self._row(end)

    def error(self, x: Float[Tensor, "token features"], generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
        """Squared error under masks of both matrices, plus that of one at a time; and the raw importances."""
        first, second = self.parts
        inner = x @ self.weight
        target = torch.relu(inner @ self.weight.T + self.bias)
        raws = [part.raw(given, given @ part.W_enc) for part, given in zip(self.parts, (x, inner), strict=True)]
        gates = [lower_leaky(raw) for raw in raws]

        def masks() -> list[Tensor]:
            return [g + (1 - g) * torch.rand(g.shape, generator=generator) for g in gates]

        def off(output: Tensor) -> Tensor:
            return (torch.relu(output) - target).square().mean()

        both, alone = masks(), masks()
        together = off(_masked(second, _masked(first, x, both[0]), both[1]))
        only_first = off(_masked(first, x, alone[0]) @ self.weight.T + self.bias)
        only_second = off(_masked(second, inner, alone[1]))
        return together + (only_first + only_second) / 2, raws

    @torch.no_grad()
    def _row(self, step: int) -> dict[str, float]:
        first = self.parts[0]
        generator = torch.Generator().manual_seed(self.spec.seed)
        x = sparse_features(_SAMPLE, len(self.weight), generator)
        error, raws = self.error(x, generator)
        mmcs, ratio = column_mmcs(self.weight, first.W_enc, first.W_dec)
        at_work = [float((raw > _AT_WORK).float().sum(-1).mean()) for raw in raws]
        lost = float(unfaithfulness([first]) / self.weight.square().mean()) ** 0.5
        row = {"step": float(step), "MMCS": mmcs, "ML2R": ratio, "at work in W": at_work[0], "at work in W^T": at_work[1]}
        return {**row, "stochastic error": float(error), "lost of W": lost}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, float]:
        """Take a kept state; returns its row of the curve."""
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, number, *rest = name.split(".")
            if kind == "parameter":
                self.adam.param_groups[0]["params"][int(number)].copy_(value)
            else:
                moments.setdefault(int(number), {})[rest[0]] = value
        self.adam.load_state_dict({"state": moments, "param_groups": self.adam.state_dict()["param_groups"]})
        return dict(values)


def _masked(part: Vpd, x: Tensor, mask: Tensor) -> Tensor:
    return part.decode(mask * (x @ part.W_enc))
