"""Ctrl-C while units go in or come out: whatever line it hits, the host is mended. Both kinds of host, 3.9 and 4.x."""

import contextlib
import signal

import pytest
import torch

import swd_lens as swd
from swd_lens.base import holding
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
    factors = identity(model, ["blocks.0.mlp_out", sites])

    def there_and_back():
        attach(model, factors).detach()

    there_and_back()  # what a host remembers of its first time (caches of names) is no difference
    before = everything(model)
    lines = run_to_line(there_and_back, None)
    assert lines > 200 and everything(model) == before
    for at in range(1, lines, max(3, lines // 300)):  # every third on a HookedTransformer, fewer on a bridge
        with pytest.raises(KeyboardInterrupt):
            run_to_line(there_and_back, at)
        assert everything(model) == before, f"interrupted before line {at} of {lines}"  # an interrupted detach is done
    with torch.no_grad():
        assert torch.equal(host_of(model).run(TOKENS), logits)


SECOND = ("swd_lens/units/attach.py", "swd_lens/base/", "swd_lens/hosts/")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kind", "family", "sites"), HOSTS[-1:] + HOSTS[:1])
@pytest.mark.parametrize("leave", ["block", "handle", "by name"])
def test_a_second_ctrl_c_while_the_first_one_leaves_an_attachment(kind, family, sites, leave):
    model = getattr(families, kind)(family)
    factors = identity(model, ["blocks.0.mlp_out"])

    def leaving(attachment):
        if leave == "block":
            with attachment:
                raise KeyboardInterrupt
        try:
            raise KeyboardInterrupt
        finally:
            attachment.detach() if leave == "handle" else swd.detach(model)

    def lines_of_leaving(stop):
        attachment = attach(model, factors)
        try:
            return run_to_line(lambda: suppressed(leaving, attachment), stop, SECOND, ("line", "call"))
        except KeyboardInterrupt:
            return None

    attach(model, factors).detach()
    before, lines = everything(model), lines_of_leaving(None)
    assert lines > 40
    # Every line until the units are out (`swd.detach` looks at the whole host afterwards), and a few of the rest.
    for at in (*range(1, min(lines, 200)), *range(200, lines + 1, max(1, lines // 40))):
        lines_of_leaving(at)
        assert everything(model) == before and model not in holding._holders, f"before line {at} of {lines}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def suppressed(function, *args):
    with contextlib.suppress(KeyboardInterrupt):
        function(*args)
