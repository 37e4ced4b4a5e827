"""A scan is qk_replay for every head, pair and prompt, made at once."""

import json

import pandas as pd
import pytest
import torch

from swd_lens.analysis.qk import QKPair, qk_replay, qk_scan, qk_screen
from swd_lens.analysis.qk import scan as scan_module
from swd_lens.analysis.qk.replay import NUMBERS
from swd_lens.base.errors import QKError
from swd_lens.base.record import column
from swd_lens.units.factors import Factors
from tests import families
from tests.analysis.qk_checks import ROW, random_factors, same, snapshot
from tests.micro import micro_model, toy_model
from tests.refusals import refuses

PROMPTS = [ROW, [5, 2], ROW[::-1], [4, 4, 1, 9, 12]]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("remove", ["q", "k", "pair"])
@pytest.mark.parametrize("host", ["learned", "qwen3"])
def test_every_case_is_a_replay(host, remove):
    model = toy_model() if host == "learned" else families.hooked(host)
    factors = random_factors(model)
    scan = qk_scan(model, factors, PROMPTS, per_head=2, remove=remove, progress=False)
    assert len(scan.frame) == 2 * int(model.cfg.n_heads) * 2 * len(PROMPTS)
    assert scan.frame["removed KL"].is_monotonic_decreasing
    for row in scan.frame.iloc[::5].to_dict("records"):
        pair = QKPair(row["layer"], row["head"], row["q unit"], row["k unit"])
        alone = qk_replay(model, factors, pair, scan.prompts[row["prompt"]], remove=remove)
        assert row["gamma"] == pytest.approx(alone.pair.gamma, rel=1e-5)
        for name in NUMBERS:
            assert row[column(name)] == pytest.approx(getattr(alone, name), rel=1e-4, abs=1e-6, nan_ok=True), name


def test_parts_of_a_scan_are_the_whole(monkeypatch):
    """Batches of one prompt and a few cases at a time give what all at once give."""
    model = toy_model()
    factors, before = random_factors(model), snapshot(model)
    whole = qk_scan(model, factors, PROMPTS, progress=False)
    assert same(snapshot(model), before) and f"{len(whole.frame)} cases on 4 prompts" in repr(whole)
    assert whole.settings["remove"] == "q" and whole.settings["per_head"] == 5 and "<svg" in whole._repr_html_()
    assert list(whole.table(3).columns)[-1] == "text" and len(whole.table(3)) == 3 and len(whole.table()) == len(whole.frame)
    monkeypatch.setattr(scan_module, "_NUMBERS", 600)
    parts = qk_scan(model, factors, PROMPTS, progress=False)
    keys = ["layer", "head", "q unit", "k unit", "prompt"]
    left, right = (each.frame.sort_values(keys, ignore_index=True) for each in (whole, parts))
    pd.testing.assert_frame_equal(left, right, rtol=1e-4, atol=1e-6)


def test_the_best_cases_pass_the_bars():
    model = toy_model()
    scan = qk_scan(model, random_factors(model), PROMPTS, progress=False)
    best = scan.best(100, max_dense_kl=1.0, min_agreement=0.5, min_share=0.1)
    assert 0 < len(best) < len(scan.frame)
    assert all(case.dense_kl <= 1 and case.agreement >= 0.5 and case.share >= 0.1 for case in best)
    assert [case.removed_kl for case in best] == sorted((case.removed_kl for case in best), reverse=True)
    limit = float(scan.frame["dense KL"].median())
    kept = qk_scan(model, random_factors(model), PROMPTS, max_dense_kl=limit, progress=False)
    assert len(kept.frame) == int((scan.frame["dense KL"] <= limit).sum()) < len(scan.frame)


def test_pairs_come_from_the_screen_or_as_given():
    model = toy_model()
    factors = random_factors(model)
    pairs = [QKPair(0, 1, 2, 3), QKPair(1, 0, 4, 5)]
    scan = qk_scan(model, factors, ROW, pairs=pairs, progress=False)  # one row of ids is one prompt
    assert sorted(zip(scan.frame["layer"], scan.frame["q unit"], strict=True)) == [(0, 2), (1, 4)]
    assert scan.settings["pairs"] == "given" and "per_head" not in scan.settings
    screen = qk_screen(model, {"blocks.1.attn_qkv": factors["blocks.1.attn_qkv"]}, top=9)
    scan = qk_scan(model, factors, torch.tensor([ROW, ROW]), screen=screen, per_head=1, progress=False)
    assert set(scan.frame["layer"]) == {1} and len(scan.frame) == 4
    of_screen = {"pairs": "of a screen", "per_head": 1, "top": 9, "distance": 0}
    assert of_screen.items() <= scan.settings.items()
    refuses(QKError, "not both", qk_scan, model, factors, [ROW], screen=screen, pairs=pairs)
    refuses(QKError, "no pairs to replay", qk_scan, model, factors, [ROW], pairs=[])
    refuses(QKError, "no prompts", qk_scan, model, factors, [])


def test_results_are_plain_values_and_back():
    model = families.hooked("qwen3")
    factors = random_factors(model)
    pair = QKPair(1, 0, 2, 4)
    screen, replay = qk_screen(model, factors), qk_replay(model, factors, pair, ROW)
    for result in (screen, qk_scan(model, factors, [ROW], pairs=[pair], progress=False), replay):
        values = json.loads(json.dumps(result.as_dict()))
        again = type(result).from_dict(values)
        assert again.as_dict() == result.as_dict() and repr(again) == repr(result)


@pytest.mark.parametrize("host", ["learned", "qwen3"])
def test_a_units_scale_changes_gamma_and_neither_size_nor_effects(host):
    model, packed = (toy_model(), True) if host == "learned" else (families.hooked(host), False)
    factors = random_factors(model, packed)
    site = "blocks.1.attn_qkv" if packed else "blocks.1.attn_q"
    read, write = factors[site].read.clone(), factors[site].write.clone()
    read[:, 4] *= 3
    write[4] /= 3
    pairs = [QKPair(1, 0, 4, 5), QKPair(1, 1, 2, 3)]
    before, after = (
        qk_scan(model, each, PROMPTS[0], pairs=pairs, progress=False).frame.sort_values("q unit")
        for each in (factors, {**factors, site: Factors(read, write)})
    )
    assert after["size"].tolist() == pytest.approx(before["size"].tolist(), rel=1e-4)
    assert after["removed KL"].tolist() == pytest.approx(before["removed KL"].tolist(), rel=1e-3)
    assert after["gamma"].tolist() == pytest.approx([before["gamma"].iloc[0], before["gamma"].iloc[1] / 3], rel=1e-5)


def test_size_by_hand():
    """One head of width 2, z = h: (1, 0), (1, 1) of tokens 0, 2. gamma of q1 and k0 is -4 / sqrt(2), rms sqrt(1/2) and 1."""
    write = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0, 9.0], [0.0, -1.0, 5.0, 0.0, 9.0, 9.0]])
    factors = {"blocks.0.attn_qkv": Factors(torch.eye(2), write)}
    scan = qk_scan(micro_model(), factors, [[0, 2]], pairs=[QKPair(0, 0, 1, 0)], progress=False)
    assert scan.frame["size"].item() == pytest.approx(2.0) and scan.frame["gamma"].item() == pytest.approx(-(8**0.5))
