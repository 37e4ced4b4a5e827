"""finetune on both kinds of host: the support, the host, the result, the paper's step by hand, errors."""

import json
from types import SimpleNamespace

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import FinetuneError
from swd_lens.hosts import host as freezing
from swd_lens.tasks.streams import TokenStream
from swd_lens.train.finetune import finetune
from swd_lens.train.finetune import fit as fit_module
from swd_lens.train.finetune.fit import FinetuneFit
from tests.micro import toy_model
from tests.train.conftest import HELD, ROWS, bits, everything, factorized, logits, supports, text_for

QUICK = {"progress": False, "steps": 6, "batch_size": 4, "learning_rate": 3e-3}
KINDS = ("hooked", "bridge", "hooked bf16", "bridge bf16")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_values_move_the_support_and_the_host_do_not(kind):
    model, factors = factorized(kind)
    asking = next(model.parameters())
    asking.requires_grad_(False)  # one flag that differs: it must be found again
    before, was, given = everything(model), logits(model), bits(factors)
    text, held = text_for(model), text_for(model, 6, seed=1)
    tuned = finetune(model, factors, text, heldout=held, loss="kl", **QUICK)
    assert supports(tuned) == supports(factors) and tuned.edges == factors.edges
    assert bits(factors) == given and all(a != b for a, b in zip(bits(tuned).values(), given.values(), strict=True))
    after = everything(model)
    for one, other in zip(before, after, strict=True):
        assert one == other
    assert torch.equal(logits(model), was)
    asking.requires_grad_(True)
    note = tuned.provenance["finetune"]
    assert note["after"]["kl"] < note["before"]["kl"]
    # What training measured is what attaching the result gives.
    measured = swd.fidelity(model, tuned, held)
    close = {"rel": 1e-5, "abs": 1e-6} if "bf16" not in kind else {"rel": 2e-2}
    assert measured.kl == pytest.approx(note["after"]["kl"], **close)
    assert measured.ce == pytest.approx(note["after"]["ce"], **close)
    assert measured.ce_dense == pytest.approx(note["after"]["ce_dense"], **close)


def test_the_result_saves_loads_and_attaches_with_its_probe(toy, tmp_path):
    model, factors = toy
    tuned = finetune(model, factors, ROWS, **QUICK)
    assert list(tuned) == list(factors)
    tuned.save(tmp_path)
    loaded = swd.FactorSet.load(tmp_path)
    with swd.attach(model, loaded):  # runs the probe
        pass
    for site, f in tuned.items():
        then = factors[site]
        assert f.settings == then.settings and f.weight is then.weight and f.origin is then.origin
        assert f.probe is not None and then.probe is not None and not torch.equal(f.probe.z, then.probe.z)
        assert f.provenance["relmse_before_finetune"] == then.provenance["relmse"] and "relmse" not in f.provenance
        assert f.provenance["relative_frobenius"] == pytest.approx(f.relative_frobenius(), rel=1e-9)
        assert f.provenance["finetune"]["steps"] == 6 and f.provenance["finetune"]["tokens"] == 6 * 4 * 10
    assert json.loads(json.dumps(tuned.provenance)) == tuned.provenance
    with pytest.raises(swd.AttachError, match="attached already"), swd.attach(model, tuned):
        finetune(model, tuned, ROWS, **QUICK)


def test_transported_factors_keep_their_offsets_and_train():
    raw, folded = toy_model(), toy_model()
    with torch.no_grad():  # a LayerNorm worth folding
        for block in raw.blocks:
            block.ln1.b.add_(0.2), block.ln2.b.sub_(0.1), block.ln1.w.add_(1.0), block.ln2.w.add_(1.0)
    factors = swd.factorize(raw, "blocks.*.mlp_*", sparsity=0.6, preset="quick", outer_iterations=2, progress=False)
    folded.load_state_dict(raw.state_dict())
    folded.process_weights_(fold_ln=True, center_writing_weights=False, center_unembed=False)
    moved = factors.transport(folded)
    assert any(f.offsets is not None for f in moved.values())
    tuned = finetune(folded, moved, ROWS, heldout=HELD, **QUICK)
    for site, f in tuned.items():
        assert f.offsets is moved[site].offsets
    assert swd.fidelity(folded, tuned, HELD).ce == pytest.approx(tuned.provenance["finetune"]["after"]["ce"], rel=1e-6)


def test_autocast_trains_in_bfloat16_and_evaluates_in_full(toy, monkeypatch):
    model, factors = toy
    seen = []
    run = fit_module.batch_loss

    def spying(mounted, rows, spec):
        kept = []
        hook = mounted.projections["blocks.0.mlp_in"].register_forward_hook(lambda m, a, y: kept.append(y.dtype))
        loss = run(mounted, rows, spec)
        hook.remove()
        seen.extend(kept)
        return loss

    monkeypatch.setattr(fit_module, "batch_loss", spying)
    same = {"preset": "paper", "heldout": HELD, "steps": 2, "progress": False}
    rounded, exact = (finetune(model, factors, ROWS, autocast=autocast, **same) for autocast in ("bfloat16", None))
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(f.read.dtype == torch.float32 for f in rounded.values())
    notes = [tuned.provenance["finetune"] for tuned in (rounded, exact)]
    assert notes[0]["before"] == notes[1]["before"] and bits(rounded) != bits(exact)


def test_the_seed_and_the_form_of_the_text_decide_the_rows_and_the_callers_gradients_nothing(toy):
    model, factors = toy
    few = {"blocks.1.mlp_out": factors["blocks.1.mlp_out"]}
    one, other = (finetune(model, few, ROWS, seed=seed, **QUICK) for seed in (0, 1))
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            again = finetune(model, few, ROWS, seed=0, **QUICK)
        assert bits(again) == bits(one) != bits(other)
    stream = TokenStream(lambda: iter(ROWS), n_rows=10)  # in its own order: 2 batches of 4 a pass, two rows left over
    tuned = finetune(model, few, stream, **QUICK)
    assert tuned.provenance["finetune"]["tokens"] == 240
    assert bits(tuned) != bits(finetune(model, few, ROWS[:10], **QUICK))


@pytest.mark.parametrize(("kind", "error"), [("hooked", KeyboardInterrupt), ("bridge", RuntimeError)])
def test_after_an_interruption_the_host_is_what_it_was(kind, error, monkeypatch):
    model, factors = factorized(kind)
    before, was = everything(model), logits(model)

    def broken(self, step):
        raise error("in the middle")

    monkeypatch.setattr(FinetuneFit, "adjust_gradients", broken)
    with pytest.raises(error, match="in the middle"):
        finetune(model, factors, text_for(model), **QUICK)
    for one, other in zip(before, everything(model), strict=True):
        assert one == other
    assert torch.equal(logits(model), was)


def test_while_it_trains_weights_cannot_be_rewritten(toy, monkeypatch):
    model, factors = toy
    monkeypatch.setattr(FinetuneFit, "adjust_gradients", lambda *args: model.load_state_dict(model.state_dict()))
    with pytest.raises(RuntimeError, match="fine-tuned on this host"):
        finetune(model, factors, ROWS, **QUICK)
    model.load_state_dict(model.state_dict())


def test_a_host_in_training_mode_stays_in_it_and_dropout_is_refused():
    model = toy_model().train()
    factors = swd.factorize(model, "blocks.0.mlp_out", sparsity=0.5, preset="quick", progress=False)
    finetune(model, factors, ROWS, **QUICK)
    assert all(module.training for module in model.modules())
    model, factors = factorized("bridge")
    model.train()
    try:
        with pytest.raises(ValueError, match=r"drops activations out.*model.eval"):
            finetune(model, factors, text_for(model), **QUICK)
    finally:
        model.eval()


def test_errors_say_what_is_wrong(toy):
    model, factors = toy
    site = "blocks.0.mlp_out"
    f, pair = factors[site], SimpleNamespace(encode=lambda x: x, decode=lambda z: z[..., :16])
    cases = [
        (dict(factors={}), swd.AttachError, "the set is empty"),
        (dict(factors={"blocks.9.mlp_out": f}), swd.UnknownSiteError, "blocks.9.mlp_out"),
        (dict(factors={site: pair}), FinetuneError, "holds SimpleNamespace, an encode/decode pair"),
        (dict(factors={"blocks.1.mlp_out": f}), swd.AttachError, "another W"),
        (dict(tokens=ROWS[:3]), FinetuneError, "3 rows of 10 tokens, too few for one batch of batch_size=4"),
        (dict(tokens=ROWS[:, :1]), FinetuneError, "tokens has rows of one token"),
        (dict(heldout=ROWS[:, :1]), FinetuneError, "heldout has rows of one token"),
        (dict(tokens=ROWS + 100), swd.TokenError, "outside the vocabulary"),
        (dict(eval_every=0), FinetuneError, "eval_every must be a whole number of at least 1, got 0"),
        (dict(checkpoint_every=-1), FinetuneError, "checkpoint_every must be a whole number of at least 1, got -1"),
        (dict(keep="best"), FinetuneError, 'keep="best" needs heldout='),
    ]
    before = everything(model)
    for changed, error, says in cases:
        named = {"factors": factors, "tokens": ROWS, **QUICK, **changed}
        with pytest.raises(error, match=says):
            finetune(model, **named)
    assert everything(model) == before


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(toy, tmp_path):
    model, factors = toy
    before = everything(model)
    with pytest.raises(FinetuneError, match=r"step \d+ of 6: .*at learning rate .* keeps step \d+"):
        finetune(model, factors, ROWS, out=tmp_path, checkpoint_every=1, schedule="constant", **{**QUICK, "learning_rate": 1e20})
    assert everything(model) == before
    assert (tmp_path / "checkpoint.safetensors").exists() and not (tmp_path / "factors").exists()


def test_interrupted_while_the_host_is_given_back(toy, monkeypatch):
    model, factors = toy
    before = everything(model)
    require, once = freezing._require_gradients, iter([KeyboardInterrupt])

    def interrupted(parameters, gradients):
        if gradients:
            for error in once:
                raise error
        require(parameters, gradients)

    monkeypatch.setattr(freezing, "_require_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(model, factors, ROWS, **QUICK)
    assert everything(model) == before
