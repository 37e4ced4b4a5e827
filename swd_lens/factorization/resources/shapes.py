"""What an estimate is asked about: matrices of a host or shapes alone, their sparsities, tokens, and the order of calibration."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any, Literal

from jaxtyping import Int
from torch import Tensor

from swd_lens.hosts.sites import PACKED, Pattern, Site, UnknownSiteError, select_sites, split_name
from swd_lens.solver import SparsityError, resolve
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.text import TokenError

CALIBRATIONS = ("sequential", "corrected", "per_block", "dense")

# A host that has every token and any context: for tokens of a model that is not loaded.
_ANY_HOST = SimpleNamespace(cfg=SimpleNamespace(d_vocab=float("inf"), n_ctx=float("inf")))


@dataclass(frozen=True)
class Shape:
    """A matrix of which no more is known than a label and its shape."""

    name: str
    d_in: int
    d_out: int

    @property
    def numel(self) -> int:
        return self.d_in * self.d_out

    def __str__(self) -> str:
        return f"{self.name} ({self.d_in}, {self.d_out})"


Matrix = Site | Shape


def matrices_of(shapes: Any, sites: Pattern = "all") -> list[Matrix]:
    """Name -> (d_in, d_out), or one (d_in, d_out), as matrices: sites where the names are site names.

    Raises:
        ValueError: no shapes, one that is not a pair of whole numbers of at least 1, or a pattern beside them.
    """
    if sites != "all":
        raise ValueError(f"sites={sites!r}: every shape given is estimated; leave out those that you do not want")
    named = dict(shapes) if isinstance(shapes, Mapping) else {"matrix": shapes}
    if not named:
        raise ValueError("there are no shapes to estimate; give name -> (d_in, d_out)")
    return [_matrix(str(name), shape) for name, shape in named.items()]


def _matrix(name: str, shape: Any) -> Matrix:
    pair = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in pair):
        raise ValueError(f"{name}: {shape!r} is no shape; give (d_in, d_out), two whole numbers of at least 1")
    try:
        return Site(*split_name(name), *pair)
    except UnknownSiteError:
        return Shape(name, *pair)


def check_calibration(calibration: str) -> str:
    """The same word. Raises ValueError unless it is one of `CALIBRATIONS`."""
    if calibration not in CALIBRATIONS:
        raise ValueError(f"calibration must be one of {', '.join(map(repr, CALIBRATIONS))}, got {calibration!r}")
    return calibration


def check_passes(batch_size: int, gram_dtype: str) -> None:
    """Raises ValueError for settings with which no pass over the tokens can be made."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: give how many rows run in one forward, 1 or more")
    if gram_dtype not in ("auto", "float32", "float64"):
        raise ValueError(f"gram_dtype={gram_dtype!r}: give 'auto', 'float32' or 'float64'")


def gram_dtype_for(
    gram_dtype: str, sites: Sequence[Matrix], preset: str, options: Mapping[str, Any]
) -> Literal["float32", "float64"]:
    """What "auto" stands for: float64 where every matrix is solved in float64, else float32.

    Factors of a float32 Gram differ between processors though they are solved in float64 (6 of 16 factorizations of the embedded
    model; of a float64 Gram none).
    """
    with naming(sites[0]):
        spec = resolve(preset, options)
    solved_in_double = all(spec.precision_for(site.d_in, site.d_out) == "float64" for site in sites)
    return "float64" if gram_dtype == "float64" or (gram_dtype == "auto" and solved_in_double) else "float32"


def refuse_whole_mlps(sites: Sequence[Matrix]) -> None:
    """Raises UnknownSiteError for a site that is no single matrix."""
    for site in sites:
        if isinstance(site, Site) and site.kind == "mlp":
            raise UnknownSiteError(
                f"{site.name} is a whole MLP, not one matrix; name {', '.join(PACKED['mlp'])} instead (only transcoders stand "
                "there)"
            )


def sparsity_of_each(sites: Sequence[Matrix], sparsity: float | int | Mapping[str, float]) -> dict[str, float]:
    """Site name -> s: one for all, or a mapping whose keys are patterns (see `swd_lens.hosts.sites.select_sites`).

    Raises:
        UnknownSiteError: a key matches none of the sites.
        SparsityError: a site without an s, or with two different ones.
    """
    if not isinstance(sparsity, Mapping):
        return {site.name: float(sparsity) for site in sites}
    given: dict[str, float] = {}
    for pattern, s in sparsity.items():
        for site in _matching(sites, pattern):
            if given.setdefault(site.name, float(s)) != float(s):
                raise SparsityError(f"{site.name} is given two sparsities, {given[site.name]:g} and {float(s):g}")
    if missing := [site.name for site in sites if site.name not in given]:
        raise SparsityError(
            f"no sparsity is given for {', '.join(missing)}; name every site, or give one number for all"
        )
    return given


def _matching(sites: Sequence[Matrix], pattern: str) -> Sequence[Matrix]:
    labelled = [site for site in sites if isinstance(site, Shape)]
    if not labelled:
        return select_sites([site for site in sites if isinstance(site, Site)], pattern)
    found = [site for site in sites if pattern == "all" or fnmatchcase(site.name, pattern)]
    if not found:
        raise UnknownSiteError(f"no matrix matches {pattern!r}; there are {', '.join(site.name for site in sites)}")
    return found


@contextmanager
def naming(site: Matrix) -> Iterator[None]:
    """A solver's ValueError with the site in front (the same kind of error): a solver only ever sees a tensor."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{site}: {error}") from error


def token_shape(tokens: Any, model: Any) -> tuple[int, int] | None:
    """(rows, pos) of calibration tokens, or of a number of them; None for zero-data. model None: any host."""
    host = _ANY_HOST if model is None else model
    if tokens is None or (isinstance(tokens, int) and tokens == 0 and not isinstance(tokens, bool)):
        return None
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        if tokens < 0:
            raise TokenError(f"tokens={tokens}: give how many there are, the (rows, pos) ids, or None for zero-data")
        pos = int(min(tokens, host.cfg.n_ctx))
        return -(-tokens // pos), pos
    stream = as_stream(tokens, host)
    return stream.n_rows, stream.row_length


def shape_of(rows: Int[Tensor, "rows pos"]) -> tuple[int, int]:
    return rows.shape[0], rows.shape[1]
