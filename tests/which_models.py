"""Which models: a small random checkpoint of every architecture, loaded as a bridge, beside transformers' own model.

    python -m tests.which_models            writes swd_lens/MODELS.md (about five minutes)
    python -m tests.which_models --check    says which rows are not as it has them

1. `Tried.of(name)` writes the checkpoint, loads it as a user does, and compares one row's logits with transformers'; a host
   that differs is refused, and the row says so.
2. Of a host that is there: its sites by kind, the share of the entries of its blocks' matrices that they hold and what holds the
   rest, the logits with exact factors in every site, and whether they are restored to the bit.
3. The page has one row for each, of the newest transformer_lens 3 (tests) and what differs on 4.x (`--check` there).
"""

import argparse
import re
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torch import nn

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import Host, host_of, matrix_entries
from swd_lens.hosts.sites import base_kind, kind_order
from tests import families

PAGE = Path(swd.__file__).parent / "MODELS.md"
_HEAD = """\
# Which models

Every architecture here was tried as a small random checkpoint (`python -m tests.which_models`): one row of tokens through
transformers' own model and through the bridge that `swd.load_host(folder)` makes, with every site replaced by exact factors, and
restored. **Sites** hold the named share of the entries of the matrices in the blocks; *left dense* says what holds the rest.
These checkpoints are tiny, so that routers and convolutions weigh more than in real ones: *full size* is that of the same
modules in a model of transformers' default configuration. A host whose logits differ from transformers' by more than a
thousandth, or that does not run, is refused (`load_host(..., check=False)` takes it).
`blocks.L.mlp_in.E` is expert E's matrix, and a name with a dot such as `attn.kv_a_proj_with_mqa` a linear map without a kind.
The rows are of transformer_lens 3.9; on 4.3 the bridges of Cohere, Cohere2 and HunYuanDenseV1 are transformers' model, too.

| architecture | host | sites | share | full size | left dense |
|---|---|---|---:|---:|---|
"""


@dataclass(frozen=True)
class Tried:
    """One architecture.

    `logits` and `exact` are largest differences, relative to the largest logit (bridge to transformers, exact factors to the
    bridge), `kinds` those of the sites, experts' together, `left` what holds matrices and is no site, `share` that of the entries
    of the blocks' matrices, `full_share` the same of a model of the default configuration, if there is one.
    """

    name: str
    refused: str | None = None
    logits: float = 0.0
    exact: float = 0.0
    kinds: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    share: float = 0.0
    full_share: float | None = None
    restored: bool = False

    @classmethod
    def of(cls, name: str) -> "Tried":
        model_class, config_class, config = families.architecture(name)
        folder = families.written(model_class, config_class, config)
        tokens = families.some_tokens()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            network = families.network(model_class, folder)
            plain = network(tokens).logits
            try:
                model = swd.load_host(str(folder), kind="bridge")
                host = host_of(model)
            except swd.UnsupportedHostError as refusal:
                return cls(name, refused=str(refusal))
            dense = model(tokens)
            with swd.attach(model, baselines.svd(model, "all")):
                replaced = model(tokens)
            again = model(tokens)
        ordered = sorted(host.sites(), key=lambda site: kind_order(site.kind))
        return cls(
            name,
            logits=_difference(dense, plain),
            exact=_difference(replaced, dense),
            kinds=tuple(dict.fromkeys(base_kind(site.kind) + ".E" * (site.expert is not None) for site in ordered)),
            left=tuple(dict.fromkeys(other.partition(":")[0] for block in host.blocks() for other in block.other_matrices)),
            share=sum(site.numel for site in host.sites()) / matrix_entries(host),
            full_share=full_share(host, network, config_class),
            restored=torch.equal(again, dense),
        )

    def row(self) -> str:
        if self.refused is not None:
            return f"| {self.name} | refused | | | | |"
        kinds, left = (", ".join(f"`{name}`" for name in names) for names in (self.kinds, self.left))
        full = "" if self.full_share is None else f"{self.full_share:.3f}"
        return f"| {self.name} | bridge | {kinds} | {self.share:.3f} | {full} | {left} |"


def full_share(host: Host, plain: nn.Module, config_class: str) -> float | None:
    """The share of blocks' matrix entries that would be sites' in a model of the default configuration, by the names of modules.

    On no device: it may have 300 billion. A module that the tiny model has not counts as left dense. None where transformers
    makes no model of the default configuration.
    """
    left = set()
    for block, shapes in zip(host.model.blocks, host.blocks(), strict=True):
        for other in shapes.other_matrices:
            component, _, path = other.partition(":")[0].partition(".")
            left.add(".".join(part for part in (block._modules[component].name, path) if part))
    seen = {module for name, p in plain.named_parameters() if p.ndim > 1 and (module := _in_block(name)) is not None}
    try:
        with torch.device("meta"):
            full = type(plain)(getattr(transformers, config_class)())
    except TypeError:  # a default of None that its own code divides by
        return None
    entries = {name: p.numel() for name, p in full.named_parameters() if p.ndim > 1 and _in_block(name) is not None}
    return sum(n for name, n in entries.items() if _in_block(name) in seen - left) / sum(entries.values())


def _in_block(parameter: str) -> str | None:
    """The path of a parameter's module within its block; None of what is in no block."""
    path = re.match(r"[^\d]*\.\d+\.(.*)\.[^.]+$", parameter)
    return None if path is None else re.sub(r"\d+", "N", path[1])


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


def page(rows: list[str]) -> str:
    return _HEAD + "\n".join(rows) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.which_models", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    parser.add_argument("names", nargs="*", help="these architectures only, printed")
    given = parser.parse_args(arguments)
    rows, failed = [], []
    for name in given.names or families.ARCHITECTURES:
        try:
            tried = Tried.of(name)
        except Exception as failure:  # named below; the others are still tried
            failed.append(f"{name}: {type(failure).__name__}: {str(failure)[:200]}")
            continue
        rows.append(tried.row())
        print(f"{rows[-1]} logits {tried.logits:.1e}, exact {tried.exact:.1e}, restored {tried.restored}", flush=True)
    print(*failed, sep="\n", file=sys.stderr)
    rows.sort(key=str.lower)
    if given.names:
        return int(bool(failed))
    if given.check:
        kept = set(PAGE.read_text().splitlines())
        print(f"transformer_lens {version('transformer_lens')}: other than on the page:")
        print(*[row for row in rows if row not in kept], sep="\n")
    else:
        PAGE.write_text(page(rows))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
