"""Train the embedded model from a seed: `python -m tests.embedded.train --out DIR --seed N [--tokens N]`.

1. Build the tokenizer from the corpus; draw the network's parameters from the seed.
2. AdamW over batches that (seed, step) define; validation scores along the way go to train_log.jsonl.
3. Every CHECK_EVERY steps a checkpoint: the same command goes on where it was stopped, to the same bits.
4. Store fp16 weights under TransformerLens' names, load them back as a TransformerLens model, check that its logits are
   those of the network, and write the held-out scores of the stored weights (scores.json).

Same machine, same torch, same seed and same number of threads (THREADS, fixed): same bits.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm.auto import tqdm

from swd_lens.hosts.embedded import Shape, load_model_folder
from swd_lens.hosts.embedded.corpus import MIX, N_CTX
from swd_lens.tasks.generators import FAMILIES
from tests.embedded.network import Network, hooked_state
from tests.embedded.score import ablation_table, all_scores, family_scores
from tests.embedded.text import COPY_TOKENS, EARLY_MIX, HEAVY, Batch, TrainingPacker, build_tokenizer, loss_weights

THREADS = 1  # sums depend on the number; one thread runs at 9k tokens/s whatever else the machine does, two at 13k
ROWS = 16  # 2,048 tokens a step: many updates per token, which is what a short run needs
TOKENS = 13_500_000  # IOI is learned abruptly between 3M and 7M, greater-than keeps improving to the end
LEARNING_RATE = 3e-3  # high for Adam, but the network is small and pre-LayerNorm
WARM_UP = 150  # steps
BETAS = (0.9, 0.98)  # a second moment of ~50 steps follows the changes of the mixture
WEIGHT_DECAY = 0.1  # on matrices and embeddings, as in GPT-2
CLIP = 1.0
PLAIN_SHARE = 0.15  # the last steps use the plain loss, so that probabilities are calibrated
LOG_EVERY, CHECK_EVERY = 100, 500  # steps
CHECK_PROMPTS = 100  # per family and template kind


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    return LEARNING_RATE * min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP))


def make_optimizer(network: Network) -> torch.optim.AdamW:
    """AdamW; weight decay on everything with two axes."""
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = [p for p in network.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)


def train_step(network: Network, optimizer: torch.optim.AdamW, batch: Batch, factor: float | int) -> float:
    """One update; returns the weighted loss (nats per token)."""
    logits = network(batch.tokens, batch.documents)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    loss = (losses * loss_weights(batch.heavy, factor).flatten()).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
    optimizer.step()
    return loss.item()


def validate(network: Network, packer: TrainingPacker) -> dict[str, float]:
    """Validation accuracy of every family (for greater-than: probability right minus wrong), seen and unseen."""
    accuracies = {}
    for family in FAMILIES:
        for templates in ("seen", "unseen"):
            scores = family_scores(network, packer, family, "validation", templates, CHECK_PROMPTS)
            accuracies[f"{family}/{templates}"] = scores["probability" if family == "greater_than" else "accuracy"]
    return accuracies


def run(out: Path, seed: int, tokens: int, check_every: int = CHECK_EVERY) -> Network:
    """Train (or go on training) to `tokens` tokens; returns the network, leaves log and checkpoint in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    steps = max(1, tokens // (ROWS * N_CTX))
    tokenizer = build_tokenizer()
    packer = TrainingPacker(tokenizer)
    network = Network(Shape(d_vocab=len(tokenizer)), seed)
    optimizer = make_optimizer(network)
    settings = {"seed": seed, "steps": steps, "tokens": steps * ROWS * N_CTX, "threads": torch.get_num_threads()}
    first, seconds = _resume(out, settings, network, optimizer)
    start, total, counted = time.perf_counter() - seconds, 0.0, 0
    for step in tqdm(range(first, steps), initial=first, total=steps, desc="training", mininterval=5):
        mix = EARLY_MIX if step * ROWS * N_CTX < COPY_TOKENS else MIX
        factor = 1.0 if step >= (1 - PLAIN_SHARE) * steps else HEAVY
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        total, counted = (total + train_step(network, optimizer, packer.batch(seed, step, ROWS, mix), factor), counted + 1)
        done = step + 1
        if done % LOG_EVERY == 0 or done == steps:
            entry = {"step": done, "tokens": done * ROWS * N_CTX, "loss": total / counted, "lr": learning_rate(step, steps)}
            if done % check_every == 0 or done == steps:
                entry |= validate(network, packer)
            _log(out, entry | {"seconds": round(time.perf_counter() - start, 1)})
            total, counted = 0.0, 0
        if done % check_every == 0 or done == steps:
            state = {"settings": settings, "step": done, "seconds": time.perf_counter() - start}
            state |= {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            _replace(out / "checkpoint.pt", lambda path, state=state: torch.save(state, path))
    return network


def export(network: Network, out: Path, notes: dict[str, object]) -> None:
    """Write model.safetensors (fp16), config.json and the tokenizer; check what was written; write scores.json."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(str(out))
    # Every document began with BOS: transformers does not write this entry, swd_lens.tasks.encoding reads it.
    config = json.loads((out / "tokenizer_config.json").read_text())
    text = json.dumps({"add_bos_token": True, **config}, indent=2) + "\n"
    _replace(out / "tokenizer_config.json", lambda path: path.write_text(text))
    half = {name: value.half() for name, value in hooked_state(network).items()}
    _replace(out / "model.safetensors", lambda path: save_file(half, path))
    _replace(out / "config.json", lambda path: path.write_text(json.dumps(asdict(network.shape), indent=1) + "\n"))
    model, packer = load_model_folder(out), TrainingPacker(tokenizer)
    rows = packer.plain_rows(0, 4, MIX)
    with torch.no_grad():
        difference = float((model(rows) - network(rows)).abs().max())
    # 0.05 of logits that span about 20: what fp16 costs; a wrong reshape or activation costs more than 1
    if difference > 0.05:
        raise RuntimeError(f"stored model's logits differ from the trained network's by {difference:.3f}; export is wrong")
    scores = {**notes, "fp16_logit_difference": difference, "parameters": sum(p.numel() for p in network.parameters())}
    scores |= {"scores": all_scores(model, packer), "ablation": ablation_table(model, packer)}
    _replace(out / "scores.json", lambda path: path.write_text(json.dumps(_rounded(scores), indent=1) + "\n"))


def _resume(out: Path, settings: dict, network: Network, optimizer: torch.optim.AdamW) -> tuple[int, float]:
    """Load a checkpoint of the same settings; returns the next step and the seconds spent so far."""
    path = out / "checkpoint.pt"
    if not path.is_file():
        (out / "train_log.jsonl").unlink(missing_ok=True)
        _log(out, settings | {"torch": torch.__version__})
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    if state["settings"] != settings:
        raise ValueError(f"{path} is of another run ({state['settings']}, not {settings}); choose another --out")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"]


def _log(out: Path, entry: Mapping[str, object]) -> None:
    with (out / "train_log.jsonl").open("a") as file:
        file.write(json.dumps(_rounded(entry)) + "\n")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a neighbour, then rename: an interrupted run leaves the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(temporary, path)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(arguments: list[str] | None = None) -> None:
    """Command line: train, export, score."""
    parser = argparse.ArgumentParser(description="Train swd_lens' embedded model from a seed.")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is written")
    parser.add_argument("--seed", type=int, required=True, help="of parameters and text")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"training tokens (default {TOKENS:,})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore  # costs time, changes no result
    network = run(options.out, options.seed, options.tokens)
    state = torch.load(options.out / "checkpoint.pt", weights_only=True)
    command = f"python -m tests.embedded.train --seed {options.seed} --tokens {options.tokens}"
    export(network, options.out, {"command": command, **state["settings"], "seconds": state["seconds"]})


if __name__ == "__main__":
    main()
