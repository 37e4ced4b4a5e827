"""The network of sparse pretraining: a GPT-2 of any size with erf GELU and no dropout (method.md §3).

1. `config_of`: a transformers GPT2Config from sizes, from another config, or of a host's shape.
2. `new_network`: the network, drawn from a seed: N(0, .02), output projections over sqrt(2 layers), biases zero.
3. `matrices`: what is projected: every matrix once, its rows the outputs. The head is tied to the embedding.
4. `project_`: keep the floor(d numel) largest entries of a matrix, at least one per output row.
5. `save`: the checkpoint folder that `load_host` reads.
"""

import copy
import difflib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import TrainError, quoted
from swd_lens.base.files import atomic, naming, remove_remains

_STD = 0.02
# What save_pretrained of a GPT-2 and of a tokenizer may write.
_CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer*.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)


def config_of(config: Any) -> Any:
    """A GPT2Config for sparse pretraining, whatever shape was given. config: a GPT2Config, a dict of its arguments, or a host
    whose sizes are taken. Raises TrainError: none of these; an argument that GPT2Config does not have; heads that do not
    divide the width."""
    from transformers import GPT2Config

    if isinstance(config, Mapping):
        # GPT2Config takes every name without a word, so that n_layers=2 would train GPT-2's twelve layers.
        known = [*GPT2Config().to_dict(), *GPT2Config.attribute_map]
        for name in config:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TrainError(f"GPT2Config has no argument {quoted(name)}{hint}")
        shape = GPT2Config(**config)
    elif isinstance(config, GPT2Config):
        shape = copy.deepcopy(config)
    elif getattr(getattr(config, "cfg", None), "d_mlp", None):
        cfg, tokenizer = config.cfg, getattr(config, "tokenizer", None)
        sizes = {"n_layer": cfg.n_layers, "n_embd": cfg.d_model, "n_head": cfg.n_heads, "n_positions": cfg.n_ctx}
        sizes["vocab_size"] = cfg.d_vocab
        if cfg.d_mlp != 4 * cfg.d_model:  # not written where it is GPT-2's own
            sizes["n_inner"] = cfg.d_mlp
        special = {f"{word}_token_id": getattr(tokenizer, f"{word}_token_id", None) for word in ("bos", "eos")}
        shape = GPT2Config(**sizes, **{name: number for name, number in special.items() if number is not None})
    else:
        raise TrainError(f"config is a {type(config).__name__}; give a GPT2Config, a dict of its arguments, or a host with MLPs")
    if shape.n_embd % shape.n_head:
        raise TrainError(f"n_embd={shape.n_embd} cannot be shared out among n_head={shape.n_head} heads; give a multiple")
    shape.activation_function = "gelu"  # exact, with erf; the published GPT-2 has the tanh approximation
    shape.attn_pdrop = shape.embd_pdrop = shape.resid_pdrop = 0.0
    shape.tie_word_embeddings = True
    return shape


def recipe_of(config: Any) -> dict[str, Any]:
    """The entries of a config that decide the bits of a run."""
    names = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "layer_norm_epsilon")
    more = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    return {name: getattr(config, name) for name in names + more} | {"n_inner": config.n_inner or 4 * config.n_embd}


def new_network(config: Any, seed: int) -> Any:
    """A GPT2LMHeadModel with this config, drawn on the CPU from the seed; the caller's random numbers are left alone."""
    from transformers import GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        network: Any = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if p.ndim == 2:
                std = _STD / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else _STD
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) * std)
    return network


def require_rows(config: Any, density: float) -> int:
    """Require, before training, that each matrix at this density has a weight for every row (else TrainError), and say how many
    weights the network has."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):  # shapes alone
        network = GPT2LMHeadModel(config)
    for matrix in matrices(network):
        rows, columns = matrix.shape
        if density < 1 and (kept := budget(matrix.numel(), density)) < rows:
            raise TrainError(
                f"density {density:.4g} leaves {kept} weights of a matrix of {rows} rows of {columns}, and each row keeps "
                "one; give a larger end_density, an earlier stop_after, or a wider model"
            )
    return network.num_parameters()


def matrices(network: Any) -> Iterator[Float[Tensor, "row column"]]:
    """Every matrix once; rows are neurons of a projection, tokens or positions of an embedding."""
    yield network.transformer.wte.weight.data
    yield network.transformer.wpe.weight.data
    yield from block_matrices(network)


def block_matrices(network: Any) -> Iterator[Float[Tensor, "row column"]]:
    """Those of the blocks alone, which the paper's count of active weights is about."""
    for block in network.transformer.h:
        for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            yield linear.weight.data.T  # transformers' Conv1D holds (d_in, d_out)


def budget(numel: int, density: float) -> int:
    """Entries that a matrix keeps: floor(d numel)."""
    return math.floor(density * numel)


@torch.no_grad()
def project_(matrix: Float[Tensor, "row column"], density: float) -> None:
    """Zero all but the budget's largest entries, in place: the largest of each row (an output neuron, a token), then the largest
    of the rest, so that the total stays floor(d numel). Raises ValueError: the budget does not give every row one entry."""
    if density >= 1:
        return
    keep = budget(matrix.numel(), density)
    rows = matrix.shape[0]
    if keep < rows:
        raise ValueError(f"density {density:.4g} keeps {keep} entries of {tuple(matrix.shape)}, fewer than its {rows} rows")
    magnitude = matrix.abs()
    kept = torch.zeros(matrix.shape, dtype=torch.bool, device=matrix.device)  # contiguous, whatever the matrix is
    kept.scatter_(1, magnitude.argmax(1, keepdim=True), True)
    rest = torch.where(kept, -1.0, magnitude).reshape(-1)
    kept.view(-1)[rest.topk(keep - rows, sorted=False).indices] = True
    matrix.mul_(kept)


def nonzeros(network: Any) -> dict[str, int]:
    """Nonzero entries and entries, of the blocks' matrices and of all."""
    counts = {}
    for name, group in (("blocks", list(block_matrices(network))), ("all", list(matrices(network)))):
        counts[name] = sum(int((m != 0).sum()) for m in group)
        counts[f"{name}_entries"] = sum(m.numel() for m in group)
    return counts


def save(network: Any, tokenizer: Any, with_bos: bool, folder: Path) -> list[str]:
    """The checkpoint folder; returns its files, relative to the folder above it. Other files that lie there are left alone.
    with_bos: whether the rows of the training text begin with BOS; the tokenizer's files say so to whoever loads them. Raises
    OSError: the disk is full, or the folder cannot be written."""
    from transformers.utils import logging

    forget(folder)
    part = folder.with_name(f".{folder.name}.part")  # one name: what a kill left of it goes with the next
    shutil.rmtree(part, ignore_errors=True)
    shown = logging.is_progress_bar_enabled()  # for a single file, too, whatever `progress` says
    try:
        logging.disable_progress_bar()
        with naming(folder):
            network.save_pretrained(part)
            tokenizer.save_pretrained(part)
            stated = part / "tokenizer_config.json"
            stated.write_text(json.dumps(json.loads(stated.read_text()) | {"add_bos_token": with_bos}, indent=2))
        names = sorted(path.relative_to(part) for path in part.rglob("*") if path.is_file())
        for name in names:
            with atomic(folder / name) as temporary:
                shutil.move(part / name, temporary)
        return [f"{folder.name}/{name.as_posix()}" for name in names]
    finally:
        if shown:
            logging.enable_progress_bar()
        shutil.rmtree(part, ignore_errors=True)


def forget(folder: Path) -> None:
    """Remove a checkpoint: weights and tokenizer files, and nothing else that may lie there."""
    if folder.is_dir():
        remove_remains(folder)
    for pattern in _CHECKPOINT_FILES:
        for path in folder.glob(pattern):
            path.unlink()
