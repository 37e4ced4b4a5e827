"""factorize with a folder: interruption, resumption with the same bits, refusals; and what its bar shows."""

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch

import swd_lens as swd
import swd_lens.factorization.factorize
import swd_lens.factorization.stages
import swd_lens.solver
from swd_lens.base.sealed import seal
from swd_lens.units.factors import Factors, FactorSet
from tests.micro import random_tokens, toy_model

QUICK = {"preset": "paper", "outer_iterations": 4, "sparsity": 0.5, "progress": False}
ALL = [f"blocks.{layer}.{kind}" for layer in (0, 1) for kind in ("attn_qkv", "attn_o", "mlp_in", "mlp_out")]
TOKENS = random_tokens(12, 9)


def bits(f: Factors) -> list[bytes]:
    return [f.read.numpy().tobytes(), f.write.numpy().tobytes()]


def assert_same(one: FactorSet, two: FactorSet, provenance: bool = True) -> None:
    assert list(one) == list(two) and one.provenance == two.provenance
    for site in one:
        assert bits(one[site]) == bits(two[site])
        assert one[site].settings == two[site].settings
        assert not provenance or one[site].provenance == two[site].provenance


def count_solves(monkeypatch, stop_at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> list[int]:
    """Count the solver's calls; the one numbered `stop_at` (from 0) raises instead."""
    calls: list[int] = []
    solve = swd_lens.solver.solve

    def counted(*arguments, **named):
        if len(calls) == stop_at:
            raise error
        calls.append(len(calls))
        return solve(*arguments, **named)

    monkeypatch.setattr(swd_lens.solver, "solve", counted)
    return calls


HOW = {
    "sequential": {"tokens": TOKENS},
    "dense": {"tokens": TOKENS, "calibration": "dense"},
    "weighed": {"tokens": TOKENS, "weigh_outputs": True},
    "zero-data": {},
    "basis by text": {"tokens": TOKENS, "preset": "quick"},
    "basis by kind": {"preset": "quick"},
    "corrected": {"tokens": TOKENS, "calibration": "corrected"},
    # What is missing of a block is calibrated without what is finished of it.
    "per block": {"tokens": TOKENS, "calibration": "per_block"},
}


@pytest.fixture(scope="module")
def whole_of(model, tmp_path_factory) -> Callable[[str], FactorSet]:
    """What a call that was not interrupted gives, with a folder as without one; each made once."""

    @cache
    def made(how):
        named = {**QUICK, **HOW[how]}
        whole = swd.factorize(model, "all", **named, out=tmp_path_factory.mktemp("whole"))
        assert_same(swd.factorize(model, "all", **named), whole, provenance=False)
        return whole

    return made


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("finished", "how"), [((1, 5)[i % 2], how) for i, how in enumerate(HOW)] + [(0, "dense"), (8, "sequential")]
)
def test_resumed_is_uninterrupted_to_the_bit(model, whole_of, tmp_path, monkeypatch, how, finished):
    named, whole = {**QUICK, **HOW[how]}, whole_of(how)
    out = tmp_path / "interrupted"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks, logits = list(model.hook_dict), model(TOKENS)
    if finished < len(ALL):
        with monkeypatch.context() as patch:
            count_solves(patch, stop_at=finished)
            with pytest.raises(KeyboardInterrupt):
                swd.factorize(model, "all", **named, out=out)
    else:
        swd.factorize(model, "all", **named, out=out)
    # The host is what it was, and what is finished can be read.
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert list(model.hook_dict) == hooks and torch.equal(model(TOKENS), logits)
    assert out.exists() == (finished > 0)
    if finished:
        kept = FactorSet.load(out)
        assert list(kept) == ALL[:finished]
        assert all(bits(kept[site]) == bits(whole[site]) for site in kept)

    calls = count_solves(monkeypatch)
    resumed = swd.factorize(model, "all", **named, out=out)
    assert len(calls) == len(ALL) - finished
    assert_same(resumed, whole)
    assert_same(FactorSet.load(out), whole)
    assert resumed[ALL[0]].relmse() == whole[ALL[0]].relmse()  # the weight is remembered, too
    swd.attach(model, FactorSet.load(out)).detach()


@pytest.fixture
def half_done(model, tmp_path, monkeypatch):
    """A folder with the first of two mlp_out, sequentially calibrated."""
    with monkeypatch.context() as patch:
        count_solves(patch, stop_at=1)
        with pytest.raises(KeyboardInterrupt):
            swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS, out=tmp_path)
    return tmp_path


DIFFERENCES = (
    ({"sparsity": 0.25}, r"made otherwise: sparsity 0\.5 then, 0\.25 now\. Rerun"),
    ({"outer_iterations": 5}, r"made otherwise: outer_iterations 4 then, 5 now\. Rerun"),
    ({"units": 16}, r"made otherwise: units None then, 16 now\. Rerun"),
    ({"batch_size": 3}, r"made otherwise: batch_size 16 then, 3 now\. Rerun"),
    ({"gram_dtype": "float64"}, "gram_dtype None then, 'float64' now"),
    ({"calibration": "dense"}, r"made otherwise: calibration 'sequential' then, 'dense' now\. Rerun"),
    ({"tokens": TOKENS.flip(0)}, r"made otherwise: the tokens \w{8} then, \w{8} now\. Rerun"),
    ({"tokens": TOKENS.view(9, 12)}, r"made otherwise: the tokens \w{8} then, \w{8} now\. Rerun"),
    ({"tokens": None}, r"the tokens \w{8} then, None now"),
    ({"weigh_outputs": True}, r"made otherwise: weigh_outputs None then, True now\. Rerun"),
    ({"preset": "quick"}, r"preset 'paper' then, 'quick' now"),
    ({"sparsity": 0.25, "outer_iterations": 5}, r"sparsity 0\.5 then, 0\.25 now; outer_iterations 4 then, 5 now"),
)


def test_a_difference_is_named(model, half_done, monkeypatch):
    calls = count_solves(monkeypatch)
    contents = {path.name: path.read_bytes() for path in half_done.iterdir()}
    for changed, message in DIFFERENCES:
        with pytest.raises(swd.ResumeError, match=message) as refusal:
            swd.factorize(model, "mlp_out", **{**QUICK, "tokens": TOKENS, **changed}, out=half_done)
        assert "holds blocks.0.mlp_out" in str(refusal.value) and "another folder, or overwrite=True" in str(refusal.value)
    assert not calls and {path.name: path.read_bytes() for path in half_done.iterdir()} == contents


def test_another_host_is_noticed(half_done):
    other = toy_model()
    with torch.no_grad():
        other.W_pos[0, 0] += 1e-3  # nothing that is factorized, but every Gram depends on it
    with pytest.raises(swd.ResumeError, match=r"made otherwise: the host \w{8} then, \w{8} now\. Rerun"):
        swd.factorize(other, "mlp_out", **QUICK, tokens=TOKENS, out=half_done)
    with torch.no_grad():
        other.blocks[0].mlp.W_out[0, 0] += 1e-3
    with pytest.raises(swd.ResumeError, match=r"the host .*; its weight \w{8} then, \w{8} now"):
        swd.factorize(other, "mlp_out", **QUICK, tokens=TOKENS, out=half_done)


def test_a_call_beside_units_of_the_users_leaves_a_folder_to_go_on_with(model, half_done, monkeypatch):
    with (
        swd.attach(model, swd.factorize(model, "blocks.0.attn_o", **QUICK)),
        pytest.raises(swd.AttachError, match=r"units are attached at blocks\.0\.attn_o: detach them first"),
    ):
        swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS, out=half_done)
    calls = count_solves(monkeypatch)
    stream = swd.TokenStream(lambda: iter(TOKENS), n_rows=len(TOKENS))  # the same tokens: what is there is taken over
    swd.factorize(model, "mlp_out", **QUICK, tokens=stream, out=half_done)
    assert len(calls) == 1


def test_zero_data_depends_on_the_weight_alone(tmp_path, monkeypatch):
    one, other = toy_model(), toy_model()
    with torch.no_grad():
        other.W_pos[0, 0] += 1e-3
        other.blocks[1].mlp.W_out[0, 0] += 1e-3
    swd.factorize(one, "blocks.0.mlp_out", **QUICK, out=tmp_path)
    calls = count_solves(monkeypatch)
    swd.factorize(other, "mlp_out", **QUICK, out=tmp_path)
    assert len(calls) == 1


def test_other_sites(model, tmp_path, monkeypatch):
    last, out = "blocks.1.mlp_out", tmp_path / "last"
    swd.factorize(model, last, **QUICK, tokens=TOKENS, out=out)
    with pytest.raises(swd.ResumeError, match=r"would now put blocks\.0\.mlp_out before it"):  # another host for the last one
        swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS, out=out)
    with pytest.raises(swd.ResumeError, match=r"holds blocks\.1\.mlp_out, which this call does not factorize"):
        swd.factorize(model, "blocks.0.mlp_out", **QUICK, tokens=TOKENS, out=out)
    # A later site is an addition; so is an earlier one where calibration does not see it, and the order stays.
    calls = count_solves(monkeypatch)
    first = "blocks.0.mlp_out"
    swd.factorize(model, first, **QUICK, tokens=TOKENS, out=tmp_path / "first")
    swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS, out=tmp_path / "first")
    assert len(calls) == 2
    dense = {**QUICK, "tokens": TOKENS, "calibration": "dense"}
    swd.factorize(model, last, **dense, out=tmp_path / "dense")
    both = swd.factorize(model, "mlp_out", **dense, out=tmp_path / "dense")
    assert len(calls) == 4 and list(both) == list(FactorSet.load(tmp_path / "dense")) == [first, last]
    assert_same(both, swd.factorize(model, "mlp_out", **dense), provenance=False)


def test_other_factors_before_a_site(model, tmp_path):
    """A finished site whose upstream was exchanged by hand: only the chain of factors can tell."""
    swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS, out=tmp_path)
    made = FactorSet.load(tmp_path)
    first = made["blocks.0.mlp_out"]
    exchanged = Factors(first.read * 2, first.write, first.settings, first.provenance)
    FactorSet({**made, "blocks.0.mlp_out": exchanged}, made.provenance).save(tmp_path)
    told = r"holds blocks\.1\.mlp_out made otherwise: factors of the earlier sites \w{8} then"
    with pytest.raises(swd.ResumeError, match=told):
        swd.factorize(model, "mlp_out", **QUICK, tokens=TOKENS, out=tmp_path)


def test_folders_that_cannot_be_resumed(model, tmp_path):
    swd.factorize(model, "mlp_out", **QUICK).save(tmp_path)
    with pytest.raises(swd.ResumeError, match="without saying how it was made"):
        swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)
    (tmp_path / "factors.json").write_text("{")
    with pytest.raises(swd.ResumeError, match=r"damaged.*overwrite=True"):
        swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)
    made = swd.factorize(model, "mlp_out", **QUICK, out=tmp_path, overwrite=True)
    assert_same(FactorSet.load(tmp_path), made)


def test_a_basis_that_there_is_not_is_a_damaged_folder(model, tmp_path):
    swd.factorize(model, "blocks.0.mlp_out", sparsity=0.5, tokens=TOKENS, out=tmp_path, progress=False)
    index = json.loads((tmp_path / "factors.json").read_text())
    for damage in ("inpu", ["input"], None):
        index["provenance"]["basis"]["chosen"]["blocks.0.mlp_out"] = damage
        (tmp_path / "factors.json").write_text(json.dumps(seal(index)))
        with pytest.raises(swd.ResumeError, match=r"factors\.json.*basis .*overwrite=True"):
            swd.factorize(model, "blocks.0.mlp_out", sparsity=0.5, tokens=TOKENS, out=tmp_path, progress=False)


def test_overwriting_keeps_the_old_set_until_there_is_a_new_matrix(model, half_done, monkeypatch):
    old = FactorSet.load(half_done)
    named = {**QUICK, "sparsity": 0.25, "tokens": TOKENS, "out": half_done, "overwrite": True}
    with monkeypatch.context() as patch:
        count_solves(patch, stop_at=0)
        with pytest.raises(KeyboardInterrupt):
            swd.factorize(model, "mlp_out", **named)
    assert_same(FactorSet.load(half_done), old)
    made = swd.factorize(model, "mlp_out", **named)
    assert_same(FactorSet.load(half_done), made)
    assert len(list(half_done.iterdir())) == 3  # two matrices, one index: the old one's file is gone


class Bar:
    """What tqdm is told."""

    made: list["Bar"] = []  # noqa: RUF012

    def __init__(self, total, **named):
        self.total, self.named, self.done, self.texts, self.closed = total, named, 0.0, [], False
        Bar.made.append(self)

    def __enter__(self):
        return self

    def update(self, n):
        assert n >= 0
        self.done += n

    def set_postfix_str(self, text, refresh):
        self.texts.append(text)

    def __exit__(self, *error):
        self.closed = True


@pytest.fixture
def bar(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(swd_lens.factorization.factorize, "tqdm", Bar)
    return Bar


# An estimate does not know what text will say.
@pytest.mark.parametrize("how", ["dense", "weighed", "basis by kind"])
def test_the_bar_counts_operations(model, bar, monkeypatch, how):
    monkeypatch.setattr(swd_lens.factorization.factorize, "_SECONDS_BETWEEN_ERRORS", 0.0)
    named = {**QUICK, **HOW[how]}
    made = swd.factorize(model, "mlp_*", **{**named, "progress": True})
    assert_same(made, swd.factorize(model, "mlp_*", **named))  # showing the error changes no bit
    shown = bar.made[0]
    expected = swd.estimate(model, "mlp_*", **{key: value for key, value in named.items() if key != "progress"})
    calibrating = sum(row.calibration_flops for row in expected.rows) if how == "weighed" else 0.0
    assert shown.total == pytest.approx(sum(row.flops for row in expected.rows) + calibrating)
    assert shown.done == pytest.approx(shown.total) and shown.closed
    assert "blocks.1.mlp_in (3/4)" in shown.texts
    assert any(text.startswith("blocks.1.mlp_in (3/4) 2/4 relMSE 0.") for text in shown.texts)
    assert shown.texts[-1] == f"blocks.1.mlp_out (4/4) relMSE {made['blocks.1.mlp_out'].provenance['relmse']:.3g}"


def test_a_failure_closes_the_bar_and_a_resumed_one_counts_the_rest(model, bar, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        count_solves(patch, stop_at=1, error=RuntimeError)
        with pytest.raises(RuntimeError):
            swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)
    swd.factorize(model, "mlp_out", **{**QUICK, "progress": True}, out=tmp_path)
    failed, resumed = bar.made
    assert failed.closed and resumed.closed
    assert resumed.done == pytest.approx(resumed.total) == pytest.approx(failed.total / 2)
    assert resumed.texts[0] == "blocks.1.mlp_out (2/2)"
    # The default interval is seconds, and this takes none: the error is not measured before the end.
    assert sum("relMSE" in text for text in resumed.texts) == 1


def test_a_site_of_the_users_is_refused_before_anything_is_solved(model, monkeypatch):
    users = swd.factorize(model, "blocks.1.mlp_in", **QUICK)
    calls = count_solves(monkeypatch)
    with swd.attach(model, users):
        for sites, tokens in (("all", None), ("all", TOKENS), ("blocks.1.mlp_out", TOKENS)):
            with pytest.raises(swd.AttachError, match=r"units are attached at blocks\.1\.mlp_in: detach them first"):
                swd.factorize(model, sites, **QUICK, tokens=tokens)
    assert calls == []


@pytest.mark.parametrize("calibration", ["corrected", "dense"])
def test_hooks_of_the_users_leave_no_probe(model, tmp_path, calibration):
    """A probe made beside them would refuse the factors on the host without them."""
    sites = ["blocks.0.attn_o", "blocks.1.attn_o", "blocks.1.mlp_out"]
    with model.hooks([("blocks.0.hook_resid_post", lambda t, hook: 2 * t)]):
        swd.factorize(model, sites, **QUICK, tokens=TOKENS, calibration=calibration, out=tmp_path)
    loaded = FactorSet.load(tmp_path)
    assert all(f.probe is None for f in loaded.values())
    swd.attach(model, loaded).detach()


def test_estimate_knows_each_matrix_basis(model):
    estimated = {row.site: row.units for row in swd.estimate(model, "all", basis="auto", tokens=(12, 9)).rows}
    assert estimated["blocks.1.mlp_out"] == 32 and estimated["blocks.1.attn_o"] == 16
    assert [row.units for row in swd.estimate((32, 16), basis="auto").rows] == [16]  # a matrix of no known kind
