"""sparse_pretrain: train a GPT-2 from scratch with ever fewer weights (paper app. sparse-pretrain-setting; method.md §3).

1. A GPT-2 drawn from the seed (sparse_network.py).
2. Each update: next-token loss of a batch of rows; gradients divided by their common root mean square; AdamW at the schedule's
   rate; then every matrix, embeddings too, is projected to the schedule's density (sparse_schedule.py). Biases and norms stay
   dense. The first update has rate 0: it only fills the optimizer's moments.
3. The result is a checkpoint folder that `load_host` reads. Its units are MLP channels (channels.py).

    run.json, log.jsonl, checkpoint.safetensors    of the run (finetune/folder.py)
    model/                                         the result: config, weights, tokenizer
"""

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from swd_lens.base._version import __version__
from swd_lens.base.machine import plain_float32
from swd_lens.hosts.load import load_host
from swd_lens.train.baselines.sparse_network import (
    config_of,
    fresh,
    matrices,
    nonzeros,
    recipe_of,
    require_rows,
    save,
)
from swd_lens.train.baselines.sparse_schedule import normalized, project_
from swd_lens.train.baselines.sparse_spec import SparseSpec, named
from swd_lens.train.baselines.spec import TrainError, whole
from swd_lens.train.baselines.train import text_of
from swd_lens.train.finetune.folder import TrainingFolder
from swd_lens.train.finetune.rows import Rows

MODEL = "model"
# Logits held at once, in numbers: 2^26 are 268 MB in float32, and some four such tensors live at a time.
_LOGITS_AT_ONCE = 2**26


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


def sparse_pretrain(
    config: Any,
    tokens: Any,
    *,
    out: str | Path,
    tokenizer: Any = None,
    preset: str = "small",
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
        tokenizer: saved beside the weights; None = that of the host.
        preset: "small" (ours, the default), "paper" (38,146 updates of 131,072 tokens, stopped after 22,000; bfloat16).
        heldout: (rows, pos) ids: cross-entropy on them is logged every `eval_every` updates and at the end.
        eval_every: updates; None = a twentieth of all.
        checkpoint_every: updates between checkpoints; the last one has one, too.
        settings: what differs from the preset: updates=, tokens_per_update=, end_density=, stop_after=, learning_rate=,
            autocast=, seed=, ... (see SparseSpec).

    Raises:
        TrainError: bad settings or config, no tokenizer, rows that do not make an update, a density that leaves some row of a
            matrix without a weight, a loss that is not finite, or a finished folder without its model.
        TokenError: bad text.
        ResumeError: `out` holds another run; every difference is named.
    """
    spec = named(preset).changed(settings)
    for name, every in (
        ("checkpoint_every", checkpoint_every),
        ("eval_every", 1 if eval_every is None else eval_every),
    ):
        whole(name, every, 1)
    tokenizer = getattr(config, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise TrainError("tokenizer= is needed: a checkpoint folder without one cannot be loaded as a host")
    made = config_of(config)
    limits = SimpleNamespace(cfg=SimpleNamespace(d_vocab=made.vocab_size, n_ctx=made.n_positions))
    rows, held = text_of(tokens, limits), None if heldout is None else text_of(heldout, limits)
    _rows_per_update(spec, rows)
    recipe = _recipe(made, spec, rows, held, eval_every or max(1, spec.last // 20))
    folder = TrainingFolder(Path(out), recipe, "sparse_pretrain", (MODEL,))
    if not overwrite and folder.check():
        return _finished(folder)
    network = fresh(made, spec.seed)
    require_rows(network, spec.density((spec.last - 1) * spec.tokens_per_update))  # densities only fall
    if overwrite:
        shutil.rmtree(folder.path / MODEL, ignore_errors=True)
        folder.start(0)  # a checkpoint of the run before must not be taken for one of this
    where = torch.device(device)
    exact = plain_float32(where) if spec.autocast is None else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), exact:
        run = _Run(network.to(where), spec, rows, held, folder, recipe["eval_every"], checkpoint_every)
        run.train(progress)
    save(run.network, tokenizer, folder.path / MODEL)
    folder.end({**nonzeros(run.network), "tokens": run.tokens, **folder.lines()[-1]})
    return _finished(folder)


def _recipe(config: Any, spec: SparseSpec, rows: Rows, held: Rows | None, eval_every: int) -> dict[str, Any]:
    hashes = {
        "tokens_sha256": rows.fingerprint(),
        "heldout_sha256": None if held is None else held.fingerprint(),
    }
    return {**recipe_of(config), **asdict(spec), **hashes, "eval_every": eval_every, "swd_lens": __version__}


def _finished(folder: TrainingFolder) -> SparsePretrained:
    if not (folder.path / MODEL / "config.json").is_file():
        raise TrainError(
            f"{folder.path / MODEL} is missing; copy the folder again, or give overwrite=True to train again"
        )
    run = json.loads((folder.path / "run.json").read_text(encoding="utf-8"))
    provenance = {"method": "sparse_pretrain", "settings": run["recipe"], **run["result"]}
    return SparsePretrained(folder.path / MODEL, pd.DataFrame(folder.lines()), provenance)


class _Run:
    """The updates, from the first or from a checkpoint on."""

    def __init__(
        self,
        network: Any,
        spec: SparseSpec,
        rows: Rows,
        heldout: Rows | None,
        folder: TrainingFolder,
        eval_every: int,
        checkpoint_every: int,
    ):
        self.network, self.spec, self.rows, self.heldout, self.folder = network, spec, rows, heldout, folder
        self.eval_every, self.checkpoint_every = eval_every, checkpoint_every
        self.update = 0
        self.parameters = list(network.parameters())
        self.rows_per_update = _rows_per_update(spec, rows)
        self.at_once = max(1, _LOGITS_AT_ONCE // (rows.row_length * int(network.config.vocab_size)))
        self.adam: Any = torch.optim.AdamW(
            self.parameters,
            lr=0.0,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            foreach=False,  # one plain loop: batched versions add up in other orders on other machines
        )

    @property
    def tokens(self) -> int:
        """Gone through so far."""
        return self.update * self.spec.tokens_per_update

    def train(self, progress: bool) -> None:
        """From the last checkpoint to the last update."""
        last = self.folder.last_step()
        if last:
            self._resume()
        self.folder.start(last)
        batches = self.rows.batches(self.rows_per_update, self.spec.seed, self.update)
        with tqdm(
            total=self.spec.last, initial=last, desc="sparse_pretrain", unit="update", disable=not progress, leave=False
        ) as bar:
            while self.update < self.spec.last:
                entry = self._one(next(batches))
                shown = {name: f"{entry[name]:.4g}" for name in ("loss", "density", "heldout_ce") if name in entry}
                bar.set_postfix(shown, refresh=False)
                bar.update()

    def _one(self, rows: Int[Tensor, "_rows pos"]) -> dict[str, Any]:
        before = self.tokens  # the schedule is of the tokens before the update (method.md §0.2)
        density, rate = self.spec.density(before), self.spec.rate(before)
        loss = self._gradients(rows)
        if not math.isfinite(loss):
            there = self.folder.last_step()
            kept = f"update {there}" if there else "no checkpoint yet"
            raise TrainError(
                f"update {self.update + 1}: the loss is {loss}, at learning rate {rate:.3g}. {self.folder.path} keeps {kept}. "
                "Lower learning_rate, or train without autocast"
            )
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for gradient, divided in zip(gradients, normalized(gradients), strict=True):
            gradient.copy_(divided)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for matrix in matrices(self.network):
            project_(matrix, density)
        self.update += 1
        entry = {"step": self.update, "tokens": self.tokens, "loss": loss, "density": density, "learning_rate": rate}
        if self.heldout is not None and (self.update % self.eval_every == 0 or self.update == self.spec.last):
            entry["heldout_ce"] = self._heldout_ce(self.heldout)
        self.folder.log(entry)
        if self.update % self.checkpoint_every == 0 or self.update == self.spec.last:
            self.folder.save(self._state(), {"step": self.update})
        return entry

    def _gradients(self, rows: Int[Tensor, "_rows pos"]) -> float:
        """The mean loss of the batch; its gradients are then in the parameters. Some rows at a time."""
        predictions, total = rows.shape[0] * (rows.shape[1] - 1), 0.0
        self.adam.zero_grad()
        for part in rows.split(self.at_once):
            loss = self._loss(part, self.spec.autocast) / predictions
            loss.backward()
            total += float(loss.detach().double())
        return total

    def _loss(self, rows: Int[Tensor, "_rows pos"], autocast: str | None = None) -> Tensor:
        """Sum of next-token cross-entropies, in nats."""
        device = self.parameters[0].device
        how: Any = nullcontext()
        if autocast is not None:
            how = torch.autocast(device.type, dtype=getattr(torch, autocast))
        rows = rows.to(device)
        with how:
            logits = self.network(rows, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    @torch.no_grad()
    def _heldout_ce(self, heldout: Rows) -> float:
        """Nats per prediction, in float32 however the network trains."""
        with plain_float32(self.parameters[0].device):
            total = sum(float(self._loss(part).double()) for part in heldout.all(self.at_once))
        return total / (heldout.n_rows * (heldout.row_length - 1))

    # ------------------------------------------------------------------ resuming

    def _state(self) -> dict[str, Tensor]:
        named = {f"network.{i}": p.detach() for i, p in enumerate(self.parameters)}
        for i, p in enumerate(self.parameters):
            moments = self.adam.state[p]
            named[f"first.{i}"], named[f"second.{i}"] = moments["exp_avg"], moments["exp_avg_sq"]
        return named

    @torch.no_grad()
    def _resume(self) -> None:
        named, state = self.folder.resume()
        self.update = int(state["step"])
        for i, p in enumerate(self.parameters):
            p.copy_(named[f"network.{i}"])
            moments = {"exp_avg": named[f"first.{i}"].to(p.device), "exp_avg_sq": named[f"second.{i}"].to(p.device)}
            self.adam.state[p] = {"step": torch.tensor(float(self.update)), **moments}


def _rows_per_update(spec: SparseSpec, rows: Rows) -> int:
    wanted, left = divmod(spec.tokens_per_update, rows.row_length)
    if left or wanted > rows.n_rows or rows.row_length < 2:
        raise TrainError(
            f"tokens_per_update={spec.tokens_per_update} cannot be made of these {rows.n_rows} rows of {rows.row_length} tokens; "
            "give a multiple of the row length (2 or more), and at least as many rows as one update takes"
        )
    return wanted
