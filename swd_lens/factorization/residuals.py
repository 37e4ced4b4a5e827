"""Residuals: what enters a block, kept on disk, so that calibrating a later block does not run the earlier ones again.

1. At the start nothing is kept: batches are token rows, embedded anew.
2. `advance(layer)` runs the blocks up to `layer`, of the host as it is now, on every batch from what is kept, and keeps what
   enters `layer`: a new file, batch after batch, then the old one goes. One batch is in memory, whatever the number of tokens.
3. Every batch that is read must be the one that was written: a file that was changed meanwhile is an error.
4. Such a road is verified, not trusted: the first row of tokens is kept in memory beside the file and advanced as the batches
   are; at every advance it is also run whole, from its tokens, and everything that the block's sites read must be the same to
   the bit. Where it is not, or the disk is too small, nothing is kept any more and runs are whole. (One row, not a batch: the
   whole run passes through all the blocks before. Of a batch of 16 rows it took half of the time of SmolLM2's calibration.)
5. `run` shows what sites read in a batch. Sites of the block where runs take up, each of which that row has shown once, are all
   that is run for: behind the last of them the forward is left, for what follows is thrown away.
"""

import hashlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import legible, warn
from swd_lens.base.files import remove_remains, workplace_beside
from swd_lens.hosts import Host, Start, host_of
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.recording import require_one_per_token
from swd_lens.hosts.sites import Site
from swd_lens.tasks.streams import TokenStream, as_stream

_NAME = "swd-lens-residuals"  # of the temporary folder
_SPARE = 1 << 28  # bytes of the disk that are left alone


class _AllHaveRead(Exception):
    """Leaves a forward behind the last matrix whose input is wanted."""


class Residuals:
    """Residuals that enter block `layer`, for every batch of a stream; a context manager, whose files go at its end.

    Units that are attached or taken out before block `layer` after an `advance` are not seen any more: attach what belongs
    there first, as sequential calibration does. folder: where the temporary folder is made; None = where the system makes them.
    What a killed process left there goes.
    """

    def __init__(self, model: Any, tokens: Any, batch_size: int = 16, folder: Path | None = None):
        self.host: Host = host_of(model)
        self.stream: TokenStream = as_stream(tokens, model)
        self.batch_size, self.layer = batch_size, 0
        self.why_not: str | None = None
        self._parent = folder
        self._folder, self._kept = None, None
        self._files = ExitStack()  # the temporary folder's end
        self._row: Start | None = None  # of the first row alone, which is checked
        self._once: frozenset[str] = frozenset()  # sites of block `layer` that it has shown once, and no more

    @property
    def kept(self) -> bool:
        """Whether residuals are used; False once a host or a disk has refused (`why_not` says why), and runs are whole."""
        return self.why_not is None

    def __enter__(self) -> "Residuals":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files; nothing is kept any more, as at the start."""
        self.layer, self._kept, self._row, self._once = 0, None, None, frozenset()
        self._folder = None
        self._files.close()

    def batches(self) -> Iterator[tuple[Int[Tensor, "_rows pos"], Start | None]]:
        """Every batch of tokens, and where its run takes up; None: at its tokens."""
        residuals = itertools.repeat(None) if self._kept is None else self._kept.read()
        for tokens, residual in zip(self.stream.batches(self.batch_size), residuals, strict=False):
            yield tokens, None if residual is None else Start(self.layer, residual)

    def run(
        self,
        tokens: Int[Tensor, "_rows pos"],
        start: Start | None,
        sites: Sequence[Site],
        use: Callable[[Site, Float[Tensor, "_rows pos _d_in"]], Any],
    ) -> None:
        """Run one of the batches for what sites read: use(site, h) of each. Raises UnsupportedHostError: a site that the
        host's forward never shows, or shows several times per token."""
        wanted = {site.name for site in sites}
        ends = start is not None and wanted <= self._once
        vectors: Counter[str] = Counter()

        def used(site: Site, h: Tensor) -> None:
            vectors[site.name] += h.numel() // site.d_in
            use(site, h)
            if ends and len(vectors) == len(wanted):
                raise _AllHaveRead

        with suppress(_AllHaveRead), self.host.inputs(sites, used):
            n_blocks = max(site.layer for site in sites) + 1
            # Without a start not even the argument: hosts that take none are hosts, too.
            self.host.run_blocks(tokens, n_blocks, **({} if start is None else {"start": start}))
        require_one_per_token(sites, vectors, tokens.numel())

    def advance(self, layer: int) -> None:
        """Keep what enters block `layer` from now on, of the host as it is now. Interrupted, all is as before. Raises
        ValueError: `layer` lies before what is kept, or there is no such block."""
        last = len(self.host.model.blocks) - 1
        if not self.layer <= layer <= last:
            raise ValueError(
                f"what enters block {self.layer} is kept, and residuals go forward only, to block {last} at most; got "
                f"layer={layer}. Make new Residuals to start again"
            )
        if layer == self.layer or not self.kept:
            return
        with torch.no_grad(), ExitStack() as stack:
            written = self._written(layer, stack)
            if written is None:
                self.close()
                return
        old, self.layer = self._kept, layer
        self._kept, self._row, self._once = written
        if old is not None:
            old.path.unlink(missing_ok=True)

    def _advanced(self, tokens: Tensor, start: Start | None, layer: int) -> Tensor:
        """Run tokens on to block `layer`, from where they take up."""
        return self.host.residual(tokens, layer, start=Start(0, self.host.residual(tokens, 0)) if start is None else start)

    def _written(self, layer: int, stack: ExitStack) -> "tuple[_Kept, Start, frozenset[str]] | None":
        """Residuals that enter `layer`: of all batches in a new file, of the first row; and the sites that it has shown once.
        None where it cannot be kept."""
        new = row = None
        once: frozenset[str] = frozenset()
        try:
            for tokens, start in self.batches():
                if new is None:
                    stack.enter_context(fused_attention(self.host, tokens))  # as the passes that take up here run
                residual = self._advanced(tokens, start, layer)
                if new is None:
                    row = Start(layer, self._advanced(tokens[:1], self._row, layer))
                    shown = self._inputs(tokens[:1], layer, row)
                    self.why_not = self._objection(tokens[:1], row, shown)
                    if self.why_not is not None:
                        return None
                    # Sites that read one vector per token, in one call.
                    calls, n_tokens = Counter(site.name for site, _ in shown), tokens[:1].numel()
                    once = frozenset(
                        site.name for site, h in shown if calls[site.name] == 1 and h.numel() == n_tokens * site.d_in
                    )
                    new = _Kept(self._temporary_folder() / f"layer-{layer}", residual)
                try:
                    new.add(residual)
                except OSError:  # others have filled the disk meanwhile
                    free = shutil.disk_usage(self._temporary_folder()).free
                    needed = self.stream.n_tokens * residual.shape[-1] * residual.element_size()
                    self.why_not = self._disk_too_small(needed, free)
                    new.path.unlink(missing_ok=True)
                    return None
        except BaseException:
            if new is not None:
                new.path.unlink(missing_ok=True)
            raise
        return None if new is None or row is None else (new, row, once)

    def _temporary_folder(self) -> Path:
        if self._folder is None:
            self._parent = self._parent or Path(tempfile.gettempdir())
            self._parent.mkdir(parents=True, exist_ok=True)
            remove_remains(self._parent, _NAME)
            self._folder = self._files.enter_context(workplace_beside(self._parent / _NAME, mode=0o700))
        return self._folder

    def _objection(self, row: Int[Tensor, "1 pos"], start: Start, resumed: "_Shown") -> str | None:
        """Why the residuals of this host cannot be kept, as seen on the first row: its run from `start` has shown `resumed`."""
        residual = start.residual
        needed = self.stream.n_tokens * residual.shape[-1] * residual.element_size()
        free = shutil.disk_usage(self._temporary_folder()).free
        if needed + _SPARE > free:
            return self._disk_too_small(needed, free)
        # A run from the residual must show the sites of its block what a whole run shows them.
        whole = self._inputs(row, start.layer, None)
        same = [site for site, _ in whole] == [site for site, _ in resumed]
        if not same or not all(torch.equal(h, again) for (_, h), (_, again) in zip(whole, resumed, strict=True)):
            return f"this host's runs from block {start.layer} are not those from the tokens, to the bit"
        return None

    def _disk_too_small(self, needed: int, free: int) -> str:
        """Why nothing is kept, after a warning; bytes."""
        why = f"residuals of {self.stream.n_tokens} tokens need {needed / 1e9:.1f} GB of disk, and {free / 1e9:.1f} GB are free"
        warn(
            f"{why} in {legible(self._parent)}; calibration runs every block anew for each stage, which takes longer. Free some, "
            "set TMPDIR to a larger disk, or give fewer tokens"
        )
        return why

    def _inputs(self, tokens: Tensor, layer: int, start: Start | None) -> "_Shown":
        """Inputs of a block's sites, in the order of the run; sites that it does not show are missing."""
        inputs: _Shown = []
        sites = [site for site in self.host.sites() if site.layer == layer]
        with self.host.inputs(sites, lambda site, h: inputs.append((site, h.clone()))):
            self.host.run_blocks(tokens, layer + 1, **({} if start is None else {"start": start}))
        return inputs


# Sites and what they read, in the order of a run; a site that reads twice is there twice.
_Shown = list[tuple[Site, Tensor]]


class _Kept:
    """One file of batches, in the host's own dtype, written and read from front to back with plain reads and writes."""

    def __init__(self, path: Path, like: Tensor):
        self.path, self.dtype, self.device = path, like.dtype, like.device
        self.batches: list[tuple[torch.Size, bytes]] = []  # and the hash of its bytes
        path.unlink(missing_ok=True)

    def add(self, residual: Tensor) -> None:
        data = residual.detach().cpu().contiguous().flatten().view(torch.uint8)  # as bytes: numpy knows no bfloat16
        with open(self.path, "ab") as file:
            file.write(data.numpy().data)
        self.batches.append((residual.shape, hashlib.sha256(data.numpy().data).digest()))

    def read(self) -> Iterator[Tensor]:
        changed = f"{legible(self.path)} was changed, cut or removed while it was in use; start this call again"
        try:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed below; no error of who reads is caught here
        except FileNotFoundError as cause:
            raise OSError(changed) from cause
        with file:
            for shape, expected in self.batches:
                batch = torch.empty(shape, dtype=self.dtype, device="cpu")
                data = memoryview(batch.flatten().view(torch.uint8).numpy().data)
                filled = 0
                while filled < len(data) and (n := file.readinto(data[filled:])):
                    filled += n
                # A batch cut short is one too: memory that an earlier batch has left may hold the very bytes that are missing.
                if filled < len(data) or hashlib.sha256(data).digest() != expected:
                    raise OSError(changed)
                yield batch.to(self.device)
