"""Prefixes in Hugging Face's caches: runs on them give the whole prompt's logits and leave them as they were."""

import pytest
import torch

from tests import families
from tests.hosts.bridge.conftest import close, sites_with, swap_dense


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("pos", "swapped"), [(2, True), (45, False)])  # gemma2's window is 32 positions
def test_a_prefix_gives_the_logits_of_the_whole_prompt(causal, pos, swapped):
    """Repeated prefixes: tests/hosts/test_host_prefixes.py."""
    tokens = families.some_tokens(rows=3, pos=pos)
    undo = swap_dense(causal, sites_with(causal, packed=True)) if swapped else lambda: None
    with torch.no_grad():
        whole, prefix, other = causal.run(tokens)[:, -1], causal.freeze_prefix(tokens), tokens.clone()
        first = causal.last_logits(tokens, prefix)
        assert prefix is not None and close(first, whole) and close(causal.last_logits(tokens), whole)
        other[:, -1] = 77
        assert close(causal.last_logits(other, prefix), causal.run(other)[:, -1])
        assert torch.equal(causal.last_logits(tokens, causal.repeat_prefix(prefix, 1)), first)
    undo()
