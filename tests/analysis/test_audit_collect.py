"""One pass over a text: contexts against looking at every position, whatever the batches; bounded memory; errors."""

import gc

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.audit import audit, collect, logit_effect, top_contexts
from swd_lens.analysis.audit.contexts import TopPlaces
from swd_lens.analysis.audit.statistics import Statistics
from swd_lens.hosts import host_of
from tests.analysis.audit_models import activations, lettered, made_scores, sparse_factors
from tests.micro import random_tokens, toy_model


@pytest.fixture(scope="module")
def model():
    return lettered()


@pytest.fixture(scope="module")
def factors(model):
    return sparse_factors(model, "mlp_out")


def brute_force(z, tokens, unit, n, before, after):
    """(tokens, z, peak) of the n rows of largest |z|, from activations of the whole text."""
    best, position = z[:, :, unit].abs().max(1)
    found = []
    for row in best.sort(descending=True, stable=True).indices[:n].tolist():
        pos = int(position[row])
        start, stop = max(0, pos - before), min(tokens.shape[1], pos + after + 1)
        letters = tuple(chr(ord("a") + token) for token in tokens[row, start:stop].tolist())
        found.append((letters, pytest.approx(z[row, start:stop, unit].tolist(), abs=1e-5), pos - start))
    return found


def as_tuples(contexts):
    return [(context.tokens, context.z, context.peak) for context in contexts]


def test_the_top_contexts_are_the_largest_z_of_each_row(model):
    factors, tokens = baselines.svd(model, "mlp_out"), random_tokens(11, 9)
    units = [("blocks.1.mlp_out", 3), ("blocks.0.mlp_out", 5), ("blocks.1.mlp_out", 0), ("blocks.1.mlp_out", 3)]
    found = top_contexts(model, factors, units, tokens, n=4, before=2, after=1, batch_size=3)
    z = activations(model, factors, tokens)
    assert set(found) == set(units)
    for site, unit in units:
        assert as_tuples(found[site, unit]) == brute_force(z[site], tokens, unit, 4, 2, 1)


def test_rows_at_a_time_are_bounded_by_their_tokens(model, factors, monkeypatch):
    monkeypatch.setattr(collect, "_TOKENS_AT_ONCE", 27)
    rows = []
    hook = model.blocks[0].register_forward_hook(lambda *a: rows.append(len(a[1][0])))
    top_contexts(model, factors, [("blocks.1.mlp_out", 3)], random_tokens(7, 9), n=2, batch_size=64)
    hook.remove()
    assert rows == [3, 3, 1]


@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_all_units_of_all_sites_at_once_equal_a_search_over_every_position(model, factors, batch_size):
    tokens = random_tokens(23, 9, seed=3)
    found = audit(model, factors, tokens, n=5, before=3, after=2, batch_size=batch_size, progress=False)
    z = activations(model, factors, tokens)
    assert len(found) == 24 and found.n_tokens == 23 * 9
    for profile in found.profiles():
        expected = brute_force(z[profile.site], tokens, profile.index, 5, 3, 2)
        dead = profile.index == 11  # never fires: no context is better than another
        assert as_tuples(profile.contexts) == ([] if dead else expected)


def test_fewer_rows_than_contexts_and_windows_wider_than_rows(model, factors):
    tokens = random_tokens(2, 3)
    found = audit(model, factors, tokens, n=20, before=30, after=30, per_row=1, progress=False)
    z = activations(model, factors, tokens)["blocks.1.mlp_out"]
    contexts = found.unit("blocks.1.mlp_out/4").contexts
    assert as_tuples(contexts) == brute_force(z, tokens, 4, 2, 30, 30) and len(contexts[0].tokens) == 3


@pytest.mark.parametrize(("per_row", "batch_size"), [(None, 2), (None, 3), (2, 1), (4, None)])
def test_a_text_of_few_rows_fills_the_list_from_each(model, factors, per_row, batch_size):
    # The paper's dashboard is 2,048 tokens, 20 contexts per unit: two rows of 1,024.
    tokens = random_tokens(3, 9, seed=5)
    found = audit(
        model, factors, tokens, n=8, before=2, after=1, per_row=per_row, batch_size=batch_size, progress=False
    )
    assert found.settings["contexts_per_row"] == (per_row or 3)
    z = activations(model, factors, tokens)
    for profile in found.profiles():
        size = z[profile.site][:, :, profile.index].abs()
        # Every position of every row by size, each row's largest only, equal ones in the order of the text.
        places = []
        for row in range(3):
            order = sorted(range(9), key=lambda pos, row=row: (-float(size[row, pos]), pos))[: per_row or 3]
            places += [(row, pos) for pos in order]
        places = sorted(places, key=lambda at: -float(size[at]))[:8]  # stable
        if profile.index != 11:  # never fires
            expected = [pytest.approx(float(z[profile.site][row, pos, profile.index]), abs=1e-5) for row, pos in places]
            assert [context.z[context.peak] for context in profile.contexts] == expected
    units = [("blocks.1.mlp_out", 4)]
    assert len(top_contexts(model, factors, units, tokens, n=8, per_row=per_row)[units[0]]) == min(
        8, 3 * (per_row or 3)
    )


def test_of_equal_peaks_the_earlier_row_stays_ahead():
    places = TopPlaces(2, 0, 0)
    for row in range(4):
        places.add(row, torch.tensor([[row]]), torch.tensor([[[1.0, -float(row)]]]))
    assert places.row.tolist() == [[0, 1], [3, 2]]


def test_a_stream_is_read_once(model, factors):
    rows, opened, read = random_tokens(10, 6), [], []

    def source():
        opened.append(True)
        for row in rows:
            read.append(True)
            yield row

    stream = swd.TokenStream(source, n_rows=10, row_length=6)
    found = audit(model, factors, stream, n=3, batch_size=4, progress=False)
    assert len(opened) == 1 and len(read) == 10
    assert found.settings["tokens_sha256"] == stream.fingerprint()
    held = audit(model, factors, rows, n=3, batch_size=4, progress=False)
    for a, b in zip(found.profiles(), held.profiles(), strict=True):
        assert a.contexts == b.contexts and torch.equal(a.histogram.counts, b.histogram.counts)
    units = [("blocks.0.mlp_out", 2)]
    assert top_contexts(model, factors, units, stream) == top_contexts(model, factors, units, rows)


def live_bytes():
    """Of all tensors that Python can reach."""
    held = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.layout is torch.strided:  # a sparse one of another test has no storage
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def test_memory_does_not_grow_with_the_text(model, factors, monkeypatch):
    add, seen, held = Statistics.add, [], []
    row = random_tokens(1, 8)[0]
    monkeypatch.setattr(collect, "N_TOKENS", 32)  # of the first rows, which are kept for the norms' scales
    for n_rows in (8, 8, 160):  # the first run fills what is kept once per process

        def watched(self, z, last=n_rows // 4):
            add(self, z)
            seen.append(True)
            if len(seen) == 2 * last:  # two sites
                held.append(live_bytes())

        monkeypatch.setattr(Statistics, "add", watched)
        stream = swd.TokenStream(lambda: iter(lambda: row, None), n_rows=n_rows)  # a source without an end
        seen.clear()
        audit(model, factors, stream, n=4, batch_size=4, progress=False)
    # 38 batches more: their tokens alone would be 9,728 bytes, their z 116,736.
    assert len(held) == 3 and abs(held[2] - held[1]) < 4096


def test_single_units_and_patterns(model, factors):
    tokens = random_tokens(9, 8)
    whole = audit(model, factors, tokens, n=3, progress=False)
    part = audit(model, factors, tokens, n=3, units=["blocks.1.*", "blocks.0.mlp_out/7"], progress=False)
    assert part.units == ["blocks.0.mlp_out/7", *(f"blocks.1.mlp_out/{i}" for i in range(12))]
    for unit in part.units:
        one, same = part.unit(unit), whole.unit(unit)
        assert one.contexts == same.contexts and dict(one.coactive) == pytest.approx(dict(same.coactive))
        assert (one.similar, one.mean, one.density) == (same.similar, same.mean, same.density)
    with pytest.raises(KeyError, match="was not audited"):
        part.unit("blocks.0.mlp_out/6")


def test_the_host_is_left_as_it_was(model, factors):
    tokens = random_tokens(3, 8)
    before, state = model(tokens), {k: v.clone() for k, v in model.state_dict().items()}
    audit(model, factors, tokens, progress=False)
    with pytest.raises(RuntimeError, match="stop here"):
        audit(model, factors, swd.TokenStream(lambda: stops(), n_rows=3), batch_size=1, progress=False)
    assert torch.equal(model(tokens), before) and "blocks.0.hook_mlp_out_unit" not in model.hook_dict
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def stops():
    yield random_tokens(1, 8)[0]
    raise RuntimeError("stop here")


def test_units_that_are_not_there(model, factors):
    tokens = random_tokens(3, 8)
    with pytest.raises(ValueError, match=r"has 12 units, counted from 0"):
        audit(model, factors, tokens, units="blocks.0.mlp_out/12", progress=False)
    with pytest.raises(swd.UnknownSiteError, match="no site matches"):
        audit(model, factors, tokens, units=["attn_o"], progress=False)
    with pytest.raises(ValueError, match="no unit was named"):
        audit(model, factors, tokens, units=[], progress=False)
    with pytest.raises(ValueError, match="n must be 1 or more"):
        audit(model, factors, tokens, n=0, progress=False)


def test_scores_of_other_factors_are_refused(model, factors):
    scores = made_scores(sparse_factors(model, "mlp_out", seed=1))
    with pytest.raises(ValueError, match="scores of a task was made with other factors"):
        audit(model, factors, random_tokens(3, 8), scores=scores, progress=False)


def test_units_that_no_hook_sees_are_an_error(model, monkeypatch):
    kind = type(host_of(model))
    run = kind.run_blocks
    monkeypatch.setattr(
        kind, "run_blocks", lambda self, rows, stop: (self.model.reset_hooks(), run(self, rows, stop))[1]
    )
    with pytest.raises(swd.UnsupportedHostError, match=r"never showed the units of blocks\.1\.mlp_out"):
        top_contexts(model, baselines.svd(model, "mlp_out"), [("blocks.1.mlp_out", 0)], random_tokens(3, 8))


def test_a_z_that_is_not_finite_is_an_error():
    model = toy_model()
    factors = sparse_factors(model, "mlp_out")
    with torch.no_grad():
        model.W_E[3] = float("inf")
    tokens = torch.tensor([[1, 2, 4], [1, 3, 4]])
    with pytest.raises(ValueError, match=r"z of blocks\.0\.mlp_out/0 is not finite"):
        audit(model, factors, tokens, progress=False)


def test_logit_effect_by_hand(model):
    factors = baselines.svd(model, "mlp_out")
    text = random_tokens(4, 8)
    effect = logit_effect(model, factors, ("blocks.0.mlp_out", 2), text, n=3)
    write = factors["blocks.0.mlp_out"].write[2]
    _, cache = model.run_with_cache(text)
    logits = ((write - write.mean()) * model.ln_final.w) @ model.W_U * (1 / cache["ln_final.hook_scale"]).mean()
    logits = (logits - logits.mean()).detach()
    order = logits.argsort(descending=True).tolist()
    assert [token for token, _ in effect.promoted] == [chr(ord("a") + i) for i in order[:3]]
    assert [token for token, _ in effect.suppressed] == [chr(ord("a") + i) for i in order[::-1][:3]]
    assert effect.promoted[0][1] == pytest.approx(float(logits.max()), rel=1e-4)
    with pytest.raises(ValueError, match="does not write to the residual stream"):
        logit_effect(model, baselines.svd(model, "mlp_in"), ("blocks.0.mlp_in", 0), text)


def test_an_rms_norm_does_not_take_the_mean_out():
    model = lettered(normalization_type="RMS")
    factors = baselines.svd(model, "attn_o")
    text = random_tokens(4, 8)
    effect = logit_effect(model, factors, ("blocks.1.attn_o", 1), text, n=20)
    _, cache = model.run_with_cache(text)
    inverse = (1 / cache["ln_final.hook_scale"]).mean()
    logits = ((factors["blocks.1.attn_o"].write[1] * model.ln_final.w) @ model.W_U * inverse).detach()
    by_letter = dict(effect.promoted)
    expected = {chr(ord("a") + i): value for i, value in enumerate((logits - logits.mean()).tolist())}
    assert by_letter == pytest.approx(expected, abs=1e-5)
