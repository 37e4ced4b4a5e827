"""Prefixes that are kept, repeated and cut, and prompts that are begun: the numbers of whole runs, and what is not kept.

Runs on transformer_lens 3.9 (HookedTransformer and bridge) and on 4.x (bridge only).
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import swd_lens as swd
from swd_lens.base.interrupts import Undo
from swd_lens.hosts import Start, host_of
from tests import families
from tests.hosts.test_families import relative
from tests.hosts.test_interrupts import everything
from tests.hosts.test_running import both_ways, every_host, loaded, two_hosts


@pytest.mark.quick_cases(10)
@every_host
@both_ways
def test_copies_of_the_batch_keep_to_their_own_prefix(kind, family, kept):
    model, _, tokens = loaded(kind, family)
    host, last = host_of(model), torch.tensor([[3], [5], [8]])
    copies = torch.cat([tokens.repeat(3, 1)[:, :-1], last.repeat_interleave(2, 0)], dim=1)
    with torch.no_grad():
        prefix = host.repeat_prefix(host.freeze_prefix(tokens), 3) if kept else None
        whole = host.run(copies)[:, -1]
        assert relative(host.last_logits(copies, prefix), whole) < 1e-5
        resid = host.residual(copies, 1, prefix)
        assert relative(host.last_logits(copies, prefix, start=Start(1, resid)), whole) < 1e-5


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("shared", [False, True])
@every_host
def test_rows_of_several_lengths_go_on_behind_one_prefix(kind, family, shared):
    model, _, tokens = loaded(kind, family)
    host, short = host_of(model), tokens[:, 3:]
    joined = host.join_prefixes([host.freeze_prefix(each) for each in (short, tokens)])
    if kind == "bridge":
        assert joined is None
        return
    rows, undo = torch.cat([F.pad(short, (3, 0)), tokens]).repeat(3, 1), Undo()
    rows[:, -1] = torch.arange(len(rows))  # copies end in different tokens
    with undo, torch.no_grad():
        n = len(tokens)
        whole = torch.stack([host.run(row[None, 0 if i % (2 * n) >= n else 3 :])[0, -1] for i, row in enumerate(rows)])
        if shared:
            host.share_prefix(undo.push)
        for layer in (0, 1):
            prefix = host.repeat_prefix(joined, 3, layer)
            start = None if layer == 0 else Start(1, host.residual(rows, 1, host.repeat_prefix(joined, 3)))
            assert relative(host.last_logits(rows, prefix, start=start), whole) < 1e-5


@pytest.mark.quick_cases(5)
@every_host
def test_prompts_of_one_token(kind, family):
    model, _, tokens = loaded(kind, family)
    host, tokens = host_of(model), tokens[:, :1]
    assert host.freeze_prefix(tokens) is None and host.repeat_prefix(None, 3, from_layer=1) is None
    with torch.no_grad():
        whole = host.run(tokens)[:, -1]
        for layer in range(len(model.blocks) + 1):
            resid = host.residual(tokens, layer)
            assert relative(host.last_logits(tokens, start=Start(layer, resid)), whole) < 1e-5


@two_hosts
def test_a_start_behind_the_end_is_refused(kind, family):
    model, _, tokens = loaded(kind, family)
    host = host_of(model)
    with torch.no_grad():
        start = Start(1, host.residual(tokens, 1))
        for run in (lambda: host.run_blocks(tokens, 0, start), lambda: host.residual(tokens, 0, start=start)):
            with pytest.raises(ValueError, match="ends before block 0, but its start is block 1"):
                run()


@pytest.mark.quick_cases(5)
@every_host
def test_prompts_that_are_begun_end_as_whole_ones_under_any_units(kind, family):
    """To the bit: a prefix from the block on, what enters it and later blocks at the last position, and the logits."""
    model, factors, tokens = loaded(kind, family)
    host, n_layers, layer = host_of(model), len(model.blocks), 1
    begun = host.begin(tokens, layer)
    if host.freeze_prefix(tokens) is None:
        assert begun is None
        return
    assert begun is not None and begun.earlier.shape[:2] == (len(tokens), tokens.shape[1] - 1)
    assert torch.equal(begun.last, host.residual(tokens, layer, host.freeze_prefix(tokens)))
    late = {site: f for site, f in factors.items() if not site.startswith("blocks.0.")}
    before = everything(model)
    for units in ({}, late):
        with torch.no_grad(), swd.attach(model, units) if units else nullcontext():
            whole, prefix = host.freeze_prefix(tokens), host.freeze_prefix(tokens, begun)
            start = Start(layer, begun.last)
            for end in range(layer, n_layers + 1):
                expected, got = host.residual(tokens, end, whole), host.residual(tokens, end, prefix, start)
                assert torch.equal(got, expected), (units.keys(), end)
            assert torch.equal(host.last_logits(tokens, prefix, start=start), host.last_logits(tokens, whole))
            twice = host.repeat_prefix(prefix, 2, layer)
            again = host.last_logits(tokens.repeat(2, 1), twice, start=Start(layer, begun.last.repeat(2, 1, 1)))
            assert (again - host.last_logits(tokens, whole).repeat(2, 1)).abs().max() <= 1e-4 * again.abs().max()
            with pytest.raises(ValueError, match="prefix"):
                host.residual(tokens, layer, prefix)
    assert everything(model) == before


def tensors_in(thing, found=None):
    """Every storage that an object holds on to: address -> bytes."""
    found = {} if found is None else found
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, list | tuple):
        [tensors_in(one, found) for one in thing]
    elif isinstance(thing, dict):
        [tensors_in(one, found) for one in thing.values()]
    elif hasattr(thing, "__dict__"):
        tensors_in(vars(thing), found)
    return found


@pytest.mark.quick_cases(5)
@every_host
def test_a_prefix_from_a_layer_on_drops_the_earlier_layers_and_repeating_copies_no_keys(kind, family):
    model, _, _ = loaded(kind, family)
    host, n_layers = host_of(model), len(model.blocks)
    tokens = families.some_tokens(4, 30) % 20
    prefix = host.freeze_prefix(tokens)
    if prefix is None:
        assert family == "bert"
        return
    whole = sum(tensors_in(prefix).values())
    mine = sum(tensors_in(host.repeat_prefix(prefix, 1, from_layer=n_layers - 1)).values())
    assert 0 < mine < whole * (1 / n_layers + 0.2)
    assert sum(tensors_in(host.repeat_prefix(prefix, 1, from_layer=n_layers)).values()) < whole * 0.2
    repeated = sum(tensors_in(host.repeat_prefix(prefix, 8, from_layer=n_layers - 1)).values())
    assert repeated < 2 * mine
    assert host.repeat_prefix(prefix, 1) is prefix


@pytest.mark.quick_cases(5)
@every_host
def test_a_prefix_that_lacks_the_layer_is_refused(kind, family):
    model, _, tokens = loaded(kind, family)
    host = host_of(model)
    prefix = host.freeze_prefix(tokens)
    if prefix is None:
        return
    late = host.repeat_prefix(host.repeat_prefix(prefix, 1, from_layer=2), 1, from_layer=1)
    resid = host.residual(tokens, 1, prefix)
    for use in (
        lambda: host.last_logits(tokens, late),
        lambda: host.residual(tokens, 2, late),
        lambda: host.last_logits(tokens, late, start=Start(1, resid)),
    ):
        with pytest.raises(ValueError, match="keeps layers from 2 on only"):
            use()
