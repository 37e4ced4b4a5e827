"""Processes: one, or those of `accelerate launch` or `torchrun`; sums over them, and who writes.

Every process runs the same `finetune` call on its own copy of the host. It takes its share of each batch's rows; losses and
gradients are sums over predictions, added over all processes and divided by the predictions of the whole batch, so that a
batch which does not divide evenly gives the same mean as in one process.
"""

import os
from typing import Any

import torch
from torch import Tensor

from swd_lens.train.finetune.spec import FinetuneError


class Processes:
    """The processes of this run, as accelerate sees them; without a launcher there is one, and accelerate is not imported."""

    def __init__(self, model_device: torch.device, batch_size: int):
        self._state: Any = None
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if launched or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            from accelerate import PartialState

            self._state = PartialState()
        state = self._state
        self.n = 1 if state is None else int(state.num_processes)
        self.index = 0 if state is None else int(state.process_index)
        if self.n > batch_size:
            raise FinetuneError(
                f"batch_size={batch_size} has no row for each of {self.n} processes; give {self.n} or more, or launch fewer"
            )
        own = model_device if state is None else torch.device(state.device)
        if self.n > 1 and model_device.type == "cuda" and own != model_device:
            raise FinetuneError(
                f"process {self.index} has its host on {model_device}, but {own} is its device: "
                "load the host with device=accelerate.PartialState().device"
            )

    @property
    def main(self) -> bool:
        """Whether this is the one process that writes files and shows progress."""
        return self.index == 0

    def share(self, rows: Tensor) -> Tensor:
        """This process's rows of a batch; may be none of the last rows of held-out text."""
        return rows[self.index :: self.n]

    def total(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each tensor, added over the processes, in one exchange (of the tensors laid end to end)."""
        if self.n == 1:
            return tensors
        from accelerate.utils import reduce

        flat = torch.cat([t.to(self._state.device).flatten() for t in tensors])
        summed: Any = reduce(flat, reduction="sum")
        parts = summed.split([t.numel() for t in tensors])
        return [part.view_as(t).to(t.device) for part, t in zip(parts, tensors, strict=True)]

    def wait(self) -> None:
        """Until every process is here."""
        if self._state is not None:
            self._state.wait_for_everyone()
