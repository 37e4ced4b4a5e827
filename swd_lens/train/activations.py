"""A site's activations in the dense host, run once and kept where a training goes through its text several times.

1. A row is run with the 16 rows that stand around it in the text, whatever the order of training: what it gives to the last bit
   does not depend on which batch asked for it first, so that a run that goes on after an interruption has the same bits.
2. Inputs and outputs are written to a memory-mapped float32 file of at most `MOST_BYTES`; larger texts, and streams, are run
   batch by batch.
3. For one training the file has no name: the system frees it when the process ends, however it ends. In a folder that several
   trainings share it is named by host, site and text, and a second file says which rows are in it; a process that was killed
   leaves whole blocks only.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import legible, warn
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts import Host
from swd_lens.hosts.recording import record, standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.train.rows import Rows

MOST_BYTES = 2**32
_LEFT_BYTES = 2**28  # of a disk, for others
_ROWS = 16  # run together
_PASSES = 2  # of a training; with fewer nothing would be read again


class KeptActivations:
    """Inputs and outputs of a site in the dense host, of rows of one text, in a file in `folder`; with a name others find it.
    Raises OSError: the disk has no room for it."""

    def __init__(self, host: Host, site: Site, rows: Int[Tensor, "rows pos"], folder: Path, name: str | None = None):
        self.host, self.site, self.rows = host, site, rows
        self.number = {row.numpy().tobytes(): i for i, row in enumerate(rows.cpu())}  # of equal rows the last
        self.device = next(host.model.parameters()).device
        shape = (len(rows), rows.shape[1], site.d_in + site.d_out)
        if name is None:
            self.known: Any = np.zeros(len(rows), dtype=bool)
            with tempfile.TemporaryFile(dir=folder) as file:  # mapped, it lives on
                self.values = _mapped(file, shape, np.float32)
            return
        with _opened(folder / f"{name}.f32") as values, _opened(folder / f"{name}.rows") as known:
            self.values = _mapped(values, shape, np.float32)
            self.known = _mapped(known, (len(rows),), np.bool_)

    def __call__(self, rows: Int[Tensor, "_rows pos"]) -> tuple[Float[Tensor, "token d_in"], Float[Tensor, "token d_out"]]:
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
        if isinstance(self.known, np.memmap):
            self.values.flush()  # whatever happens next, a row that is known is on the disk
        self.known[block] = True


def _opened(path: Path) -> Any:
    """A file to read and to write, made where it is not there yet."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")


def _mapped(file: Any, shape: tuple[int, ...], kind: type[np.generic]) -> np.memmap[Any, Any]:
    """Room of this shape in a file, zeros where nothing was written."""
    # Room that is reserved now: a disk that fills later cannot kill the process.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, np.dtype(kind).itemsize * math.prod(shape))
    return np.memmap(file, dtype=kind, mode="r+", shape=shape)


def kept_activations(
    host: Host, site: Site, rows: Rows, n_tokens: int, folder: Path | None, shared: Path | None = None
) -> KeptActivations | None:
    """Activations that are kept, where that saves runs of the host; None where it does not, they are too many, or (with a
    warning) the disk has no room for them.

    n_tokens: that the training goes through; folder: where the file lies, None: the system's temporary folder; shared: where it
    lies for other trainings, too.
    """
    in_text = rows.n_rows * rows.row_length
    needed = 4 * in_text * (site.d_in + site.d_out)
    read_again = shared is not None or n_tokens >= _PASSES * in_text
    if rows.in_memory is None or not read_again or needed > MOST_BYTES:
        return None
    name = None
    if shared is not None:  # named by everything that decides the bits of a site's activations
        decides = [host_fingerprint(host.model), standing_hooks(host.model), site.name]
        decides += [rows.stream.fingerprint(), list(rows.in_memory.shape)]
        digest = hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()
        name = f"{site.name}-{digest[:12]}"
    folder = shared or folder or Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free >= needed + _LEFT_BYTES or (name is not None and (folder / f"{name}.rows").exists()):
        with suppress(OSError):  # somebody else took the room meanwhile, or a quota forbids it
            return KeptActivations(host, site, rows.in_memory, folder, name)
    warn(
        f"activations of the text need {needed / 1e9:.1f} GB of disk, and {free / 1e9:.1f} GB are free "
        f"in {legible(folder)}; the host runs every batch anew, which takes longer"
    )
    return None
