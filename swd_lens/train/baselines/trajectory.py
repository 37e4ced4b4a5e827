"""The weights of a training run at some token counts, in memory or as files.

A file weights/{tokens}.safetensors holds the tensors of one point and, as metadata, the provenance of the run.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swd_lens.base.files import atomic
from swd_lens.train.baselines.spec import TrainError
from swd_lens.train.finetune.folder import without_remains

WEIGHTS = "weights"


class Trajectory(Mapping[int, Mapping[str, Tensor]]):
    """Tokens -> weights by name, on the CPU. With a folder each point is a file, read when it is asked for."""

    def __init__(self, folder: Path | None = None, provenance: Mapping[str, Any] | None = None):
        self.folder, self.provenance = folder, dict(provenance or {})
        self._points: dict[int, Mapping[str, Tensor] | Path] = {}

    def add(self, tokens: int, weights: Mapping[str, Tensor]) -> None:
        """Keep these weights; a point that is there is replaced."""
        on_cpu = {name: t.detach().cpu().contiguous().clone() for name, t in weights.items()}
        if self.folder is None:
            self._points[tokens] = on_cpu
            return
        path = self._path(tokens)
        without_remains(path)
        with atomic(path) as temporary:
            about = json.dumps({**self.provenance, "tokens": tokens})
            save_file(on_cpu, temporary, metadata={"provenance": about})
        self._points[tokens] = path

    def found(self, tokens: int) -> None:
        """Take over a point that the folder holds.

        Raises:
            TrainError: it does not.
        """
        path = self._path(tokens)
        if not path.is_file():
            raise TrainError(f"{path} is missing; copy the folder again, or train again")
        self._points[tokens] = path

    def _path(self, tokens: int) -> Path:
        assert self.folder is not None
        return self.folder / WEIGHTS / f"{tokens:015d}.safetensors"

    def __getitem__(self, tokens: int) -> Mapping[str, Tensor]:
        point = self._points[tokens]
        if not isinstance(point, Path):
            return point
        try:
            with safe_open(point, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        except (OSError, SafetensorError) as error:
            raise TrainError(f"{point} cannot be read ({error}); copy the folder again, or train again") from error

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._points))

    def __len__(self) -> int:
        return len(self._points)

    def __repr__(self) -> str:
        where = "in memory" if self.folder is None else f"in {self.folder}"
        return f"Trajectory(after {', '.join(f'{tokens:,}' for tokens in self)} tokens, {where})"
