"""What an item will cost."""

import pytest

from swd_lens.study import paper
from swd_lens.study.paper.settings import profiles_of

EVERY = [(item, profile) for item in paper.ITEMS for profile in profiles_of(item)]


@pytest.mark.parametrize("item, profile", EVERY)
def test_every_plan_has_a_cost(item, profile):
    cost = paper.run.cost_of(paper.settings_of(item, profile), speed=1e11)
    assert cost.seconds > 0 and cost.memory_bytes > 0
    assert cost.seconds == pytest.approx(sum(cost.works.values()))
