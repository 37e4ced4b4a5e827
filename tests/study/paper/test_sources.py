"""The tasks of an item."""

import swd_lens as swd
from swd_lens.study import paper
from swd_lens.study.paper import materials
from tests.study.paper.conftest import SMALL


def test_circuits_are_sought_where_a_task_is_judged_and_done(model, tmp_path):
    tasks = {"gendered_pronoun": [16, 12], "greater_than": [16, 12]}
    judged = {"blocks.2.mlp_out": ["greater_than"]}
    settings = paper.settings_of("controls", "tiny").changed(**{**SMALL, "tasks": tasks}, judged=judged)
    bench = materials.Materials(model, settings, tmp_path)
    assert [task.name for task in bench.judged("blocks.2.mlp_out, zero-data")] == ["greater_than"]
    assert [task.name for task in bench.judged("blocks.3.mlp_out")] == list(tasks)
    right = {name: float(swd.skill(model, bench.task(name))["right"].iloc[0]) for name in tasks}
    assert bench.accuracy == right
    bench.settings = settings.changed(least_accuracy=0.7)
    bench.accuracy = {"gendered_pronoun": 0.65, "greater_than": 0.75}
    assert [task.name for task in bench.judged("blocks.3.mlp_out")] == ["greater_than"]
    assert bench.left_out_in_words() == [
        "Left out, as the dense model does less than 70%: gendered_pronoun (65% right).",
        "Below 80%, and so no fair test of circuits: greater_than (75% right).",
    ]
