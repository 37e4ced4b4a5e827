"""Fused attention: the same numbers, the same hook points, the plain host where somebody looks inside or where it differs.

Runs on transformer_lens 3.9 (HookedTransformer and bridge) and on 4.x (bridge only).
"""

import contextlib
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.divergence import CHUNK_BYTES, Buffers, DensePredictions
from swd_lens.base.interrupts import Undo
from swd_lens.hosts import fused, host_of
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.host import appended
from swd_lens.hosts.recording import record
from tests import families

HAS_HOOKED = find_spec("transformer_lens.HookedTransformer") is not None
FUSED = ("gpt2", "pythia", "llama", "qwen2", "qwen3")
HOSTS = [("bridge", family) for family in FUSED] + [("hooked", family) for family in FUSED if HAS_HOOKED]
PLAIN = [("bridge", "gemma2"), ("bridge", "bert")]  # soft caps; attention both ways
TWO = [(kind, family) for kind, family in HOSTS if family in ("gpt2", "llama")]
TOKENS = families.some_tokens(2, 40)

every_host = pytest.mark.parametrize(("kind", "family"), HOSTS)
two_families = pytest.mark.parametrize(("kind", "family"), TWO)
one_each = pytest.mark.parametrize(("kind", "family"), [("bridge", "llama"), ("hooked", "gpt2")][: 1 + HAS_HOOKED])


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Small rows, too."""
    monkeypatch.setattr(fused, "MIN_SCORES", 0)


@pytest.fixture
def calls(monkeypatch):
    """Grows by one at every fused layer."""
    seen, plain = [], F.scaled_dot_product_attention

    def counted(*args, **kwargs):
        seen.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return seen


def fresh(kind, family):
    return host_of(getattr(families, kind)(family))


def state(model):
    """What a context changes: classes, covered methods, and how transformers is told to compute attention."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    modules = {name: (type(module), frozenset(vars(module))) for name, module in model.named_modules()}
    return modules, getattr(config, "_attn_implementation", None)


def close(a, b, tolerance=1e-5):
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


@pytest.mark.quick_cases(3)
@every_host
@torch.no_grad()
def test_every_layer_is_fused_and_gives_the_same_logits(kind, family, calls):
    host = fresh(kind, family)
    plain, last = host.run(TOKENS), host.last_logits(TOKENS)
    before = state(host.model)
    with fused_attention(host, TOKENS) as is_fused:
        assert is_fused
        calls.clear()
        assert close(host.run(TOKENS), plain)
        assert len(calls) == host.model.cfg.n_layers
        prefix = host.freeze_prefix(TOKENS)
        assert close(host.last_logits(TOKENS, prefix), last)
        # A host whose context is open already is left as it is by a second one.
        with fused_attention(host, TOKENS):
            pass
        calls.clear()
        host.run(TOKENS)
        assert len(calls) == host.model.cfg.n_layers
    assert state(host.model) == before
    calls.clear()
    assert torch.equal(host.run(TOKENS), plain) and not calls


@torch.no_grad()
def test_sliding_windows_stay_windows(calls):
    config = {**families.SIZES, "sliding_window": 16}
    folder = str(families.written("MistralForCausalLM", "MistralConfig", config))
    host = host_of(swd.load_host(folder, kind="bridge"))
    plain = host.run(TOKENS)
    with fused_attention(host, TOKENS):
        calls.clear()
        assert close(host.run(TOKENS), plain) and len(calls) == 2


@pytest.mark.parametrize("family", FUSED if HAS_HOOKED else ())
def test_copies_that_share_a_prefix_give_the_same_logits_and_copy_none_of_it(family, monkeypatch):
    host, tokens, copied = fresh("hooked", family), families.some_tokens(3, 20), []
    monkeypatch.setattr("swd_lens.hosts.hooked.running.appended", lambda *args: copied.append(1) or appended(*args))
    prefix = host.freeze_prefix(tokens)
    rows = tokens.repeat(4, 1)
    rows[:, -1] = torch.arange(len(rows))  # copies end in different tokens

    def logits(shared, hooks=()):
        undo, before = Undo(), state(host.model)
        with undo, torch.no_grad(), host.model.hooks(fwd_hooks=list(hooks)):
            if shared:
                assert host.share_prefix(undo.push)
            found = host.last_logits(rows, host.repeat_prefix(prefix, 4))
        assert state(host.model) == before
        return found

    expected, n_layers = logits(False), len(host.model.blocks)
    assert len(copied) == 2 * n_layers and not torch.allclose(expected[0], expected[3])
    for _ in range(2):  # what is kept of the prefix serves again
        torch.testing.assert_close(logits(True), expected, atol=1e-5, rtol=1e-5)
    assert len(copied) == 2 * n_layers
    # Where somebody looks inside, that layer runs plainly.
    seen = []
    hook = ("blocks.1.attn.hook_pattern", lambda pattern, hook: seen.append(pattern.shape))
    torch.testing.assert_close(logits(True, [hook]), expected, atol=1e-5, rtol=1e-5)
    assert len(copied) == 2 * n_layers + 2 and seen[0][-1] == tokens.shape[1]


@pytest.mark.parametrize(("kind", "family"), PLAIN)
@torch.no_grad()
def test_attention_that_is_more_than_scores_and_softmax_is_never_fused(kind, family, calls):
    host = fresh(kind, family)
    plain = host.run(TOKENS)
    with fused_attention(host, TOKENS) as is_fused:
        assert not is_fused and not calls
        assert torch.equal(host.run(TOKENS), plain)


@pytest.mark.quick_cases(3)
@every_host
@torch.no_grad()
def test_inputs_outputs_and_attached_units_show_the_same(kind, family, calls):
    host = fresh(kind, family)
    sites = host.sites()
    units = baselines.svd(host.model, "all")
    for attached in (False, True):
        with swd.attach(host.model, units) if attached else contextlib.nullcontext():
            asked = {"inputs": sites, "outputs": sites, "units": sites if attached else [], "hooks": RESIDUALS}
            plain = record(host, TOKENS, **asked)
            with fused_attention(host, TOKENS) as is_fused:
                calls.clear()
                seen = record(host, TOKENS, **asked)
                assert is_fused and len(calls) == host.model.cfg.n_layers
        for kept in ("inputs", "outputs", "units", "hooks"):
            a, b = getattr(seen, kept), getattr(plain, kept)
            assert a.keys() == b.keys()
            assert all(close(a[name], b[name]) for name in a), kept


RESIDUALS = ("blocks.0.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.1.hook_attn_out", "blocks.0.attn.hook_z")


@two_families
@pytest.mark.parametrize("point", ["hook_pattern", "hook_attn_scores"])
@torch.no_grad()
def test_a_layer_that_somebody_looks_into_runs_plainly(kind, family, point, calls):
    host, shown = fresh(kind, family), []
    name, shape = f"blocks.0.attn.{point}", (2, host.model.cfg.n_heads, 40, 40)
    module = host.model.hook_dict[name]
    plain = record(host, TOKENS, hooks=[name]).hooks[name]
    with fused_attention(host, TOKENS):
        calls.clear()
        with host.model.hooks(fwd_hooks=[(name, lambda tensor, hook: shown.append(tensor))]):
            host.run(TOKENS)
        handle = module.register_forward_hook(lambda _, args, out: shown.append(out))
        host.run(TOKENS)
        handle.remove()
        assert len(calls) == 2 * (host.model.cfg.n_layers - 1)
        # What a hook changes is changed.
        changed = host.model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda tensor, hook: tensor * 0)])
    assert [tensor.shape for tensor in shown] == [shape, shape]
    assert all(torch.equal(tensor, plain) for tensor in shown)
    again = host.model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda tensor, hook: tensor * 0)])
    assert close(changed, again) and not close(changed, host.run(TOKENS), 1e-3)


@two_families
@torch.no_grad()
def test_padded_rows_and_rows_behind_a_cache_are_not_taken_for_causal_ones(kind, family):
    host = fresh(kind, family)
    mask = torch.ones_like(TOKENS)
    mask[:, :7] = 0
    plain = host.model(TOKENS, attention_mask=mask)
    with fused_attention(host, TOKENS):
        assert close(host.model(TOKENS, attention_mask=mask)[:, 7:], plain[:, 7:])
        assert not close(host.run(TOKENS)[:, 7:], plain[:, 7:], 1e-3)


@one_each
def test_gradients_are_the_same(kind, family, calls):
    host = fresh(kind, family)

    def gradient():
        host.model.zero_grad()
        host.run(TOKENS).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in host.model.parameters() if p.grad is not None])

    plain = gradient()
    with fused_attention(host, TOKENS):
        calls.clear()
        assert close(gradient(), plain, 1e-4) and calls


@one_each
@torch.no_grad()
def test_a_host_that_gives_other_numbers_stays_plain_and_says_so(kind, family, monkeypatch):
    host = fresh(kind, family)
    plain, before, sdpa = host.run(TOKENS), state(host.model), F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: sdpa(*args, **kwargs) * 1.001)
    with (
        pytest.warns(UserWarning, match="other logits when a run is shortened .fused attention."),
        fused_attention(host, TOKENS) as is_fused,
    ):
        assert not is_fused and state(host.model) == before
        assert torch.equal(host.run(TOKENS), plain)


@one_each
@torch.no_grad()
def test_after_an_exception_the_host_is_as_it_was(kind, family):
    host = fresh(kind, family)
    plain, before = host.run(TOKENS), state(host.model)

    def fails(tensor, hook):
        raise KeyboardInterrupt

    with (
        contextlib.suppress(KeyboardInterrupt),
        fused_attention(host, TOKENS),
        host.model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", fails)]),
    ):
        host.run(TOKENS)
    assert state(host.model) == before
    assert torch.equal(host.run(TOKENS), plain)


@one_each
@torch.no_grad()
def test_few_scores_are_left_alone_to_the_bit(kind, family, calls, monkeypatch):
    host = fresh(kind, family)
    monkeypatch.setattr(fused, "MIN_SCORES", host.model.cfg.n_heads * TOKENS.shape[1] ** 2 + 1)
    plain = host.run(TOKENS)
    with fused_attention(host, TOKENS) as is_fused:
        assert not is_fused and torch.equal(host.run(TOKENS), plain) and not calls


def test_the_embedded_model_is_never_fused(monkeypatch):
    monkeypatch.undo()
    cfg = swd.load_default_model(kind="hooked" if HAS_HOOKED else "bridge").cfg
    assert cfg.n_heads * cfg.n_ctx**2 < fused.MIN_SCORES


@one_each
def test_a_longer_row_is_compared_again(kind, family, calls):
    host, n_layers = fresh(kind, family), 2  # once each, for the comparison
    for n_positions, n_calls in ((20, n_layers), (20, 0), (10, 0), (40, n_layers)):
        calls.clear()
        with fused_attention(host, TOKENS[:, :n_positions]):
            assert len(calls) == n_calls, n_positions


@one_each
@torch.no_grad()
def test_a_comparison_under_a_hook_inside_is_not_remembered(kind, family, calls):
    host = fresh(kind, family)
    hooks = [(f"blocks.{i}.attn.hook_pattern", lambda tensor, hook: None) for i in range(2)]
    with host.model.hooks(fwd_hooks=hooks), fused_attention(host, TOKENS):
        assert not calls  # every layer ran plainly
    with fused_attention(host, TOKENS):
        assert len(calls) == 2


# ---------------------------------------------------------------------------------------------- who uses it


@pytest.mark.quick_cases(2)
@two_families
def test_calibration_and_fidelity_run_fused(kind, family, calls, monkeypatch):
    model = getattr(families, kind)(family)
    sites = swd.find_sites(model, "mlp_out")
    units = swd.factorize(model, sites, sparsity=0.5, preset="paper", outer_iterations=4, progress=False)

    def figures():
        calls.clear()
        grams = swd.collect_grams(model, sites, TOKENS)
        return grams, swd.fidelity(model, units, TOKENS)

    grams, measured = figures()
    assert len(calls) > 0
    monkeypatch.setattr(fused, "MIN_SCORES", 2**60)
    plain_grams, plain = figures()
    assert not calls
    assert all(close(grams[site.name], plain_grams[site.name]) for site in sites)
    for name in ("ce_dense", "ce", "kl"):
        assert getattr(measured, name) == pytest.approx(getattr(plain, name), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_buffers_change_no_bit_of_a_divergence(dtype):
    generator = torch.Generator().manual_seed(0)
    dense, replaced = (torch.randn(2, 9, 50, generator=generator).to(dtype) for _ in range(2))
    tokens = torch.randint(50, (2, 9), generator=generator)
    kept = (dense.clone(), replaced.clone())
    p, q = (x[:, :-1].to(torch.float64 if dtype == torch.float64 else torch.float32).log_softmax(-1) for x in kept)
    buffers = Buffers()
    for _ in range(2):
        total = DensePredictions(dense, tokens, buffers).divergence(replaced)
        assert total.kl == float((p.exp() * (p - q)).sum(dtype=torch.float64))
        assert total.ce == float(-q.gather(-1, tokens[:, 1:, None]).squeeze(-1).double().sum())
    assert torch.equal(dense, kept[0]) and torch.equal(replaced, kept[1])  # the caller's logits are not written to
    short = DensePredictions(dense[:, :4], tokens[:, :4], buffers).divergence(replaced[:, :4])
    assert short == DensePredictions(dense[:, :4], tokens[:, :4]).divergence(replaced[:, :4])
    assert CHUNK_BYTES == 2**26


@one_each
def test_fine_tuning_runs_fused(kind, family, calls):
    model = getattr(families, kind)(family)
    sites = swd.find_sites(model, "blocks.1.mlp_out")
    units = swd.factorize(model, sites, sparsity=0.5, preset="paper", outer_iterations=4, progress=False)
    calls.clear()
    tuned = swd.finetune(model, units, TOKENS, steps=2, batch_size=2, progress=False)
    assert len(calls) > 2 * model.cfg.n_layers  # more than the comparison
    assert not torch.equal(tuned[sites[0].name].write, units[sites[0].name].write)
