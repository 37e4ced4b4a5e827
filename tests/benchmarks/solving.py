"""A process that solves what it is asked to, with the package of the folder that it runs in (throughput.py).

1. A line of standard input is JSON: a file of (weight, Gram, held-out Gram), and settings of `swd.solve`.
2. The line that answers it: seconds of the solve, and relMSE under the held-out Gram, in float64.

It needs nothing of this repository but `swd_lens`, so that an older version can be asked, too.
"""

import json
import sys
import time

import torch

import swd_lens as swd

SPARSITY = 0.5


def main() -> None:
    threads, tokens = (int(argument) for argument in sys.argv[1:])
    torch.set_num_threads(threads)
    for line in sys.stdin:
        file, settings = json.loads(line)
        weight, gram, heldout = torch.load(file)
        began = time.perf_counter()
        solution = swd.solve(weight, gram, SPARSITY, tokens=tokens, **settings)
        seconds = time.perf_counter() - began
        print(json.dumps([seconds, _relmse(weight, solution, heldout)]), flush=True)


def _relmse(weight: torch.Tensor, solution: "swd.Solution", gram: torch.Tensor) -> float:
    dense, gram = weight.double(), gram.double()
    missed = dense - solution.read.double() @ solution.write.double()
    return float((gram @ missed * missed).sum() / (gram @ dense * dense).sum())


if __name__ == "__main__":
    main()
