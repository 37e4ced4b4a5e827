"""Reading inputs and outputs of a bridge's sites, and running its first blocks."""

import pytest
import torch

from swd_lens.hosts.families import facts_of
from tests.hosts.bridge.conftest import TOKENS, close, fresh, sites_with, swap_dense


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("packed", "swapped"), [(True, False), (False, True)])
def test_outputs_are_inputs_times_the_weight_plus_the_bias(kept, packed, swapped):
    host = kept
    sites, h, y = sites_with(host, packed), {}, {}
    undo = swap_dense(host, sites) if swapped else lambda: None
    with torch.no_grad(), host.inputs(sites, h.__setitem__), host.outputs(sites, y.__setitem__):
        host.run(TOKENS)
    undo()
    assert h.keys() == y.keys() == set(sites)
    for site in sites:
        assert h[site].shape == (*TOKENS.shape, site.d_in) and y[site].shape == (*TOKENS.shape, site.d_out)
        bias = y[site] - h[site] @ host.weight(site)
        assert close(bias + 1, (bias[:1, :1] + 1).expand_as(bias)), site  # the same everywhere
    seen = len(h)
    host.run(TOKENS)
    assert len(h) == seen


def test_watching_survives_a_swap_inside():
    host = fresh("gpt2")
    site, seen = host.sites()[-1], []
    with torch.no_grad(), host.inputs([site], lambda _, h: seen.append(h)):
        host.run(TOKENS)
        undo = swap_dense(host, [site])
        host.run(TOKENS)
        undo()
        host.run(TOKENS)
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_run_blocks_runs_the_first_blocks(kept):
    """Of an encoder at least these."""
    for n in range(1, kept.model.cfg.n_layers + 1):
        seen = []
        with torch.no_grad(), kept.inputs(kept.sites(), lambda site, _, seen=seen: seen.append(site.layer)):
            kept.run_blocks(TOKENS, n)
        assert set(seen) == set(range(n)) or (not facts_of(kept.model).causal and set(seen) > set(range(n)))
