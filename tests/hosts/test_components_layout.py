"""Matrices of a HookedTransformer lie as its forward reads them, and give the same bits."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.load import load_host
from tests import families


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", families.HOOKED)
def test_weights_lie_as_the_forward_reads_them_and_give_the_same_bits(family, dtype):
    model, plain = (load_host(str(families.checkpoint(family)), kind="hooked", dtype=dtype) for _ in range(2))
    moved = set()
    for (name, parameter), of_plain in zip(model.named_parameters(), plain.parameters(), strict=True):
        of_plain.data = of_plain.data.contiguous()  # as TransformerLens keeps it
        assert torch.equal(parameter, of_plain)
        if parameter.stride() != of_plain.stride():
            moved.add(name.rpartition(".")[2])
    gated = {"W_gate", "W_in", "W_out"} if model.cfg.gated_mlp else set()
    grouped = {"_W_K", "_W_V"} if model.cfg.n_key_value_heads else {"W_K", "W_V"}
    assert moved == {"W_Q", "W_O", "W_U"} | grouped | gated
    tokens = families.some_tokens()
    for n_rows in (1, 2):
        assert torch.equal(model(tokens[:n_rows]), plain(tokens[:n_rows]))
    assert host_fingerprint(model) == host_fingerprint(plain)
    assert all(torch.equal(host_of(model).weight(site), host_of(plain).weight(site)) for site in find_sites(model))


def test_a_forward_copies_no_matrix():
    model = families.hooked("llama")
    shapes = {tuple(p.shape) for p in [*model.blocks.parameters(), model.unembed.W_U] if p.ndim > 1}
    transposed = {(*shape[:-2], shape[-1], shape[-2]) for shape in shapes}
    of_outputs = {(shape[2], shape[0] * shape[1]) for shape in shapes if len(shape) == 3}  # W_O
    # Seven rows of eleven positions: no activation has the shape of a matrix.
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        model(families.some_tokens(7, 11))
    copied = {tuple(event.input_shapes[0]) for event in seen.events() or () if event.name == "aten::copy_"}
    assert copied and not (shapes | transposed | of_outputs) & copied
