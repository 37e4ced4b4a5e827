"""swd-lens: the command line. Each command walks part of the same road and prints tables, or JSON with --json.

    swd-lens demo       the whole road on the embedded model, offline, ending in a report
    swd-lens factorize  SWD factors of your model's matrices, saved to a folder, with their fidelity
    swd-lens replace    a whole surface: budgets, factors, fine-tuning, fidelity before and after, samples
    swd-lens circuit    factors, fidelity, circuits and a report for your model and tasks
    swd-lens report     the report of such a run again, from its folder; no model is needed
    swd-lens train-baseline METHOD
                        a transcoder, VPD or a sparsely pretrained model, to compare with
    swd-lens estimate   memory and time of a factorization, before it starts

1. Options (options.py) become a host, token rows and tasks (common.py).
2. The commands (circuits.py, matrices.py, baselines.py) call one function each; progress goes to stderr, results to stdout.
3. Files are written whole, the report last. Errors that a user can mend are printed without a traceback; exit code 1. Ctrl-C
   exits with 130 and leaves no half-written file; `factorize`, `replace` and `train-baseline` go on from there when called again.
"""

from swd_lens.cli import baselines, circuits, matrices
from swd_lens.cli.common import app

__all__ = ["app", "baselines", "circuits", "main", "matrices"]


def main() -> None:
    """Entry point of the console script."""
    app()
