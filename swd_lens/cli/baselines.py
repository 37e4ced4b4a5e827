"""finetune and train-baseline: what is trained on text. Each goes on after an interruption.

swd-lens finetune                        the values of finished factors on their fixed supports, in one process or many:
                                         accelerate launch --num_processes 2 -m swd_lens.cli finetune ...

train-baseline: what the paper compares SWD with, trained on a matrix or from scratch.

swd-lens train-baseline transcoder       a ReLU transcoder of one matrix, or of a whole MLP
swd-lens train-baseline vpd-recon        rank-one parameter components, by local reconstruction
swd-lens train-baseline vpd-kl           the same by the KL of the host's logits
swd-lens train-baseline sparse-pretrain  a GPT-2 of a host's shape, trained from scratch with ever fewer weights
"""

import ast
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import typer
from typer import Option

from swd_lens.base.errors import legible
from swd_lens.circuits import fidelity
from swd_lens.cli import status
from swd_lens.cli.options import (
    LargeModelOptions,
    ModelOptions,
    OutputOptions,
    OverwriteOption,
    TextOptions,
    TrainingTextOptions,
    TrainingTokensOption,
    app,
    command,
    plan,
    say,
)
from swd_lens.hosts import find_sites
from swd_lens.hosts.embedded import text_tokens
from swd_lens.report.terminal import table
from swd_lens.train.baselines import LearnedUnits, channels_of, sparse_pretrain, transcoder, vpd_kl, vpd_recon
from swd_lens.train.baselines.sparse_training import SPARSE_PRETRAINS
from swd_lens.train.baselines.spec import DEFAULT, TRANSCODERS, VPD_KLS, VPD_RECONS, recipe
from swd_lens.train.finetune import PRESETS as FINETUNINGS
from swd_lens.train.finetune import finetune
from swd_lens.train.rows import launched
from swd_lens.units.factors import FactorSet

group = typer.Typer(no_args_is_help=True, help="Train what SWD is compared with: transcoders, VPD, sparse pretraining.")
app.add_typer(group, name="train-baseline")

OutOption = Annotated[Path, Option(help="Folder for recipe, log, checkpoints and result.")]
EveryOption = Annotated[int, Option("--checkpoint-every", help="Steps between checkpoints.", min=1)]
SetOption = Annotated[list[str] | None, Option("--set", help="NAME=VALUE, a setting of the recipe; repeatable.")]


def _preset_option(names: Any) -> Any:
    return Option("--preset", help=f"Of the recipe: {', '.join(names)}.")


def _register(name: str, train: Callable[..., LearnedUnits], recipes: Any, summary: str) -> None:
    """Register the command of one method; the three differ in their presets only."""

    def train_units(
        *,
        out: OutOption,
        site: Annotated[str, Option("--site", help="One matrix, blocks.8.mlp_out, or a whole MLP, blocks.8.mlp.")],
        model_options: ModelOptions,
        text: TrainingTextOptions,
        n_tokens: Annotated[int | None, Option("--n-tokens", help="Tokens to train on; default the preset's.", min=1)] = None,
        preset: Annotated[str, _preset_option(recipes)] = DEFAULT,
        settings: SetOption = None,
        checkpoint_every: EveryOption = 100,
        overwrite: OverwriteOption = False,
        printed: OutputOptions,
    ) -> None:
        changes = parsed_settings(settings, n_tokens)
        plan("load", "train", "measure")
        model = model_options.load()
        # A wrong name or setting should fail before the text is read.
        recipe(recipes, preset, find_sites(model, site)[0].kind).changed(changes)
        rows, heldout = text.rows(model, model_options)
        say(f"train {name} at {site}")
        units = train(
            model,
            site,
            rows,
            preset=preset,
            out=out,
            overwrite=overwrite,
            checkpoint_every=checkpoint_every,
            progress=True,
            **changes,
        )
        say("measure fidelity and activity on held-out text")
        measured = fidelity(model, units, heldout, progress=True)
        activity = units.report(model, heldout, progress=True).table()
        numbers = {"fidelity": measured.as_dict(), "activity": activity.to_dict("records")}
        printed.show(
            {"folder": str(out), "tokens": units.tokens, "provenance": units.provenance, **numbers},
            table("Fidelity on held-out text", measured.table()),
            table("Units at work", activity),
            f"Saved to {out}; swd.baselines.LearnedUnits.load({str(out)!r}) reads it.",
        )

    train_units.__doc__ = f"{summary}\n\nThe same command again goes on where it was stopped."
    command(group, name, goes_on=True)(train_units)


_register("transcoder", transcoder, TRANSCODERS, "A ReLU transcoder in place of one matrix, or of a whole MLP.")
_register("vpd-recon", vpd_recon, VPD_RECONS, "VPD-Recon-CI: components and their importance, by reconstruction.")
_register("vpd-kl", vpd_kl, VPD_KLS, "VPD-KL: components and their importance, by the KL of the host's logits.")


@dataclass(frozen=True)
class FinetuneTextOptions(TextOptions):
    """Text that factors are fine-tuned on, and text that judges them."""

    tokens: TrainingTokensOption = 117_760
    purpose: ClassVar[str] = "factors are fine-tuned on its first part and measured on its last"

    def rows(self, model: Any, options: ModelOptions, tokens: int | None = None) -> tuple[Any, Any]:
        """See `TextOptions.rows`; rows of the embedded model are of another seed than calibration's, new to the solver."""
        if self.text is None and options.model == "default":
            return text_tokens(self.tokens, split="train", seed=1), text_tokens(self.heldout_tokens, split="validation")
        return super().rows(model, options, tokens)


@command(app, "finetune", goes_on=True)
def finetune_command(
    *,
    factors: Annotated[Path, Option(help="Folder of finished factors.")],
    out: Annotated[Path, Option(help="Folder for log, checkpoints and the tuned factors (OUT/factors).")],
    model_options: LargeModelOptions,
    text: FinetuneTextOptions,
    preset: Annotated[str, _preset_option(FINETUNINGS)] = "best",
    settings: SetOption = None,
    eval_every: Annotated[int | None, Option(help="Steps between measurements on held-out text.", min=1)] = None,
    checkpoint_every: EveryOption = 100,
    overwrite: OverwriteOption = False,
    printed: OutputOptions,
) -> None:
    """Fine-tune the values of finished factors on their fixed supports, in one process or many (accelerate launch).

    The same command again goes on where it was stopped. Each of several processes loads the model on its own device.
    """
    first, device = True, None
    if launched():
        from accelerate import PartialState

        state = PartialState()
        first, device = state.is_main_process, str(state.device)
    status.quiet = not first
    changes = parsed_settings(settings)
    plan("load", "fine-tune")
    model = model_options.load(device=device)
    rows, heldout = text.rows(model, model_options)
    say("fine-tune")
    tuned = finetune(
        model,
        FactorSet.load(factors),
        rows,
        preset=preset,
        heldout=heldout,
        out=out,
        overwrite=overwrite,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        progress=True,
        **changes,
    )
    if first:
        numbers = {name: value for name, value in tuned.provenance["finetune"].items() if name != "settings"}
        shown = {name: value for name, value in numbers.items() if isinstance(value, int | float | str)}
        printed.show(
            {"factors": str(out / "factors"), **tuned.provenance["finetune"]},
            table("Fine-tuned", pd.DataFrame([shown])),
            f"Saved to {out / 'factors'}; swd.FactorSet.load reads it.",
        )


@dataclass(frozen=True)
class LikeOptions(ModelOptions):
    """A model whose shape and tokenizer are taken."""

    model: Annotated[str, Option("--like", help="A model whose shape and tokenizer are taken, as --model elsewhere.")] = "default"


@dataclass(frozen=True)
class PretrainingTextOptions(TrainingTextOptions):
    """As for the other baselines, but more."""

    tokens: TrainingTokensOption = 1_048_576


@command(group, "sparse-pretrain", goes_on=True)
def sparse_pretrain_command(
    *,
    out: OutOption,
    like: LikeOptions,
    text: PretrainingTextOptions,
    preset: Annotated[str, _preset_option(SPARSE_PRETRAINS)] = "small",
    settings: SetOption = None,
    checkpoint_every: EveryOption = 200,
    overwrite: OverwriteOption = False,
    printed: OutputOptions,
) -> None:
    """A GPT-2 trained from scratch under a falling density; OUT/model is a checkpoint folder that --model takes.

    The same command again goes on where it was stopped.
    """
    changes = parsed_settings(settings)
    recipe(SPARSE_PRETRAINS, preset).changed(changes)  # a wrong name should fail before the text is read
    plan("load", "pretrain")
    model = like.load()
    rows, heldout = text.rows(model, like)
    say("pretrain")
    pretrained = sparse_pretrain(
        model,
        rows,
        out=out,
        preset=preset,
        heldout=heldout,
        overwrite=overwrite,
        checkpoint_every=checkpoint_every,
        progress=True,
        **changes,
    )
    channels, provenance = channels_of(pretrained.load()).values(), pretrained.provenance
    numbers = {key: value for key, value in provenance.items() if key not in ("settings", "method", "step")}
    numbers |= {"units": sum(u.n_units for u in channels), "edges": sum(u.edges for u in channels)}
    folder = str(pretrained.folder)
    printed.show(
        {"folder": folder, "provenance": provenance, **numbers},
        table("Sparsely pretrained", pd.DataFrame([numbers])),
        f"Saved to {folder}; load_host({folder!r}) reads it.",
    )


def parsed_settings(texts: Sequence[str] | None, n_tokens: int | None = None) -> dict[str, Any]:
    """Settings of a recipe from NAME=VALUE; values as JSON or as Python writes them (true, True, null, None, .001), else words.

    Raises:
        ValueError: no NAME=VALUE, or a name twice.
    """
    settings: dict[str, Any] = {} if n_tokens is None else {"n_tokens": n_tokens}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {legible(text)}: give NAME=VALUE, such as --set learning_rate=1e-3")
        if name.strip() in settings:
            raise ValueError(f"--set {legible(text)}: {legible(name.strip())} is given twice")
        settings[name.strip()] = value.strip()
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError):
                settings[name.strip()] = read(value.strip())
                break
    return settings
