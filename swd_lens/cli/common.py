"""swd-lens: the command line. Each command walks part of the same road and prints tables, or JSON with --json.

    swd-lens demo       the whole road on the embedded model, offline, ending in a report
    swd-lens factorize  SWD factors of your model's matrices, saved to a folder, with their fidelity
    swd-lens circuit    factors, fidelity, circuits and a report for your model and tasks

1. Options become a host, token rows and tasks (`_load_model`, `_text`, `load_task`).
2. `run_study` or `factorize` does the work; progress goes to stderr, results to stdout.
3. Files are written whole, the report last. Errors that a user can mend are printed without a traceback; exit code 1. Ctrl-C
   exits with 130 and leaves no half-written file; `factorize` goes on from there when called again.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.markup import escape

from swd_lens import __version__
from swd_lens.default_model import load_default_model, text_tokens
from swd_lens.default_model.load import KINDS
from swd_lens.files import plain
from swd_lens.hosts import UnsupportedHostError, find_sites
from swd_lens.hosts.load import load_host
from swd_lens.plan import factorize as factorize_model
from swd_lens.report import write_report
from swd_lens.report.terminal import print_run, table
from swd_lens.solver import DEFAULT_PRESET, PRESETS
from swd_lens.study import Run, fidelity, run_study
from swd_lens.study.run import CONTROLS
from swd_lens.tasks import load_task, pack_text
from swd_lens.tasks.generators import FAMILIES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pretrained weights become circuit units.",
)
status, output = Console(stderr=True), Console()

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", help="'default' (embedded), a TransformerLens model name, or a local Hugging Face checkpoint folder."
    ),
]
HostOption = Annotated[
    str,
    typer.Option(
        "--host",
        help=f"Load it as: {', '.join(KINDS)}. auto: HookedTransformer where possible, else TransformerBridge.",
    ),
]
SitesOption = Annotated[
    list[str],
    typer.Option("--sites", help="Pattern of sites, e.g. blocks.8.mlp_out or 'blocks.*.mlp_out'; repeatable."),
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text", help="Text file: its first part calibrates, its last part judges. Not needed for the embedded model."
    ),
]
TokensOption = Annotated[int, typer.Option("--tokens", help="Calibration tokens; 0 = zero-data.", min=0)]
HeldoutOption = Annotated[
    int, typer.Option("--heldout-tokens", help="Held-out tokens for fidelity and contexts.", min=2)
]
IterationsOption = Annotated[
    int | None, typer.Option("--outer-iterations", help="Of the solver; default the preset's.", min=4)
]
PresetOption = Annotated[str, typer.Option("--preset", help=f"Of the solver: {', '.join(PRESETS)}.")]
UnitsOption = Annotated[
    str | None, typer.Option("--units", help='Per matrix: a number, or "2x" for twice min(d_in, d_out), the default.')
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads.", min=1)]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, the numbers and the factors.")] = Path("swd-demo"),
    host: HostOption = "auto",
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """The whole road on the embedded model: factors, hooked units, fidelity, circuits of four tasks, a report. Offline."""
    with _told():
        _use(threads)
        model = load_default_model(kind=host)
        last = model.cfg.n_layers - 1
        # One matrix, then a kind of matrix in every layer. Names are copied by attention, so attn_o is there beside the MLPs.
        surfaces = {
            f"blocks.{last}.mlp_out": f"blocks.{last}.mlp_out",
            "all attn_o": "attn_o",
            "all mlp_out": "mlp_out",
        }
        tasks = [load_task(name, model, n_train=150, n_test=150) for name in FAMILIES]
        run = run_study(
            model,
            surfaces,
            tasks,
            sparsities=(0.5, 0.75),
            calibration_tokens=text_tokens(16_384, split="train"),
            heldout_tokens=text_tokens(16_384, split="test"),
            # In float64, both kinds of host get the same factors: choosing supports amplifies the rounding of float32.
            calibration_model=load_default_model(kind=host, dtype=torch.float64),
            on_step=_say,
            progress=_progress(),
        )
        _deliver(run, out, as_json)


@app.command()
def factorize(
    out: Annotated[Path, typer.Option(help="Folder for the factors.")],
    sites: SitesOption,
    model_name: ModelOption = "default",
    host: HostOption = "auto",
    sparsity: Annotated[
        float, typer.Option("--sparsity", "-s", help="s in (0, 1): the fraction of edges removed.")
    ] = 0.5,
    text: TextOption = None,
    tokens: TokensOption = 16_384,
    heldout_tokens: HeldoutOption = 16_384,
    preset: PresetOption = DEFAULT_PRESET,
    units: UnitsOption = None,
    outer_iterations: IterationsOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again in place of what the folder holds.")
    ] = False,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Factorize matrices of a model into sparse read and write factors; each is saved when finished.

    The same command again after an interruption goes on with the matrices that are missing.
    """
    with _told():
        _use(threads)
        model = _load_model(model_name, host)
        find_sites(model, sites)  # a wrong name should fail before the text is read
        calibration, heldout = _text(model, model_name, text, tokens, heldout_tokens)
        solver = _solver_options(preset, units, outer_iterations)
        _say(f"factorize {', '.join(sites)} at s={sparsity:g}")
        factors = factorize_model(
            model,
            sites,
            sparsity=sparsity,
            tokens=calibration,
            progress=_progress(),
            out=out,
            overwrite=overwrite,
            **solver,
        )
        _say("fidelity on held-out text")
        measured = fidelity(model, factors, heldout)
        rows = [
            {"site": name, "units": f.n_units, "edges": f.edges, "sparsity": f.sparsity}
            | {"relMSE (calibration)": f.provenance["relmse"], "relMSE (held-out)": measured.relmse[name]}
            for name, f in factors.items()
        ]
        if as_json:
            _print_json(
                {"folder": str(out), "provenance": factors.provenance, "sites": rows, "fidelity": measured.as_dict()}
            )
            return
        output.print(table("Factors", pd.DataFrame(rows)))
        output.print(table("Fidelity on held-out text", measured.table()))
        output.print(escape(f"Saved to {out}. Load with swd_lens.FactorSet.load({str(out)!r})."))


@app.command()
def circuit(
    out: Annotated[Path, typer.Option(help="Folder for the report, the numbers and the factors.")],
    sites: SitesOption,
    task: Annotated[
        list[str], typer.Option("--task", help="Task family or path to an auto-circuit JSON file; repeatable.")
    ],
    model_name: ModelOption = "default",
    host: HostOption = "auto",
    sparsity: Annotated[
        list[float] | None, typer.Option("--sparsity", "-s", help="s in (0, 1); repeatable. [default: 0.5 0.75]")
    ] = None,
    text: TextOption = None,
    tokens: TokensOption = 16_384,
    heldout_tokens: HeldoutOption = 16_384,
    n_train: Annotated[int, typer.Option(help="Prompts that score units.", min=1)] = 600,
    n_test: Annotated[int, typer.Option(help="Prompts that judge circuits.", min=1)] = 200,
    positions: Annotated[str, typer.Option(help="'scoring' (paper) or 'all'.")] = "scoring",
    ablation: Annotated[str, typer.Option(help="What replaces a unit: its 'mean' (paper) or 'zero'.")] = "mean",
    controls: Annotated[
        str, typer.Option(help="Exact factorizations beside SWD: svd, random_b (3 seeds), 'svd,random_b', or 'none'.")
    ] = "svd",
    preset: PresetOption = DEFAULT_PRESET,
    units: UnitsOption = None,
    outer_iterations: IterationsOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Factors, fidelity, circuits and a report for a model of your own: what the demo does, on your matrices and tasks."""
    with _told():
        _use(threads)
        if positions not in ("scoring", "all"):
            raise ValueError(f"--positions must be 'scoring' or 'all', got {positions!r}")
        if ablation not in ("mean", "zero"):
            raise ValueError(f"--ablation must be 'mean' or 'zero', got {ablation!r}")
        chosen = [] if controls == "none" else [name.strip() for name in controls.split(",")]
        if unknown := [name for name in chosen if name not in CONTROLS]:
            raise ValueError(f"--controls takes {', '.join(CONTROLS)} or none, got {', '.join(map(repr, unknown))}")
        model = _load_model(model_name, host)
        find_sites(model, sites)
        tasks = [load_task(name, model, n_train=n_train, n_test=n_test) for name in task]
        calibration, heldout = _text(model, model_name, text, tokens, heldout_tokens)
        solver = _solver_options(preset, units, outer_iterations)
        run = run_study(
            model,
            {", ".join(sites): sites},
            tasks,
            sparsities=tuple(sparsity or (0.5, 0.75)),
            calibration_tokens=calibration,
            heldout_tokens=heldout,
            positions=positions,
            ablation=ablation,
            controls=chosen,
            on_step=_say,
            progress=_progress(),
            **solver,
        )
        _deliver(run, out, as_json)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        output.print(f"swd-lens {__version__}")
        raise typer.Exit


# ---------------------------------------------------------------------------------------------- in


def _load_model(name: str, kind: str) -> Any:
    if name == "default":
        return load_default_model(kind=kind)
    _say(f"load {name}")
    return load_host(name, kind)


def _text(model: Any, name: str, file: Path | None, n_calibration: int, n_heldout: int) -> tuple[Any, Any]:
    """Calibration rows (None for zero-data) and held-out rows that share no token with them."""
    if file is None:
        if name != "default":
            raise ValueError(
                "--text FILE is needed: fidelity and unit contexts are measured on text (add --tokens 0 for zero-data factors)"
            )
        heldout = text_tokens(n_heldout, split="test")
        return (text_tokens(n_calibration, split="train") if n_calibration else None), heldout
    rows = pack_text(model, file.read_text(encoding="utf-8"))
    per_row = rows.shape[1]
    wanted = -(-n_heldout // per_row)
    if len(rows) < 2:
        raise ValueError(
            f"{file} gives {len(rows)} row(s) of {per_row} tokens; calibration and held-out text need at least one each"
        )
    heldout = rows[-min(wanted, len(rows) // 2) :]
    calibration = rows[: len(rows) - len(heldout)][: -(-n_calibration // per_row)] if n_calibration else None
    return calibration, heldout


def _solver_options(preset: str, units: str | None, outer_iterations: int | None) -> dict[str, Any]:
    """What was asked of the solver; what was not asked stays with its defaults."""
    options: dict[str, Any] = {} if preset == DEFAULT_PRESET else {"preset": preset}
    if units is not None:
        options["units"] = int(units) if units.isdecimal() else units
    if outer_iterations is not None:
        options["outer_iterations"] = outer_iterations
    return options


def _use(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- out


def _deliver(run: Run, out: Path, as_json: bool) -> None:
    _say("write the report")
    run.save(out)
    report = write_report(run, out / "report.html")
    if as_json:
        _print_json({"report": str(report), **run.as_dict()})
        return
    print_run(output, run)
    output.print(f"Done in {run.seconds:.0f} s. Everything is in {escape(str(out))}:", highlight=False)
    for name, what in (("report.html", "the report"), ("run.json", "every number"), ("factors/", "the SWD factors")):
        output.print(f"  {name:<12} {what}", highlight=False)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def _say(step: str) -> None:
    status.print(f"[dim]·[/dim] {escape(step)}", highlight=False)


def _progress() -> bool:
    return sys.stderr.isatty()


@contextmanager
def _told() -> Iterator[None]:
    """Errors that a user can mend become one line and exit code 1; Ctrl-C becomes exit code 130."""
    warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
    try:
        yield
    except (ValueError, OSError, ImportError, UnsupportedHostError) as error:
        status.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        status.print("interrupted; nothing half-written was left behind")
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
