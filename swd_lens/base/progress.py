"""progress: how far a long call is, and how long the rest of it will take.

1. `tqdm` draws bars as tqdm.auto does, on a terminal and in a notebook. A log (a file, a pipe) gets a line of text every
   SECONDS in their place, which also says where the loops around this one are.
2. `Steps` numbers the steps of a long call as they begin.
3. What is left is reckoned from rates that were measured in this call; before there is one, nothing is said.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm as bars

from swd_lens.base import interrupted

SECONDS = 30.0  # between the lines of a log
_open: list["Lines"] = []  # the loops that run now, outermost first
_told = [-SECONDS]  # when the last line was written


def tqdm(iterable: Iterable[Any] | None = None, **how: Any) -> Any:
    """A bar, or `Lines` where bars would fill a log; arguments as for tqdm.auto.tqdm."""
    # That ipykernel was imported does not make a notebook: other packages import it, too.
    in_notebook = "IPKernelApp" in getattr(ipython(), "config", {})
    seen = sys.stderr.isatty() or in_notebook
    return (bars if seen or how.get("disable") else Lines)(iterable, **how)


def ipython() -> Any:
    """The IPython that runs this code, of a notebook's kernel or of a terminal; None where there is none."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


class Lines:
    """A stand-in for tqdm, as far as this package uses it, that prints lines of text to stderr; arguments as there."""

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        *,
        desc: str | None = None,
        total: float | int | None = None,
        unit: str = "it",
        unit_scale: bool = False,
        initial: float | int = 0,
        **_: Any,
    ):
        self.iterable, self.desc, self.unit, self.scaled = iterable, desc or "", unit, unit_scale
        self.total = len(iterable) if total is None and hasattr(iterable, "__len__") else total  # pyright: ignore[reportArgumentType]
        self.n = self.initial = initial
        self.postfix = ""
        self.began = self.updated = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self.iterable or ():
                yield item
                self.update()

    def __enter__(self) -> "Lines":
        if self not in _open:
            _open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def update(self, n: float | int = 1) -> None:
        """Count n more as done; print a line, where one is due."""
        self.n += n
        self.updated = time.monotonic()
        self._tell()

    def _tell(self) -> None:
        now, began = time.monotonic(), _open[0].began if _open else self.began
        if now - max(began, _told[0]) >= SECONDS:
            _told[0] = now
            print(self, file=sys.stderr, flush=True)

    def reset(self, total: float | int | None = None) -> None:
        """Start again from zero, with another total if one is given."""
        self.n, self.initial = 0, 0
        self.total = self.total if total is None else total
        self.began = self.updated = time.monotonic()

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Set the end of a line; print one now, where one is due: the next step may take minutes."""
        self.postfix = text
        if refresh:
            self._tell()

    def set_postfix(self, values: Mapping[str, Any], refresh: bool = True) -> None:
        """Set the end of a line from names and values."""
        self.postfix = ", ".join(f"{name}={value}" for name, value in values.items())

    def close(self) -> None:
        """Take the loop off the list of those that run."""
        if self in _open:
            _open.remove(self)

    def __str__(self) -> str:
        outer = _open[: _open.index(self)] if self in _open else []
        parts = [": ".join(filter(None, [" > ".join([*(each._at() for each in outer), self._at()]), self.postfix]))]
        whole = outer[0] if outer else self  # a reader wants to know when all of it is done
        now, done = time.monotonic(), whole.n - whole.initial
        parts.append(f"{duration(now - whole.began)} so far")
        if whole.total and done > 0:
            left = (whole.updated - whole.began) * (whole.total - whole.n) / done - (now - whole.updated)
            parts += [f"about {duration(left)} left"] * (left >= 1)
        return f"    {', '.join(parts)}"

    def _at(self) -> str:
        if self.scaled and self.total:
            return f"{self.desc} {self.n / self.total:.0%}"
        return f"{self.desc} {self.n:g}{f'/{self.total:g}' if self.total else ''} {self.unit}"


class Steps:
    """Steps of a long call, numbered as they begin: "3/9 measure blocks.8.mlp_out (about 40 s, as the last of these)".

    Args:
        tell: takes the line.
        kinds: the first word of every step, in their order. A call may leave steps out (what a folder holds already); what is not
            among them is a part of the present step.
        complete: False where further steps follow that are not known yet, see `follow`.
    """

    def __init__(self, tell: Callable[[str], None], kinds: Sequence[str], complete: bool = True):
        self.tell, self.kinds, self.complete = tell, list(kinds), complete
        self.at, self.text = 0, ""
        self._seconds: dict[str, float] = {}
        self._kind, self._began = "", time.monotonic()

    def where(self) -> str:
        """Words to put behind a verb: the step that the call is in, and how many are finished; "" before the first."""
        number = f"{self.at} of {len(self.kinds)}" if self.complete else str(self.at)
        return f" in step {number} ({self.text}), {self.at - 1} finished" if self.at else ""

    def follow(self, kinds: Sequence[str]) -> None:
        """Add the steps that were not known at first."""
        self.kinds, self.complete = [*self.kinds, *kinds], True

    def __call__(self, text: str) -> None:
        """Announce that a step begins, or a part of one."""
        kind, now = text.split()[0], time.monotonic()
        if kind not in self.kinds[self.at :]:
            self.tell(f"  {text}")
            return
        self._seconds[self._kind] = now - self._began
        self._kind, self._began, self.text = kind, now, text
        self.at = self.kinds.index(kind, self.at) + 1
        interrupted.reached(self.where())
        last = self._seconds.get(kind, 0.0)
        expected = f" (about {duration(last)}, as the last of these)" if last >= 1 else ""
        self.tell(f"{self.at}{f'/{len(self.kinds)}' if self.complete else ''} {text}{expected}")


def duration(seconds: float | int) -> str:
    """8 s, 3:05 min, 2:10 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    unit, (large, small) = ("min", divmod(whole, 60)) if whole < 3600 else ("h", divmod(whole // 60, 60))
    return f"{large}:{small:02} {unit}"
