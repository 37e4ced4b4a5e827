"""Checkpoint folders that are refused or mended: missing tensors, adapters, other models, packed tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import swd_lens as swd
from swd_lens.hosts import adapters
from tests import families

KINDS = ("hooked", "bridge")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of a small Llama's checkpoint."""
    monkeypatch.setenv("SWD_LENS_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(families.checkpoint("llama"), tmp_path / "llama"))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(folder, kind, check):
    """transformers would draw it at random, another one at each load."""
    weights = load_file(folder / "model.safetensors")
    del weights[UP]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"llama lacks 1 tensors of its architecture.*{UP}"):
        swd.load_host(str(folder), kind, check=check)


def with_adapter(folder):
    """The folder with a LoRA of up_proj and q_proj beside its weights; peft's own logits of a row."""
    peft = pytest.importorskip("peft", reason="needs peft (pip install peft)")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_alpha=4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    tuned.save_pretrained(folder)
    return tuned


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_beside_the_weights_is_merged_into_them(folder, kind):
    tuned, row = with_adapter(folder).eval(), families.some_tokens()
    host = swd.load_host(str(folder), kind)
    assert host.cfg.model_name == "llama, adapter merged"
    with torch.no_grad():
        expected, plain = tuned(row).logits, families.reference("llama")(row).logits
        found = host(row)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()  # the adapter does something
    assert host.tokenizer.bos_token == "<|bos|>"


def test_an_adapter_that_nothing_can_merge_is_refused(folder, monkeypatch):
    with_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="peft cannot merge the adapter in"):
        swd.load_host(str(folder))
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="holds an adapter beside the weights, which peft merges: pip install peft"):
        swd.load_host(str(folder))


def test_a_model_in_memory_with_an_adapter_is_refused(folder):
    from transformer_lens.model_bridge import TransformerBridge

    tuned = with_adapter(folder)
    with pytest.raises(TypeError, match=r"has an adapter in it .* Merge it first: model\.merge_and_unload"):
        swd.find_sites(tuned)
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=tuned.base_model.model)
    with pytest.raises(TypeError, match="has an adapter in it"):
        swd.find_sites(bridge)


# Of every kind that transformers would load, one or two.
NO_HOSTS = {
    "an encoder-decoder .t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1},
    ),
    "no language model .vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 32,
        },
    ),
}


@pytest.mark.parametrize("kind", ["auto", *KINDS])
@pytest.mark.parametrize("said", NO_HOSTS)
def test_what_is_no_language_model_is_refused_by_its_settings(said, kind, monkeypatch, tmp_path):
    model_class, config_class, sizes = NO_HOSTS[said]
    config = getattr(transformers, config_class)(**sizes)
    getattr(transformers, model_class)(config).save_pretrained(tmp_path / "other")
    monkeypatch.setattr(torch.nn.Module, "__init__", None)  # nothing is built
    with pytest.raises(swd.UnsupportedHostError, match=f"other is {said}"):
        swd.load_host(str(tmp_path / "other"), kind)


def test_a_quantized_checkpoint_is_refused_by_its_settings(folder, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    quantization = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    with pytest.raises(swd.UnsupportedHostError, match=r"llama is quantized .torchao.: .* model\.dequantize"):
        swd.load_host(str(folder))


def test_a_model_in_memory_whose_tensors_are_packed_is_refused(folder):
    """torch's own example of a tensor that stands for others, as torchao's do."""
    from torch.testing._internal.two_tensor import TwoTensor
    from transformer_lens.model_bridge import TransformerBridge

    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weight = network.model.layers[1].mlp.up_proj.weight.detach()
    network.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()))
    bridge = TransformerBridge.boot_transformers(str(folder), hf_model=network)
    with pytest.raises(swd.UnsupportedHostError, match=rf"{UP} is a TwoTensor, no plain tensor"):
        swd.find_sites(bridge)
