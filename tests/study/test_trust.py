"""look_at_trust on the embedded model: every circuit beside null, worst case and dense model, and a card, in one section."""

from dataclasses import replace

import pytest

import swd_lens as swd
from swd_lens.study.trust import COLUMNS, PROMPTS, _of_common_lengths, look_at_trust, trusted, verdict_of
from tests.micro import split_of

pytestmark = pytest.mark.usefixtures("few_alternations")
SITE = "blocks.3.mlp_out"


@pytest.fixture(scope="module")
def run(default_model, tasks, few_alternations):
    calibration, heldout = swd.text_tokens(1024, split="train"), swd.text_tokens(512, split="test")
    texts = {"calibration_tokens": calibration, "heldout_tokens": heldout}
    return swd.run_study(default_model, {SITE: SITE}, tasks, sparsities=(0.75,), controls=(), **texts, outer_iterations=4)


@pytest.fixture(scope="module")
def section(default_model, tasks, run):
    texts = {"calibration_tokens": swd.text_tokens(1024, split="train"), "text": swd.text_tokens(256, split="test")}
    return look_at_trust(default_model, run, tasks, **texts, vary=SITE, n=4, runs=2, nulls=1)


def test_a_circuit_is_held_against_what_each_measure_says_alone(default_model, tasks, run):
    task, [replacement] = tasks[1], run.replacements
    circuit = run.comparisons[SITE][task.name].curves[replacement.method].circuit_at()
    values = trusted(default_model, replacement.factors, task, circuit, n=4, steps=2)
    assert tuple(values) == COLUMNS
    common = replace(task, validation=_of_common_lengths(task.validation, PROMPTS))
    worst = swd.attack(default_model, replacement.factors, common, circuit, n=4, steps=2, starts=1, max_prompts=PROMPTS)
    null = swd.circuit_null(default_model, replacement.factors, task, circuit.scores, circuit=circuit, n=4)
    transfer = swd.dense_transfer(default_model, replacement.factors, task, circuit)
    assert (values["recovered"], values["at the worst"], values["attack p"]) == (worst.own, worst.recovered, worst.p)
    assert (values["null p"], values["gap p"]) == (null.recovered_p, transfer.p)
    assert values["error term kept"] == pytest.approx(values["recovered"] + transfer.gap, abs=1e-5)
    assert values["at the worst"] <= values["recovered"]


def test_the_section_has_a_row_for_every_surface_and_task(run, section):
    circuits, tails, card = section.tables
    rows = [dict(zip(circuits.columns, row, strict=True)) for row in circuits.rows]
    assert [(row["surface"], row["task"]) for row in rows] == [(SITE, "ioi"), (SITE, "gendered pronoun")]
    # The embedded model's last MLP does not carry ioi: no number is made of that.
    assert set(list(rows[0].values())[2:]) == {None} and None not in rows[1].values()
    assert rows[1]["edges"] == run.comparisons[SITE]["gendered_pronoun"].curves["SWD s=0.75"].cost_at()
    [tail] = tails.rows
    assert tail[:2] == (SITE, "SWD s=0.75") and tail[2] <= tail[3] <= tail[4] <= tail[5]
    assert len(card.rows) == 5 and "gendered pronoun" in card.caption
    assert section.intro[0].startswith("Of 1 circuits, ") and "able (" in section.intro[0]  # Stable, or Not stable
    assert section.title == "How far to trust this"


def test_the_adversary_gets_prompts_of_the_commonest_lengths():
    split = split_of([[1], [1, 2], [1, 2, 3], [2, 3], [3, 4], [2, 3, 4]], [[1]] * 6, [[2]] * 6, 20)
    assert [len(tokens) for tokens in _of_common_lengths(split, 4).tokens] == [2, 3, 2, 2]
    assert len(_of_common_lengths(split, 9)) == 6


def test_the_verdict_counts():
    row = {"edges": 5, "recovered": 0.9, "null p": 0.05, "at the worst": 0.45}
    weak = row | {"null p": 0.06, "at the worst": 0.44}
    assert verdict_of([row, weak, {"surface": "x", "task": "y"}], None) == (
        "Of 2 circuits, 1 recover more than random circuits of their size (p ≤ 0.05; no correction for how many are asked), and "
        "1 keep half of what they recover under the worst partial ablation found."
    )
    assert verdict_of([{"surface": "x", "task": "y"}], None).startswith("No surface carries a task")


def test_what_is_refused(default_model, tasks, run):
    text = swd.text_tokens(256, split="test")
    with pytest.raises(ValueError, match="vary needs calibration_tokens"):
        look_at_trust(default_model, run, tasks, text, vary=SITE)
    with pytest.raises(ValueError, match="vary"):
        look_at_trust(default_model, run, tasks, text, vary="blocks.0.mlp_out", calibration_tokens=text)


def test_the_card_has_the_sparsity_of_the_circuit(default_model, tasks, run, monkeypatch):
    asked: dict[str, float] = {}

    def refused(*args, **how):
        asked.update(how)
        raise RuntimeError("the card is asked for")

    monkeypatch.setattr("swd_lens.study.trust.stability", refused)
    text = swd.text_tokens(256, split="test")
    other = replace(run, replacements=[replace(r, factors=at(r.factors, 0.6)) for r in run.replacements])
    with pytest.raises(RuntimeError, match="the card is asked for"):
        look_at_trust(default_model, other, tasks, text, vary=SITE, calibration_tokens=text, n=2)
    assert asked["sparsity"] == 0.6


def at(factors, sparsity):
    """These factors as if another sparsity had been asked for; they stay the ones that the scores are of."""
    [(site, f)] = factors.items()
    return swd.FactorSet({site: replace(f, settings={**f.settings, "sparsity": sparsity})}, factors.provenance)
