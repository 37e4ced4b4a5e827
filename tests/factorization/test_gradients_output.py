"""Output Grams: gradients at what sites write, by hand and beside plain autograd, on every kind of host; and `weigh_outputs`."""

import pytest
import torch

import swd_lens as swd
from swd_lens.factorization import gradients
from swd_lens.factorization.gradients import collect_output_grams
from swd_lens.hosts import find_sites
from tests import families
from tests.factorization.test_factorize import QUICK, assert_same
from tests.micro import micro_model, random_tokens

TOKENS = random_tokens(12, 9)


def test_by_hand():
    # Token 0: x = (1, 0), relu(x W_in) = (1, 2), the MLP writes (7, 10); residual and logits (8, 10), and 0 for token 2. It
    # predicts token 1: the gradient by the residual is (p0, p1 - 1). The last position predicts nothing.
    model = micro_model()
    made = collect_output_grams(model, find_sites(model, "blocks.0.mlp_out"), [[0, 1]])["blocks.0.mlp_out"]
    p = torch.tensor([8.0, 10.0, 0.0]).softmax(0)
    g = torch.stack([p[0], p[1] - 1])
    torch.testing.assert_close(made, torch.outer(g, g) / 2)


def by_autograd(model, hooks: list[str], tokens: torch.Tensor) -> torch.Tensor:
    """Mean of g^T g at these hook points side by side, by TransformerLens' own forward."""
    shown: dict[str, torch.Tensor] = {}

    def keep(value, hook):
        shown[hook.name] = value

    with model.hooks(fwd_hooks=[(name, keep) for name in hooks]):
        log_probs = model(tokens).log_softmax(-1)
    loss = -log_probs[:, :-1].gather(-1, tokens[:, 1:, None]).sum()
    gradients = torch.autograd.grad(loss, [shown[name] for name in hooks])
    flat = torch.cat([g.flatten(2).flatten(0, 1) for g in gradients], 1)
    return flat.T @ flat / tokens.numel()


@pytest.mark.parametrize(
    ("site", "hooks"),
    [
        ("blocks.1.mlp_out", ["blocks.1.hook_mlp_out"]),
        ("blocks.0.attn_o", ["blocks.0.hook_attn_out"]),
        ("blocks.0.mlp_in", ["blocks.0.mlp.hook_pre"]),
        ("blocks.1.attn_qkv", [f"blocks.1.attn.hook_{part}" for part in "qkv"]),
    ],
)
def test_they_are_those_of_plain_autograd(model, site: str, hooks: list[str]):
    made = collect_output_grams(model, find_sites(model, site), TOKENS)[site]
    torch.testing.assert_close(made, by_autograd(model, hooks, TOKENS), rtol=1e-4, atol=1e-7)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", families.CAUSAL)
def test_every_family_on_a_bridge(name: str):
    model, tokens = families.bridge(name), families.some_tokens(4, 12)
    sites = find_sites(model)
    made = collect_output_grams(model, sites, tokens)
    assert set(made) == {site.name for site in sites}
    for site in sites:
        assert made[site.name].shape == (site.d_out, site.d_out) and bool(made[site.name].diagonal().any())


def test_both_hosts_agree_inside_an_mlp():
    # There weight processing changes nothing.
    hooked, bridge = families.hooked("llama"), families.bridge("llama")
    tokens, kinds = families.some_tokens(4, 12), ["mlp_in", "mlp_gate"]
    of_hooked, of_bridge = (collect_output_grams(m, find_sites(m, kinds), tokens) for m in (hooked, bridge))
    for site, made in of_hooked.items():
        torch.testing.assert_close(made, of_bridge[site], rtol=1e-3, atol=1e-3 * float(made.max()))


def test_passes_have_room_for_their_sums(model, monkeypatch):
    made = swd.factorize(model, "all", **QUICK, tokens=TOKENS, weigh_outputs=True)
    passes: list[int] = []
    collect = gradients.collect_output_grams

    def counted(model, sites, *arguments, **named):
        passes.append(len(sites))
        return collect(model, sites, *arguments, **named)

    monkeypatch.setattr("swd_lens.factorization.stages.collect_output_grams", counted)
    assert_same(swd.factorize(model, "all", **QUICK, tokens=TOKENS, weigh_outputs=True), made)
    assert passes == [len(made)]
    assert made.provenance["weigh_outputs"] is True and all(f.settings["output_gram"] is True for f in made.values())
    plain = swd.factorize(model, "blocks.0.attn_qkv", **QUICK, tokens=TOKENS)
    assert "weigh_outputs" not in plain.provenance
    for site, f in plain.items():  # the same support, other values
        assert torch.equal(made[site].read != 0, f.read != 0) and torch.equal(made[site].write != 0, f.write != 0)
        assert not torch.equal(made[site].write, f.write)
    monkeypatch.setattr("swd_lens.factorization.stages.GRAM_BYTES", 1)
    assert_same(swd.factorize(model, "all", **QUICK, tokens=TOKENS, weigh_outputs=True), made)
    assert passes == [len(made)] + [1] * len(made)


def test_the_estimate_counts_them(model):
    for of, tokens in ((model, TOKENS), ({"a": (16, 32), "b": (32, 16)}, 64)):
        plain, weighed = (swd.estimate(of, tokens=tokens, weigh_outputs=w) for w in (False, True))
        assert weighed.flops > plain.flops and weighed.peak_bytes > plain.peak_bytes


@pytest.mark.slow
def test_the_embedded_model_keeps_its_predictions_better():
    model = swd.load_default_model()
    tokens, heldout = swd.text_tokens(4_096, split="train"), swd.text_tokens(4_096, split="test")
    for site in ("blocks.1.attn_o", "blocks.1.attn_qkv"):
        plain, weighed = (
            swd.factorize(model, site, sparsity=0.75, tokens=tokens, preset="quick", weigh_outputs=w, progress=False)
            for w in (False, True)
        )
        assert weighed.edges == plain.edges
        assert swd.fidelity(model, weighed, heldout).kl < 0.95 * swd.fidelity(model, plain, heldout).kl


def test_bad_input(model, monkeypatch):
    with pytest.raises(ValueError, match="needs calibration tokens"):
        swd.factorize(model, "mlp_out", **QUICK, weigh_outputs=True)
    with pytest.raises(swd.TokenError, match="rows of a single token"):
        swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS[:, :1], weigh_outputs=True)
    monkeypatch.setattr(gradients, "_cross_entropy", lambda targets, logits: logits.sum() * float("nan"))
    logits = model(TOKENS)
    with pytest.raises(ValueError, match=r"gradients at blocks\.0\.mlp_out are not finite"):
        swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS, weigh_outputs=True)
    assert torch.equal(model(TOKENS), logits)
