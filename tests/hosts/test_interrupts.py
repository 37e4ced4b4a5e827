"""Ctrl-C while units go in or come out: whatever line it hits, the host is mended. Both kinds of host, 3.9 and 4.x."""

import pytest
import torch

from swd_lens.hosts import host_of
from swd_lens.units import attach
from tests import families
from tests.contract import identity
from tests.hosts.test_families import HAS_HOOKED
from tests.interrupts import run_to_line

TOKENS = families.some_tokens(1, 4)
HOSTS = [("bridge", "gpt2", "blocks.1.attn_qkv"), ("bridge", "llama", "blocks.1.attn_o")]
HOSTS += [("hooked", "gpt2", "blocks.1.attn_*")] if HAS_HOOKED else []


def everything(model):
    """What a host is made of: modules and their classes, hooks, parameters, forward hooks, shadowed methods."""
    modules = [
        (name, id(m), type(m), list(m._forward_hooks), list(m._forward_pre_hooks), sorted(m.__dict__))
        for name, m in model.named_modules()
    ]
    state = [(name, t.data_ptr(), t.sum().item()) for name, t in model.state_dict().items()]
    return modules, list(model.hook_dict.items()), list(getattr(model, "mod_dict", {}).items()), state


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kind", "family", "sites"), HOSTS)
def test_ctrl_c_at_any_line_of_attach_or_detach_restores_the_host(kind, family, sites):
    model = getattr(families, kind)(family)
    with torch.no_grad():
        logits = host_of(model).run(TOKENS)
    factors, kept = identity(model, ["blocks.0.mlp_out", sites]), []

    def there_and_back():
        kept.append(attach(model, factors))
        kept[-1].detach()

    there_and_back()  # what a host remembers of its first time (caches of names) is no difference
    before = everything(model)
    lines = run_to_line(there_and_back, None)
    assert lines > 200 and everything(model) == before
    for at in range(1, lines, max(3, lines // 300)):  # every third on a HookedTransformer, fewer on a bridge
        kept.clear()
        with pytest.raises(KeyboardInterrupt):
            run_to_line(there_and_back, at)
        if kept and kept[-1].attached:  # an interrupted detach is called again, as leaving a with block would
            kept[-1].detach()
        assert everything(model) == before, f"interrupted before line {at} of {lines}"
    with torch.no_grad():
        assert torch.equal(host_of(model).run(TOKENS), logits)
