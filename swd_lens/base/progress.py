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

SECONDS = 30.0  # between the lines of a log
_open: list["Lines"] = []  # the loops that run now, outermost first
_told = [-SECONDS]  # when the last line was written


def tqdm(iterable: Iterable[Any] | None = None, **how: Any) -> Any:
    """A bar, or `Lines` where bars would fill a log; arguments as for tqdm.auto.tqdm."""
    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return (bars if seen or how.get("disable") else Lines)(iterable, **how)


class Lines:
    """What this package uses of tqdm, as lines of text on stderr; arguments as there."""

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
        self.began = time.monotonic()

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
        """So much more is done; a line, where one is due."""
        self.n += n
        now = time.monotonic()
        began = _open[0].began if _open else self.began
        if now - max(began, _told[0]) >= SECONDS:
            _told[0] = now
            print(self, file=sys.stderr, flush=True)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """What a line ends in."""
        self.postfix = text

    def set_postfix(self, values: Mapping[str, Any], refresh: bool = True) -> None:
        """The same, of names and values."""
        self.postfix = ", ".join(f"{name}={value}" for name, value in values.items())

    def close(self) -> None:
        """The loop is over."""
        if self in _open:
            _open.remove(self)

    def __str__(self) -> str:
        outer = _open[: _open.index(self)] if self in _open else []
        parts = [": ".join(filter(None, [" > ".join([*(each._at() for each in outer), self._at()]), self.postfix]))]
        spent, done = time.monotonic() - self.began, self.n - self.initial
        parts.append(f"{duration(spent)} so far")
        if self.total and done > 0 and self.n <= self.total:
            parts.append(f"about {duration(spent * (self.total - self.n) / done)} left")
        return f"    {', '.join(parts)}"

    def _at(self) -> str:
        if self.scaled and self.total:
            return f"{self.desc} {self.n / self.total:.0%}"
        return f"{self.desc} {self.n:g}{f'/{self.total:g}' if self.total else ''} {self.unit}"


class Steps:
    """Steps of a long call: "3/9 circuits of ioi (about 40 s, as the last of these)".

    Args:
        tell: takes the line.
        kinds: the first word of every step, in their order. A call may leave steps out (what a folder holds already).
    """

    def __init__(self, tell: Callable[[str], None], kinds: Sequence[str]):
        self.tell, self.kinds = tell, list(kinds)
        self.at, self.seconds = 0, dict[str, float]()
        self.kind, self.began = "", time.monotonic()

    def __call__(self, text: str) -> None:
        """A step begins."""
        now = time.monotonic()
        self.seconds[self.kind] = now - self.began
        self.kind, self.began = text.split()[0], now
        number = ""
        if self.kind in self.kinds[self.at :]:
            self.at = self.kinds.index(self.kind, self.at) + 1
            number = f"{self.at}/{len(self.kinds)} "
        last = self.seconds.get(self.kind, 0.0)
        self.tell(f"{number}{text}{f' (about {duration(last)}, as the last of these)' if last >= 1 else ''}")


def duration(seconds: float | int) -> str:
    """8 s, 3:05 min, 2:10 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    unit, (large, small) = ("min", divmod(whole, 60)) if whole < 3600 else ("h", divmod(whole // 60, 60))
    return f"{large}:{small:02} {unit}"
