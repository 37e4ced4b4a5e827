"""The paper's tables and figures, each by one call: `swd_lens.study.paper`.

    from swd_lens.study import paper

    paper.plan("all", profile="paper")                             # every setting with the paper's section, and the cost
    result = paper.run_item("single-matrix", profile="small", out="paper/")
    paper.run_items("all", profile="tiny", out="tiny/")

settings.py reads items/*.toml; materials.py makes once what items share; circuit_items.py, quality_items.py and inside_items.py
are the items; primary.py is the number that was fixed beforehand; costs.py says what an item takes; run.py runs them.
"""

from swd_lens.study.paper.costs import Cost
from swd_lens.study.paper.result import ItemResult
from swd_lens.study.paper.run import Plan, plan, results_in, run_item, run_items
from swd_lens.study.paper.settings import ITEMS, PROFILES, ItemSettings, settings_of

__all__ = [
    "ITEMS",
    "PROFILES",
    "Cost",
    "ItemResult",
    "ItemSettings",
    "Plan",
    "plan",
    "results_in",
    "run_item",
    "run_items",
    "settings_of",
]
