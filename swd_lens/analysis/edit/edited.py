"""edited: a low-rank change of one matrix, W' = W + read @ write, that can be put into a host, taken out, saved and exported.

1. An `Edit` holds the pair (`Delta`), never a dense (d_in, d_out) copy, and what it was made for (`Target`).
2. `apply` checks that the host's W is the one that the edit was made for (its fingerprint), keeps a copy of it, and writes
   W' in place. `undo` puts the copy back, bit for bit; so does leaving a with block, also by an exception or Ctrl-C.
3. Edits of one site nest: the second must be made on the host that bears the first (another W, another fingerprint), and
   they are undone in reverse order. Undoing the lower one first is refused.
4. An edit of a replacement (base="replacement") changes a row of the factors and no weight of the host: applying it
   attaches the changed factors.
5. `save` and `load` keep the pair in one sealed safetensors file; `state_dict` gives the host's own state_dict with W' in it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.edit.target import Target
from swd_lens.base.display import card, folded_settings
from swd_lens.base.errors import EditError, legible, quoted, visible
from swd_lens.base.interrupts import Undo, hold_back_interrupts, joint, unparted
from swd_lens.base.record import checked
from swd_lens.base.sealed import read_tensors, readable, write_tensors
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import Host, host_of, sites_of
from swd_lens.hosts.sites import Site
from swd_lens.hosts.weights import stored_matrix
from swd_lens.units import Attachment, attach
from swd_lens.units.attach import require_free
from swd_lens.units.factors import FactorSet, fingerprint
from swd_lens.units.match import check_units, same_weights
from swd_lens.units.unit_set import UnitSet

FORMAT, WHAT = "swd_lens edit 1", "an edit"
_TENSORS = ("read", "write", "input", "direction")
_HEADER: Mapping[str, Any] = {
    "site": str,
    "method": str,
    "shift": float,
    "target": Mapping[str, Any],
    "settings": Mapping[str, Any],
}
# What an edit reads of its settings.
_SETTINGS: Mapping[str, Any] = {"base": str, "weight_norm": float}


@with_torch_defaults
@dataclass(frozen=True, eq=False)
class Delta:
    """A matrix of low rank: read @ write.

    Attributes:
        read: (d_in, rank) float32, on the CPU.
        write: (rank, d_out) float32, on the CPU.
    """

    read: Float[Tensor, "d_in rank"]
    write: Float[Tensor, "rank d_out"]

    @property
    def rank(self) -> int:
        return self.read.shape[1]

    @property
    def norm(self) -> float:
        """||read @ write||_F, from two rank x rank products."""
        read, write = self.read.double(), self.write.double()
        return float(((read.T @ read) * (write @ write.T)).sum().clamp(min=0).sqrt())

    def dense(self) -> Float[Tensor, "d_in d_out"]:
        """read @ write, as one matrix."""
        return self.read @ self.write

    def added_to(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """weight + read @ write in float32, where the weight lies."""
        return torch.addmm(weight.float(), self.read.to(weight.device), self.write.to(weight.device))


class _Overwritten:
    """An edit in a host: W' in W's place, and W beside it. `restore` may be called any number of times."""

    def __init__(self, host: Host, site: Site, delta: Delta):
        self.host, self.site, self.delta, self.undo = host, site, delta, Undo()
        self.stored = stored_matrix(host, site)
        self.kept = self.stored.parameter.detach().clone()
        self.before, self.after = fingerprint(self.stored.matrix()), ""

    def put_in(self) -> None:
        self.stored.write(self.delta.added_to(self.stored.matrix()))
        self.after = fingerprint(self.stored.matrix())

    def check(self) -> None:
        """Refuse to be taken out where W is neither of the two that this edit knows."""
        require_free(self.host, [self.site])
        if fingerprint(self.stored.matrix()) not in (self.before, self.after):
            raise EditError(
                f"the matrix of {self.site.name} has changed since this edit was applied. If another edit came on top, "
                "undo that one first (edits come off in reverse order); leaving a with block restores W whatever happened"
            )

    def restore(self) -> None:
        self.stored.restore(self.kept)


class _AttachedFactors:
    """An edit of a replacement in a host: the changed factors, attached. `restore` may be called any number of times."""

    def __init__(self, host: Host, factors: FactorSet):
        self.host, self.factors, self.undo = host, factors, Undo()
        self.attachment: Attachment | None = None

    @joint
    def put_in(self) -> None:
        self.attachment = attach(self.host.model, self.factors)

    def check(self) -> None:
        """Detaching needs no other check than its own."""

    def restore(self) -> None:
        if self.attachment is not None and self.attachment.attached:
            self.attachment.detach()


@with_torch_defaults
@dataclass(frozen=True, eq=False, repr=False)
class Edit:
    """A change of one site's matrix that moves a prompt's margin; made by `edit_unit` and by its controls.

        with edit:                       # in the model it was made on
            model(prompt)
        with edit.applied(other): ...    # in another host with the same W
        edit.apply(); edit.undo()

    Attributes:
        site: the site's name.
        method: "unit", "random", "oracle" or "lora".
        shift: what was asked for, in logits: h* dW d of the first three, the final margin's change of "lora".
        delta: dW as a pair.
        target: prompt, answer, foil, h* and d.
        settings: every choice, and whose W this belongs to; plain JSON values.
        model: what `with edit:` acts on; None in an edit from a file.
        factors, replaced: base="replacement" only: the changed factors, and those before the change.
    """

    site: str
    method: str
    shift: float
    delta: Delta
    target: Target
    settings: Mapping[str, Any]
    model: Any = None
    factors: FactorSet | None = None
    replaced: FactorSet | None = None
    _standing: list[_Overwritten | _AttachedFactors] = field(default_factory=list, init=False)
    _entered: list[int] = field(default_factory=list, init=False)  # how many stood before each open with block

    # ------------------------------------------------------------------ what it is

    @property
    def base(self) -> str:
        """The thing that is changed: "dense" (the host's W) or "replacement" (the factors)."""
        return str(self.settings["base"])

    @property
    def local_shift(self) -> float:
        """h* dW d in logits, computed from the pair in float64: `shift` but for rounding, unless the method is "lora"."""
        out = self.target.input.double() @ self.delta.read.double() @ self.delta.write.double()
        out = out + self.settings.get("offset", 0.0) * self.delta.write[0].double()
        return float(out @ self.target.direction.double())

    @property
    def size(self) -> float | None:
        """alpha |read vector|: how far the edit writes along d for an input along the unit's read vector.

        alpha itself depends on how the unit is scaled (the same unit with a read vector twice as long has half the alpha); this
        number, as dW itself, does not. None where there is no alpha ("lora").
        """
        alpha = self.settings.get("alpha")
        return None if alpha is None else float(alpha) * float(self.delta.read.double().norm())

    @property
    def relative_norm(self) -> float:
        """||dW||_F / ||W||_F."""
        return self.delta.norm / self.settings["weight_norm"]

    def table(self) -> pd.DataFrame:
        """One row: what was asked for and what was changed."""
        row = {
            "method": self.method,
            "unit": self.settings.get("unit", ""),
            "requested shift": self.shift,
            "h* dW d": self.local_shift,
            "alpha": self.settings.get("alpha"),
            "alpha |a|": self.size,
            "rank": self.delta.rank,
            "norm of dW": self.delta.norm,
            "relative norm": self.relative_norm,
        }
        return pd.DataFrame([row])

    def __repr__(self) -> str:
        which = f" ({self.settings['unit']})" if self.settings.get("unit") else ""
        state = "applied" if self._standing else "not applied"
        return visible(
            f"Edit({self.method}{which} of {self.site}, {self.base}: {self.target.answer!r} over {self.target.foil!r} by "
            f"{self.shift:+g}, rank {self.delta.rank}, |dW|/|W| = {self.relative_norm:.2g}, {state})"
        )

    def _repr_html_(self) -> str:
        what = f"{self.target.prompt!r}: {self.target.answer!r} over {self.target.foil!r}"
        return card(f"Edit of {self.site}", what, self.table(), folded_settings(self.settings))

    # ------------------------------------------------------------------ applying

    def check(self, model: Any = None) -> Host:
        """Check that `apply` would succeed; nothing is changed.

        Returns:
            The host.

        Raises:
            EditError, AttachError: see `apply`.
        """
        model = self.model if model is None else model
        if model is None:
            raise EditError("this edit was loaded from a file and has no model of its own; use edit.applied(model)")
        host = host_of(model)
        if self.factors is None:
            site = sites_of(host, self.site)[0]
            require_free(host, [site])
            shape = (self.delta.read.shape[0], self.delta.write.shape[1])
            if shape != (site.d_in, site.d_out):
                raise EditError(
                    f"this edit of {site.name} is {shape}, the host's matrix is ({site.d_in}, {site.d_out}): it belongs to "
                    "another model"
                )
            if not same_weights(host, site, self.settings):
                raise EditError(
                    f"this edit of {site.name} was made for another W than this host has now. Either another edit (or this "
                    "one) is applied already, which edit.undo() takes out, or it is another checkpoint or another weight "
                    "processing: make the edit on this host"
                )
            return host
        units = UnitSet.of(host, self.factors)
        require_free(host, units.sites)
        for site in units.sites:
            check_units(host, site, units[site.name])
        return host

    @joint
    def apply(self, model: Any = None) -> "Edit":
        """Put the edit into a host, in place; `undo` takes it out.

        Args:
            model: a host with the W that this was made for; None = the one it was made on.

        Returns:
            This edit.

        Raises:
            EditError: another W; or no model to apply it to (an edit from a file).
            AttachError: units are attached at the site.
        """
        host = self.check(model)
        if self.factors is None:
            standing = _Overwritten(host, sites_of(host, self.site)[0], self.delta)
        else:
            standing = _AttachedFactors(host, self.factors)
        undo = standing.undo
        with undo.if_broken():
            hold_back_interrupts(undo.push)
            undo.push(partial(self._forget, standing))
            undo.push(standing.restore)
            self._standing.append(standing)
            standing.put_in()
        return self

    def undo(self) -> None:
        """Take the edit out of the host it was applied to last: its W is what it was, bit for bit.

        Raises:
            EditError: it is not applied; or W has changed since (another edit on top: undo that first).
            AttachError: units are attached at the site.
        """
        if not self._standing:
            raise EditError(f"this edit of {self.site} is not applied (any more); edit.apply(model) applies it")
        self._standing[-1].check()
        self._down_to(len(self._standing) - 1)

    @contextmanager
    @joint
    def applied(self, model: Any = None) -> Iterator["Edit"]:
        """`apply` for a with block. On leaving it, W is what it was on entering, whatever happened in between."""
        depth = len(self._standing)
        with Undo() as undo:
            undo.push(lambda: self._down_to(depth))
            yield self.apply(model)

    @joint
    def __enter__(self) -> "Edit":
        depth, blocks = len(self._standing), len(self._entered)
        try:
            self.apply()
            self._entered.append(depth)
            return self
        except BaseException:
            # A Ctrl-C in here: the with statement does not leave what it has not entered.
            self._down_to(depth)
            del self._entered[blocks:]
            raise

    @joint
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        depth = 0
        try:
            # Not one less than stand now: in the block it may have been undone, or applied to another host as well.
            depth = self._entered.pop()
            self._down_to(depth)
        finally:  # a Ctrl-C may hit the first; what is undone is not undone again
            self._down_to(depth)

    @unparted
    def _down_to(self, depth: int) -> None:
        while len(self._standing) > depth:
            self._standing[-1].undo.run()

    def _forget(self, standing: _Overwritten | _AttachedFactors) -> None:
        self._standing[:] = [other for other in self._standing if other is not standing]

    # ------------------------------------------------------------------ files and export

    def state_dict(self, model: Any = None) -> dict[str, Tensor]:
        """The host's own state_dict with the edited matrix in it; the host itself is not touched.

        Every tensor has the shape that the host has it in. The edited ones are new; the others are the host's own, as in any
        state_dict. `load_state_dict` of the host, and of any model with the same keys, takes it.

        Raises:
            EditError: an edit of a replacement, which changes no weight; another W; or no model.
            AttachError: units are attached at the site.
        """
        if self.factors is not None:
            raise EditError("an edit of a replacement changes no weight of the host; save its factors: edit.factors.save(folder)")
        model = self.model if model is None else model
        is_applied = any(each.host.model is model for each in self._standing)
        host = host_of(model) if is_applied else self.check(model)
        site = sites_of(host, self.site)[0]
        require_free(host, [site])
        stored, state = stored_matrix(host, site), dict(host.model.state_dict())
        names = stored.names(state)
        if not names:
            raise EditError(f"this host's state_dict does not list the matrix of {site.name}; please report the model")
        edited = stored.parameter if is_applied else stored.as_stored(self.delta.added_to(stored.matrix()))
        return {**state, **dict.fromkeys(names, edited.detach().clone())}

    def save(self, path: str | Path) -> Path:
        """Write the pair, h*, d and all settings into one safetensors file, whole or not at all.

        Raises:
            EditError: an edit of a replacement; its factors are what to save.
        """
        if self.factors is not None:
            raise EditError("an edit of a replacement is its factors; save them: edit.factors.save(folder)")
        path = Path(path)
        tensors = (self.delta.read, self.delta.write, self.target.input, self.target.direction)
        header = {"site": self.site, "method": self.method, "shift": self.shift, "target": self.target.described()}
        header |= {"settings": dict(self.settings)}
        metadata = {"format": FORMAT, "edit": json.dumps(header, allow_nan=False)}
        write_tensors(path, dict(zip(_TENSORS, tensors, strict=True)), metadata)
        return path

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> "Edit":
        """Read what `save` wrote.

        Args:
            model: what `with edit:` is to act on; None = name it in `edit.applied(model)`.

        Raises:
            FileNotFoundError: no such file.
            EditError: not a file of `save`, not what was written, or values that are not finite.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {legible(path)}; edit.save(path) writes one")
        tensors, metadata = read_tensors(path, WHAT, EditError)
        if metadata.get("format") != FORMAT or set(tensors) != set(_TENSORS):
            raise EditError(
                f"{path} is not an edit that this swd_lens wrote (format {quoted(metadata.get('format'))}, not {quoted(FORMAT)})"
            )
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise EditError(f"{path}: {name} holds values that are not finite; copy the file again, or make the edit again")
        with readable(path, WHAT, EditError):
            header = checked(WHAT, json.loads(metadata.get("edit", "")), _HEADER)
            checked(WHAT, header["settings"], _SETTINGS)
            read, write, h, d = (tensors[name] for name in _TENSORS)
            fit = read.ndim == write.ndim == 2 and read.shape[1] == write.shape[0]
            if not fit or h.shape != read.shape[:1] or d.shape != write.shape[1:]:
                raise ValueError(f"read {tuple(read.shape)} and write {tuple(write.shape)} do not fit each other, h* or d")
            return cls(
                site=header["site"],
                method=header["method"],
                shift=header["shift"],
                delta=Delta(read, write),
                target=Target.of_described(header["site"], header["target"], h, d),
                settings=header["settings"],
                model=model,
            )
