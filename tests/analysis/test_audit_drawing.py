"""How units are shown."""

import pytest

from swd_lens.analysis.audit import audit
from tests.analysis.audit_models import sparse_factors
from tests.micro import random_tokens


def test_sites_without_a_direct_effect_say_so(model):
    factors = sparse_factors(model, "blocks.0.mlp_in")
    profile = audit(model, factors, random_tokens(4, 8), progress=False).unit("blocks.0.mlp_in/0")
    assert profile.logits is None and profile.writes.strongest[0][0].startswith("neuron ")
    assert "does not write to the residual stream" in profile._repr_html_()


def test_it_shows_itself(model, factors, found):
    assert "24 units" not in repr(found) and "48 units on 72 tokens" in repr(found)
    assert "best units for a task" in found._repr_html_()
    assert found.plot("a task").axes and found.unit("blocks.0.mlp_out/2").plot().axes
    without = audit(model, factors, random_tokens(3, 8), progress=False)
    assert "top token" in without._repr_html_()
    for ask in (without.rank_table, without.plot):
        with pytest.raises(ValueError, match="this audit knows no scores"):
            ask()
