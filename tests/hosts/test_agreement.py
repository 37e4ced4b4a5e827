"""load_host compares a HookedTransformer with transformers' own model, and "auto" takes the kind that agrees."""

import pytest
import torch
from transformer_lens import HookedTransformer
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from swd_lens import HostDiffersError, load_host
from swd_lens.hosts.agreement import difference_of
from swd_lens.hosts.hooked import layout
from tests import families
from tests.bridge.test_agreement import folder, loaded_with, scaled


@pytest.fixture
def wrong(monkeypatch):
    """HookedTransformers whose last norm is scaled by 1.01."""
    lay_out = layout.lay_out

    def laid_out_wrongly(model):
        lay_out(model)
        with torch.no_grad():
            model.ln_final.w.mul_(1.01)

    monkeypatch.setattr(layout, "lay_out", laid_out_wrongly)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*families.HOOKED, "opt"])
def test_a_host_that_is_right_is_as_without_the_check(name, dtype):
    model, plain = (load_host(folder(name), "hooked", dtype=dtype, check=check) for check in (True, False))
    difference = difference_of(model)
    assert difference is not None and difference < (1e-5 if dtype == "float32" else 1e-3)
    assert model.cfg.dtype == plain.cfg.dtype == getattr(torch, dtype)
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def test_a_wrong_one_is_refused_and_auto_takes_the_bridge(wrong, monkeypatch):
    with pytest.raises(
        HostDiffersError, match=r'this HookedTransformer of .*by up to 0\.0\d+ of .*Try kind="bridge"; check=False'
    ):
        load_host(folder("gpt2"), "hooked")
    assert type(load_host(folder("gpt2"), "hooked", check=False)).__name__ == "HookedTransformer"
    assert type(load_host(folder("gpt2"), check=False)).__name__ == "HookedTransformer"
    assert type(load_host(folder("gpt2"))).__name__ == "TransformerBridge"
    with (
        loaded_with(monkeypatch, scaled(1.02)),
        pytest.raises(HostDiffersError, match="Another version of transformer_lens"),
    ):
        load_host(folder("gpt2"))
    with loaded_with(monkeypatch, scaled(1.02)), pytest.raises(HostDiffersError, match='Try kind="hooked"'):
        load_host(folder("gpt2"), "bridge")


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
    monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", from_pretrained)
    monkeypatch.setattr("swd_lens.hosts.load._config", lambda *_: named.cfg)
    if is_wrong:
        with pytest.raises(HostDiffersError, match="this HookedTransformer of gpt2-medium gives other logits"):
            load_host("gpt2-medium", "hooked")
    else:
        difference = difference_of(load_host("gpt2-medium", "hooked"))
        assert difference is not None and difference < 1e-5
    assert read == ["gpt2-medium"]


def test_a_name_whose_weights_transformers_does_not_read_is_not_compared(monkeypatch):
    named = load_host(folder("gpt2"), "hooked", check=False)
    monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", lambda name, hf_model, **_: named)
    monkeypatch.setattr("swd_lens.hosts.load._config", lambda *_: named.cfg)
    with pytest.warns(UserWarning, match="transformer_lens loads it without transformers' own model"):
        model = load_host("solu-1l", "hooked")
    assert difference_of(model) is None


@pytest.mark.parametrize("runs", [HookedTransformer, GPT2LMHeadModel])
def test_for_want_of_memory_no_other_kind_is_taken_and_no_host_goes_unchecked(runs, monkeypatch):
    failure = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes")

    def fails(*_, **__):
        raise failure

    monkeypatch.setattr(runs, "forward", fails)
    with pytest.raises(RuntimeError) as raised:
        load_host(folder("gpt2"))
    assert raised.value is failure
