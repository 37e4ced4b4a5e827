"""The network of sparse pretraining: what a row of a matrix is, how it is drawn, its GELU; the projection worked by hand."""

import pytest
import torch
from torch.nn.functional import gelu
from transformers import GPT2LMHeadModel

import swd_lens as swd
from swd_lens.train.baselines.sparse_network import config_of, matrices, new_network, project_
from tests.train.baselines.test_sparse_recipe import CONFIG, TEXT, tokenizer


def test_a_row_is_an_output_a_token_or_a_position_and_projection_by_hand():
    """A row of small weights keeps one; an input of small weights keeps none. Conv1D holds (d_in, d_out)."""
    network = new_network(config_of(CONFIG), 0)
    block = network.transformer.h[1]
    linear = [part.weight for part in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]
    embeddings = [network.transformer.wte.weight, network.transformer.wpe.weight]
    with torch.no_grad():
        for weight in linear:
            weight[:, 3] *= 1e-4
            weight[5] *= 1e-4
        for weight in embeddings:
            weight[7] *= 1e-4
    for matrix in matrices(network):
        project_(matrix, 0.2)
    for weight in linear:
        assert int((weight[:, 3] != 0).sum()) == 1 and int((weight[5] != 0).sum()) <= 1 and bool((weight != 0).any(0).all())
    for weight in embeddings:
        assert int((weight[7] != 0).sum()) == 1 and bool((weight != 0).any(1).all())
    assert network.lm_head.weight is network.transformer.wte.weight
    matrix = torch.tensor([[4.0, -5.0, 3.0], [0.1, 0.2, -0.3]])
    project_(matrix, 0.5)  # 3 of 6: the rows' largest, -5 and -0.3, then 4
    assert matrix.tolist() == [[4.0, -5.0, 0.0], [0.0, 0.0, pytest.approx(-0.3)]]
    with pytest.raises(ValueError, match="keeps 1 entries"):
        project_(matrix, 0.2)
    ties = torch.ones(4, 5)
    project_(ties, 0.63)
    assert int((ties != 0).sum()) == 12 and bool((ties != 0).any(1).all())


def test_how_the_network_is_drawn():
    """N(0, .02); what writes to the residual stream over sqrt(2 layers); biases 0, norms 1 and 0."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    network = new_network(config_of({**CONFIG, "n_embd": 64}), 3)
    assert torch.equal(torch.get_rng_state(), before)
    for name, p in network.named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p) if "ln_" in name and "weight" in name else torch.zeros_like(p)), name
        else:
            wanted = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02  # sqrt(2 * 2 layers) = 2
            std, mean = float(p.detach().std()), float(p.detach().mean())
            assert std == pytest.approx(wanted, rel=0.03) and abs(mean) < 0.1 * wanted, name
    again = dict(new_network(config_of({**CONFIG, "n_embd": 64}), 3).named_parameters())
    assert all(torch.equal(again[name], p) for name, p in network.named_parameters())
    three, four = (new_network(config_of(CONFIG), seed).transformer.wte.weight for seed in (3, 4))
    assert not torch.equal(three, four)


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_the_gelu_is_exact_in_every_host(kind, tmp_path):
    network = new_network(config_of({**CONFIG, "activation_function": "gelu_new", "resid_pdrop": 0.1}), 0)
    x = torch.linspace(-4, 4, 101)
    assert torch.equal(network.transformer.h[0].mlp.act(x), gelu(x))  # torch's, with erf
    with torch.no_grad():
        for matrix in matrices(network):
            matrix *= 20  # where erf and tanh differ
    network.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    wanted = network(TEXT).logits
    assert torch.equal(wanted, network(TEXT).logits)  # no dropout, though in training mode
    logits = swd.load_host(str(tmp_path), kind)(TEXT)
    assert float((logits - wanted).abs().max()) < 1e-4
    network.config.activation_function = "gelu_new"
    approximate = GPT2LMHeadModel(network.config)
    approximate.load_state_dict(network.state_dict())
    assert float((approximate(TEXT).logits - wanted).abs().max()) > 1e-3
