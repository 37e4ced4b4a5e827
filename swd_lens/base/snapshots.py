"""TensorSnapshot: notices when tensors no longer hold what they held before.

1. `checksum` makes one integer of a tensor's bits, at the speed of memory: words times fixed odd numbers, summed modulo 2^64
   by rows of `_WIDTH`, and the rows' sums in the same way, until one is left. A single changed word always changes it;
   values that were exchanged, permuted, scaled or rounded do, but for a chance of 2^-60 or so. It is no hash against malice.
2. `TensorSnapshot` remembers tensors and where they are kept. `written` looks at versions, in microseconds: every in-place
   operation counts there, but for those on `.data` and on inference tensors. `changed` compares checksums, which see those, too.
3. `count_nonzeros` reads a tensor once as well.
4. `as_normal_tensor` makes an ordinary tensor of an inference tensor, which counts no versions and cannot enter a backward pass.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

_WIDTH = 1024
# Off the CPU torch has no integer matrix product: this many words at a time are multiplied and summed.
_TILE = 2**22


_DRAWN = torch.Generator().manual_seed(0)
_FACTORS = torch.randint(-(2**62), 2**62, (_WIDTH,), generator=_DRAWN, dtype=torch.int64, device="cpu") * 2 + 1  # odd


def checksum(tensor: Shaped[Tensor, "..."]) -> tuple[Any, ...]:
    """Shape, dtype and one integer of all bits; equal on every device and for every layout in memory."""
    if tensor.is_meta:
        return tuple(tensor.shape), tensor.dtype, None
    flat = (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach().reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 8:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    data = flat.view(torch.uint8)
    n_words, rest = divmod(len(data), 8)
    total = _total(data[: 8 * n_words].view(torch.int64)) if n_words else 0
    return tuple(tensor.shape), tensor.dtype, (total, bytes(data[8 * n_words :].tolist()) if rest else b"")


def _total(words: Tensor) -> int:
    factors = _FACTORS.to(words.device)
    while True:
        n_rows, rest = divmod(len(words), _WIDTH)
        rows = words[: n_rows * _WIDTH].view(n_rows, _WIDTH)
        if rows.device.type == "cpu":
            sums = [torch.mv(rows, factors)] if n_rows else []
        else:
            sums = [(some * factors).sum(1) for some in rows.split(_TILE // _WIDTH)] if n_rows else []
        if rest:
            sums.append((words[n_rows * _WIDTH :] * factors[:rest]).sum().view(1))
        words = torch.cat(sums)
        if len(words) == 1:
            return int(words)


def count_nonzeros(tensor: Shaped[Tensor, "..."]) -> int:
    """Count by a mask, without branches (torch counts random values fifteen times as slowly), a piece at a time."""
    return sum(int(torch.count_nonzero(some != 0)) for some in tensor.detach().reshape(-1).split(_TILE // 16))


def as_normal_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or an ordinary copy of an inference tensor."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class TensorSnapshot:
    """A record of what some tensors hold now, to be compared with what they hold later. places: (mapping, key) of every
    tensor: a module's `_parameters`, so that a parameter that was replaced is noticed."""

    def __init__(self, places: Iterable[tuple[Mapping[str, Tensor | None], str]]):
        self.places = tuple(places)
        self.renew()

    def written(self) -> bool:
        """Whether a tensor was replaced, or written to by an operation that counts versions. Cheap: for every forward."""
        for mapping, key, tensor, version in self._seen:
            if mapping.get(key) is not tensor or (version is not None and tensor._version != version):  # type: ignore[union-attr]
                return True
        return False

    def changed(self) -> bool:
        """Whether the values differ. Where they do not (written to with the same values, copied, moved to another device), the
        tensors as they are now count as marked."""
        checksums, seen = self._look()
        if checksums != self.checksums:
            return True
        self._seen = seen
        return False

    def recast(self) -> bool:
        """Whether a tensor has another dtype now: its values cannot be compared with those that were marked."""
        now = [mapping.get(key) for mapping, key in self.places]
        return any(t is not None and t.dtype != dtype for t, (_, dtype, _) in zip(now, self.checksums, strict=True) if dtype)

    def renew(self) -> None:
        """Mark what the tensors hold now."""
        self.checksums, self._seen = self._look()

    def _look(
        self,
    ) -> tuple[tuple[tuple[Any, ...], ...], list[tuple[Mapping[str, Tensor | None], str, Tensor | None, int | None]]]:
        """Checksums of the tensors as they are now; and where each is kept, itself, and its version."""
        now = [(mapping, key, mapping.get(key)) for mapping, key in self.places]
        checksums = tuple((None, None, None) if tensor is None else checksum(tensor) for _, _, tensor in now)
        # An inference tensor counts no versions.
        return checksums, [(m, k, t, None if t is None or t.is_inference() else t._version) for m, k, t in now]
