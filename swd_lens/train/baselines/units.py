"""LearnedUnits: a trained baseline as a unit source, with its trajectory, in memory or in a folder.

    units.json                              provenance, sites, log, and the hashes of the weights at every token count
    weights/{tokens}.{hash}.safetensors     the weights of one count, with the provenance as metadata
    run.json, log.jsonl                     the recipe and what was logged, if training wrote the folder

It is a mapping of sites to units, which `attach`, `fidelity`, `attribute`, `evaluate` and `compare` take as they take factors.
`at(tokens)` is the same training after fewer tokens. `METHODS` says what each trained method's coder is.

Files of weights carry their hash in their names, so that no write touches what an index names, and the index is replaced by a
rename: who reads while another saves has all of the old units or all of the new ones.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor, nn

from swd_lens.base.display import card
from swd_lens.base.errors import TrainError, brief, legible, quoted, seen
from swd_lens.base.files import remove_remains
from swd_lens.base.record import SavedRecord
from swd_lens.base.sealed import open_tensors, read_tensors, readable, tensor_digest, write_tensors
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.train.baselines.activity import Activity, activity_of
from swd_lens.train.baselines.coders import Coder, Transcoder
from swd_lens.train.baselines.spec import TrainSpec, TranscoderSpec, VpdSpec
from swd_lens.train.baselines.vpd import Vpd
from swd_lens.train.folder import RUN
from swd_lens.units.coder import CoderUnits

INDEX = "units.json"
_WEIGHTS = "weights"
_WEIGHTS_FILE = "weights of learned units"

# Method -> its settings, and its coder, made by (d_in, d_out, settings).
METHODS: Mapping[str, tuple[type[TrainSpec], Callable[[int, int, Any], Coder]]] = {
    "transcoder": (TranscoderSpec, Transcoder),
    "vpd_recon_ci": (VpdSpec, Vpd),
    "vpd_kl": (VpdSpec, Vpd),
}


class Trajectory(Mapping[int, Mapping[str, Tensor]]):
    """Tokens -> weights by name, on the CPU. With a folder each point is a file, read and checked when it is asked for.
    hashes: tokens -> `tensor_digest` of the points in the folder."""

    def __init__(self, folder: Path | None = None, provenance: Mapping[str, Any] | None = None):
        self.folder, self.provenance = folder, dict(provenance or {})
        self.hashes: dict[int, str] = {}
        self._points: dict[int, Mapping[str, Tensor] | Path] = {}
        self._files: dict[int, Any] = {}  # open, so that points stay readable when other units are saved over them

    def add(self, tokens: int, weights: Mapping[str, Tensor]) -> None:
        """Keep these weights; a point that is there is replaced. Raises OSError: the disk is full, or the folder cannot be
        written."""
        on_cpu = {name: t.detach().cpu().contiguous().clone() for name, t in weights.items()}
        if self.folder is None:
            self._points[tokens] = on_cpu
            return
        metadata = {"provenance": json.dumps({**self.provenance, "tokens": tokens})}
        self.hashes[tokens] = tensor_digest(on_cpu, metadata)
        write_tensors(self.path(tokens), on_cpu, metadata)
        self._points[tokens] = self.path(tokens)

    def take_over(self, tokens: int, digest: str) -> None:
        """Add a point that the folder holds already. Raises TrainError: it does not."""
        self.hashes[tokens] = digest
        path = self.path(tokens)
        try:
            self._files[tokens] = open_tensors(path, _WEIGHTS_FILE, TrainError)
        except FileNotFoundError:
            raise TrainError(f"{path} is missing; copy the folder again, or train again") from None
        self._points[tokens] = path

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files out: a copy reads its files by name again."""
        return {**self.__dict__, "_files": {}}

    def path(self, tokens: int) -> Path:
        """The file of a point in the folder."""
        assert self.folder is not None
        return self.folder / _WEIGHTS / f"{tokens:015d}.{self.hashes[tokens][:12]}.safetensors"

    def __getitem__(self, tokens: int) -> Mapping[str, Tensor]:
        point = self._points[tokens]
        if not isinstance(point, Path):
            return point
        try:
            return read_tensors(point, _WEIGHTS_FILE, TrainError, self.hashes[tokens], self._files.get(tokens))[0]
        except FileNotFoundError:
            raise TrainError(f"{point} is missing; copy the folder again, or train again") from None

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._points))

    def __len__(self) -> int:
        return len(self._points)

    @seen
    def __repr__(self) -> str:
        where = "in memory" if self.folder is None else f"in {self.folder}"
        return f"Trajectory(after {', '.join(f'{tokens:,}' for tokens in self)} tokens, {where})"


@dataclass(frozen=True)
class UnitsIndex(SavedRecord):
    """The index of a folder of units: their provenance, the hash of the weights at every token count, and the log."""

    WHAT: ClassVar[str] = "an index of learned units"
    ERROR: ClassVar[type[Exception]] = TrainError
    provenance: dict[str, Any]
    tokens: dict[str, str]
    log: list[dict[str, Any]]

    @classmethod
    def of_folder(cls, folder: Path) -> "UnitsIndex":
        """Read a folder's index. Raises TrainError: there is none, or it cannot be read."""
        with suppress(FileNotFoundError):
            if (folder / INDEX).is_file():
                return cls.load(folder / INDEX)
        raise TrainError(f"{folder} holds no {INDEX}: no learned units, or their training is not finished")


@with_torch_defaults
class LearnedUnits(Mapping[str, CoderUnits]):
    """One or several sites' units after training; the matrices of a whole MLP are several.

    Attributes:
        provenance: method, settings, host, text; plain JSON values.
        checkpoints: tokens -> weights, as training went.
        log: what every logged step said, one row each.
        tokens: after how many these units are.
    """

    def __init__(
        self,
        checkpoints: Trajectory,
        provenance: Mapping[str, Any],
        log: pd.DataFrame,
        *,
        tokens: int | None = None,
        device: "str | torch.device" = "cpu",
    ):
        self.checkpoints, self.provenance, self.log = checkpoints, dict(provenance), log
        self.tokens = max(checkpoints) if tokens is None else tokens
        self.device = torch.device(device)
        coders = coders_of(self.provenance, meta=True, source=checkpoints.folder)
        coders.load_state_dict(dict(checkpoints[self.tokens]), assign=True)
        coders.requires_grad_(False)
        coders.to(self.device)
        self._units: dict[str, CoderUnits] = {}
        shared = {key: value for key, value in self.provenance.items() if key != "sites"}
        for name, site in self.provenance["sites"].items():
            about = {"name": str(shared["method"]), "provenance": {**shared, **site["host"], "site": name, "tokens": self.tokens}}
            coder: Any = coders[site["kind"]]
            self._units[name] = CoderUnits(coder, site["d_in"], site["d_out"], coder.W_enc.shape[1], **about)

    def __getitem__(self, site: str) -> CoderUnits:
        if site not in self._units:
            raise KeyError(f"no units for site {quoted(site)}; these are of {legible(', '.join(self._units))}")
        return self._units[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    @property
    def edges(self) -> int:
        """Edges of all sites."""
        return sum(units.edges for units in self.values())

    @property
    def n_units(self) -> int:
        """Number of units of all sites."""
        return sum(units.n_units for units in self.values())

    def at(self, tokens: float | int) -> "LearnedUnits":
        """The units as they were after this many tokens of the training. Raises TrainError: no weights were kept there."""
        kept = [n for n in self.checkpoints if n == tokens]  # 1e6 is 1,000,000
        if not kept:
            counts = ", ".join(f"{n:,}" for n in self.checkpoints)
            raise TrainError(f"no weights were kept at {tokens:,} tokens; there are {counts}")
        return LearnedUnits(self.checkpoints, self.provenance, self.log, tokens=kept[0], device=self.device)

    def to(self, device: "str | torch.device") -> "LearnedUnits":
        """Copy the units to another device: a host computes with units on its own device."""
        return LearnedUnits(self.checkpoints, self.provenance, self.log, tokens=self.tokens, device=device)

    def table(self) -> pd.DataFrame:
        """One row per site: method, tokens used, units, edges, and s (below zero where there are more edges than weights)."""
        shared = {"method": self.provenance["method"], "tokens": self.tokens}
        return pd.DataFrame(
            {"site": site, **shared, "units": u.n_units, "edges": u.edges, "s": u.sparsity} for site, u in self.items()
        )

    def report(self, model: Any, tokens: Any, *, batch_size: int = 16, progress: bool = False) -> Activity:
        """How many units are at work per token (L0), and which never are (dead), on some text.

        Args:
            model: the host, with these sites not attached.
            tokens: (rows, pos) ids, or a TokenStream.
            batch_size: rows per forward.

        Raises:
            AttachError, TokenError: bad host or text.
        """
        return activity_of(model, self, tokens, batch_size=batch_size, progress=progress)

    @seen
    def __str__(self) -> str:
        lines = [f"{site}: {units!r}" for site, units in self.items()]
        head = f"LearnedUnits({self.provenance['method']}, {self.tokens:,} tokens, {len(self.checkpoints)} checkpoints)"
        return "\n  ".join([head, *lines])

    def __repr__(self) -> str:
        return brief(str(self))

    def _repr_html_(self) -> str:
        shown = [column for column in self.log.columns if column not in ("step", "learning_rate", "p")]
        kept = self.log[self.log["tokens"].isin(list(self.checkpoints))][shown] if len(self.log) else None
        return card(f"{self.provenance['method']} at {self.provenance['replaces']}", self.table(), kept)

    # ------------------------------------------------------------------ files

    def save(self, folder: str | Path) -> None:
        """Write everything, the whole trajectory among it; the index last, so that a folder with an index is complete.

        Units that were saved there before are replaced. A training's own folder holds them already and is left as it is.

        Raises:
            TrainError: the folder holds a run, whose result they would pass for.
            FolderInUseError, OSError: another call writes there, or it cannot be written.
        """
        folder, source = Path(folder), self.checkpoints.folder
        if (folder / RUN).exists():
            if source is not None and folder.resolve() == source.resolve():
                return
            raise TrainError(f"{folder} holds a run ({RUN}); units saved there would pass for its result. Give another folder")
        n_bytes = len(self.checkpoints) * sum(t.nbytes for t in self.checkpoints[self.tokens].values())
        with writing(folder, "LearnedUnits.save", n_bytes):
            copied = Trajectory(folder, self.provenance)
            for tokens, weights in self.checkpoints.items():
                copied.add(tokens, weights)
            write_index(folder, self.provenance, copied, self.log)

    @classmethod
    def load(cls, folder: str | Path, *, device: "str | torch.device" = "cpu") -> "LearnedUnits":
        """Read a folder that `save`, or training with out=, wrote. Raises TrainError: it is none, of a later format, or not what
        was written."""
        folder = Path(folder)
        while True:
            index = UnitsIndex.of_folder(folder)
            try:
                with readable(folder / INDEX, UnitsIndex.WHAT, TrainError):
                    checkpoints = Trajectory(folder, index.provenance)
                    for tokens, digest in index.tokens.items():
                        checkpoints.take_over(int(tokens), digest)
                    return cls(checkpoints, index.provenance, pd.DataFrame(index.log), device=device)
            except TrainError:
                if UnitsIndex.of_folder(folder) == index:  # else it was replaced while its files were read
                    raise


def write_index(folder: Path, provenance: Mapping[str, Any], checkpoints: Trajectory, log: pd.DataFrame) -> None:
    """Write the index of a folder whose weights are whole; then remove other weights that were written there."""
    lines = [{str(k): value for k, value in line.items() if pd.notna(value)} for line in log.to_dict("records")]
    hashes = {str(tokens): checkpoints.hashes[tokens] for tokens in checkpoints}
    UnitsIndex(dict(provenance), hashes, lines).save(folder / INDEX)
    _remove_weights(folder, {checkpoints.path(tokens) for tokens in checkpoints})


def forget(folder: Path) -> None:
    """Remove a folder's units: the index first, so that nobody reads what is only half there."""
    (folder / INDEX).unlink(missing_ok=True)
    _remove_weights(folder, set())


def _remove_weights(folder: Path, kept: set[Path]) -> None:
    """Remove files of weights (nothing else that may lie there), and what killed processes began to write."""
    if not (folder / _WEIGHTS).is_dir():
        return
    remove_remains(folder / _WEIGHTS)
    for path in set((folder / _WEIGHTS).iterdir()) - kept:
        if re.fullmatch(r"\d{15}\.[0-9a-f]{12}\.safetensors", path.name):
            path.unlink(missing_ok=True)


def coders_of(provenance: Mapping[str, Any], *, meta: bool = False, source: Path | None = None) -> nn.ModuleDict:
    """Untrained coders of every site, by its kind. meta: without memory, to be filled by load_state_dict(assign=True); source:
    the folder that they are of, for the message. Raises TrainError: settings that this swd_lens does not know."""
    try:
        settings, coder = METHODS[provenance["method"]]
        spec = settings(**provenance["settings"])
    except (KeyError, TypeError, TrainError) as cause:
        raise TrainError(
            f"{source or 'units'}: settings that this swd_lens does not know ({cause}); update swd_lens, or copy the folder again"
        ) from cause
    with torch.device("meta" if meta else "cpu"):
        return nn.ModuleDict({site["kind"]: coder(site["d_in"], site["d_out"], spec) for site in provenance["sites"].values()})
