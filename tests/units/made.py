"""Factors by hand, and ways to change a saved folder, that several files of tests share."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from swd_lens.base.files import sha256
from swd_lens.base.sealed import seal
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.index import INDEX


def small() -> Factors:
    # W = [[2, 0], [0, 3]]; read = I without its second entry, so unit 1 reads nothing and is not valid.
    return Factors(
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[2.0, 1.0], [0.0, 3.0]]),
        {"preset": "paper"},
        {"site": "blocks.0.mlp_out"},
        torch.tensor([[2.0, 0.0], [0.0, 3.0]]),
    )


def sparse_factors(d_in: int, units: int, d_out: int, density: float, seed: int = 0) -> Factors:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        mask = torch.rand(rows, columns, generator=generator) < density
        return torch.randn(rows, columns, generator=generator) * mask

    return Factors(draw(d_in, units), draw(units, d_out), {"preset": "best"}, {"seed": seed})


def same(one: FactorSet, two: FactorSet) -> bool:
    return (
        list(one) == list(two)
        and one.provenance == two.provenance
        and all(
            torch.equal(one[site].read, two[site].read)
            and torch.equal(one[site].write, two[site].write)
            and (one[site].settings, one[site].provenance) == (two[site].settings, two[site].provenance)
            for site in one
        )
    )


def edit_index(folder: Path, edit: Callable[[dict], object], sealed: bool = False) -> None:
    """Change the index; sealed: with the hash that a program would give it which knows how."""
    described = json.loads((folder / INDEX).read_text())
    edit(described)
    (folder / INDEX).write_text(json.dumps(seal(described) if sealed else described))


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Exchange tensors of the one file (None removes one) and give the index the new hash: only the contents differ."""
    (path,) = folder.glob("*.safetensors")
    tensors = {**load_file(path), **{name.replace("__", "."): value for name, value in changed.items()}}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    edit_index(folder, lambda d: [entry.update(sha256=sha256(path)) for entry in d["sites"].values()], sealed=True)
