"""What several tests of the command line start from."""

from dataclasses import replace

import pytest
import torch

from swd_lens.solver import PRESETS, automatic


@pytest.fixture(scope="package", autouse=True)
def few_alternations():
    """The paper's solver is a usual control: most of a small command's time, and how good it is is no matter here. So are the
    many rotations of what looks like a product of sparse factors, as some of the embedded model's matrices do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(automatic.PATIENCE, "rotations", 1)
        patch.setitem(PRESETS, "paper", replace(PRESETS["paper"], outer_iterations=4))
        yield


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory, default_model):
    """A tiny Hugging Face GPT-2 checkpoint with random weights, as a user would have one on disk."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("tiny-gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=default_model.cfg.d_vocab, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    default_model.tokenizer.save_pretrained(folder)
    return folder
