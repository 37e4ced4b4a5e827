"""Prefixes in Hugging Face's caches: runs on them give the whole prompt's logits and leave them as they were."""

import pytest
import torch

from tests import families
from tests.hosts.bridge.conftest import close, sites_with, swap_dense


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("pos", "swapped"), [(2, True), (45, False)])  # gemma2's window is 32 positions
def test_a_prefix_gives_the_logits_of_the_whole_prompt(causal, pos, swapped):
    tokens = families.some_tokens(rows=3, pos=pos)
    undo = swap_dense(causal, sites_with(causal, packed=True)) if swapped else lambda: None
    with torch.no_grad():
        whole = causal.run(tokens)[:, -1]
        prefix = causal.freeze_prefix(tokens)
        assert prefix is not None
        first = causal.last_logits(tokens, prefix)
        assert close(first, whole) and close(causal.last_logits(tokens), whole)
        assert torch.equal(causal.last_logits(tokens, prefix), first)
        other = tokens.clone()
        other[:, -1] = 77
        assert close(causal.last_logits(other, prefix), causal.run(other)[:, -1])
        twice = causal.last_logits(tokens.repeat(2, 1), causal.repeat_prefix(prefix, 2))
        assert close(twice, whole.repeat(2, 1))
        assert torch.equal(causal.last_logits(tokens, prefix), first)
        assert torch.equal(causal.last_logits(tokens, causal.repeat_prefix(prefix, 1)), first)
    undo()
