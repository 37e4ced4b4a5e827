"""load_host: local folders compute what transformers computes; which kind of host a name gets; what is refused, and how.

Bridges of every family: tests/bridge/test_load.py, which also runs on transformer_lens 4.x.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.load import load_host
from tests import families


@pytest.mark.parametrize("family", families.HOOKED)
def test_a_folder_as_a_hooked_transformer_computes_what_transformers_computes(family):
    tokens, model = families.some_tokens(), families.hooked(family)
    with torch.no_grad():
        expected, found = families.reference(family)(tokens).logits, model(tokens)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert type(model).__name__ == "HookedTransformer" and not model.training
    assert model.cfg.model_name == families.checkpoint(family).name


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
    with pytest.raises(ValueError, match="a host's kind must be one of auto, hooked, bridge; got 'transformer'"):
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
    assert host_fingerprint(model, model.cfg) == host_fingerprint(plain, plain.cfg)
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
