"""Activations of a training text, run once and kept in a file, where a training goes through the text several times.

1. A row is run with the 16 rows that stand around it in the text, whatever the order of training: what it gives to the last bit
   does not depend on which batch asked for it first, so that a run that goes on after an interruption has the same bits.
2. Inputs and outputs of the site are written to a memory-mapped float32 file without a name: the system frees it when the
   process ends, however it ends. It has at most `MOST_BYTES`; larger texts, and streams, are run batch by batch.
"""

import math
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import callers_level, warning
from swd_lens.hosts import Host
from swd_lens.hosts.recording import record
from swd_lens.hosts.sites import Site
from swd_lens.train.rows import Rows, Shuffled

MOST_BYTES = 2**32
_LEFT_BYTES = 2**28  # of a disk, for others
_ROWS = 16  # run together
_PASSES = 2  # of a training; with fewer nothing would be read again


class KeptActivations:
    """What a site reads and writes in the dense host, of rows of one text.

    Args:
        folder: where the file lies.

    Raises:
        OSError: the disk has no room for it.
    """

    def __init__(self, host: Host, site: Site, rows: Int[Tensor, "rows pos"], folder: Path):
        self.host, self.site, self.rows = host, site, rows
        self.number = {row.numpy().tobytes(): i for i, row in enumerate(rows.cpu())}  # of equal rows the last
        self.known = np.zeros(len(rows), dtype=bool)
        self.device = next(host.model.parameters()).device
        with tempfile.TemporaryFile(dir=folder) as file:  # mapped, it lives on
            shape = (len(rows), rows.shape[1], site.d_in + site.d_out)
            # Room that is reserved now: a disk that fills later cannot kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
            self.values = np.memmap(file, dtype=np.float32, mode="w+", shape=shape)

    def __call__(
        self, rows: Int[Tensor, "_rows pos"]
    ) -> tuple[Float[Tensor, "token d_in"], Float[Tensor, "token d_out"]]:
        """Inputs and outputs at all positions of the rows, row after row."""
        numbers = [self.number[row.numpy().tobytes()] for row in rows.cpu()]
        for number in numbers:
            if not self.known[number]:
                self._run(number // _ROWS * _ROWS)
        both = torch.from_numpy(self.values[numbers]).flatten(0, 1).to(self.device)
        x, y = both.split([self.site.d_in, self.site.d_out], dim=-1)
        return x.contiguous(), y.contiguous()

    def _run(self, first: int) -> None:
        block = slice(first, first + _ROWS)
        seen = record(self.host, self.rows[block], inputs=[self.site], outputs=[self.site], keep=Tensor.float)
        both = torch.cat([seen.inputs[self.site.name], seen.outputs[self.site.name]], dim=-1)
        self.values[block] = both.cpu().numpy()
        self.known[block] = True


def kept_activations(host: Host, site: Site, rows: Rows, n_tokens: int, folder: Path | None) -> KeptActivations | None:
    """Activations that are kept, where that saves runs of the host; None where it does not, or they are too many.

    Args:
        n_tokens: that the training goes through.
        folder: where the file lies; None: the system's temporary folder.

    Warns:
        UserWarning: the disk has no room for them.
    """
    in_text = rows.n_rows * rows.row_length
    needed = 4 * in_text * (site.d_in + site.d_out)
    if not isinstance(rows, Shuffled) or n_tokens < _PASSES * in_text or needed > MOST_BYTES:
        return None
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free >= needed + _LEFT_BYTES:
        with suppress(OSError):  # somebody else took the room meanwhile, or a quota forbids it
            return KeptActivations(host, site, rows.rows, folder)
    text = warning("activations-not-kept", needed=needed / 1e9, free=free / 1e9, folder=folder)
    warnings.warn(text, stacklevel=callers_level())
    return None
