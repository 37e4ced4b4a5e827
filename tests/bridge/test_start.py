"""Starting a bridge at a block: blocks of every form of output, sliding windows, processed weights, other unembeddings."""

import tempfile
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from swd_lens.hosts import Host, Start, host_of
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from swd_lens.hosts.load import load_host
from tests import families
from tests.bridge.conftest import close, fresh

_V2 = {"vocab_size": families.D_VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2}
_V3 = {"vocab_size": families.D_VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
# Model class -> config class and config, what its blocks return.
OTHERS = {
    "BloomForCausalLM": ("BloomConfig", {**_V3, "n_layer": 2, "n_head": 2}, tuple),  # alibi
    "FalconForCausalLM": ("FalconConfig", _V3, tuple),
    "GPTJForCausalLM": ("GPTJConfig", {**_V2, "rotary_dim": 4, "n_positions": 64}, tuple),
    "OPTForCausalLM": ("OPTConfig", {**_V3, "ffn_dim": 32, "word_embed_proj_dim": 16}, torch.Tensor),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", {**_V2, "n_positions": 64}, list),  # no normalization at the end
}
IDS = torch.tensor([30, 7, 11])


@cache
def other(name: str) -> Host:
    """A two-layer model with random weights, of an architecture that is not in tests/families.py."""
    config_class, config, _ = OTHERS[name]
    ends = {} if name.startswith("OpenAI") else {"bos_token_id": 0, "eos_token_id": 0}
    model = getattr(transformers, name)(getattr(transformers, config_class)(**config, **ends)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    folder = tempfile.mkdtemp(prefix="swd-lens-other-")
    model.save_pretrained(folder)
    load_tokenizer(WEIGHTS).save_pretrained(folder)
    # Under an explicit mask, with which hosts are run here, bridges of OpenAI GPT are another model (3.9 and 4.3): refused.
    return host_of(load_host(folder, kind="bridge", check=not name.startswith("OpenAI")))


def check(host: Host, tokens: torch.Tensor, kept: bool) -> None:
    with torch.no_grad():
        whole = host.run(tokens)[:, -1]
        prefix = host.freeze_prefix(tokens) if kept else None
        for layer in range(len(host.model.blocks) + 1):
            resid = host.residual(tokens, layer, prefix)
            assert close(host.last_logits(tokens, prefix, start=Start(layer, resid)), whole), layer
            start = Start(layer, resid.repeat(3, 1, 1))
            repeated = host.repeat_prefix(prefix, 3, from_layer=layer)
            for _ in range(2):
                some = host.last_logits(tokens.repeat(3, 1), repeated, start=start, token_ids=IDS)
                assert close(some, whole[:, IDS].repeat(3, 1)), layer


@pytest.mark.filterwarnings("ignore:.* parts of this bridge hold matrices")  # Falcon's
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_blocks_that_return_a_tensor_a_tuple_or_a_list(name, kept):
    host, forms = other(name), []
    seen = host.model.blocks[0].register_forward_hook(lambda _, args, output: forms.append(type(output)))
    host.run(families.some_tokens())
    seen.remove()
    assert forms == [OTHERS[name][2]]
    check(host, families.some_tokens(), kept)


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_a_single_row_can_be_unembedded(name):
    host, tokens = other(name), families.some_tokens(1, 9)
    residual = host.residual(tokens, len(host.model.blocks))
    assert close(host.unembed(tokens, residual), host.run(tokens))


@pytest.mark.parametrize("kept", [False, True])
def test_prompts_longer_than_a_sliding_window(kept):
    check(fresh("gemma2"), families.some_tokens(pos=45), kept)  # its window is 32 positions


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_processed_weights(name, kept):
    host = fresh(name)
    host.model.enable_compatibility_mode()
    check(host, families.some_tokens(), kept)


def test_an_unembedding_that_is_no_plain_matrix_is_run_whole():
    host, tokens = fresh("llama"), families.some_tokens()

    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    with torch.no_grad():
        single = host.last_logits(tokens)
        host.model.unembed._modules["_original_component"].__class__ = Doubled
        assert close(host.last_logits(tokens, token_ids=IDS), 2 * single[:, IDS])


def test_what_a_block_hands_on_unpacks_to_the_residual_alone():
    # A model whose loop unpacks a block's output must not get the rows of the batch.
    from swd_lens.hosts.bridge.running import starting

    host, resid = fresh("gpt2"), torch.randn(2, 3, 16)
    handed_on = starting(host.model, Start(2, resid))[0][1]("anything", mask=None)
    first, *_ = handed_on
    assert first.shape == resid.shape and torch.equal(first, resid) and torch.equal(handed_on[0], resid)
    assert type(first) is torch.Tensor and type(handed_on + 1) is torch.Tensor and type(handed_on[0]) is torch.Tensor
    assert handed_on[:, -1:].shape == (2, 1, 16)
