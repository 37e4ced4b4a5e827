"""sparse_pretrain: train a GPT-2 from scratch with ever fewer weights (paper app. sparse-pretrain-setting; method.md §§0.2, 3).

1. A GPT-2 drawn from the seed (sparse_network.py).
2. Each update: next-token loss of a batch of rows; gradients divided by their common root mean square; AdamW at the schedule's
   rate; then every matrix, embeddings too, is projected to the schedule's density. Biases and norms stay dense. The first update
   has rate 0: it only fills the optimizer's moments.
3. The schedule (`SparseSpec`): density is 1 in the warm-up, falls exponentially to its end value, and stays. The learning rate
   grows with 1 / sqrt(density), times a linear warm-up and a linear fall to 0.
4. The result is a checkpoint folder that `load_host` reads. Its units are MLP channels (exact.py).

    run.json, log.jsonl, checkpoint.safetensors    of the run (train/folder.py)
    model/                                         the result: config, weights, tokenizer
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn

from swd_lens.base import __version__
from swd_lens.base.checks import bounded
from swd_lens.base.errors import TrainError
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.settings import Settings, setting
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.load import load_host
from swd_lens.train.baselines.sparse_network import (
    config_of,
    forget,
    matrices,
    new_network,
    nonzeros,
    project_,
    recipe_of,
    require_rows,
    save,
)
from swd_lens.train.baselines.spec import DEFAULT, recipe
from swd_lens.train.engine import Engine, Fit, autocast, normalized, root_mean_square
from swd_lens.train.folder import TrainingFolder, require_possible
from swd_lens.train.rows import Rows, rows_for, rows_of

MODEL = "model"
# Logits held at once, in numbers: 2^26 are 268 MB in float32, and some four such tensors live at a time.
_LOGITS_AT_ONCE = 2**26
# What sparse pretraining adds to the gradients' root mean square before dividing by it (paper, app. sparse-pretrain-setting).
ADDED_TO_RMS = 1e-5


@dataclass(frozen=True)
class SparseSpec(Settings):
    """The schedule by tokens gone through before an update, and the optimizer. The defaults are the paper's."""

    error: ClassVar[type[Exception]] = TrainError

    # Of the whole schedule, whatever part of it is trained.
    updates: int = setting(38_146, at_least=1)
    tokens_per_update: int = setting(131_072, at_least=1)
    end_density: float | int = setting(0.2, above=0, at_most=1)
    # Where density is 1 and the warm-up is over.
    learning_rate: float | int = setting(3e-4, above=0)
    # Shares of the updates, rounded down to whole ones: end of the warm-up, and from where the density stays.
    warmup: float | int = setting(0.01, at_least=0, below=1)
    falling_until: float | int = setting(0.8, at_least=0, at_most=1)
    # Updates after which training ends, within the schedule; None: at its end. The paper's model is that of update 22,000.
    stop_after: int | None = setting(None, at_least=1)
    beta1: float | int = setting(0.9, at_least=0, below=1)
    beta2: float | int = setting(0.95, at_least=0, below=1)
    # As large as the normalised gradients: between Adam and plain gradient descent.
    eps: float | int = setting(0.1, above=0)
    weight_decay: float | int = setting(1e-3, at_least=0)
    # What matrix products run in; weights and moments stay in float32.
    autocast: str | None = setting("bfloat16", one_of=("bfloat16", None))
    seed: int = setting(0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_after is not None and self.stop_after > self.updates:
            raise TrainError(f"stop_after={self.stop_after}: the schedule has {self.updates} updates")
        if self.warmup > self.falling_until:
            raise TrainError(f"warmup={self.warmup} ends after falling_until={self.falling_until}; density falls between")

    @property
    def last(self) -> int:
        """The last update that is made."""
        return self.updates if self.stop_after is None else self.stop_after

    @property
    def tokens(self) -> int:
        """Tokens of the whole schedule."""
        return self.updates * self.tokens_per_update

    @property
    def n0(self) -> int:
        """Tokens at the end of the warm-up; whole updates."""
        return self._tokens(self.warmup)

    @property
    def n1(self) -> int:
        """Tokens from which the density stays; whole updates."""
        return self._tokens(self.falling_until)

    def _tokens(self, share: float | int) -> int:
        """The tokens of a share of all updates, rounded down to whole ones: 0.29 of 100 are 29, not 28 as floats say."""
        return math.floor(round(share * self.updates, 6)) * self.tokens_per_update

    def density(self, tokens: int) -> float:
        """Density after `tokens` tokens, before the update that follows."""
        if tokens < self.n0:
            return 1.0
        if tokens >= self.n1:
            return float(self.end_density)
        return self.end_density ** ((tokens - self.n0) / (self.n1 - self.n0))

    def rate(self, tokens: int) -> float:
        """Learning rate of the update that follows `tokens` tokens."""
        rising = tokens / self.n0 if tokens < self.n0 else (self.tokens - tokens) / (self.tokens - self.n0)
        return self.learning_rate * rising / math.sqrt(self.density(tokens))


# "small": ours, for networks of some hundred thousand weights and a CPU: a short run of many small updates. On the embedded
# model's shape and text, 409,600 tokens into a schedule of 1M, held-out CE was 2.17 with this rate, 2.39 with 3e-3.
SPARSE_PRETRAINS: Mapping[str, SparseSpec] = {
    "paper": SparseSpec(stop_after=22_000),
    "small": SparseSpec(updates=4000, tokens_per_update=2048, learning_rate=1e-2, warmup=0.04, autocast=None),
}


@with_torch_defaults
@dataclass(frozen=True)
class SparsePretrained:
    """A sparsely pretrained model.

    Attributes:
        folder: a Hugging Face checkpoint folder.
        log: one row per update: loss, density, learning rate, tokens; held-out cross-entropy where it was measured.
        provenance: settings, nonzeros, text, last held-out cross-entropy; plain JSON values.
    """

    folder: Path
    log: pd.DataFrame = field(repr=False)
    provenance: Mapping[str, Any]

    def load(self, kind: str = "auto", **options: Any) -> Any:
        """The model as a host. See `swd_lens.load_host`."""
        return load_host(str(self.folder), kind, **options)


@says_when_interrupted
@with_torch_defaults
def sparse_pretrain(
    config: Any,
    tokens: Any,
    *,
    out: str | Path,
    tokenizer: Any = None,
    preset: str = DEFAULT,
    heldout: Any = None,
    eval_every: int | None = None,
    overwrite: bool = False,
    checkpoint_every: int = 200,
    device: "str | torch.device" = "cpu",
    progress: bool = True,
    **settings: Any,
) -> SparsePretrained:
    """Train a GPT-2 from scratch under the paper's schedule of densities and learning rates.

    Memory: 16 bytes a parameter, the activations of some rows, and a checkpoint's copy; it does not grow with the text.

    Args:
        config: a transformers GPT2Config, a dict of its arguments, or a host whose sizes (and tokenizer) are taken. erf GELU,
            no dropout and a tied head are set here.
        tokens: (rows, pos) ids, shuffled by the seed, again and again; or a `TokenStream`, in its own order. Rows of
            n_positions tokens as a rule.
        out: the folder; the same call after an interruption goes on there, to the same bits; after the end it reads the result.
            Of several processes that a launcher starts with one folder, one trains and the others wait for its result.
        tokenizer: saved beside the weights; None = that of the host.
        preset: "small" (ours, the default), "paper" (38,146 updates of 131,072 tokens, stopped after 22,000; bfloat16).
        heldout: (rows, pos) ids: cross-entropy on them is logged every `eval_every` updates and at the end.
        eval_every: updates; None = a twentieth of all.
        checkpoint_every: updates between checkpoints; the last one has one, too.
        settings: what differs from the preset: updates=, tokens_per_update=, end_density=, stop_after=, learning_rate=,
            autocast=, seed=, ... (see SparseSpec).

    Raises:
        TrainError: bad settings or config, no tokenizer, rows that do not make an update, a density that leaves some row of a
            matrix without a weight, or a loss that is not finite.
        TokenError: bad text.
        ResumeError: `out` holds another run (every difference is named), or files that changed after they were written.
        FolderInUseError, OSError: another call writes `out`, or it cannot be written, or the disk is full.
    """
    require_possible(out)
    spec = recipe(SPARSE_PRETRAINS, preset).changed(settings)
    bounded("checkpoint_every", checkpoint_every, 1, error=TrainError)
    bounded("eval_every", 1 if eval_every is None else eval_every, 1, error=TrainError)
    tokenizer = getattr(config, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise TrainError("tokenizer= is needed: a checkpoint folder without one cannot be loaded as a host")
    shape = config_of(config)
    limits = SimpleNamespace(cfg=SimpleNamespace(d_vocab=shape.vocab_size, n_ctx=shape.n_positions))
    rows = rows_of(tokens, limits)
    heldout_rows = None if heldout is None else rows_of(heldout, limits)
    n_rows = rows_for("tokens_per_update", spec.tokens_per_update, rows, shortest=2)
    eval_every = eval_every or max(1, spec.last // 20)
    of_heldout = None if heldout_rows is None else heldout_rows.stream.fingerprint()
    hashes = {"tokens_sha256": rows.stream.fingerprint(), "heldout_sha256": of_heldout}
    decides = {**recipe_of(shape), **spec.as_dict(), **hashes, "eval_every": eval_every, "swd_lens": __version__}
    folder = TrainingFolder(Path(out), decides, "sparse_pretrain", (f"{MODEL}/config.json",))
    n_weights = require_rows(shape, spec.density((spec.last - 1) * spec.tokens_per_update))  # densities only fall
    with folder.opened(overwrite, 28 * n_weights) as finished:
        if finished:
            return _finished(folder)
        network = new_network(shape, spec.seed)
        if overwrite:
            forget(folder.path / MODEL)
        with torch.enable_grad():
            fit = SparseFit(network.to(torch.device(device)), spec, heldout_rows, rows.row_length)
            every = None if heldout_rows is None else eval_every
            engine = Engine(fit, rows, n_rows, folder, checkpoint_every, every)
            engine.run(progress=progress)
        bos = tokenizer.bos_token_id
        with_bos = bos is not None and bool((next(rows.stream.batches(4))[:, 0] == bos).all())
        files = save(network, tokenizer, with_bos, folder.path / MODEL)
        folder.end({**nonzeros(network), "tokens": engine.tokens, **engine.lines[-1]}, files)
        return _finished(folder)


def _finished(folder: TrainingFolder) -> SparsePretrained:
    provenance = {"method": "sparse_pretrain", "settings": folder.recipe, **folder.outcome()}
    return SparsePretrained(folder.path / MODEL, pd.DataFrame(folder.lines()), provenance)


class SparseFit(Fit):
    """A network in training, whose matrices are projected after every update. row_length: tokens of a training row."""

    title = "sparse_pretrain"
    unit: ClassVar[str] = "update"
    advice: ClassVar[str] = "Lower learning_rate, or train without autocast"

    def __init__(self, network: Any, spec: SparseSpec, heldout: Rows | None, row_length: int):
        self.network, self.spec, self.steps, self.heldout = network, spec, spec.last, heldout
        self.parameters = {str(i): p for i, p in enumerate(network.parameters())}
        self.eps = float(spec.eps)
        self.device = self.parameters["0"].device
        self.rows_at_once = max(1, _LOGITS_AT_ONCE // (row_length * int(network.config.vocab_size)))

    def schedule(self, step: int) -> dict[str, float]:
        before = (step - 1) * self.spec.tokens_per_update  # of the tokens before the update (method.md §0.2)
        return {"density": self.spec.density(before), "learning_rate": self.spec.rate(before)}

    def gradients(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[float, dict[str, Any]]:
        predictions, total = rows.shape[0] * (rows.shape[1] - 1), 0.0
        for part in rows.split(self.rows_at_once):
            loss = self._loss(part, self.spec.autocast) / predictions
            loss.backward()
            total += float(loss.detach().double())
        return total, {}

    def adjust_gradients(self, step: int) -> dict[str, float]:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        normal = normalized(gradients, root_mean_square(gradients), ADDED_TO_RMS)
        for gradient, divided in zip(gradients, normal, strict=True):
            gradient.copy_(divided)
        return {}

    def after_update(self, step: int) -> None:
        density = self.schedule(step)["density"]
        for matrix in matrices(self.network):
            project_(matrix, density)

    def evaluate(self) -> dict[str, float]:
        """Nats per prediction, in float32 however the network trains."""
        assert self.heldout is not None
        with torch.no_grad():
            total = sum(float(self._loss(part).double()) for part in self.heldout.stream.batches(self.rows_at_once))
        return {"heldout_ce": total / (self.heldout.n_rows * (self.heldout.row_length - 1))}

    def _loss(self, rows: Int[Tensor, "_rows pos"], dtype: str | None = None) -> Tensor:
        """Sum of next-token cross-entropies, in nats."""
        rows = rows.to(self.device)
        with autocast(self.device, dtype):
            logits = self.network(rows, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {f"network.{name}": p.detach() for name, p in self.parameters.items()}, {}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        for name, p in self.parameters.items():
            p.copy_(tensors[f"network.{name}"])
