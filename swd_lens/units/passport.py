"""Passport: what travels with factors, so that they can be checked and moved to another host.

1. `Origin` says what the factors were made from: what of the site's input could be folded, and two random sketches of the
   dense matrix (`sketch`). Whoever holds W, or a matrix that follows from it linearly, can compare.
2. `Offsets` are the constants that transported factors add: z = h @ read + unit; y = z @ write + bias + out.
3. `Probe` is one input of the site with the z it must give on some units: whether loaded factors still compute what they
   computed when they were saved.
4. `to_tensors` and `from_tensors` turn them into named tensors for a file, and back.

`fingerprint` names a dense matrix exactly, where a sketch compares it roughly. All tensors here are float32 on the CPU
(the units of a probe are int64); only the offsets follow the factors to another device, because they take part in z.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import error

# Rows of W that `sketch` and `Probe.of` turn into float64 at a time, in entries: no second matrix of W's size.
_TILE = 2**22


@dataclass(frozen=True, eq=False)
class Origin:
    """Where factors come from.

    Attributes:
        scale: (d_in,) factor in the site's input that weight processing folds away: the weight of the normalization that
            feeds it; None: there is none, or it is folded already.
        shift: (d_in,) constant in the site's input that folds away: the normalization's bias, or attn_o's value biases.
        shifted: (d_out,) shift @ W; None where shift is.
        right: (d_in,) W @ r, see `sketch`.
        left: (d_out,) l @ W, see `sketch`.
    """

    scale: Float[Tensor, " d_in"] | None
    shift: Float[Tensor, " d_in"] | None
    shifted: Float[Tensor, " d_out"] | None
    right: Float[Tensor, " d_in"]
    left: Float[Tensor, " d_out"]


@dataclass(frozen=True, eq=False)
class Offsets:
    """Constants of transported factors: z = h @ read + unit; y = z @ write + bias + out.

    Attributes:
        unit: (unit,) added to z.
        out: (d_out,) added to the output, beside the host's own bias.
    """

    unit: Float[Tensor, " unit"]
    out: Float[Tensor, " d_out"]

    def to(self, device: torch.device | str) -> "Offsets":
        return Offsets(self.unit.to(device), self.out.to(device))


@dataclass(frozen=True, eq=False)
class Probe:
    """One activation vector that entered the site, and what z must be on k units.

    Attributes:
        input: (d_in,) the vector h.
        units: (k,) int64, the units that are looked at, the largest |z| first.
        z: (k,) h @ read[:, units], plus the offsets of these units where there are any.
    """

    input: Float[Tensor, " d_in"]
    units: Int[Tensor, " k"]
    z: Float[Tensor, " k"]

    @classmethod
    def of(
        cls, h: Float[Tensor, " d_in"], read: Float[Tensor, "d_in unit"], offsets: Offsets | None = None, k: int = 4
    ) -> "Probe":
        """The probe of input h on the k units (all of them, if there are fewer) that it moves most; ties go to the first.

        Raises:
            ValueError: k is less than 1, or h gives a z that is not finite.
        """
        if k < 1:
            raise error("probe-of-no-units", k=k)
        h = h.detach().to("cpu", torch.float32)
        columns = max(1, _TILE // len(h))  # of read at a time
        everything = torch.arange(read.shape[1])
        z = torch.cat([_z(h, read, units, offsets) for units in everything.split(columns)])
        if not bool(z.isfinite().all()):
            raise error("probe-not-finite", unit=int((~z.isfinite()).nonzero()[0]))
        units = z.abs().argsort(descending=True, stable=True)[:k]
        return cls(h.clone(), units, z[units].float())

    def found(self, read: Float[Tensor, "d_in unit"], offsets: Offsets | None = None) -> Float[Tensor, " k"]:
        """(k,) float64: z of the probe's units by this read factor; computed in float64."""
        return _z(self.input, read, self.units, offsets)

    def error(self, read: Float[Tensor, "d_in unit"], offsets: Offsets | None = None) -> float:
        """max |found - expected| / max |expected|: 0.0 where all agree, infinite where zeros were expected and not found."""
        difference = float((self.found(read, offsets) - self.z.double()).abs().max())
        expected = float(self.z.abs().max())
        if expected == 0.0:
            return 0.0 if difference == 0.0 else float("inf")
        return difference / expected


def _z(
    h: Float[Tensor, " d_in"], read: Float[Tensor, "d_in unit"], units: Int[Tensor, " k"], offsets: Offsets | None
) -> Float[Tensor, " k"]:
    """(k,) float64 on the CPU: h @ read[:, units] + offsets.unit[units]."""
    z = h.double() @ read.detach()[:, units.to(read.device)].cpu().double()
    return z if offsets is None else z + offsets.unit.detach().cpu().double()[units]


def sketch(weight: Float[Tensor, "d_in d_out"]) -> tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]:
    """Two random projections of W: right (d_in,) = W @ r and left (d_out,) = l @ W; float32, on the CPU.

    r (d_out,) and l (d_in,) are standard normal, drawn in this order by a CPU generator seeded with 0; in float64, because
    torch's float32 draws depend on the machine's vector unit. Sums in float64 as well: every machine gets the same, to
    float32's precision. right(D @ W) = D @ right(W) for any square D, left(W @ E) = left(W) @ E for any square E.
    """
    d_in, d_out = weight.shape
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(d_out, generator=generator, dtype=torch.float64)
    l = torch.randn(d_in, generator=generator, dtype=torch.float64)  # noqa: E741 - the letter of the docstring
    right, left = torch.empty(d_in, dtype=torch.float64), torch.zeros(d_out, dtype=torch.float64)
    for rows in torch.arange(d_in).split(max(1, _TILE // d_out)):
        part = weight.detach()[rows.to(weight.device)].cpu().double()
        right[rows], left = part @ r, left + l[rows] @ part
    return right.float(), left.float()


def fingerprint(weight: Float[Tensor, "d_in d_out"]) -> str:
    """SHA-256 over shape and float32 values of a matrix: factors carry that of the matrix they were made from."""
    data = weight.detach().float().cpu().contiguous()
    digest = hashlib.sha256(str(tuple(data.shape)).encode())
    digest.update(data.flatten().numpy().data)  # the buffer itself: no copy of a large matrix
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- named tensors

_PARTS = {"origin": Origin, "offsets": Offsets, "probe": Probe}
_OPTIONAL = {"origin.scale", "origin.shift", "origin.shifted"}
_LENGTHS = {
    "origin.scale": "d_in",
    "origin.shift": "d_in",
    "origin.shifted": "d_out",
    "origin.right": "d_in",
    "origin.left": "d_out",
    "offsets.unit": "units",
    "offsets.out": "d_out",
    "probe.input": "d_in",
}


def to_tensors(origin: Origin | None, offsets: Offsets | None, probe: Probe | None) -> dict[str, Tensor]:
    """Name -> tensor ("origin.right", "probe.units", ...), on the CPU, float32 (int64 the units); what is None is left out."""
    named: dict[str, Tensor] = {}
    for part, holder in (("origin", origin), ("offsets", offsets), ("probe", probe)):
        for field in fields(holder) if holder is not None else ():
            if (value := getattr(holder, field.name)) is not None:
                dtype = torch.int64 if field.name == "units" else torch.float32
                named[f"{part}.{field.name}"] = value.detach().to("cpu", dtype).contiguous()
    return named


def from_tensors(named: Mapping[str, Tensor], d_in: int, units: int, d_out: int) -> dict[str, Any]:
    """{"origin": Origin, "offsets": Offsets, "probe": Probe}, those that `to_tensors` named, for factors of this size.

    Raises:
        ValueError: a tensor is missing or unknown, of another length than the factors ask for, or not finite.
    """
    known = {f"{part}.{field.name}" for part, kind in _PARTS.items() for field in fields(kind)}
    if unknown := sorted(set(named) - known):
        raise error("passport-unknown-entries", entries=", ".join(unknown))
    sizes = {"d_in": d_in, "units": units, "d_out": d_out}
    for name, tensor in named.items():
        _check(name, tensor, sizes)
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        names = {field.name: f"{part}.{field.name}" for field in fields(kind)}
        if not any(name in named for name in names.values()):
            continue
        if missing := [name for name in names.values() if name not in named and name not in _OPTIONAL]:
            raise error("passport-entries-missing", entries=", ".join(missing))
        if part == "probe":
            _check_units(named["probe.units"], named["probe.z"], units)
        parts[part] = kind(**{key: named.get(name) for key, name in names.items()})
    return parts


def _check(name: str, tensor: Tensor, sizes: Mapping[str, int]) -> None:
    wanted = torch.int64 if name == "probe.units" else torch.float32
    if tensor.ndim != 1 or tensor.dtype != wanted:
        raise error("passport-not-a-vector", name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), expected=wanted)
    if name in _LENGTHS and len(tensor) != sizes[_LENGTHS[name]]:
        raise error(
            "passport-of-another-length",
            name=name,
            n_values=len(tensor),
            side=_LENGTHS[name],
            size=sizes[_LENGTHS[name]],
        )
    if not bool(tensor.isfinite().all()):
        index = int((~tensor.isfinite()).nonzero()[0])
        raise error("passport-not-finite", name=name, index=index, value=tensor[index].item())


def _check_units(indices: Tensor, z: Tensor, units: int) -> None:
    if len(indices) != len(z) or not len(indices):
        raise error("passport-probe-lengths-differ", n_units=len(indices), n_values=len(z))
    if outside := [unit for unit in indices.tolist() if not 0 <= unit < units]:
        raise error("passport-probe-unit-outside", unit=outside[0], n_units=units)
