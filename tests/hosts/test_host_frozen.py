"""A frozen host: no parameter asks for a gradient, no weight is rewritten, and afterwards it is what it was."""

import pytest

from swd_lens.hosts import host_of
from swd_lens.hosts.host import frozen
from tests import families


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_it_is_frozen_for_a_while(kind):
    host = host_of(getattr(families, kind)("gpt2"))
    apart, *others = host.model.parameters()
    apart.requires_grad_(False)  # and stays so
    steps = []
    with pytest.raises(ZeroDivisionError), frozen(host, "while this test runs") as undo:
        undo.push(lambda: steps.append(1))
        assert not any(parameter.requires_grad for parameter in host.model.parameters())
        with pytest.raises(RuntimeError, match="was called while this test runs"):
            host.model.load_state_dict({})
        raise ZeroDivisionError
    assert steps == [1] and not apart.requires_grad and all(parameter.requires_grad for parameter in others)
    host.model.load_state_dict(host.model.state_dict())
