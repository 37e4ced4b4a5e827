"""screen: the numbers of TransformerLens' own hooks, on both kinds of host; shortcuts change nothing; what is chosen and said.

SmolLM2's screen is tests/real/.
"""

from dataclasses import replace
from importlib import metadata

import pytest
import torch

import swd_lens as swd
from swd_lens.circuits.screen import Screen, TaskScreen
from swd_lens.tasks.aligned import aligned_prompts

KINDS = ("hooked", "bridge") if int(metadata.version("transformer_lens").split(".")[0]) < 4 else ("bridge",)
HOOKS = {"mlp_out": "hook_mlp_out", "attn_o": "hook_attn_out"}


@pytest.fixture(scope="module", params=KINDS)
def host(request):
    model = swd.load_default_model(kind=request.param)
    return model, [swd.load_task(name, model, n_train=5, n_test=5) for name in ("ioi", "greater_than")]


def by_hooks(model, split, names, last_only, each=False):
    """Mean margin with some outputs at their means, by run_with_hooks, prompt by prompt."""
    points = {name: f"blocks.{name.split('.')[1]}.{HOOKS[name.split('.')[2]]}" for name in names}
    seen = {name: [] for name in names}
    for tokens in split.tokens:
        _, cache = model.run_with_cache(tokens[None], prepend_bos=False, names_filter=list(points.values()))
        for name, point in points.items():
            seen[name].append(cache[point][0, -1:] if last_only else cache[point][0])

    def putting(mean):
        def put(value, hook):
            value = value.clone()
            value[:, -1 if last_only else slice(None)] = mean
            return value

        return put

    means = {name: torch.stack(outputs).mean(0) if each else torch.cat(outputs).mean(0) for name, outputs in seen.items()}
    hooks = [(points[name], putting(mean)) for name, mean in means.items()]
    margins = []
    for tokens, right, wrong in zip(split.tokens, split.answer_ids, split.distractor_ids, strict=True):
        with torch.no_grad():
            logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0, -1]
        margins.append(float(logits[list(right)].mean() - logits[list(wrong)].mean()))
    return sum(margins) / len(margins)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_margins_are_those_of_hooks_that_put_means_in_place(host, positions):
    model, tasks = host
    screened = swd.screen(model, tasks, positions=positions, tokens_per_forward=300)
    assert screened.settings["fast_forward"]["ioi"] == (["start", "prefix"] if positions == "scoring" else ["start"])
    for task in tasks:
        result = screened.tasks[task.name]
        interventions = {name: [name] for name in ("blocks.0.mlp_out", "blocks.2.attn_o", "blocks.3.mlp_out")}
        interventions |= {"all attn_o": [f"blocks.{layer}.attn_o" for layer in range(4)]}
        for label, names in interventions.items():
            expected = by_hooks(model, task.train, names, positions == "scoring")
            assert result.margins[label] == pytest.approx(expected, abs=2e-3)
            assert result.dropped(label) == pytest.approx(result.margin - expected, abs=2e-3)
            assert result.kept(label) == pytest.approx(expected / result.margin, abs=1e-3)


def test_each_position_by_its_own_mean(host):
    model, (task, _) = host
    aligned = replace(task, train=aligned_prompts(model, task, 5).split)
    screened = swd.screen(model, aligned, sites=["attn_o", "mlp_out"], positions="each").tasks["ioi"]
    for names in (["blocks.0.mlp_out"], ["blocks.2.attn_o"], [f"blocks.{layer}.attn_o" for layer in range(4)]):
        expected = by_hooks(model, aligned.train, names, False, each=True)
        assert screened.margins[names[0] if len(names) == 1 else "all attn_o"] == pytest.approx(expected, abs=2e-3)
    with pytest.raises(ValueError, match='positions="each" takes the mean of every position'):
        swd.screen(model, task, positions="each")


def test_the_host_is_left_as_it_was(host):
    model, tasks = host
    tokens, hooks = tasks[0].test.tokens[0][None], list(model.hook_dict)
    with torch.no_grad():
        before = model(tokens)
        swd.screen(model, tasks[0], sites="mlp_out", n_prompts=4)
        assert torch.equal(model(tokens), before) and list(model.hook_dict) == hooks
    factors = swd.baselines.svd(model, "blocks.1.mlp_out")
    with swd.attach(model, factors), pytest.raises(ValueError, match=r"units are attached at blocks\.1\.mlp_out: detach"):
        swd.screen(model, tasks[0])
    with pytest.raises(ValueError, match="positions must be one of 'scoring', 'all', 'each', got 'last'"):
        swd.screen(model, tasks[0], positions="last")


def test_what_is_shown_saved_and_chosen(host, tmp_path):
    model, tasks = host
    screened = swd.screen(model, tasks, sites=["attn_o", "mlp_out"], surfaces={"late": "blocks.3.*"}, n_prompts=4)
    assert screened.settings["prepend_bos"] == {"ioi": True, "greater_than": True}
    assert screened.settings["prompts"] == {"ioi": 4, "greater_than": 4} and list(screened.surfaces) == ["late"]
    table = screened.table(2)
    assert list(table["task"]) == ["ioi"] * 3 + ["greater_than"] * 3 and set(table["without"]) >= {"late"}
    result = screened.tasks["ioi"]
    best = max(screened.sites, key=result.dropped)
    assert screened.choose()[best] == [best]
    of_task = screened.chosen().set_index("task")
    assert of_task.loc["ioi", "without"] == of_task.loc["ioi", "sites"] == best
    assert of_task.loc["ioi", "lost (logits)"] == result.dropped(best) and of_task.loc["ioi", "±"] == result.errors[best]
    said = f"ioi: margin {result.margin:.2f} logits, right 100%; needs {best} most: {result.dropped(best):.2f} ± "
    assert said in repr(screened) and repr(screened).count("\n") == 2
    assert list(screened.skill()["remark"]) == ["", ""] and "<svg" in screened._repr_html_()
    screened.save(tmp_path / "screen.json")
    again = type(screened).load(tmp_path / "screen.json")
    assert again == screened and again.table().equals(screened.table())


def test_a_surface_is_chosen_where_no_single_site_matters_and_nothing_where_the_task_is_not_done():
    def task(margins, margin=4.0):
        values = {name: 0.0 for name in margins}
        return TaskScreen("t", 4, margin, 0.7, margins, values, values)

    sites, surfaces = ("blocks.0.attn_o", "blocks.0.mlp_out"), {"both": ("blocks.0.attn_o", "blocks.0.mlp_out")}
    redundant = {"blocks.0.attn_o": 3.9, "blocks.0.mlp_out": 3.8, "both": 1.0}
    single = {"blocks.0.attn_o": 3.9, "blocks.0.mlp_out": 2.0, "both": 1.0}
    settings = {"positions": "scoring"}
    for screened, chosen in (
        (task(redundant), {"both": list(sites)}),
        (task(single), {"blocks.0.mlp_out": ["blocks.0.mlp_out"]}),
        (task(single, margin=-1.0), {}),
    ):
        assert Screen({"t": screened}, sites, surfaces, settings).choose() == chosen
    shown = Screen({"t": task(redundant), "u": task(single, margin=-1.0)}, sites, surfaces, settings)
    assert list(shown.chosen()["without"].fillna("")) == ["both", ""]
    assert list(shown.chosen()["sites"]) == ["blocks.0.attn_o, blocks.0.mlp_out", ""]
    assert "its mean margin is not positive" in repr(shown) and "needs both most: 3.00 ± 0.00 logits (75%)" in repr(shown)
    assert task(single).remark == "the dense model does only 70% of the prompts: a circuit of this task says little"
    assert "its mean margin is not positive" in task(single, margin=-1.0).remark


def test_skill_is_the_share_right_and_the_margin_of_the_test_prompts(host):
    model, tasks = host
    table = swd.skill(model, tasks)
    assert list(table["task"]) == ["ioi", "greater_than"] and list(table["right"]) == [1.0, 1.0]
    expected = []
    for tokens, right, wrong in zip(tasks[0].test.tokens, tasks[0].test.answer_ids, tasks[0].test.distractor_ids, strict=True):
        with torch.no_grad():
            logits = model(tokens[None])[0, -1]
        expected.append(float(logits[list(right)].mean() - logits[list(wrong)].mean()))
    assert table["mean margin"][0] == pytest.approx(sum(expected) / len(expected), abs=1e-3)


def test_tasks_that_need_none_of_the_sites_are_named():
    sites, surfaces = ("blocks.0.mlp_out", "blocks.1.mlp_out"), {"both": ("blocks.0.mlp_out", "blocks.1.mlp_out")}

    def screened(margin, single, both):
        margins = {sites[0]: margin, sites[1]: margin - single, "both": margin - both}
        values = dict.fromkeys(margins, 0.0)
        return TaskScreen("t", 4, margin, 0.9, margins, values, values)

    cases = {"idle": screened(4.0, 0.25, 0.375), "one": screened(4.0, 0.5, 0.25), "two": screened(4.0, 0.25, 0.5)}
    cases["not done"] = screened(-1.0, 0.0, 0.0)
    assert Screen(cases, sites, surfaces, {"positions": "scoring"}).needless() == ["idle"]
