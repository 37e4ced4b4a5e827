"""A run's folder: interruption anywhere, the same bits and the same log; what is refused; a finished run taken over."""

import json
import shutil

import pytest
import torch

import swd_lens as swd
from swd_lens.train.engine import Engine, normalized, root_mean_square
from swd_lens.train.finetune import finetune
from tests.micro import toy_model
from tests.train.conftest import HELD, ROWS, bits, interrupt

SAME = {
    **{"progress": False, "steps": 7, "batch_size": 5, "learning_rate": 3e-3, "heldout": HELD},
    **{"eval_every": 2, "checkpoint_every": 3, "loss": "kl"},
}


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return finetune(*toy, ROWS, out=out, **SAME), out


def log(out):
    return (out / "log.jsonl").read_text()


def test_the_log_says_what_happened(whole, toy):
    tuned, out = whole
    lines = [json.loads(line) for line in log(out).splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["tokens"] for line in lines] == [50 * step for step in range(8)]
    assert [line["step"] for line in lines if "heldout_ce" in line] == [0, 2, 4, 6, 7]
    assert all({"loss", "learning_rate", "grad_rms"} <= line.keys() for line in lines[1:])
    note = tuned.provenance["finetune"]
    for line, when in ((lines[0], "before"), (lines[-1], "after")):
        assert (line["heldout_ce"], line["heldout_kl"]) == (note[when]["ce"], note[when]["kl"])
    # The first loss is that of the factors given.
    alone = finetune(*toy, ROWS, **{**SAME, "heldout": None})
    assert bits(alone) == bits(tuned)  # neither a folder nor evaluation changes a bit
    assert bits(swd.FactorSet.load(out / "factors")) == bits(tuned)
    assert sorted(path.name for path in out.iterdir()) == ["factors", "log.jsonl", "run.json"]


@pytest.fixture(scope="module")
def whole_best(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("best")
    return finetune(*toy, ROWS, out=out, keep="best", **SAME), out


@pytest.mark.parametrize(("after", "keep"), [(0, "last"), (5, "best")])
def test_resumed_is_uninterrupted_to_the_bit(toy, whole, whole_best, tmp_path, monkeypatch, after, keep):
    model, factors = toy
    plain, reference = whole if keep == "last" else whole_best
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        interrupt(patch, after)
        with pytest.raises(KeyboardInterrupt):
            finetune(model, factors, ROWS, out=out, **SAME, keep=keep)
    with open(out / "log.jsonl", "a") as file:
        file.write('{"step": 9, "lo')  # a kill in the middle of a line
    made = []
    one = Engine.advance
    monkeypatch.setattr(Engine, "advance", lambda self, rows: made.append(self.step) or one(self, rows))
    resumed = finetune(model, factors, ROWS, out=out, **SAME, keep=keep)
    assert made == list(range(after - after % 3, 7))  # from the last checkpoint on, not from the start
    assert bits(resumed) == bits(plain) and resumed.provenance == plain.provenance
    assert log(out) == log(reference)
    for name in resumed:
        assert resumed[name].provenance == plain[name].provenance


def test_another_run_is_refused_and_every_difference_named(toy, whole, tmp_path):
    model, factors = toy
    tuned, out = whole
    before = log(out)
    other_host = toy_model()
    with torch.no_grad():
        other_host.embed.W_E.add_(1.0)
    cases = [
        (dict(learning_rate=1e-3), r"learning_rate 0.003 then, 0.001 now"),
        (dict(steps=9, loss="ce"), r"loss 'kl' then, 'ce' now; steps 7 then, 9 now"),
        (dict(tokens=ROWS[:-1]), r"the tokens \w{8} then, \w{8} now"),
        (dict(heldout=None), r"the held-out tokens \w{8} then, None now"),
        (dict(factors=tuned), r"the factors \w{8} then, \w{8} now"),
        (dict(model=other_host), r"the host \w{8} then, \w{8} now"),
    ]
    for changed, says in cases:
        with pytest.raises(swd.ResumeError, match=says):
            finetune(**{"model": model, "factors": factors, "tokens": ROWS, "out": out, **SAME, **changed})
    assert log(out) == before
    shutil.copytree(out / "factors", tmp_path / "set")
    with pytest.raises(swd.ResumeError, match=r"holds factors.json without run.json"):
        finetune(model, factors, ROWS, out=tmp_path / "set", **SAME)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    with pytest.raises(swd.ResumeError, match=r"run\.json is not a training run, or damaged"):
        finetune(model, factors, ROWS, out=tmp_path / "damaged", **SAME)


def test_gradients_are_divided_by_their_common_rms():
    # rms of (3, 4) and (0, 0): sqrt(25 / 4) = 2.5
    gradients = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    got = normalized(gradients, root_mean_square(gradients))
    torch.testing.assert_close(got[0], torch.tensor([3.0, 4.0]) / 2.5)
    assert root_mean_square(got) == pytest.approx(1.0, rel=1e-6)
    added = normalized(gradients, root_mean_square(gradients), 0.5)
    torch.testing.assert_close(added[0], torch.tensor([3.0, 4.0]) / 3)
    tiny = [torch.full((3,), 1e-9)]
    assert torch.equal(normalized(tiny, root_mean_square(tiny))[0], tiny[0])
