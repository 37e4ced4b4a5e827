"""torch.compile on hosts with units, in a process of its own: the suite's run-time type checks cannot be traced.

`python -m tests.hosts.compile_check` prints one JSON line per family: graph breaks, graphs compiled for three batches, and
the largest difference to the logits without compiling.
"""

import json
import warnings

import torch

import swd_lens as swd
from swd_lens import baselines
from tests import families


def check(family: str) -> dict[str, object]:
    model = families.hooked(family)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), swd.attach(model, baselines.svd(model, "all")):
        compiled, worst = torch.compile(model, backend="eager"), 0.0
        for seed in range(3):
            tokens = families.some_tokens(seed=seed)
            worst = max(worst, float((compiled(tokens) - model(tokens)).abs().max()))
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"family": family, "breaks": breaks, "graphs": graphs, "difference": worst}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for name in ("gpt2", "llama"):
        print(json.dumps(check(name)))
