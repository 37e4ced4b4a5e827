"""What holds of every kind of host: what is refused, and the constants in the input of attn_o."""

import pytest
import torch
from torch import nn

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts import host_of, matrix_entries, require_gradients, require_no_dropout
from swd_lens.hosts.host import Host, drops_out, frozen, is_centered, require_matrix, require_unattached, value_constant
from swd_lens.hosts.sites import Site
from tests import families

KINDS = pytest.mark.parametrize("kind", ["hooked", "bridge"])


@KINDS
def test_a_model_is_wrapped_as_its_kind(kind):
    host = host_of(getattr(families, kind)("llama"))
    assert isinstance(host, Host) and type(host).__name__ == ("BridgeHost" if kind == "bridge" else "HookedTransformerHost")
    assert matrix_entries(host) == sum(site.numel for site in host.sites())
    with pytest.raises(UnsupportedHostError, match="got Linear"):
        host_of(nn.Linear(2, 2))


def test_dropout_counts_in_train_mode_also_where_it_is_a_function():
    model = families.bridge("llama")
    attention = next(module for module in model.modules() if "attention_dropout" in vars(module))
    attention.attention_dropout = 0.5
    assert not drops_out(model)
    model.train()
    assert drops_out(model)
    with pytest.raises(ValueError, match="in train mode and drops activations out"):
        require_no_dropout(model)


def test_a_host_of_inference_tensors_has_no_gradients():
    model = families.hooked("gpt2")
    require_gradients(model)
    with torch.inference_mode():
        twin = model.blocks[0].ln1.w.clone()
    model.blocks[0].ln1.w = nn.Parameter(twin, requires_grad=False)
    with pytest.raises(UnsupportedHostError, match=r"made under torch\.inference_mode"):
        require_gradients(model)


def test_overlapping_and_whole_sites_are_refused():
    require_unattached(Site(0, "attn_q", 4, 4), {"blocks.0.attn_k", None})
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn_q cannot be attached: blocks\.0\.attn_qkv is attached"):
        require_unattached(Site(0, "attn_q", 4, 4), {"blocks.0.attn_qkv"})
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.mlp is a whole MLP"):
        require_matrix(Site(0, "mlp", 4, 4))


def test_constants_of_shared_value_heads_are_repeated():
    bias, shift, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, -1.0, 0.0]), torch.ones(3, 2)
    weight[0, 1] = 3
    assert value_constant(bias, None, weight, 2, 4).tolist() == [1, 2, 1, 2]
    assert value_constant(bias, shift, weight, 2, 4).tolist() == [1, 4, 1, 4]


def test_rows_without_a_mean_are_centered():
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert not is_centered(weight) and is_centered(weight - weight.mean(1, keepdim=True))


@KINDS
def test_a_host_is_frozen_for_a_while(kind):
    """No parameter asks for a gradient, no weight is rewritten, and afterwards it is what it was."""
    host = host_of(getattr(families, kind)("gpt2"))
    apart, *others = host.model.parameters()
    apart.requires_grad_(False)  # and stays so
    steps = []
    with pytest.raises(ZeroDivisionError), frozen(host, "while this test runs") as undo:
        undo.push(lambda: steps.append(1))
        assert not any(parameter.requires_grad for parameter in host.model.parameters())
        with pytest.raises(RuntimeError, match="was called while this test runs"):
            host.model.load_state_dict({})
        raise ZeroDivisionError
    assert steps == [1] and not apart.requires_grad and all(parameter.requires_grad for parameter in others)
    host.model.load_state_dict(host.model.state_dict())
