"""Integrity: records that travel with factors, so that they can be checked and moved to another host.

1. `Origin` says what the factors were made from: what of the site's input could be folded, and two random sketches of the
   dense matrix (`sketch`). Whoever holds W, or a matrix that follows from it linearly, can compare.
2. `Offsets` are the constants that transported factors add: z = h @ read + unit; y = z @ write + bias + out.
3. `Probe` is one input of the site with the z and the y it must give on some units and outputs: whether loaded factors still
   compute what they computed when they were saved. The y take all units, so that read and write are both covered.
4. `to_tensors` and `from_tensors` turn them into named tensors for a file, and back.

`fingerprint` names a dense matrix exactly, where a sketch compares it roughly. All tensors here are float32 on the CPU
(the indices of a probe are int64); only the offsets follow the factors to another device, because they take part in z.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import legible
from swd_lens.solver.shapes import Dense, Read, Write

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
    """Constants of transported factors: z = h @ read + unit; y = z @ write + bias + out."""

    unit: Float[Tensor, " unit"]  # (unit,) added to z
    out: Float[Tensor, " d_out"]  # (d_out,) added to the output, beside the host's own bias

    def to(self, device: torch.device | str) -> "Offsets":
        unit, out = self.unit.to(device), self.out.to(device)
        return self if unit is self.unit and out is self.out else Offsets(unit, out)


@dataclass(frozen=True, eq=False)
class Probe:
    """One activation vector that entered the site, what z must be on k units, and what y must be on k outputs."""

    input: Float[Tensor, " d_in"]  # (d_in,) the vector h
    units: Int[Tensor, " k"]  # (k,) int64, the units that are looked at, the largest |z| first
    z: Float[Tensor, " k"]  # (k,) h @ read[:, units], plus the offsets of these units where there are any
    outputs: Int[Tensor, " m"]  # (k,) int64, the outputs that are looked at, the largest |y| first
    y: Float[Tensor, " m"]  # (k,) z @ write[:, outputs] over all units, plus the offsets of these outputs where there are any

    @classmethod
    def of(cls, h: Float[Tensor, " d_in"], read: Read, write: Write, offsets: Offsets | None = None, k: int = 4) -> "Probe":
        """The probe of input h on the k units and the k outputs (all of them, if there are fewer) that it moves most; ties go
        to the first. Raises ValueError: k is less than 1, or h gives a z or y that is not finite."""
        if k < 1:
            raise ValueError(f"a probe looks at k={k} units; give 1 or more")
        h = h.detach().to("cpu", torch.float32)
        z = _product(h, read, offsets and offsets.unit)
        y = _product(z, write, offsets and offsets.out)
        for what, values in (("z of unit", z), ("y of output", y)):
            if not bool(values.isfinite().all()):
                raise ValueError(f"the probe's {what} {int((~values.isfinite()).nonzero()[0])} is not finite; give another input")
        units, outputs = (v.abs().argsort(descending=True, stable=True)[:k] for v in (z, y))
        return cls(h.clone(), units, z[units].float(), outputs, y[outputs].float())

    def computed(
        self, read: Read, write: Write, offsets: Offsets | None = None
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, " m"]]:
        """z of the probe's units and y of its outputs by these factors, float64."""
        z = _product(self.input, read, offsets and offsets.unit)
        return z[self.units], self._y(z, write, offsets)

    def misfit(self, z: Float[Tensor, " unit"], write: Write, offsets: Offsets | None = None) -> tuple[str, float]:
        """("z" or "y", how far it is from what it must be) when a host computed this z of all units; the worse of the two."""
        of_z = _relative(z.cpu()[self.units], self.z)
        # Relative to the terms of the sum: where they cancel, the rounding of a bfloat16 host's z does not.
        columns = write.detach()[:, self.outputs.to(write.device)].cpu().double()
        terms = (z.cpu().double().square() @ columns.square()).sqrt()
        of_y = _relative(self._y(z, write, offsets), self.y, max(float(terms.max()), float(self.y.abs().max())))
        return ("z", of_z) if of_z >= of_y else ("y", of_y)

    def _y(self, z: Float[Tensor, " unit"], write: Write, offsets: Offsets | None) -> Float[Tensor, " m"]:
        """(m,) float64 on the CPU: the probe's outputs when this is z."""
        y = z.cpu().double() @ write.detach()[:, self.outputs.to(write.device)].cpu().double()
        return y if offsets is None else y + offsets.out.detach().cpu().double()[self.outputs]

    def error(self, read: Read, write: Write, offsets: Offsets | None = None) -> float:
        """max |computed - expected| / max |expected| of z or of y, the larger of the two; 0.0 where all agree, infinite where
        zeros were expected and something else was computed."""
        z, y = self.computed(read, write, offsets)
        return max(_relative(z, self.z), _relative(y, self.y))


def _relative(computed: Float[Tensor, " k"], expected: Float[Tensor, " k"], size: float | None = None) -> float:
    """max |computed - expected| / size; infinite where something differs from a size of 0, or is not a number. size: what
    differences are relative to; None = max |expected|."""
    difference = float((computed.double() - expected.double()).abs().max())
    size = float(expected.abs().max()) if size is None else size
    if difference != difference or size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def _product(
    vector: Float[Tensor, " rows"], matrix: Float[Tensor, "rows columns"], constant: Float[Tensor, " columns"] | None
) -> Float[Tensor, " columns"]:
    """vector @ matrix + constant in float64 on the CPU, some rows at a time."""
    step, total = max(1, _TILE // matrix.shape[1]), torch.zeros(matrix.shape[1], dtype=torch.float64, device="cpu")
    for start in range(0, len(vector), step):
        total += vector[start : start + step].double() @ matrix.detach()[start : start + step].cpu().double()
    return total if constant is None else total + constant.detach().cpu().double()


def sketch(weight: Dense) -> tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]:
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


def fingerprint(weight: Dense) -> str:
    """SHA-256 over shape and float32 values of a matrix: factors carry that of the matrix they were made from."""
    data = weight.detach().float().cpu().contiguous()
    digest = hashlib.sha256(str(tuple(data.shape)).encode())
    digest.update(data.flatten().numpy().data)  # the buffer itself: no copy of a large matrix
    return digest.hexdigest()


_PARTS = {"origin": Origin, "offsets": Offsets, "probe": Probe}
_OPTIONAL = {"origin.scale", "origin.shift", "origin.shifted"}
_INDICES = {"probe.units", "probe.outputs"}
_LENGTHS: dict[str, str] = dict.fromkeys(("origin.scale", "origin.shift", "origin.right", "probe.input"), "d_in")
_LENGTHS |= dict.fromkeys(("origin.shifted", "origin.left", "offsets.out"), "d_out") | {"offsets.unit": "units"}


def to_tensors(origin: Origin | None, offsets: Offsets | None, probe: Probe | None) -> dict[str, Tensor]:
    """Name -> tensor ("origin.right", "probe.units", ...), on the CPU, float32 (int64 the indices); what is None is left out."""
    named: dict[str, Tensor] = {}
    for part, holder in (("origin", origin), ("offsets", offsets), ("probe", probe)):
        for field in fields(holder) if holder is not None else ():
            if (value := getattr(holder, field.name)) is not None:
                name = f"{part}.{field.name}"
                dtype = torch.int64 if name in _INDICES else torch.float32
                named[name] = value.detach().to("cpu", dtype).contiguous()
    return named


def from_tensors(named: Mapping[str, Tensor], d_in: int, units: int, d_out: int) -> dict[str, Any]:
    """{"origin": Origin, "offsets": Offsets, "probe": Probe}, those that `to_tensors` named, for factors of this size. Raises
    ValueError: a tensor is missing or unknown, of another length than the factors ask for, or not finite."""
    known = {f"{part}.{field.name}" for part, kind in _PARTS.items() for field in fields(kind)}
    if unknown := sorted(set(named) - known):
        raise ValueError(f"{legible(', '.join(unknown))} is nothing that this swd_lens knows")
    sizes = {"d_in": d_in, "units": units, "d_out": d_out}
    for name, tensor in named.items():
        wanted = torch.int64 if name in _INDICES else torch.float32
        if tensor.ndim != 1 or tensor.dtype != wanted:
            raise ValueError(
                f"{legible(name)} is {tensor.dtype} of shape {tuple(tensor.shape)}; it should be a vector of {wanted}"
            )
        size = sizes.get(_LENGTHS.get(name, ""), len(tensor))
        if len(tensor) != size:
            raise ValueError(f"{legible(name)} has {len(tensor)} values, the factors' {_LENGTHS[name]} is {size}")
        if not bool(tensor.isfinite().all()):
            index = int((~tensor.isfinite()).nonzero()[0])
            raise ValueError(f"{legible(name)}[{index}] is {tensor[index].item()}")
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        names = {field.name: f"{part}.{field.name}" for field in fields(kind)}
        if not any(name in named for name in names.values()):
            continue
        if missing := [name for name in names.values() if name not in named and name not in _OPTIONAL]:
            raise ValueError(f"{legible(', '.join(missing))} is missing")
        if part == "probe":
            for which, values, size in (("units", "z", units), ("outputs", "y", d_out)):
                indices, n_values = named[f"probe.{which}"], len(named[f"probe.{values}"])
                if len(indices) != n_values or not n_values:
                    raise ValueError(f"probe.{which} has {len(indices)} indices for {n_values} values of probe.{values}")
                if outside := [index for index in indices.tolist() if not 0 <= index < size]:
                    raise ValueError(f"probe.{which} names number {outside[0]}; the factors have {size}")
        parts[part] = kind(**{key: named.get(name) for key, name in names.items()})
    return parts
