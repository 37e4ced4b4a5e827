"""load_host compares a host with transformers' own model, and "auto" takes the kind that agrees; on 3.9 and 4.x."""

import os
import warnings
from contextlib import contextmanager
from importlib import metadata

import pytest
import torch
import transformer_lens
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from swd_lens import HostDiffersError, load_host
from swd_lens.hosts import agreement
from swd_lens.hosts.agreement import difference_of
from tests import families

VERSION = int(metadata.version("transformer_lens").split(".")[0])
needs_hooked = pytest.mark.skipif(VERSION > 3, reason="this transformer_lens has no HookedTransformer")
RIGHT = [("bridge", name, "float32") for name in (*families.FAMILIES, "opt")]
RIGHT += [("hooked", name, "float32") for name in (*families.HOOKED, "opt") if VERSION < 4]
RIGHT += [(kind, name, "bfloat16") for kind in ("bridge", "hooked")[: 1 + (VERSION < 4)] for name in ("gpt2", "llama")]
SUSPECTS = ("stablelm", "cohere", "cohere2", "hunyuan")


def folder(name):
    return str(families.checkpoint(name))


def measured(model, name):
    """Largest difference from transformers' model over its largest logit, on rows of this test's own."""
    tokens = families.some_tokens(2, 40, seed=3)
    with torch.no_grad():
        expected, found = families.reference(name)(tokens).logits, model(tokens)
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def loaded_with(monkeypatch, change):
    """Bridges on which `change` was done after they were made."""
    boot = TransformerBridge.boot_transformers

    def booted(*args, **kwargs):
        model = boot(*args, **kwargs)
        with torch.no_grad():
            change(model)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(TransformerBridge, "boot_transformers", staticmethod(booted))
        yield


def scaled(by):
    def change(model):
        model.ln_final.original_component.weight.mul_(by)

    return change


@pytest.mark.parametrize("name", SUSPECTS)
def test_a_family_that_the_bridge_computes_otherwise_is_refused_or_right(name):
    refused = None
    for kind in ("bridge", "auto"):
        try:
            model = load_host(folder(name), kind=kind)
        except HostDiffersError as error:
            refused = str(error)
            assert "this TransformerBridge of swd-lens-" in refused and "check=False loads it all the same" in refused
            assert f"transformer_lens {metadata.version('transformer-lens')}" in refused
            assert measured(load_host(folder(name), kind=kind, check=False), name) > 0.01
        else:
            assert measured(model, name) < 1e-5
    assert VERSION > 3 or refused is not None


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_stretched_rotary_positions_are_left_to_the_kind_that_computes_them(name):
    """YaRN: HookedTransformer 3.9 takes positions as they were before."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}
    sizes = {**families.SIZES, "rope_parameters": yarn, **({"head_dim": 8} if name == "qwen3" else {})}
    stretched = str(families.written(f"{name.capitalize()}ForCausalLM", f"{name.capitalize()}Config", sizes))
    if VERSION < 4:
        with pytest.raises(HostDiffersError, match=r'this HookedTransformer .*Try kind="bridge"'):
            load_host(stretched, "hooked")
    model = load_host(stretched)
    assert isinstance(model, TransformerBridge) and difference_of(model) < 1e-5  # pyright: ignore[reportOptionalOperand]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_wrong_host_is_refused_and_a_slightly_wrong_one_warned_of(monkeypatch, dtype):
    step = torch.finfo(getattr(torch, dtype)).eps
    with loaded_with(monkeypatch, scaled(1 + max(2e-3, 4 * step))):
        with pytest.raises(HostDiffersError, match=r"other logits than transformers' own .* at position \d+ of a row of 32"):
            load_host(folder("llama"), "bridge", dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_host(folder("llama"), "bridge", dtype=dtype, check=False)
    with loaded_with(monkeypatch, scaled(1 + max(3e-4, 2 * step))):
        with pytest.warns(UserWarning, match="which is more than rounding makes") as seen:
            load_host(folder("llama"), "bridge", dtype=dtype)
        named = [w.filename for w in seen if "rounding" in str(w.message)]
        # Where all annotations are checked, wrappers stand between the package and its callers.
        assert len(named) == 1 and (named == [__file__] or os.environ.get("SWD_LENS_TYPES") == "all")


def test_large_models_in_half_precision_are_compared_within_their_rounding(monkeypatch):
    monkeypatch.setattr(agreement, "EXACT_BYTES", 0)
    for dtype in ("bfloat16", "float16", "float32"):
        difference = difference_of(load_host(folder("qwen2"), "bridge", dtype=dtype))
        assert difference is not None and difference < 1e-2
    with pytest.raises(HostDiffersError), loaded_with(monkeypatch, scaled(1.1)):
        load_host(folder("qwen2"), "bridge", dtype="bfloat16")
    with pytest.raises(HostDiffersError), loaded_with(monkeypatch, scaled(float("nan"))):
        load_host(folder("qwen2"), "bridge", dtype="bfloat16")


def test_the_checkpoint_is_read_once_and_both_run_once(monkeypatch):
    read, runs = [], []
    load = AutoModelForCausalLM.from_pretrained

    def counted(*args, **kwargs):
        network, found = load(*args, **kwargs)
        network.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
        read.append(network)
        return network, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    load_host(folder("llama"), "bridge")
    assert len(read) == 1 and len(runs) == 2


def test_a_model_that_takes_more_than_tokens_is_not_compared_and_that_is_said(monkeypatch):
    load = AutoModelForCausalLM.from_pretrained

    def asks_for_images(*_):
        raise TypeError("pixel_values is missing")

    def loaded(*args, **kwargs):
        network, found = load(*args, **kwargs)
        network.register_forward_pre_hook(asks_for_images)
        return network, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    with pytest.warns(
        UserWarning, match="without being compared .*: transformers' own model does not run on tokens alone .*pixel_values"
    ):
        model = load_host(folder("llama"), "bridge")
    assert difference_of(model) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_host(folder("llama"), "bridge", check=False)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("kind", "name", "dtype"), RIGHT)
def test_a_host_that_is_right_says_how_far_it_is_off_and_is_as_without_the_check(kind, name, dtype):
    model, plain = (load_host(folder(name), kind, dtype=dtype, check=check) for check in (True, False))
    difference = difference_of(model)
    # A HookedTransformer's rotary angles stay rounded.
    assert difference is not None and difference < (1e-3 if (kind, dtype) == ("hooked", "bfloat16") else 1e-5)
    assert difference_of(plain) is None and not model.training
    assert model.cfg.dtype == plain.cfg.dtype == getattr(torch, dtype)
    states = model.state_dict(), plain.state_dict()
    assert list(states[0]) == list(states[1])
    for a, b in zip(*(state.values() for state in states), strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@pytest.fixture
def wrong(monkeypatch):
    """HookedTransformers whose last norm is scaled by 1.01."""
    from swd_lens.hosts.hooked import components

    lay_out = components.lay_out

    def laid_out_wrongly(model):
        lay_out(model)
        with torch.no_grad():
            model.ln_final.w.mul_(1.01)

    monkeypatch.setattr(components, "lay_out", laid_out_wrongly)


@needs_hooked
def test_a_wrong_one_is_refused_and_auto_takes_the_bridge(wrong, monkeypatch):
    with pytest.raises(
        HostDiffersError, match=r'this HookedTransformer of .*by up to 0\.0\d+ of .*Try kind="bridge"; check=False'
    ):
        load_host(folder("gpt2"), "hooked")
    assert type(load_host(folder("gpt2"), "hooked", check=False)).__name__ == "HookedTransformer"
    assert type(load_host(folder("gpt2"), check=False)).__name__ == "HookedTransformer"
    assert type(load_host(folder("gpt2"))).__name__ == "TransformerBridge"
    with loaded_with(monkeypatch, scaled(1.02)), pytest.raises(HostDiffersError, match="Another version of transformer_lens"):
        load_host(folder("gpt2"))
    with loaded_with(monkeypatch, scaled(1.02)), pytest.raises(HostDiffersError, match='Try kind="hooked"'):
        load_host(folder("gpt2"), "bridge")


@needs_hooked
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_name_is_compared_too_and_its_checkpoint_read_once(is_wrong, monkeypatch, request):
    """The hub is a folder here."""
    if is_wrong:
        request.getfixturevalue("wrong")
    read, load = [], AutoModelForCausalLM.from_pretrained
    named = load_host(folder("gpt2"), "hooked", check=False)

    def from_hub(name, **how):
        read.append(name)
        return load(folder("gpt2"), local_files_only=True, dtype=how["dtype"], output_loading_info=True)

    def from_pretrained(name, hf_model, **how):
        assert hf_model is not None and next(hf_model.parameters()).dtype == how["dtype"]
        return named

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_hub)
    monkeypatch.setattr(transformer_lens.HookedTransformer, "from_pretrained_no_processing", from_pretrained)
    monkeypatch.setattr("swd_lens.hosts.load._config", lambda *_: named.cfg)
    if is_wrong:
        with pytest.raises(HostDiffersError, match="this HookedTransformer of gpt2-medium gives other logits"):
            load_host("gpt2-medium", "hooked")
    else:
        difference = difference_of(load_host("gpt2-medium", "hooked"))
        assert difference is not None and difference < 1e-5
    assert read == ["gpt2-medium"]


@needs_hooked
def test_a_name_whose_weights_transformers_does_not_read_is_not_compared(monkeypatch):
    named = load_host(folder("gpt2"), "hooked", check=False)
    monkeypatch.setattr(transformer_lens.HookedTransformer, "from_pretrained_no_processing", lambda name, hf_model, **_: named)
    monkeypatch.setattr("swd_lens.hosts.load._config", lambda *_: named.cfg)
    with pytest.warns(UserWarning, match="transformer_lens loads it without transformers' own model"):
        model = load_host("solu-1l", "hooked")
    assert difference_of(model) is None


@needs_hooked
@pytest.mark.parametrize("network", [False, True])
def test_for_want_of_memory_no_other_kind_is_taken_and_no_host_goes_unchecked(network, monkeypatch):
    failure = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes")

    def fails(*_, **__):
        raise failure

    monkeypatch.setattr(GPT2LMHeadModel if network else transformer_lens.HookedTransformer, "forward", fails)
    with pytest.raises(RuntimeError) as raised:
        load_host(folder("gpt2"))
    assert raised.value is failure
