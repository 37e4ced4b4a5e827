"""Checksums see what anyone does to a tensor; marks see it in time, and forgive what left the values as they were."""

import copy
import pickle

import pytest
import torch

from swd_lens.base.snapshots import TensorSnapshot, as_normal_tensor, checksum, count_nonzeros

EDITS = {
    "one entry": lambda t: t[3, 5].add_(1e-6),
    "scaled": lambda t: t.mul_(3),
    "two rows negated": lambda t: t.index_copy_(0, torch.tensor([1, 2]), -t[[1, 2]]),
    "negated": lambda t: t.neg_(),
    "rows exchanged": lambda t: t.copy_(t[torch.tensor([1, 0, *range(2, len(t))])]),
    "rows permuted": lambda t: t.copy_(t[torch.randperm(len(t), generator=torch.Generator().manual_seed(1))]),
    "columns permuted": lambda t: t.copy_(t[:, torch.randperm(t.shape[1], generator=torch.Generator().manual_seed(1))]),
    "rolled": lambda t: t.copy_(t.roll(1, 0)),
    "two entries exchanged": lambda t: t.view(-1)[:2].copy_(t.view(-1)[:2].flip(0)),
    "a row cleared": lambda t: t[7].zero_(),
    "last entry": lambda t: t.view(-1)[-1:].neg_(),
    "rounded": lambda t: t.copy_(t.bfloat16()),
    "a zero negated": lambda t: t[0, 0].mul_(-1),
}


def some(rows=33, columns=47, dtype=torch.float32):
    t = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    t[0, 0] = 0.0
    return t


@pytest.mark.parametrize("shape", [(33, 47), (64, 64), (40, 3072)], ids=str)
@pytest.mark.parametrize("name", EDITS)
def test_a_checksum_differs_after_every_edit(name, shape):
    t = some(*shape)
    before = checksum(t)
    EDITS[name](t)
    assert checksum(t) != before
    words = torch.arange(4096, dtype=torch.int64)  # blocks of the checksum's own width, exchanged
    assert checksum(words) != checksum(torch.cat([words[1024:2048], words[:1024], words[2048:]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (5, 5), (33, 47), (129, 1024)], ids=str)
def test_a_checksum_is_of_the_values_wherever_they_lie(dtype, shape):
    t = some(*shape, dtype=dtype)
    wider = torch.zeros(shape[0] + 1, shape[1] + 3, dtype=dtype)
    wider[1:, 3:] = t
    assert checksum(t) == checksum(t.clone()) == checksum(wider[1:, 3:]) == checksum(t.T.contiguous().T)
    flat = torch.cat([torch.zeros(1, dtype=dtype), t.reshape(-1)])[1:].view(shape)  # at an odd address
    assert checksum(flat) == checksum(t)
    assert checksum(t) != checksum(t.reshape(-1)) and checksum(torch.zeros(0)) != checksum(torch.zeros(0, 1))


def test_a_mark_sees_writes_at_once_and_values_when_asked():
    place = {"weight": torch.nn.Parameter(some()), "bias": None}
    mark = TensorSnapshot((place, name) for name in place)
    assert not mark.written() and not mark.changed()
    before = place["weight"].detach().clone()
    with torch.no_grad():
        place["weight"].mul_(2)
    assert mark.written() and mark.changed() and mark.written()
    with torch.no_grad():
        place["weight"].copy_(before)
    # Written to, with what was there: from now on this is what is marked.
    assert mark.written() and not mark.changed() and not mark.written()
    place["weight"].data.mul_(2)
    assert not mark.written() and mark.changed()
    place["weight"].data = before
    assert not mark.changed()
    place["weight"] = torch.nn.Parameter(2 * before)
    assert mark.written() and mark.changed() and not mark.recast()
    place["weight"] = torch.nn.Parameter(before.double())
    assert mark.recast() and mark.changed()
    mark.renew()
    assert not mark.recast() and not mark.changed() and not mark.written()
    place["bias"] = torch.zeros(3)
    assert mark.written() and mark.changed()
    del place["weight"]
    assert mark.written() and mark.changed() and not mark.recast()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copied_mark_watches_the_copies(again):
    place = {"weight": some()}
    place["weight"].mul_(2)
    mark = TensorSnapshot([(place, "weight")])
    place_again, mark_again = again((place, mark))
    assert not mark_again.changed() and not mark_again.written()
    place["weight"].mul_(2)
    assert not mark_again.changed() and mark.changed()
    place_again["weight"].mul_(2)
    assert mark_again.written() and mark_again.changed()


def test_inference_tensors_are_compared_by_value_and_nonzeros_are_counted():
    with torch.inference_mode():
        t = some()
        mark = TensorSnapshot([({"t": t}, "t")])
        t.mul_(2)
    assert not mark.written() and mark.changed()
    kept = as_normal_tensor(t)
    assert not kept.is_inference() and torch.equal(kept, t) and as_normal_tensor(kept) is kept
    with torch.inference_mode():
        assert not as_normal_tensor(t).is_inference()
    t = some(700, 900) * (some(700, 900) > 0)
    t[1, 1] = torch.nan
    assert count_nonzeros(t) == int(torch.count_nonzero(t)) and count_nonzeros(torch.zeros(0)) == 0
