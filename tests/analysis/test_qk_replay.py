"""A replay is what really happens: removed patterns equal a hook's, numbers follow from the maps, the host stays as it was."""

import pytest
import torch

from swd_lens.analysis.qk import QKPair, qk_replay
from swd_lens.base.errors import QKError
from swd_lens.base.figures import svg
from swd_lens.train.baselines import svd
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests import families
from tests.analysis.qk_checks import ROW, intervened, random_factors
from tests.micro import toy_model

HOSTS = {
    "learned": lambda: toy_model(),
    "alibi": lambda: toy_model(positional_embedding_type="alibi"),
    "soft cap": lambda: toy_model(attn_scores_soft_cap=2.0),
    "pythia": lambda: families.hooked("pythia"),
    "llama": lambda: families.hooked("llama"),
    "qwen3": lambda: families.hooked("qwen3"),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("host", HOSTS)
def test_the_removed_pattern_is_that_of_a_real_intervention(host, packed):
    model = HOSTS[host]()
    factors = random_factors(model, packed)
    pair = QKPair(1, int(model.cfg.n_heads) - 1, 3, 5)
    for remove in ("q", "k"):
        replay = qk_replay(model, factors, pair, ROW, remove=remove)
        assert torch.allclose(replay.removed, intervened(model, factors, pair, ROW, remove), atol=1e-5)
        assert torch.allclose(replay.reconstructed, intervened(model, factors, pair, ROW, "none"), atol=1e-5)
        assert replay.max_change > 1e-4


def test_the_numbers_follow_from_the_maps():
    model = toy_model()
    factors = random_factors(model)
    replay = qk_replay(model, factors, QKPair(1, 1, 2, 4), ROW)
    _, cache = model.run_with_cache(torch.tensor([ROW]))
    assert torch.allclose(replay.dense, cache["pattern", 1][0, 1], atol=1e-6)
    write = factors["blocks.1.attn_qkv"].write
    gamma = float(write[2, 8:16] @ write[4, 24:32]) / 8**0.5
    with attach(model, factors):
        _, cache = model.run_with_cache(torch.tensor([ROW]))
        z, scores = cache["attn_qkv_unit", 1][0], cache["attn_scores", 1][0, 1]
    assert replay.pair.gamma == pytest.approx(gamma, rel=1e-5)
    contribution = (torch.outer(z[:, 2], z[:, 4]) * gamma).tril()
    assert torch.allclose(replay.contribution, contribution, atol=1e-6)
    assert torch.equal(replay.mask, torch.ones(7, 7).tril().bool())
    assert replay.signed_mean == pytest.approx(float(contribution.sum()) / 28, abs=1e-6)

    def kl(p: torch.Tensor, q: torch.Tensor) -> float:
        return float(torch.where(replay.mask, p * (p.log() - q.log()), 0.0).nan_to_num(0).sum(-1).mean())

    assert replay.dense_kl == pytest.approx(kl(replay.dense, replay.reconstructed), abs=1e-6)
    assert replay.removed_kl == pytest.approx(kl(replay.reconstructed, replay.removed), abs=1e-6)
    change = replay.removed - replay.reconstructed
    assert replay.max_change == pytest.approx(float(change.abs().max()))
    foretold = (scores - contribution).softmax(-1) - replay.reconstructed
    correlation = torch.corrcoef(torch.stack([foretold[replay.mask], change[replay.mask]]))[0, 1]
    assert replay.agreement == pytest.approx(float(correlation), abs=1e-4)


def test_shares_of_all_partners_sum_to_one():
    model = toy_model()
    factors = random_factors(model)
    shares = [qk_replay(model, factors, QKPair(0, 1, 6, b), ROW).share for b in range(9)]
    # The unit with the key bias gives every source of a row the same, which no pattern feels.
    assert sum(shares) == pytest.approx(1, abs=1e-5) and max(shares) < 1.5


def test_removing_the_pair_alone_is_what_the_map_foretells():
    model = toy_model()
    replay = qk_replay(model, random_factors(model), QKPair(0, 0, 1, 2), ROW, remove="pair")
    assert replay.agreement == pytest.approx(1, abs=1e-6) and replay.share == pytest.approx(1, abs=1e-6)
    assert replay.taken_out == "q1×k2"


def test_a_unit_that_writes_nothing_changes_nothing():
    model = toy_model()
    factors = random_factors(model)
    packed = factors["blocks.0.attn_qkv"]
    write = packed.write.clone()
    write[1, :8] = 0
    factors["blocks.0.attn_qkv"] = Factors(packed.read, write)
    replay = qk_replay(model, factors, QKPair(0, 0, 1, 2), ROW)
    assert replay.max_change == 0 and replay.removed_kl == 0 and replay.agreement != replay.agreement


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kl_of_a_half_precision_host_is_one_of_probabilities(dtype):
    """Exact factors: what is left is rounding, and rows that do not sum to one would make it negative."""
    model = toy_model().to(dtype)
    model.cfg.dtype = dtype
    factors = svd(model, "attn_qkv")
    for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        replay = qk_replay(model, factors, QKPair(layer, head, 2, 4), ROW)
        for pattern in (replay.dense, replay.removed):  # scored in float32: bfloat16 would miss by 1e-2
            assert torch.allclose(pattern.sum(-1), torch.ones(7), atol=1e-6) and replay.removed.dtype == torch.float32
        assert -1e-7 < replay.dense_kl < 1e-3


def test_a_replay_shows_itself(default_model):
    factors = random_factors(default_model)
    replay = qk_replay(default_model, factors, QKPair(0, 0, 1, 2), "Mary gave a drink to John")
    assert replay.tokens[0] == default_model.tokenizer.bos_token and "".join(replay.tokens[1:]) == "Mary gave a drink to John"
    drawn = svg(replay.plot())
    assert "reconstructed" in drawn and "without q1" in drawn and "·gave" in drawn
    assert "contribution to the score" in svg(replay.plot_contribution())
    panel = replay.panel()._repr_html_()
    assert "without q1" in panel and "AttentionHeads" in panel
    assert "L0H0 q1×k2" in replay._repr_html_() and "L0H0 q1×k2" in repr(replay)
    assert replay.table()["removed KL"][0] == replay.removed_kl


@pytest.mark.parametrize(
    ("pair", "prompt", "remove", "message"),
    [
        (QKPair(0, 0, 9, 0), ROW, "q", r"q_unit is 9, but blocks\.0\.attn_qkv has units 0 to 8"),
        (QKPair(0, 0, 0, -1), ROW, "q", "k_unit is -1"),
        (QKPair(1, 0, 0, 0), ROW, "q", "layer 1 has no units on its queries and keys; layers with both: 0"),
        (QKPair(0, 2, 0, 0), ROW, "q", "layer 0 has heads 0 to 1, not 2"),
        (QKPair(0, 0, 0, 0), [3], "q", "at least two tokens"),
        (QKPair(0, 0, 0, 0), [ROW, ROW], "q", "one row of tokens, got 2"),
        (QKPair(0, 0, 0, 0), ROW, "v", "remove must be one of 'q', 'k', 'pair', got 'v'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(pair, prompt, remove, message):
    model = toy_model()
    factors = {"blocks.0.attn_qkv": random_factors(model)["blocks.0.attn_qkv"]}
    with pytest.raises(QKError, match=message):
        qk_replay(model, factors, pair, prompt, remove=remove)
