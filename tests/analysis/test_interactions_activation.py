"""The activation that is found in a host."""

import pytest

from swd_lens.analysis.interactions import unit_interactions
from swd_lens.base.errors import UnsupportedHostError
from tests.analysis.interaction_checks import TOKENS, sparse_factors
from tests.micro import toy_model

SITE = "blocks.1.mlp_in"


@pytest.mark.parametrize("act_fn", ["solu", "solu_ln"])
def test_an_activation_that_mixes_channels_is_refused(act_fn):
    model = toy_model(act_fn=act_fn)
    with pytest.raises(UnsupportedHostError, match="activation that acts on each channel by itself"):
        unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)


def test_a_step_behind_the_activation_is_refused():
    model = toy_model()
    model.add_hook("blocks.1.mlp.hook_post", lambda post, hook: 2 * post)
    with pytest.raises(UnsupportedHostError, match="another step stands there"):
        unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)
