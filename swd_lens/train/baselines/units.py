"""LearnedUnits: a trained baseline as a unit source, with its trajectory, in memory or in a folder.

    units.json             provenance, sites, and the token counts at which weights were kept
    weights/               one safetensors file per count
    log.jsonl              what training logged (run.json beside it: the recipe, if training wrote the folder)

It is a mapping of sites to units, which `attach`, `fidelity`, `attribute`, `evaluate` and `compare` take as they take factors.
`at(tokens)` is the same training after fewer tokens.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from swd_lens.base.display import card
from swd_lens.base.files import write_json, write_text
from swd_lens.train.baselines.activity import Activity, measured
from swd_lens.train.baselines.spec import TrainError, TranscoderSpec, VpdSpec
from swd_lens.train.baselines.trajectory import WEIGHTS, Trajectory
from swd_lens.train.baselines.transcoders import Transcoder
from swd_lens.train.baselines.vpd import Vpd
from swd_lens.units.coder import CoderUnits

INDEX = "units.json"
RUN = "run.json"  # of every training's folder (finetune/folder.py), and of a study's
_LOG = "log.jsonl"
_FORMAT = 1


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
        self._units = self._made()

    def _made(self) -> dict[str, CoderUnits]:
        coders = coders_of(self.provenance, meta=True)
        coders.load_state_dict(dict(self.checkpoints[self.tokens]), assign=True)
        coders.requires_grad_(False)
        coders.to(self.device)
        units = {}
        for name, site in self.provenance["sites"].items():
            about = {key: value for key, value in self.provenance.items() if key != "sites"}
            about |= {**site["host"], "site": name, "tokens": self.tokens}
            coder: Any = coders[site["kind"]]
            width, method = coder.W_enc.shape[1], str(self.provenance["method"])
            units[name] = CoderUnits(coder, site["d_in"], site["d_out"], width, name=method, provenance=about)
        return units

    def __getitem__(self, site: str) -> CoderUnits:
        if site not in self._units:
            raise KeyError(f"no units for site {site!r}; these are of {', '.join(self._units)}")
        return self._units[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    @property
    def edges(self) -> int:
        """Of all sites."""
        return sum(units.edges for units in self.values())

    @property
    def n_units(self) -> int:
        """Of all sites."""
        return sum(units.n_units for units in self.values())

    # ------------------------------------------------------------------ trajectory

    def at(self, tokens: float | int) -> "LearnedUnits":
        """The same training after this many tokens.

        Raises:
            TrainError: no weights were kept there.
        """
        kept = [n for n in self.checkpoints if n == tokens]  # 1e6 is 1,000,000
        if not kept:
            there = ", ".join(f"{n:,}" for n in self.checkpoints)
            raise TrainError(f"no weights were kept at {tokens:,} tokens; there are {there}")
        return LearnedUnits(self.checkpoints, self.provenance, self.log, tokens=kept[0], device=self.device)

    def to(self, device: "str | torch.device") -> "LearnedUnits":
        """The same units on another device: a host computes with units on its own."""
        return LearnedUnits(self.checkpoints, self.provenance, self.log, tokens=self.tokens, device=device)

    # ------------------------------------------------------------------ reports

    def table(self) -> pd.DataFrame:
        """One row per site: method, tokens used, units, edges, and s (below zero where there are more edges than weights)."""
        method = self.provenance["method"]
        return pd.DataFrame(
            [
                {
                    "site": site,
                    "method": method,
                    "tokens": self.tokens,
                    "units": u.n_units,
                    "edges": u.edges,
                    "s": u.sparsity,
                }
                for site, u in self.items()
            ]
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
        return measured(model, self, tokens, batch_size=batch_size, progress=progress)

    def __repr__(self) -> str:
        lines = [f"{site}: {units!r}" for site, units in self.items()]
        head = f"LearnedUnits({self.provenance['method']}, {self.tokens:,} tokens, {len(self.checkpoints)} checkpoints)"
        return "\n  ".join([head, *lines])

    def _repr_html_(self) -> str:
        shown = [column for column in self.log.columns if column not in ("step", "learning_rate", "p")]
        kept = self.log[self.log["tokens"].isin(list(self.checkpoints))][shown] if len(self.log) else None
        return card(f"{self.provenance['method']} at {self.provenance['replaces']}", self.table(), kept)

    # ------------------------------------------------------------------ files

    def save(self, folder: str | Path) -> None:
        """Write everything, the whole trajectory among it; the index last, so that a folder with an index is complete.

        Units that were saved there before are replaced.

        Raises:
            TrainError: the folder holds a run, whose result they would pass for.
        """
        folder, own = Path(folder), self.checkpoints.folder
        if own is None or folder.resolve() != own.resolve():
            if (folder / RUN).exists():
                raise TrainError(
                    f"{folder} holds a run ({RUN}); units saved there would pass for its result. Give another folder"
                )
            if (folder / INDEX).exists():
                forget(folder)
        copied = Trajectory(folder, self.provenance)
        for tokens, weights in self.checkpoints.items():
            copied.add(tokens, weights)
        lines = self.log.to_dict("records")
        write_text(folder / _LOG, "".join(json.dumps(line) + "\n" for line in lines))
        write_index(folder, self.provenance, copied)

    @classmethod
    def load(cls, folder: str | Path, *, device: "str | torch.device" = "cpu") -> "LearnedUnits":
        """Read a folder that `save`, or training with out=, wrote.

        Raises:
            TrainError: it is none, of a later format, or damaged.
        """
        folder = Path(folder)
        provenance, counts = _index(folder)
        checkpoints = Trajectory(folder, provenance)
        for tokens in counts:
            checkpoints.found(tokens)
        text = (folder / _LOG).read_text(encoding="utf-8") if (folder / _LOG).is_file() else ""
        log = pd.DataFrame([json.loads(line) for line in text.splitlines()])
        return cls(checkpoints, provenance, log, device=device)


def _index(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """Provenance and token counts of a folder; see `LearnedUnits.load` for what it raises."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        version = int(index["format"])
        found = dict(index["provenance"]), [int(tokens) for tokens in index["tokens"]]
    except (FileNotFoundError, NotADirectoryError):
        raise TrainError(f"{folder} holds no {INDEX}: no learned units, or their training is not finished") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{folder / INDEX} is damaged ({error!r}); copy the folder again, or train again") from error
    if version > _FORMAT:
        raise TrainError(f"{folder / INDEX} has format {version}, newer than this swd_lens; update it")
    return found


def write_index(folder: Path, provenance: Mapping[str, Any], checkpoints: Trajectory) -> None:
    """The word that a folder's weights are whole."""
    write_json(folder / INDEX, {"format": _FORMAT, "provenance": dict(provenance), "tokens": list(checkpoints)})


def forget(folder: Path) -> None:
    """Take a folder's units away: the index first, so that nobody reads what is only half there."""
    (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder / WEIGHTS, ignore_errors=True)


def coders_of(provenance: Mapping[str, Any], *, meta: bool = False) -> nn.ModuleDict:
    """Untrained coders of every site, by its kind; meta: without memory, to be filled by load_state_dict(assign=True).

    Raises:
        TrainError: settings that this swd_lens does not know.
    """
    try:
        kind = TranscoderSpec if provenance["method"] == "transcoder" else VpdSpec
        spec = kind(**provenance["settings"])
    except TypeError as error:
        raise TrainError(
            f"these units have settings that this swd_lens does not know ({error}); update swd_lens"
        ) from error
    with torch.device("meta" if meta else "cpu"):
        made = {
            site["kind"]: Transcoder(site["d_in"], site["d_out"], spec)
            if isinstance(spec, TranscoderSpec)
            else Vpd(site["d_in"], site["d_out"], spec)
            for site in provenance["sites"].values()
        }
    return nn.ModuleDict(made)
