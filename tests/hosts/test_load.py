"""load_host: which kind of host a name gets; what is refused, and how. What folders compute: test_families.py."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.load import load_host
from tests import families


def test_auto_takes_a_hooked_transformer_where_it_knows_the_architecture_and_else_a_bridge():
    assert type(load_host(str(families.checkpoint("gpt2")))).__name__ == "HookedTransformer"
    for family in sorted(set(families.FAMILIES) - set(families.HOOKED)):
        assert type(load_host(str(families.checkpoint(family)))).__name__ == "TransformerBridge"


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", r"is a BertForMaskedLM, no HookedTransformer\. Load it as a TransformerBridge: kind=\"bridge\""),
        ("qwen3_5", r"HookedTransformer cannot load .*Load it as a TransformerBridge: kind=\"bridge\""),
    ],
)
def test_hooked_refuses_what_hooked_transformer_does_not_compute(family, message):
    with pytest.raises(UnsupportedHostError, match=message):
        load_host(str(families.checkpoint(family)), kind="hooked")


def test_a_name_that_hooked_transformer_does_not_know_goes_to_the_bridge(monkeypatch):
    from transformer_lens.model_bridge import TransformerBridge

    with pytest.raises(UnsupportedHostError, match="HookedTransformer does not know a model named 'nobody/new'"):
        load_host("nobody/new", kind="hooked")
    asked = []

    def boot(name, **how):
        asked.append((name, how))
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(TransformerBridge, "boot_transformers", staticmethod(boot))
    load_host("nobody/new", device="cpu", check=False)
    [(name, how)] = asked
    how.pop("model_class")  # ours, which looks at what it loads
    assert (name, how) == ("nobody/new", {"device": "cpu", "dtype": torch.float32, "device_map": None})


def test_a_folder_that_is_no_checkpoint_and_a_kind_that_there_is_not(tmp_path):
    for kind in ("auto", "hooked", "bridge"):
        with pytest.raises(ValueError, match=r"has no config\.json; give a Hugging Face checkpoint folder"):
            load_host(str(tmp_path), kind)
    with pytest.raises(ValueError, match="kind must be one of 'auto', 'hooked', 'bridge', got 'transformer'"):
        load_host(str(tmp_path), kind="transformer")


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_a_host_in_bfloat16_holds_the_same_weights_rounded(kind):
    folder = str(families.checkpoint("gpt2"))
    exact, rounded = load_host(folder, kind=kind), load_host(folder, kind=kind, dtype="bfloat16")
    assert {p.dtype for p in rounded.blocks.parameters()} == {torch.bfloat16}
    for site, same in zip(find_sites(exact), find_sites(rounded), strict=True):
        one, two = host_of(exact).weight(site), host_of(rounded).weight(same)
        assert two.dtype == torch.float32 and torch.equal(two, one.bfloat16().float())


def test_a_host_laid_over_devices_is_a_bridge():
    folder = str(families.checkpoint("gpt2"))
    model = load_host(folder, device_map={"": "cpu"})
    assert type(model).__name__ == "TransformerBridge"
    assert torch.equal(model(families.some_tokens()), load_host(folder, kind="bridge")(families.some_tokens()))
    with pytest.raises(ValueError, match=r"device_map lays a TransformerBridge .* does not go with kind=\"hooked\""):
        load_host(folder, kind="hooked", device_map="auto")
    with pytest.raises(ValueError, match="does not go with device='cpu'"):
        load_host(folder, device="cpu", device_map="auto")
    with pytest.raises(ValueError, match="dtype='int8': give a floating dtype"):
        load_host(folder, dtype="int8")


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(llama_folder, kind, check):
    """transformers would draw it at random, another one at each load."""
    up, weights = "model.layers.1.mlp.up_proj.weight", load_file(llama_folder / "model.safetensors")
    del weights[up]
    save_file(weights, llama_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"llama lacks 1 tensors of its architecture.*{up}"):
        load_host(str(llama_folder), kind, check=check)
