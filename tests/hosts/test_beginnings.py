"""Rows begin as the host's text does: Grams, fidelity and tasks see one first token, and rows that do not are told."""

import json
import math
import shutil
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import swd_lens as swd
from swd_lens.base.errors import TextWarning, TokenError
from swd_lens.hosts import find_sites, host_of, predictions
from swd_lens.hosts.beginnings import text_for
from swd_lens.hosts.load import load_host
from swd_lens.hosts.verified import verified
from swd_lens.tasks.streams import as_stream
from tests import families

SITE = "blocks.0.mlp_out"
QUICK = {"preset": "paper", "outer_iterations": 4, "progress": False}
TEXT = [" ".join(["Mary gave a drink to John. Then John went to the store."] * 20)]
BOS, EOS, SPECIAL = 0, 1, 4  # ids below 4 are special
pytestmark = pytest.mark.filterwarnings("ignore:.*calibration tokens for:UserWarning")


both_ways = pytest.mark.parametrize("model", ["set by hand", "said by the tokenizer"], indirect=True)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A Llama folder whose tokenizer says so, as Llama's own do, or a bridge whose default is set by hand."""
    if getattr(request, "param", "") == "set by hand":
        host = families.bridge("gpt2")
        host.cfg.default_prepend_bos = True
        return host
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    shutil.copytree(families.checkpoint("llama"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    host = load_host(str(folder), kind="bridge")
    assert host.cfg.default_prepend_bos is True
    return host


def ce_by_hand(model, rows, first=1):
    logits = host_of(model).run(rows)[:, first - 1 : -1].float()
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, first:].flatten()))


@both_ways
def test_grams_fidelity_and_tasks_see_one_first_token(model):
    rows = swd.load_text(TEXT, model, 8 * 16, context=16)
    assert rows.shape == (8, 16) and set(rows[:, 0].tolist()) == {BOS}
    with warnings.catch_warnings():
        warnings.simplefilter("error", TextWarning)
        factors = swd.factorize(model, SITE, tokens=rows, **QUICK)
        measured = swd.fidelity(model, factors, rows)
        found = swd.audit(model, factors, rows, n=2, progress=False)
    assert factors.provenance["rows_begin_with_bos"] is True and factors.provenance["tokens"] == 128
    assert measured.text == {"rows_begin_with_bos": True} and measured.as_dict()["text"] == measured.text
    assert found.settings["rows_begin_with_bos"] is True
    task = swd.Task.from_prompts("t", model, ["Then Mary", "Then John", "When Mary"], [" went"] * 3, [" gave"] * 3)
    assert {int(tokens[0]) for split in task.splits for tokens in split.tokens} == {BOS}
    narrow = swd.concentration(model, factors, rows, n_predictions=4, context=3)
    assert narrow.settings["prepend_bos"] is True


def test_the_text_goes_on_from_row_to_row(model):
    with_bos, without = (swd.load_text(TEXT, model, 8 * 16, context=n, bos=bos) for n, bos in ((16, True), (15, False)))
    assert torch.equal(with_bos[:, 1:], without[:8])
    packed = swd.pack_text(model, TEXT[0], context=16)
    assert torch.equal(packed[:, 0], torch.zeros(len(packed), dtype=torch.int64))
    assert torch.equal(packed[:, 1:], swd.pack_text(model, TEXT[0], context=15, bos=False)[: len(packed)])


@both_ways
def test_cross_entropy_of_the_default_text_is_that_with_bos_put_by_hand(model):
    by_hand = torch.cat([torch.full((8, 1), BOS), swd.load_text(TEXT, model, 8 * 15, context=15, bos=False)], 1)
    factors = swd.factorize(model, SITE, sparsity=0.5, calibration="zero-data", **QUICK)
    measured = swd.fidelity(model, factors, swd.load_text(TEXT, model, 8 * 16, context=16))
    assert measured.ce_dense == swd.fidelity(model, factors, by_hand).ce_dense
    assert math.isclose(measured.ce_dense, ce_by_hand(model, by_hand), rel_tol=1e-5)


@both_ways
def test_rows_without_bos_are_one_warning_with_both_cross_entropies(model):
    rows = swd.load_text(TEXT, model, 6 * 16, context=16, bos=False)
    with pytest.warns(TextWarning) as told:
        factors = swd.factorize(model, SITE, tokens=rows, **QUICK)
    (said,) = [str(each.message) for each in told if each.category is TextWarning]
    few = rows[:4]
    without, beginning = ce_by_hand(model, few), ce_by_hand(model, torch.cat([torch.full((4, 1), BOS), few], 1), 2)
    assert said.startswith("calibration tokens: 4 of the first 4 rows do not begin with BOS ('<|bos|>')")
    assert f"is {without:.3f} nats without and {beginning:.3f} with BOS" in said
    assert factors.provenance["rows_begin_with_bos"] is False
    for call in (
        lambda: swd.fidelity(model, factors, rows),
        lambda: swd.audit(model, factors, rows, progress=False),
        lambda: swd.allocate(model, SITE, sparsity=0.5, tokens=swd.TokenStream(lambda: iter(rows), 6), judge=rows, **QUICK),
    ):
        with pytest.warns(TextWarning, match="do not begin with BOS"):
            call()


def test_a_host_that_begins_without_bos_is_not_told():
    model = families.bridge("gpt2")
    rows = swd.load_text(TEXT, model, 64, context=16)
    assert not (rows[:, 0] == BOS).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TextWarning)
        factors = swd.factorize(model, SITE, tokens=rows, **QUICK)
    assert factors.provenance["rows_begin_with_bos"] is False
    assert (swd.load_text(TEXT, model, 64, context=16, bos=True)[:, 0] == BOS).all()


# ---------------------------------------------------------------------------------------------- what counts


def gram_of(model, rows, counted=None):
    """The Gram of what SITE reads, by hand."""
    read = []
    with host_of(model).inputs(find_sites(model, SITE), lambda site, h: read.append(h.double())):
        host_of(model).run(rows)
    h = read[0].flatten(0, 1)
    h = h if counted is None else h[counted.flatten()]
    return h.T @ h / len(h)


def test_special_tokens_do_not_count_in_a_gram(model):
    rows = swd.load_text(TEXT, model, 6 * 16, context=16)
    rows[2, 5] = EOS
    counted = rows >= SPECIAL
    grams = swd.collect_grams(model, find_sites(model, SITE), rows, batch_size=4, dtype="float64", exclude="special")
    torch.testing.assert_close(grams[SITE], gram_of(model, rows, counted), rtol=1e-5, atol=1e-8)
    assert grams.n_tokens == 89 and grams.first_share[SITE] == 0.0
    whole = swd.collect_grams(model, find_sites(model, SITE), rows, batch_size=4, dtype="float64")
    by_hand, first = gram_of(model, rows), torch.zeros_like(rows, dtype=torch.bool)
    first[:, 0] = True
    share = gram_of(model, rows, first).trace() * 6 / (by_hand.trace() * 96)
    assert whole.first_share[SITE] == pytest.approx(float(share), rel=1e-5)
    factors = swd.factorize(model, SITE, tokens=rows, exclude="special", **QUICK)
    said = factors.provenance
    assert (said["exclude"], said["left_out"], said["tokens"]) == ("special", 7, 89)
    assert factors[SITE].provenance["first_position_share"] == 0.0
    assert "first_position_share" not in swd.factorize(model, SITE, calibration="zero-data", **QUICK)[SITE].provenance


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("calibration", ["sequential", "corrected", "dense", "per_block"])
def test_every_calibration_leaves_them_out(model, calibration):
    """The same factors as of a Gram that was made without the excluded positions, in every matrix of two blocks."""
    rows = swd.load_text(TEXT, model, 6 * 16, context=16)
    sites = [SITE, "blocks.1.mlp_out"]
    how = {"calibration": calibration, "batch_size": 4, **QUICK}
    made = swd.factorize(model, sites, tokens=rows, exclude=[BOS], weigh_outputs=True, **how)
    plain = swd.factorize(model, sites, tokens=rows, weigh_outputs=True, **how)
    assert not torch.equal(made[SITE].read, plain[SITE].read) or not torch.equal(made[SITE].write, plain[SITE].write)
    nothing = swd.factorize(model, sites, tokens=rows, exclude=[7], weigh_outputs=True, **how)
    for site in sites:
        assert torch.equal(nothing[site].write, plain[site].write) and torch.equal(nothing[site].read, plain[site].read)
        assert made[site].provenance["first_position_share"] == 0.0 < plain[site].provenance["first_position_share"]


def padded(model):
    """Three texts of 6, 9 and 4 tokens, padded at their ends or at their beginnings, and the masks."""
    rows = swd.load_text(TEXT, model, 3 * 9, context=9)
    lengths, pad = (6, 9, 4), 2
    right, left = torch.full((3, 9), pad), torch.full((3, 9), pad)
    for i, n in enumerate(lengths):
        right[i, :n], left[i, 9 - n :] = rows[i, :n], rows[i, :n]
    return [rows[i : i + 1, :n] for i, n in enumerate(lengths)], (right, right != pad), (left, left != pad)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("side", [0, 1], ids=["behind", "before"])
def test_padding_is_left_out_wherever_it_is(model, side):
    alone, *both = padded(model)
    rows, mask = both[side]
    factors = swd.factorize(model, SITE, tokens=rows, attention_mask=mask, **QUICK)
    assert factors.provenance["left_out"] == 27 - 19 and factors.provenance["rows_begin_with_bos"] is True
    h = []
    with host_of(model).inputs(find_sites(model, SITE), lambda site, x: h.append(x.flatten(0, 1).double())):
        for row in alone:
            host_of(model).run(row)
    gram = torch.cat(h).T @ torch.cat(h) / 19
    stream = as_stream(rows, model, attention_mask=mask)
    made = swd.collect_grams(model, find_sites(model, SITE), stream, dtype="float64")[SITE]
    torch.testing.assert_close(made, gram, rtol=1e-4, atol=1e-7)
    measured = swd.fidelity(model, factors, rows, attention_mask=mask)
    parts = [swd.fidelity(model, factors, row) for row in alone]
    n = [part.n_predictions for part in parts]
    assert measured.n_predictions == sum(n) == 16
    for name in ("ce_dense", "ce", "kl"):
        expected = sum(getattr(part, name) * k for part, k in zip(parts, n, strict=True)) / 16
        assert getattr(measured, name) == pytest.approx(expected, rel=1e-4, abs=2e-7), name
    # Rows of different lengths: a ratio, linearized; its rows add up to the mean.
    deltas = [part.ce_delta * k for part, k in zip(parts, n, strict=True)]
    residuals = torch.tensor([d - k * measured.ce_delta for d, k in zip(deltas, n, strict=True)], dtype=torch.float64)
    assert measured.ce_delta_se == pytest.approx(float((residuals.square().sum() * 3 / 2).sqrt() / 16), rel=1e-3)
    assert sum(measured.ce_delta_rows) / 3 == pytest.approx(measured.ce_delta, rel=1e-6)


def test_padding_without_a_mask_is_refused(model):
    _, (right, _), (left, _) = padded(model)
    for rows, end in ((right, "row 0 ends"), (left, "row 0 begins")):
        with pytest.raises(TokenError, match=rf"{end} with several pad tokens \('<\|pad\|>', id 2; 2 such rows"):
            swd.factorize(model, SITE, tokens=rows, **QUICK)


def test_predictions_at_and_of_special_tokens_are_left_out(model):
    rows = swd.load_text(TEXT, model, 4 * 12, context=12)
    rows[1, 4] = EOS  # neither read there nor predicted
    factors = swd.factorize(model, SITE, sparsity=0.5, calibration="zero-data", **QUICK)
    measured = swd.fidelity(model, factors, rows, exclude="special", local=True)
    counted = rows >= SPECIAL
    of_predictions = counted[:, :-1] & counted[:, 1:]
    losses = F.cross_entropy(host_of(model).run(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    expected = float(losses[of_predictions.flatten()].double().mean())
    assert measured.n_predictions == int(of_predictions.sum()) == 38
    assert measured.ce_dense == pytest.approx(expected, rel=1e-5)
    assert measured.text == {"rows_begin_with_bos": True, "exclude": "special", "left_out": 5}
    assert "(5 positions left out)" in measured.title()
    y = {}
    for name, units in (("dense", nullcontext), ("own", lambda: swd.attach(model, factors))):
        with units(), host_of(model).outputs(find_sites(model, SITE), lambda site, out, n=name: y.update({n: out.double()})):
            host_of(model).run(rows)
    lost = (y["own"] - y["dense"])[counted].square().sum() / y["dense"][counted].square().sum()
    assert measured.relmse[SITE] == pytest.approx(float(lost), rel=1e-4)
    plain = swd.fidelity(model, factors, rows, local=True)
    assert measured.local_relmse[SITE] != plain.local_relmse[SITE]
    # Whole runs, where stages do not do, say the same.
    with pytest.MonkeyPatch.context() as patch:
        wrong = lambda fast, plain, **how: verified(lambda: fast() + 1, plain, **how)  # noqa: E731
        patch.setattr(predictions, "verified", wrong)
        with pytest.warns(UserWarning, match="shortened .*stages"):
            whole = swd.fidelity(model, factors, rows, exclude="special")
    assert whole.kl == pytest.approx(measured.kl, rel=1e-3) and whole.ce == pytest.approx(measured.ce, rel=1e-5)


def test_refused_before_any_work(model):
    rows = swd.load_text(TEXT, model, 32, context=16)
    factors = swd.factorize(model, SITE, sparsity=0.5, calibration="zero-data", **QUICK)
    for exclude, message in (
        ("bos", "exclude must be 'special'"),
        ([1, 1366], "exclude names 1366, which is no token id"),
        (range(1366), "every one of the 32 tokens is left out"),
    ):
        with pytest.raises(TokenError, match=message):
            swd.factorize(model, SITE, tokens=rows, exclude=exclude, **QUICK)
        with pytest.raises(TokenError, match=message):
            swd.fidelity(model, factors, rows, exclude=exclude)
    alternate = torch.tensor([[0, 9, 0, 9]])
    with pytest.raises(TokenError, match="no prediction counts"):
        swd.fidelity(model, factors, alternate, exclude=[9])


def test_a_mask_for_an_encoder_is_refused():
    model = families.bridge("bert")
    rows = families.some_tokens(2, 6)
    with pytest.raises(TokenError, match="attends both ways"):
        text_for(model, rows, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]))
    assert text_for(model, rows, attention_mask=torch.ones(2, 6)).n_counted == 12


def test_an_audit_says_what_lies_on_special_tokens():
    model = families.bridge("gpt2")
    model.cfg.default_prepend_bos = True
    rows = swd.load_text(TEXT, model, 6 * 16, context=16)
    rows[:, 3::3] = EOS  # so that some of the peaks lie there
    factors = swd.factorize(model, SITE, sparsity=0.5, calibration="zero-data", **QUICK)
    how = {"n": 3, "progress": False}
    plain, without = swd.audit(model, factors, rows, **how), swd.audit(model, factors, rows, exclude="special", **how)
    of_site = plain.sites[SITE]
    peaks = of_site.places.tokens[..., of_site.places.before]
    shares = ((peaks < SPECIAL) & (of_site.places.value > 0)).sum(1) / (of_site.places.value > 0).sum(1).clamp(min=1)
    assert torch.allclose(of_site.special_peaks, shares.float()) and 0 < float(shares.max()) <= 1
    assert float(without.sites[SITE].special_peaks.max()) == 0
    assert without.settings["left_out"] == 36 and without.n_tokens == 60
    unit = int(shares.argmax())
    assert f"{float(shares[unit]):.0%} of its peaks on special tokens" in repr(plain.unit(f"{SITE}/{unit}"))
    assert plain.table()["special peaks"].max() == pytest.approx(float(shares.max()))
    z = []
    with swd.attach(model, factors) as attachment:
        name = attachment.sites[0].hook_name
        with model.hooks(fwd_hooks=[(name, lambda t, hook: z.append(t.double()))]):
            host_of(model).run(rows)
    torch.testing.assert_close(without.sites[SITE].mean.double(), z[0][rows >= SPECIAL].mean(0), rtol=1e-4, atol=1e-6)


def test_concentration_leaves_predictions_out(model):
    rows = swd.load_text(TEXT, model, 6 * 16, context=16)
    factors = swd.factorize(model, SITE, sparsity=0.5, calibration="zero-data", **QUICK)
    rows[3, 4] = EOS  # the answer of a context
    made = swd.concentration(model, factors, rows, n_predictions=8, context=3, exclude="special")
    assert made.settings["predictions_left_out"] == 1 and made.settings["exclude"] == "special"
