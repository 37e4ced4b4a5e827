"""Loading a host from a local Hugging Face folder: the same function as the checkpoint itself."""

import pytest
import torch

from swd_lens.hosts import find_sites
from swd_lens.hosts.load import load_host


@pytest.mark.parametrize("architecture", ["gpt2", "pythia"])
def test_a_local_checkpoint_computes_what_transformers_computes(tmp_path, default_model, architecture):
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    vocabulary = default_model.cfg.d_vocab
    if architecture == "gpt2":
        checkpoint = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    else:
        checkpoint = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=vocabulary,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=64,
            )
        )
    checkpoint.eval().save_pretrained(tmp_path)
    default_model.tokenizer.save_pretrained(tmp_path)
    model = load_host(str(tmp_path))
    tokens = torch.arange(12)[None] + 5
    with torch.no_grad():
        expected, found = checkpoint(tokens).logits, model(tokens)
    # Softmax does not see a constant shift of all logits; nothing else may differ.
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert len(find_sites(model)) == 8
    assert model.cfg.model_name == tmp_path.name


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give a Hugging Face checkpoint folder"):
        load_host(str(tmp_path))
