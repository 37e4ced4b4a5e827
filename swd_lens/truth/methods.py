"""Every way to take a matrix apart that the tables compare, each a function of one `Problem` to a read and a write factor.

1. SWD: its presets, the side that units start from, more units than the true ones, and dense write vectors ("sparse reads").
2. Without an error: neurons and singular vectors; the same pruned to the budget.
3. Learned: dictionary learning of W's rows or columns (scikit-learn), a transcoder and VPD (the package's coders, trained on
   drawn inputs by AdamW). Rivals get several tries and keep what is nearest to W, or to its outputs. Where W is of a toy model
   of superposition, VPD is trained on the model's own loss, as published (spd.py).
Methods whose vectors are dense are trimmed to the budget before supports are compared (scores.py, `trimmed`); their cosines are
those of the untrimmed vectors.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import one_of
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.solver import solve
from swd_lens.train.baselines.coders import Coder, Transcoder
from swd_lens.train.baselines.spec import TrainSpec, TranscoderSpec, VpdSpec
from swd_lens.train.baselines.vpd import Vpd
from swd_lens.truth.scores import relative_error, trimmed
from swd_lens.truth.spd import decompose
from swd_lens.units.exact import neuron_factors, svd_factors

SKLEARN = "dictionary learning needs scikit-learn: pip install scikit-learn, or leave the method out (methods=)"


@dataclass(frozen=True)
class Problem:
    """A matrix to be taken apart, and what a method is told of the answer.

    Attributes:
        weight: W (d_in, d_out). gram: of its inputs; None: the identity.
        edges, units: the budget, and how many units there are.
        inputs: (sample, d_in) on which learned methods are trained; sparse, as they want them.
        bias: b of the toy model relu(x W W^T + b) whose W this is; None: of no such model.
    """

    weight: Float[Tensor, "d_in d_out"]
    gram: Float[Tensor, "d_in d_in"] | None
    edges: int
    units: int
    inputs: Float[Tensor, "sample d_in"]
    bias: Float[Tensor, " d_in"] | None = None


@dataclass(frozen=True)
class Answer:
    """A method's finding: read and write vectors, and the coder that has them, where units are no product of the two."""

    read: Float[Tensor, "d_in unit"]
    write: Float[Tensor, "unit d_out"]
    coder: Coder | None = None


def _swd(problem: Problem, **how: Any) -> Answer:
    units = how.pop("units", problem.units)
    found = solve(problem.weight, problem.gram, edges=how.pop("edges", problem.edges), units=units, **how)
    return Answer(found.read, found.write)


def _standard_width(preset: str) -> Callable[[Problem], Answer]:
    """A preset that knows one number of units only: that of the coordinates which they start as."""
    return lambda problem: _swd(problem, preset=preset, units=None)


def _sparse_reads(problem: Problem) -> Answer:
    """As many edges as dense write vectors take on top of half of the budget: for outputs without a privileged basis."""
    d_in, d_out = problem.weight.shape
    reads, writes = problem.edges // 2, problem.units * d_out
    reads = max(reads, problem.units)
    share = writes / (reads + writes) if d_in > d_out else reads / (reads + writes)
    return _swd(problem, edges=reads + writes, square_share=share)


def _exact(factors: Any) -> Answer:
    return Answer(factors.read, factors.write)


def dictionary_learning(problem: Problem) -> Answer:
    """Sparse codes of W's rows in a learned dictionary, or of its columns: whichever is nearer to W once trimmed to the budget.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.decomposition import DictionaryLearning
        from sklearn.exceptions import ConvergenceWarning
    except ImportError as missing:
        raise ImportError(SKLEARN) from missing
    tries: list[Answer] = []
    for rows in (problem.weight, problem.weight.T):
        # Half of the edges for the code, as evenly over its rows as orthogonal matching pursuit has them.
        used = min(problem.units, max(1, round(problem.edges / 2 / len(rows))))
        how: dict[str, Any] = {"max_iter": 100, "transform_algorithm": "omp", "transform_n_nonzero_coefs": used}
        how |= {"alpha": 0.1 * float(rows.std()), "random_state": 0}
        learner: Any = DictionaryLearning(problem.units, **how)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", RuntimeWarning)  # of units that the pursuit has no use for
            code = torch.as_tensor(learner.fit_transform(rows.double().numpy())).float()
        atoms = torch.as_tensor(learner.components_).float()
        tries.append(Answer(code, atoms) if rows is problem.weight else Answer(atoms.T, code.T))
    return min(tries, key=lambda a: relative_error(problem.weight, *trimmed(a.read, a.write, problem.edges), problem.gram))


# Learned coders: (strength of the penalty) -> settings. The one whose outputs err least among those tried is kept; errors within
# a tenth of the least count as equal, the sparser one then wins.
_STEPS, _BATCH = 1000, 512
_TRANSCODERS = (1e-5, 1e-4, 1e-3)
_VPDS = (1e-4, 1e-3, 1e-2)


def transcoder(problem: Problem) -> Answer:
    """A ReLU transcoder from the inputs to their products with W, of twice the units (a feature has one sign): of three L1
    penalties the largest whose error is near the least."""
    tries = [
        _trained(problem, Transcoder, TranscoderSpec(width=2 * problem.units, l1=l1, loss="mse", **_shared()))
        for l1 in _TRANSCODERS
    ]
    return _sparsest(tries)


def vpd(problem: Problem, cache: StepCache | None = None) -> Answer:
    """Of a toy model: stochastic parameter decomposition of it, whose parts the cache keeps. Else VPD-Recon-CI, rank-one
    components under learned importance: of three minimalities the largest whose error is near the least."""
    if problem.bias is not None:
        found = decompose(problem.weight, problem.bias, cache=cache)
        return Answer(found.read, found.write, found.vpd)
    how = {"width": problem.units, "importance": "shared_mlp", "hidden": 64, "p_start": 1.0, "p_end": 1.0, **_shared()}
    tries = [_trained(problem, Vpd, VpdSpec(minimality=weight, **how)) for weight in _VPDS]
    return _sparsest(tries)


def _shared() -> dict[str, Any]:
    n_tokens = _STEPS * _BATCH
    return {"n_tokens": n_tokens, "tokens_per_step": _BATCH, "learning_rate": 3e-3, "schedule": "cosine", "seed": 0}


def _sparsest(tries: list[tuple[Coder, float]]) -> Answer:
    least = min(error for _, error in tries)
    coder = [coder for coder, error in tries if error <= max(1.1 * least, 0.01)][-1]
    return Answer(coder.W_enc.detach(), coder.W_dec.detach(), coder)


def _trained(problem: Problem, kind: Callable[..., Coder], spec: TrainSpec) -> tuple[Coder, float]:
    """A coder of the package in a loop of its own: there is no host here. The error is relative, of the outputs."""
    weight, inputs = problem.weight.float(), problem.inputs.float()
    coder: Any = kind(*weight.shape, spec)
    generator = torch.Generator().manual_seed(spec.seed)
    coder.draw(generator)
    if spec.per_matrix:
        coder.stand_for(weight, torch.zeros(weight.shape[1]))
    with torch.enable_grad():
        coder.begin(inputs[:_BATCH], inputs[:_BATCH] @ weight)
        adam = torch.optim.AdamW(coder.parameters(), lr=spec.learning_rate, weight_decay=0.0, foreach=False)
        for step in range(1, spec.steps + 1):
            x = inputs[torch.randint(len(inputs), (_BATCH,), generator=generator)]
            adam.param_groups[0]["lr"] = spec.rate(step)
            coder.before_step()
            adam.zero_grad()
            coder.loss(x, x @ weight, step)[0].backward()
            coder.adjust_gradients()
            adam.step()
    coder.before_step()
    with torch.no_grad():
        y = inputs @ weight
        error = float((coder.decode(coder.encode(inputs)) - y).norm() / y.norm())
    return coder.requires_grad_(False), error


# Name in the tables -> method.
METHODS: Mapping[str, Callable[[Problem], Answer]] = {
    "SWD": _swd,
    "SWD quick": lambda problem: _swd(problem, preset="quick"),
    "SWD deep": lambda problem: _swd(problem, preset="deep"),
    "SWD paper": _standard_width("paper"),
    "SWD from inputs": lambda problem: _swd(problem, basis="input"),
    "SWD from outputs": lambda problem: _swd(problem, basis="output"),
    "SWD, twice the units": lambda problem: _swd(problem, units=2 * problem.units),
    "SWD, sparse reads": _sparse_reads,
    "neurons": lambda problem: _exact(neuron_factors(problem.weight)),
    "neurons pruned": _standard_width("pruned"),
    "SVD": lambda problem: _exact(svd_factors(problem.weight)),
    "SVD pruned": _standard_width("svd_pruned"),
    "dictionary learning": dictionary_learning,
    "transcoder": transcoder,
    "VPD": vpd,
}
# Methods with dense vectors, whose supports are compared after trimming.
DENSE = frozenset({"neurons", "SVD", "dictionary learning", "transcoder", "VPD", "SWD, sparse reads"})


@with_torch_defaults
def answer(method: str, problem: Problem, cache: StepCache | None = None) -> Answer:
    """Solve a problem by one method. cache: where trainings of minutes keep their parts; the same call goes on there.

    Raises:
        ValueError: an unknown method; or (SolveInputError) one that cannot make such factors: too few edges, say.
        ImportError: it needs a package that is not there.

    Source: ours; each method is that of its own documentation.
    """
    one_of("method", method, METHODS)
    if method == "VPD":
        return vpd(problem, cache)
    return METHODS[method](problem)
