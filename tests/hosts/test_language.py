"""Models that are refused before a weight is read: no language models, quantized checkpoints, packed tensors."""

import json

import pytest
import torch
import transformers

import swd_lens as swd

# Of every kind that transformers would load, one or two.
NO_HOSTS = {
    "an encoder-decoder .t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1}),
    "no language model .vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32},
    ),
}


@pytest.mark.parametrize("kind", ["auto", "hooked", "bridge"])
@pytest.mark.parametrize("said", NO_HOSTS)
def test_what_is_no_language_model_is_refused_by_its_settings(said, kind, monkeypatch, tmp_path):
    model_class, config_class, sizes = NO_HOSTS[said]
    config = getattr(transformers, config_class)(**sizes)
    getattr(transformers, model_class)(config).save_pretrained(tmp_path / "other")
    monkeypatch.setattr(torch.nn.Module, "__init__", None)  # nothing is built
    with pytest.raises(swd.UnsupportedHostError, match=f"other is {said}"):
        swd.load_host(str(tmp_path / "other"), kind)


def test_a_quantized_checkpoint_is_refused_by_its_settings(llama_folder, monkeypatch):
    config = json.loads((llama_folder / "config.json").read_text())
    quantization = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
    (llama_folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    with pytest.raises(swd.UnsupportedHostError, match=r"llama is quantized .torchao.: .* model\.dequantize"):
        swd.load_host(str(llama_folder))


def test_a_model_in_memory_whose_tensors_are_packed_is_refused(llama_folder):
    """torch's own example of a tensor that stands for others, as torchao's do."""
    from torch.testing._internal.two_tensor import TwoTensor
    from transformer_lens.model_bridge import TransformerBridge

    network = transformers.AutoModelForCausalLM.from_pretrained(llama_folder)
    weight = network.model.layers[1].mlp.up_proj.weight.detach()
    network.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()))
    bridge = TransformerBridge.boot_transformers(str(llama_folder), hf_model=network)
    with pytest.raises(swd.UnsupportedHostError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is a TwoTensor, no plain tensor"):
        swd.find_sites(bridge)
