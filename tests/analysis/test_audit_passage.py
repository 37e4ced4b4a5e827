"""The direct effect of a write vector on the logits is what transformers' own model says of it, behind every kind of norm."""

import pytest
import torch
import transformers

import swd_lens as swd
from swd_lens.analysis.audit import logit_effect
from swd_lens.units.factors import Factors
from tests import families

ROWS = families.some_tokens(3, 8)
# One more that norms what attention and MLP write, as Gemma 2 does; and one that norms nothing else.
MORE = {
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**families.SIZES, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", families.SIZES),
    # Norms before the matrices, which their adapters do not let us fold; Nemotron's stores its distance from one.
    **{name.lower(): families.architecture(name) for name in ("Phi3", "Nemotron")},
}
# What the two matrices are called in transformers' blocks, beside "self_attn.o_proj" and "mlp.down_proj".
NAMES = {"gpt2": {"attn_o": "attn.c_proj", "mlp_out": "mlp.c_proj"}}
LLAMA = {"attn_o": "self_attn.o_proj", "mlp_out": "mlp.down_proj"}


def held(norm):
    """A norm as it stands at each position: linear, its scale a constant."""
    plain, centred = norm.forward, isinstance(norm, torch.nn.LayerNorm)

    def forward(x):
        y, shift = plain(x), norm.bias if centred else 0.0
        x = x - x.mean(-1, keepdim=True) if centred else x
        return x * ((y - shift) / x).detach() + shift

    norm.forward = forward


def mean_effect(network, path, write):
    """Mean over positions of the change of the centred logits along what a matrix of the last block writes, by autograd."""
    for module in network.modules():
        if "Norm" in type(module).__name__:
            held(module)
    blocks = network.transformer.h if hasattr(network, "transformer") else network.model.layers
    block = blocks[-1]
    if "attn" in path:  # past the MLP of the block, which reads it, too
        block.mlp.register_forward_hook(lambda _, args, out: out.detach())

    def logits(along):
        hook = block.get_submodule(path).register_forward_hook(lambda _, args, out: out + along)
        try:
            values = network(ROWS).logits
        finally:
            hook.remove()
        return (values - values.mean(-1, keepdim=True)).mean((0, 1))

    return torch.autograd.functional.jvp(logits, torch.zeros_like(write), write)[1]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", ["attn_o", "mlp_out"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gemma3", "olmo2", "phi3", "nemotron"])
def test_a_direct_effect_is_that_of_transformers_own_model(name, kind):
    folder = families.written(*MORE[name]) if name in MORE else families.checkpoint(name)
    model = swd.load_host(str(folder), kind="bridge")
    site = f"blocks.{model.cfg.n_layers - 1}.{kind}"
    shape = swd.find_sites(model, site)[0]
    write = torch.randn(shape.d_out, generator=torch.Generator().manual_seed(1))
    factors = {site: Factors(torch.ones(shape.d_in, 1), write[None])}
    effect = logit_effect(model, factors, (site, 0), ROWS, n=model.cfg.d_vocab)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    network.config.final_logit_softcapping = None  # Gemma 2 caps the logits that this is the effect on
    expected = mean_effect(network, NAMES.get(name, LLAMA)[kind], write)
    assert [value for _, value in effect.promoted] == pytest.approx(sorted(expected.tolist(), reverse=True), rel=1e-3, abs=1e-4)
    best = int(expected.argmax())
    assert effect.promoted[0][0] == model.tokenizer.decode([best])
