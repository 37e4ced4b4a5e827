"""Fine-tune saved factors from the command line, on one process or many:

    python -m swd_lens.train.finetune --factors DIR --out DIR
    accelerate launch --num_processes 2 -m swd_lens.train.finetune --model NAME --factors DIR --text FILE --out DIR

Each process loads the host on its own device. The embedded model has its own text; other hosts need --text.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from swd_lens.base.errors import error
from swd_lens.hosts.embedded import load_default_model, text_tokens
from swd_lens.hosts.load import load_host
from swd_lens.tasks.text import pack_text
from swd_lens.train.finetune import PRESETS, finetune
from swd_lens.units.factors import FactorSet


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m swd_lens.train.finetune", description="Fixed-support fine-tuning (SWD-FT)."
    )
    parser.add_argument("--factors", type=Path, required=True, help="folder of a FactorSet")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for log, checkpoints and the result (OUT/factors)"
    )
    parser.add_argument("--model", default="default", help='"default" (embedded), or what load_host takes')
    parser.add_argument("--host", default="auto", choices=("auto", "hooked", "bridge"))
    parser.add_argument("--text", type=Path, help="UTF-8 text; the held-out part is taken from its end")
    parser.add_argument("--tokens", type=int, default=117_760, help="training tokens [default: 117760]")
    parser.add_argument("--heldout-tokens", type=int, default=16_384)
    parser.add_argument("--preset", default="best", choices=list(PRESETS))
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--eval-every", type=int)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of FinetuneSpec; repeatable"
    )
    args = parser.parse_args()
    try:
        recipe = dict(_setting(text) for text in args.set)
        model = _model(args.model, args.host)
        tokens, heldout = _text(model, args)
        result = finetune(
            model,
            FactorSet.load(args.factors),
            tokens,
            preset=args.preset,
            heldout=heldout,
            out=args.out,
            overwrite=args.overwrite,
            eval_every=args.eval_every,
            checkpoint_every=args.checkpoint_every,
            progress=True,
            **recipe,
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"factors": str(args.out / "factors"), **result.provenance["finetune"]}, indent=1))
    return 0


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a word


def _model(name: str, kind: str) -> Any:
    device = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        device = PartialState().device
    if name == "default":
        return load_default_model(device, kind=kind)
    return load_host(name, kind, device=None if device is None else str(device))


def _text(model: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """Training and held-out rows that share no token."""
    if args.text is None:
        if args.model != "default":
            raise error("cli-finetune-text-needed")
        # Rows of another seed than calibration's, so that training text is text that the solver has not seen.
        heldout = text_tokens(args.heldout_tokens, split="validation")
        return text_tokens(args.tokens, split="train", seed=1), heldout
    rows = pack_text(model, args.text.read_text(encoding="utf-8"))
    n = min(-(-args.heldout_tokens // rows.shape[1]), len(rows) // 2)
    if n == 0:
        raise error("cli-finetune-text-too-short", file=args.text, n_rows=len(rows), n_tokens=rows.shape[1])
    return rows[:-n][: -(-args.tokens // rows.shape[1])], rows[-n:]


if __name__ == "__main__":
    sys.exit(main())
