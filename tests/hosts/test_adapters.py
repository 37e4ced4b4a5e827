"""Checkpoint folders with an adapter beside the weights: merged, or refused; models in memory that have one are refused."""

import pytest
import torch
import transformers

import swd_lens as swd
from swd_lens.hosts import adapters
from tests import families

KINDS = ("hooked", "bridge")


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
def test_an_adapter_beside_the_weights_is_merged_into_them(llama_folder, kind):
    tuned, row = with_adapter(llama_folder).eval(), families.some_tokens()
    host = swd.load_host(str(llama_folder), kind)
    assert host.cfg.model_name == "llama, adapter merged"
    with torch.no_grad():
        expected, plain = tuned(row).logits, families.reference("llama")(row).logits
        found = host(row)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()  # the adapter does something
    assert host.tokenizer.bos_token == "<|bos|>"


def test_an_adapter_that_nothing_can_merge_is_refused(llama_folder, monkeypatch):
    with_adapter(llama_folder)
    (llama_folder / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="peft cannot merge the adapter in"):
        swd.load_host(str(llama_folder))
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="holds an adapter beside the weights, which peft merges: pip install peft"):
        swd.load_host(str(llama_folder))


def test_a_model_in_memory_with_an_adapter_is_refused(llama_folder):
    from transformer_lens.model_bridge import TransformerBridge

    tuned = with_adapter(llama_folder)
    with pytest.raises(TypeError, match=r"has an adapter in it .* Merge it first: model\.merge_and_unload"):
        swd.find_sites(tuned)
    bridge = TransformerBridge.boot_transformers(str(llama_folder), hf_model=tuned.base_model.model)
    with pytest.raises(TypeError, match="has an adapter in it"):
        swd.find_sites(bridge)
