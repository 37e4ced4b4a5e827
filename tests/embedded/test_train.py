"""Training: the network is the HookedTransformer, starts as claimed, and a run is reproducible and resumable."""

import json
from functools import partial

import pytest
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

from swd_lens.hosts.embedded import WEIGHTS, Shape, load_model_folder
from swd_lens.hosts.embedded.corpus import load_tokenizer
from tests.embedded import train
from tests.embedded.network import Network, hooked_state

SMALL = Shape(d_vocab=50, n_layers=2, d_model=64, n_heads=2, d_mlp=96, n_ctx=32)


def hooked(network: Network) -> HookedTransformer:
    model = HookedTransformer(HookedTransformerConfig(**network.shape.hooked_config(), device="cpu"))
    state = hooked_state(network)
    state |= {"unembed.W_U": state["embed.W_E"].T, "unembed.b_U": torch.zeros(network.shape.d_vocab)}
    model.load_state_dict(state, strict=False)
    return model


def test_network_is_the_hooked_transformer():
    network = Network(SMALL, seed=1)
    with torch.no_grad():
        for p in network.parameters():  # biases and LayerNorm gains too, which start at 0 and 1
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    tokens = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hooked(network)(tokens), network(tokens), atol=2e-4, rtol=1e-4)


def test_document_mask_keeps_documents_apart():
    network = Network(SMALL, seed=1)
    tokens = torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, :8] = (other[0, :8] + 1) % 50
    documents = torch.tensor([[0] * 8 + [1] * 12])
    assert torch.equal(network(tokens, documents)[0, 8:], network(other, documents)[0, 8:])
    assert not torch.allclose(network(tokens)[0, 8:], network(other)[0, 8:])


def test_two_heads_start_as_previous_token_heads():
    model = hooked(Network(Shape(d_vocab=300), seed=0))
    tokens = torch.randint(300, (4, 64), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    for head in (0, 1):
        back = cache["pattern", 0][:, head].diagonal(-(head + 1), dim1=1, dim2=2)
        assert float(back.mean()) > 0.5


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [train.learning_rate(step, 1000) for step in range(1001)]
    assert max(rates) == pytest.approx(train.LEARNING_RATE)
    assert rates.index(max(rates)) in (train.WARM_UP - 1, train.WARM_UP)
    assert rates[1000] == 0.0


@pytest.fixture
def short(monkeypatch):
    """Few prompts and the shipped tokenizer, so that a run takes seconds; torch's settings as before afterwards."""
    threads = torch.get_num_threads()
    tokenizer = load_tokenizer(WEIGHTS)
    monkeypatch.setattr(train, "build_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(train, "CHECK_PROMPTS", 4)
    monkeypatch.setattr(train, "all_scores", partial(train.all_scores, n=4, splits=("validation",)))
    monkeypatch.setattr(train, "ablation_table", partial(train.ablation_table, n=2))
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.slow
def test_the_command_makes_a_model_and_the_same_bits_again(short, tmp_path):
    steps = 3
    for name in ("a", "b"):
        train.main(["--out", str(tmp_path / name), "--seed", "5", "--tokens", str(steps * 16 * 128)])
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b
    model = load_model_folder(tmp_path / "a")
    assert model("So Mary is").shape == (1, 4, model.cfg.d_vocab)
    scores = json.loads((tmp_path / "a" / "scores.json").read_text())
    assert scores["seed"] == 5
    assert scores["tokens"] == steps * 16 * 128
    assert set(scores["scores"]["validation"]["seen"]) == set(train.FAMILIES)
    log = [json.loads(line) for line in (tmp_path / "a" / "train_log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == steps
    assert not list((tmp_path / "a").glob("*.tmp"))


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(short, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    whole = train.run(tmp_path / "whole", 5, 4 * 16 * 128)
    real, calls = train.train_step, []

    def stop(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(train, "train_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train.run(tmp_path / "parts", 5, 4 * 16 * 128, check_every=2)
    monkeypatch.setattr(train, "train_step", real)
    parts = train.run(tmp_path / "parts", 5, 4 * 16 * 128, check_every=2)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), parts.parameters(), strict=True))
    with pytest.raises(ValueError, match="is of another run"):
        train.run(tmp_path / "parts", 6, 4 * 16 * 128)
