"""train-baseline: what the paper compares SWD with, trained on a matrix or from scratch; it goes on after an interruption.

swd-lens train-baseline transcoder       a ReLU transcoder of one matrix, or of a whole MLP
swd-lens train-baseline vpd-recon        rank-one parameter components, by local reconstruction
swd-lens train-baseline vpd-kl           the same by the KL of the host's logits
swd-lens train-baseline sparse-pretrain  a GPT-2 of a host's shape, trained from scratch with ever fewer weights
"""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.markup import escape

from swd_lens.circuits import fidelity
from swd_lens.cli.common import app, load_model, print_json, say, show_progress, text_rows, told, use_threads
from swd_lens.cli.options import (
    HeldoutOption,
    HostOption,
    JsonOption,
    ModelOption,
    OverwriteOption,
    ThreadsOption,
)
from swd_lens.cli.outline import output
from swd_lens.hosts import find_sites
from swd_lens.report.terminal import table
from swd_lens.train.baselines import (
    LearnedUnits,
    channels_of,
    presets,
    sparse_pretrain,
    sparse_spec,
    transcoder,
    vpd_kl,
    vpd_recon,
)
from swd_lens.train.baselines.spec import resolve

group = typer.Typer(no_args_is_help=True, help="Train what SWD is compared with: transcoders, VPD, sparse pretraining.")
app.add_typer(group, name="train-baseline")

OutOption = Annotated[Path, typer.Option(help="Folder for recipe, log, checkpoints and result.")]
SiteOption = Annotated[str, typer.Option("--site", help="One matrix, blocks.8.mlp_out, or a whole MLP, blocks.8.mlp.")]
TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text", help="Text file: its first part trains, its last measures. Not needed for the embedded model."
    ),
]
TextTokensOption = Annotated[int, typer.Option("--tokens", help="Tokens of training text; gone through again.", min=1)]
BudgetOption = Annotated[
    int | None, typer.Option("--n-tokens", help="Tokens to train on; default the preset's.", min=1)
]
EveryOption = Annotated[int, typer.Option("--checkpoint-every", help="Steps between checkpoints.", min=1)]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE, a setting of the recipe; repeatable.")]


def _preset_option(names: Any) -> Any:
    return typer.Option("--preset", help=f"Of the recipe: {', '.join(names)}.")


def _command(name: str, train: Callable[..., LearnedUnits], recipes: Any, summary: str) -> None:
    """Register the command of one method; the three differ in their presets only."""

    def command(
        out: OutOption,
        site: SiteOption,
        model_name: ModelOption = "default",
        host: HostOption = "auto",
        text: TextOption = None,
        tokens: TextTokensOption = 262_144,
        n_tokens: BudgetOption = None,
        heldout_tokens: HeldoutOption = 16_384,
        preset: Annotated[str, _preset_option(recipes)] = presets.DEFAULT,
        settings: SetOption = None,
        checkpoint_every: EveryOption = 100,
        overwrite: OverwriteOption = False,
        as_json: JsonOption = False,
        threads: ThreadsOption = None,
    ) -> None:
        with told(goes_on=True):
            use_threads(threads)
            chosen = _settings(settings, n_tokens)
            model = load_model(model_name, host)
            # A wrong name or setting should fail before the text is read.
            resolve(presets.named(recipes, preset, find_sites(model, site)[0].kind), chosen)
            rows, heldout = text_rows(model, model_name, text, tokens, heldout_tokens, trained=True)
            say(f"train {name} at {site}")
            units = train(
                model,
                site,
                rows,
                preset=preset,
                out=out,
                overwrite=overwrite,
                checkpoint_every=checkpoint_every,
                progress=show_progress(),
                **chosen,
            )
            say("fidelity and activity on held-out text")
            _deliver(model, units, heldout, out, as_json)

    command.__doc__ = f"{summary}\n\nThe same command again goes on where it was stopped."
    group.command(name)(command)


_command("transcoder", transcoder, presets.TRANSCODERS, "A ReLU transcoder in place of one matrix, or of a whole MLP.")
_command(
    "vpd-recon", vpd_recon, presets.VPD_RECONS, "VPD-Recon-CI: components and their importance, by reconstruction."
)
_command("vpd-kl", vpd_kl, presets.VPD_KLS, "VPD-KL: components and their importance, by the KL of the host's logits.")


@group.command("sparse-pretrain")
def sparse_pretrain_command(
    out: OutOption,
    like: Annotated[
        str, typer.Option(help="A model whose shape and tokenizer are taken, as --model elsewhere.")
    ] = "default",
    host: HostOption = "auto",
    text: TextOption = None,
    tokens: TextTokensOption = 1_048_576,
    heldout_tokens: HeldoutOption = 16_384,
    preset: Annotated[str, _preset_option(sparse_spec.PRESETS)] = "small",
    settings: SetOption = None,
    checkpoint_every: EveryOption = 200,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """A GPT-2 trained from scratch under a falling density; OUT/model is a checkpoint folder that --model takes.

    The same command again goes on where it was stopped.
    """
    with told(goes_on=True):
        use_threads(threads)
        chosen = _settings(settings, None)
        sparse_spec.named(preset).changed(chosen)  # a wrong name should fail before the text is read
        model = load_model(like, host)
        rows, heldout = text_rows(model, like, text, tokens, heldout_tokens, trained=True)
        say("pretrain")
        made = sparse_pretrain(
            model,
            rows,
            out=out,
            preset=preset,
            heldout=heldout,
            overwrite=overwrite,
            checkpoint_every=checkpoint_every,
            progress=show_progress(),
            **chosen,
        )
        channels = channels_of(made.load())
        numbers = {key: value for key, value in made.provenance.items() if key not in ("settings", "method", "step")}
        numbers |= {
            "units": sum(u.n_units for u in channels.values()),
            "edges": sum(u.edges for u in channels.values()),
        }
        if as_json:
            print_json({"folder": str(made.folder), "provenance": made.provenance, **numbers})
            return
        output.print(table("Sparsely pretrained", pd.DataFrame([numbers])))
        output.print(escape(f"Saved to {made.folder}; load_host({str(made.folder)!r}) reads it."), highlight=False)


def _settings(given: list[str] | None, n_tokens: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {} if n_tokens is None else {"n_tokens": n_tokens}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: give NAME=VALUE, such as --set learning_rate=1e-3")
        if name.strip() in found:
            raise ValueError(f"--set {text}: {name.strip()} is given twice")
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    """A value as JSON or as Python writes it (true, True, null, None, .001), else a word."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _deliver(model: Any, units: LearnedUnits, heldout: Any, out: Path, as_json: bool) -> None:
    measured, activity = fidelity(model, units, heldout), units.report(model, heldout)
    if as_json:
        numbers = {"fidelity": measured.as_dict(), "activity": activity.table().to_dict("records")}
        print_json({"folder": str(out), "tokens": units.tokens, "provenance": units.provenance, **numbers})
        return
    output.print(table("Fidelity on held-out text", measured.table()))
    output.print(table("Units at work", activity.table()))
    output.print(escape(f"Saved to {out}; swd.baselines.LearnedUnits.load({str(out)!r}) reads it."), highlight=False)
