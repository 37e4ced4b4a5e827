"""QK studies on bridges: scores add up, removals are real interventions, and what is not plain attention is refused."""

import pytest
import torch

from swd_lens.analysis.qk import QKPair, qk_replay, qk_scan, qk_screen
from swd_lens.base.errors import UnsupportedHostError
from tests import families
from tests.analysis.qk_checks import ROW, check_parts, intervened, random_factors, same, snapshot

# Gemma 2 caps its scores and, in every other layer, sees 32 positions back.
LONG = (ROW * 6)[:38]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "pythia", "llama", "qwen3", "gemma2"])
def test_parts_sum_to_scores_and_removals_are_real_interventions(name, packed):
    model = families.bridge(name)
    factors, row = random_factors(model, packed), LONG if name == "gemma2" else ROW
    before = snapshot(model)
    check_parts(model, factors, row)
    pair = QKPair(1, int(model.cfg.n_heads) - 1, 3, 5)
    for remove in ("q", "k"):
        replay = qk_replay(model, factors, pair, row, remove=remove)
        assert torch.allclose(replay.removed, intervened(model, factors, pair, row, remove), atol=1e-5)
        assert torch.allclose(replay.reconstructed, intervened(model, factors, pair, row, "none"), atol=1e-5)
    assert same(snapshot(model), before)


def test_a_sliding_window_is_in_the_mask():
    model = families.bridge("gemma2")
    replays = [qk_replay(model, random_factors(model), QKPair(layer, 0, 1, 2), LONG) for layer in (0, 1)]
    seen = sorted(int(replay.mask[-1].sum()) for replay in replays)
    assert seen == [32, 38] and not any(bool(replay.contribution[~replay.mask].any()) for replay in replays)
    assert replays[0].settings["soft_cap"] == 50


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_both_hosts_give_the_same(name):
    pytest.importorskip("transformer_lens.HookedTransformer", reason="transformer_lens 4 has no HookedTransformer")
    models = families.hooked(name), families.bridge(name)
    screens = [qk_screen(model, random_factors(model), distance=3) for model in models]
    assert torch.allclose(screens[0].gamma, screens[1].gamma, atol=1e-5)
    assert torch.equal(screens[0].q_units, screens[1].q_units)
    pairs = screens[0].pairs(2)
    frames = [qk_scan(m, random_factors(m), [ROW], pairs=pairs, progress=False).frame for m in models]
    keys = ["layer", "head", "q unit", "k unit"]
    left, right = (frame.sort_values(keys, ignore_index=True) for frame in frames)
    assert left[keys].equals(right[keys])
    assert torch.allclose(torch.tensor(left["removed KL"]), torch.tensor(right["removed KL"]), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"), [("bert", "attends both ways"), ("qwen3_5", "no softmax attention|a gate beside its queries")]
)
def test_what_is_not_plain_causal_attention_is_refused(name, message):
    model = families.bridge(name)
    for packed in (True, False):
        with pytest.raises(UnsupportedHostError, match=message):
            qk_screen(model, random_factors(model, packed))
