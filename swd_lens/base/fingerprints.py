"""SHA-256 of what decides a result and is too large to be kept beside it: a host, tokens, prompts, any bytes."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch


def tokens_fingerprint(rows: torch.Tensor) -> str:
    """SHA-256 over shape and ids."""
    data = rows.to("cpu", torch.int64).contiguous()
    return sha256([str(tuple(data.shape)).encode(), data.flatten().numpy().data])


def host_fingerprint(model: Any) -> str:
    """SHA-256 over everything calibration sees of a host: parameters, buffers (factors attached to it among them) and the
    settings that change its forward without changing a parameter."""
    words = ("act_fn", "normalization_type", "positional_embedding_type", "eps", "attn_scale", "rotary_base")
    parts: list[Any] = [str({word: getattr(model.cfg, word, None) for word in words}).encode()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        parts.append(tensor)
    return sha256(parts)


def splits_fingerprint(splits: Iterable[Any]) -> str:
    """SHA-256 over prompts, answers and distractors of task splits; of a metric of their own, over its name."""
    parts: list[bytes] = []
    for split in splits:
        parts.append(repr((split.name, split.prepend_bos, split.answer_ids, split.distractor_ids)).encode())
        prompts = [None if tokens is None else tokens.tolist() for tokens in (*split.tokens, *split.corrupt)]
        parts.append(repr(prompts).encode())
        metric = "" if split.metric is None else getattr(split.metric, "__qualname__", type(split.metric).__qualname__)
        parts.append(metric.encode())
    return sha256(parts)


def sha256(parts: Iterable[Any]) -> str:
    """SHA-256 over bytes and tensors, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):  # as bytes: numpy knows no bfloat16
            part = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        digest.update(part)
    return digest.hexdigest()
