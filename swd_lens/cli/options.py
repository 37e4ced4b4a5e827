"""The options that several commands have, each with its line of help."""

from pathlib import Path
from typing import Annotated

import typer

from swd_lens.hosts.embedded.load import KINDS
from swd_lens.solver import PRESETS

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
SparsityOption = Annotated[float, typer.Option("--sparsity", "-s", help="s in (0, 1): the fraction of edges removed.")]
CalibrationOption = Annotated[
    str,
    typer.Option(
        help="Inputs from the host with everything earlier replaced (sequential), every earlier block, or dense."
    ),
]
WorkersOption = Annotated[str, typer.Option(help="Matrices solved at a time, in processes of their own; or 'ray'.")]
DtypeOption = Annotated[str, typer.Option(help="Of the host: float32, bfloat16, float16. Solving is float32 always.")]
DeviceMapOption = Annotated[str | None, typer.Option(help="'auto' lays a large host over several devices.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Start again in place of what the folder holds.")]
