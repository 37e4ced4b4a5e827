"""torch.compile on a host with units at every site: `python -m tests.hosts.test_compile` prints what it finds.

In a process of its own: the suite's run-time type checks cannot be traced.
"""

import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from tests import families


def check(family: str) -> tuple[int, int, float]:
    """Graph breaks, graphs compiled for three batches, and the largest difference to the logits without compiling."""
    model = families.hooked(family)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), swd.attach(model, baselines.svd(model, "all")):
        compiled, worst = torch.compile(model, backend="eager"), 0.0
        for seed in range(3):
            tokens = families.some_tokens(seed=seed)
            worst = max(worst, float((compiled(tokens) - model(tokens)).abs().max()))
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"], worst


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformer_lens.HookedTransformer") is None, reason="torch.compile is promised for HookedTransformer only"
)
def test_units_compile_into_one_graph_that_is_not_compiled_anew():
    root, command = Path(__file__).resolve().parents[2], [sys.executable, "-m", "tests.hosts.test_compile"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=root, env=offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"gpt2": [0, 1, 0.0], "llama": [0, 1, 0.0]}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps({name: check(name) for name in ("gpt2", "llama")}))
