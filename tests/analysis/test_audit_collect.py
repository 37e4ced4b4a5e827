"""One pass over a text: all units of all sites, streams, bounded memory, errors."""

import gc

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.audit import audit, collect, top_contexts
from swd_lens.analysis.audit.statistics import Statistics
from swd_lens.hosts import host_of
from tests.analysis.audit_models import made_scores, sparse_factors
from tests.micro import random_tokens, toy_model
from tests.refusals import refuses


@pytest.fixture(scope="module")
def factors(model):
    return sparse_factors(model, "mlp_out")


def test_rows_at_a_time_are_bounded_by_their_tokens(model, factors, monkeypatch):
    monkeypatch.setattr(collect, "_TOKENS_AT_ONCE", 27)
    rows = []
    hook = model.blocks[0].register_forward_hook(lambda *a: rows.append(len(a[1][0])))
    top_contexts(model, factors, [("blocks.1.mlp_out", 3)], random_tokens(7, 9), n=2, batch_size=64)
    hook.remove()
    assert rows == [3, 3, 1]


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
    refuses(KeyError, "was not audited", part.unit, "blocks.0.mlp_out/6")


def test_units_that_are_not_there_and_scores_of_other_factors(model, factors):
    tokens = random_tokens(3, 8)
    with pytest.raises(ValueError, match=r"has 12 units, counted from 0"):
        audit(model, factors, tokens, units="blocks.0.mlp_out/12", progress=False)
    refuses(swd.UnknownSiteError, "no site matches", audit, model, factors, tokens, units=["attn_o"], progress=False)
    refuses(ValueError, "no unit was named", audit, model, factors, tokens, units=[], progress=False)
    refuses(ValueError, "n must be 1 or more", audit, model, factors, tokens, n=0, progress=False)
    scores = made_scores(sparse_factors(model, "mlp_out", seed=1))
    with pytest.raises(ValueError, match="scores of a task was made with other factors"):
        audit(model, factors, tokens, scores=scores, progress=False)


def test_units_that_no_hook_sees_are_an_error(model, monkeypatch):
    kind = type(host_of(model))
    run = kind.run_blocks
    monkeypatch.setattr(kind, "run_blocks", lambda self, rows, stop: (self.model.reset_hooks(), run(self, rows, stop))[1])
    with pytest.raises(swd.UnsupportedHostError, match=r"never showed the units of blocks\.1\.mlp_out"):
        top_contexts(model, baselines.svd(model, "mlp_out"), [("blocks.1.mlp_out", 0)], random_tokens(3, 8))


def test_a_z_that_is_not_finite_is_an_error():
    model = toy_model()
    factors = sparse_factors(model, "mlp_out")
    with torch.no_grad():
        model.W_E[3] = float("inf")
    tokens = torch.tensor([[1, 2, 4], [1, 3, 4]])
    refuses(ValueError, r"z of blocks\.0\.mlp_out/0 is not finite", audit, model, factors, tokens, progress=False)
