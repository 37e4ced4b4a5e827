"""Where matrices are kept, and methods that are covered while units are attached."""

import copy

import pytest
import torch

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.base.interrupts import Undo
from swd_lens.hosts import host_of
from swd_lens.hosts.weights import stored_matrix
from tests import families
from tests.hosts.test_families import HAS_HOOKED, HOSTS


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("kind", "family"), HOSTS)
def test_what_rewrites_weights_is_refused_while_guarded(kind, family):
    host = host_of(getattr(families, kind)(family))
    model, state = host.model, host.model.state_dict()
    before = sorted(vars(model))
    outer, nested = Undo(), Undo()
    for undo in (outer, nested):
        host.guard("while units are attached", undo.push)
    methods = (
        ("process_weights", "enable_compatibility_mode")
        if kind == "bridge"
        else ("process_weights_", "fold_layer_norm", "center_writing_weights")
    )
    for call in (
        *(getattr(model, name) for name in methods),
        lambda: model.load_state_dict(state),
        lambda: getattr(copy.deepcopy(model), methods[0])(),
    ):
        with pytest.raises(RuntimeError, match="while units are attached"):
            call()
    nested.run()
    nested.run()
    with pytest.raises(RuntimeError, match="while units are attached"):
        getattr(model, methods[0])()
    outer.run()
    assert sorted(vars(model)) == before
    model.load_state_dict(state)


def test_other_sites_are_not_written_to():
    host = host_of(families.bridge("gpt2"))
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.attn_qkv is not kept as one matrix to write to"):
        stored_matrix(host, host.sites()[0])


@pytest.mark.parametrize("kind", ["bridge", "hooked"][: 1 + HAS_HOOKED])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_stored_matrix_is_the_hosts_own(kind, family):
    host = host_of(getattr(families, kind)(family))
    for site in (site for site in host.sites() if site.kind in ("attn_o", "mlp_out")):
        stored, weight = stored_matrix(host, site), host.weight(site).clone()
        assert torch.equal(stored.matrix(), weight) and len(stored.names(host.model.state_dict())) >= 1
        kept = stored.parameter.detach().clone()
        stored.write(2 * weight)
        assert torch.equal(host.weight(site), 2 * weight)
        stored.restore(kept)
        assert torch.equal(host.weight(site), weight)
        assert [parameters[name] is stored.parameter for parameters, name in host.stored_parameters(site)] == [True]
