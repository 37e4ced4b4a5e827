"""The report page: whole, true to the run, harmless whatever the tokens say, and on its own."""

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swd_lens.base.figures import new_figure
from swd_lens.base.panels import library
from swd_lens.circuits import Comparison, CostCurve
from swd_lens.circuits.comparison import TaskComparison
from swd_lens.circuits.measure import Threshold
from swd_lens.report import render_report, wording, write_report
from swd_lens.study import Run
from swd_lens.study.section import Picture, ReportSection, SectionTable
from tests.report.conftest import (
    HOSTILE,
    HOSTILE_SURFACE,
    HOSTILE_TASK,
    Page,
    of_tasks,
    section_with_graph,
    with_attention,
    with_cards,
    with_screen,
)


@pytest.fixture(scope="module")
def html(run: Run) -> str:
    return render_report(run)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.fixture(scope="module")
def still(run: Run) -> str:
    """The report of a run without attention views: it needs no script."""
    return render_report(replace(run, attention=[]))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _check(html: str) -> Page:
    """What holds for every page, however odd its run."""
    html = html.replace(library(), "")
    page = Page(html)
    assert not page.errors and not page.open
    ids = Counter(page.values("id"))
    assert [name for name, n in ids.items() if n > 1] == []
    for tag, name, value in page.attributes:
        if name in ("aria-labelledby", "href") and not (value or "").startswith("data:image/png;base64,"):
            for target in (value or "").replace("#", "").split():
                assert target in ids, f"{tag} {name} points to nothing: {value}"
    assert {target for target in re.findall(r"url\(#([^)]+)\)", html)} <= set(ids)
    assert "nan" not in re.findall(r"[a-z]+", "".join(page.text).lower())
    return page


def test_holds_every_setting_method_surface_and_task(run: Run, html: str, page: Page) -> None:
    _check(html)
    assert html.startswith("<!doctype html>") and page.tags["main"] == page.tags["h1"] == 1
    text = "".join(page.text)
    for value in _leaves(run.settings):
        assert str(value) in text
    for r in run.replacements:
        assert r.method in text and r.surface in text
        for site, f in r.factors.items():
            assert site in text
            for value in _leaves({**f.settings, **f.provenance}):
                assert str(value) in text or value is None
    for name in run.settings["tasks"]:
        assert wording.readable(name) in text


def test_fidelity_table_is_the_runs(run: Run, page: Page) -> None:
    for r in run.replacements:
        f = r.fidelity
        assert f.ce_delta_se is not None
        numbers = [wording.count(r.factors.n_units), wording.count(r.factors.edges)]
        numbers += [wording.fixed(f.ce_dense, 4), wording.fixed(f.ce, 4), wording.tiny(f.kl)]
        numbers += [f"{wording.signed(f.ce_delta)} ± {wording.tiny(f.ce_delta_se)}"]
        numbers += [wording.percent(f.top1_agreement, 2), wording.tiny(max(f.relmse.values()))]
        assert any(set(numbers) <= set(row) and r.method in row for row in page.rows), (r.method, numbers)


def carrying(run: Run) -> Run:
    """The run as if every surface carried every task (of a random model none does), and prefixes recovered more and more."""

    def as_if(curve: CostCurve, i: int) -> CostCurve:
        rows = curve.rows.assign(recovered=[(n / len(curve.rows)) ** (1 + i) for n in range(1, len(curve.rows) + 1)])
        return replace(curve, rows=rows, validation=rows, q_full=2.0 + i, q_empty=0.0, carried_se=0.01, q_dense=3.0)

    def of_task(its: TaskComparison) -> TaskComparison:
        return replace(its, curves={name: as_if(c, i) for i, (name, c) in enumerate(its.curves.items())})

    return replace(run, comparisons={surface: of_tasks(each, of_task) for surface, each in run.comparisons.items()})


def test_circuit_table_is_the_runs(small: Run) -> None:
    run = carrying(small)
    page = Page(render_report(run))
    wanted = Counter()
    for record in run.circuit_table().to_dict("records"):
        costs = [record[f"{cost} at {what}"] for what in ("recovered 0.9", "necessity 0.5") for cost in ("units", "edges")]
        if record["carries"]:
            cells = tuple(wording.count(None if wording.missing(c) else c) for c in costs)
            wanted[(record["method"], wording.fixed(record["margin"], 2), *cells)] += 1
    assert wanted
    # ... method, margin, accuracy, carried, costs at three thresholds; the task is in the first row of its block only
    found = Counter(
        (row[-10], row[-9], *row[-6:-4], *row[-2:])
        for row in page.rows
        if len(row) in (10, 11) and row[-10] in {m for m, *_ in wanted}
    )
    assert wanted <= found


def test_a_surface_that_does_not_carry_a_task_has_a_sentence(run: Run, page: Page) -> None:
    of_tasks = [each.curves for by_task in run.comparisons.values() for each in by_task.values()]
    curves = [(method, curve) for curves in of_tasks for method, curve in curves.items() if not curve.carries]
    assert curves
    for method, curve in curves:
        assert any(row[-1] == curve.in_words() and method in row for row in page.rows)


def test_curves_are_there_as_numbers_and_as_pictures(run: Run, html: str, page: Page) -> None:
    curves = [curve for by_task in run.comparisons.values() for c in by_task.values() for curve in c.curves.values()]
    rows = {tuple(row[-7:]) for row in page.rows if len(row) in (7, 8)}
    for curve in curves:
        for point in curve.rows.to_dict("records"):
            cells = [wording.count(point[name]) for name in ("units", "edges")]
            cells += [wording.fixed(point[name]) for name in ("recovered", "sufficiency", "drop")]
            cells += [wording.percent(point[name]) for name in ("accuracy keep", "accuracy ablate")]
            assert tuple(cells) in rows
    for cost in ("edges", "units"):  # two surfaces, two tasks
        assert len(re.findall(rf'<svg [^>]*aria-labelledby="circuit-\d+-\d+-{cost}-title', html)) == 4
        assert html.count(f'class="task-grid of-{cost}"') == 2 == html.count(f' value="{cost}"')
    words = {cost: re.findall(rf"<desc id=\"circuit-0-0-{cost}-desc\">(.*?)</desc>", html) for cost in ("edges", "units")}
    curve = run.comparisons[next(iter(run.comparisons))][curves[0].task].curves["SWD s=0.5"]
    for cost, said in (("edges", "active edges"), ("units", "units")):
        row = curve.row_of(Threshold("recovered", 0.9), cost)
        reached = "never reached" if row is None else f"with {int(row[cost]):,} {said}"
        assert (reached if curve.carries else "does not carry") in words[cost][0]


@pytest.mark.slow
def test_every_intervention_has_curves_and_costs_of_its_own(small: Run) -> None:
    surface, comparison = next(iter(small.comparisons.items()))
    task, of_task = next(iter(comparison.items()))
    zero = {name: {**curve.settings, "ablation": "zero"} for name, curve in of_task.curves.items()}
    zeroed = {name: replace(curve, q_full=77.125, settings=zero[name]) for name, curve in of_task.curves.items()}
    other = replace(comparison, tasks={task: replace(of_task, curves=zeroed)})
    both = replace(small, comparisons={**small.comparisons, surface: replace(comparison, others=(other,))})
    page = _check(render_report(both))
    text = "".join(page.text)
    for words in ("mean ablation at the scoring position", "zero ablation at the scoring position"):
        assert f"{surface}: {words}" in text
    assert sum("77.12" in row for row in page.rows) == len(zeroed)
    assert both.circuit_table()["ablation"].value_counts()["zero"] == len(zeroed)


@pytest.mark.slow
def test_the_screen_is_drawn_and_says_what_the_dense_model_cannot_do(small: Run, tmp_path: Path) -> None:
    page = _check(html := render_report(with_screen(small)))
    text = "".join(page.text)
    assert "The dense model does only 50% of the prompts: a circuit of this task says little." in text
    assert len(re.findall(r'<svg [^>]*aria-labelledby="screen-\d+-title', html)) == 2
    for i, name in enumerate(("blocks.0.attn_qkv", "blocks.1.attn_o", "blocks.1.mlp_out", f"all {HOSTILE_SURFACE}")):
        kept = 2.0 - 0.625 * i
        row = [name, wording.percent(kept / 2), wording.fixed(2 - kept), "0.125", "25.0%"]
        assert page.rows.count(row) == 2, row
    with_screen(small).save(tmp_path)
    loaded = Run.load(tmp_path)
    assert loaded.screen == with_screen(small).screen and render_report(loaded) == html
    assert "Screen" not in "".join(_check(render_report(small)).text)


@pytest.mark.slow
def test_tasks_that_the_dense_model_does_badly_are_named(small: Run) -> None:
    for accuracy, margin in ((0.75, 1.0), (0.8, -0.5)):

        def changed(of_task: TaskComparison, accuracy: float = accuracy, margin: float = margin) -> TaskComparison:
            curves = {m: replace(c, q_dense=margin, accuracy_dense=accuracy) for m, c in of_task.curves.items()}
            return replace(of_task, curves=curves)

        comparisons = {surface: of_tasks(c, changed) for surface, c in small.comparisons.items()}
        text = "".join(_check(render_report(replace(small, comparisons=comparisons))).text)
        assert ("does only 75% of the prompts: a circuit of this task says little" in text) == (accuracy == 0.75)
        assert "says little" not in text or accuracy == 0.75
        assert ("the dense model does not do this task" in text) == (margin < 0)


@pytest.mark.slow
def test_the_legend_names_what_is_further_off_in_ce(small: Run) -> None:
    for comparison in small.comparisons.values():
        assert comparison.reference == "SWD s=0.5"
        assert set(comparison.fidelities) == {r.method for r in small.replacements}
    near, far = (
        replace(small, comparisons={s: replace(c, tolerance=t) for s, c in small.comparisons.items()}) for t in (1e9, 1e-12)
    )
    assert "(CE " not in "".join(_check(render_report(near)).text)
    text = "".join(_check(render_report(far)).text)
    # Exact SVD is no worse than anything; what is worse says by how much, wherever there is such a method.
    out = [(c, method) for c in far.comparisons.values() for method in c.methods if c.out_by(method)]
    assert out and all(method != "SVD" for _, method in out)
    for comparison, method in out:
        label = comparison.label(method)
        assert re.search(r" \((CE|KL) [+-]\d\.\d{4} ± \d\.\d{4}", label) and label in text


def test_tokens_are_harmless_and_visible(carded: Run, tmp_path: Path) -> None:
    """Nor does a lone surrogate stop the file."""
    html = write_report(with_cards(carded, (*HOSTILE, "\ud83d")), tmp_path / "r.html").read_text(encoding="utf-8")
    page = _check(html)
    assert page.tags["script"] == 0
    assert page.tags["b"] == Page(render_report(with_cards(carded, ("plain",)))).tags["b"] and not page.handlers()
    text = "".join(page.text)
    for shown in ("</script>", "<b>", "&amp;", "{{7*7}}", "<!--", "$x$", "↵", "····", "⇥", "⟨U+202E⟩"):
        assert shown in text
    assert "\u202e" not in html


def test_names_are_harmless(run: Run, html: str, still: str, page: Page) -> None:
    assert Page(still).tags["script"] == 0 and "<i>task" not in html and HOSTILE_SURFACE not in html
    assert page.tags["script"] == _scripts(len(run.attention))
    text = "".join(page.text)
    assert wording.readable(HOSTILE_TASK) in text and HOSTILE_SURFACE in text and "tiny <model>" in text


def _scripts(panels: int) -> int:
    """CircuitsVis, data and call of every panel, and the report's own."""
    return 1 + 2 * panels + 1


def test_attention_is_drawn_by_one_library_and_said_in_words(run: Run, html: str, page: Page) -> None:
    views = run.attention
    assert [view.task for view in views if view.title == "the dense model"] == [HOSTILE_TASK, "other_way"]
    assert html.count(library()) == 1 and html.count("data-swd-panel=") == len(views)
    text = "".join(page.text)
    for view in views:
        assert view.caption in text
        for column in view.measures.values():
            assert all(any(row == [head, wording.tiny(kl, 4)] for row in page.rows) for head, kl in column.items())
    # For paper and for browsers without scripts: a picture per view, one image per head.
    assert html.count("data:image/png;base64,") == sum(len(view.names) for view in views)


def test_attention_of_hostile_tokens_is_harmless(small: Run) -> None:
    hostile = render_report(with_attention(small, HOSTILE))
    page = _check(hostile)
    assert page.tags["script"] == _scripts(1) - 1  # the check leaves the library out
    assert not page.handlers()
    plain = _check(render_report(with_attention(small, tuple(f"t{i}" for i in range(len(HOSTILE))))))
    assert page.tags == plain.tags
    assert "\u202e" not in hostile.replace(library(), "")
    assert "sees it" in "".join(page.text) and "KL of </script>" in "".join(page.text)


def test_further_sections_are_shown_and_harmless(small: Run) -> None:
    figure, axes = new_figure()
    axes[0, 0].plot([1, 2])
    words = "</script><b>&amp;"
    picture = Picture.of(figure, f"graph {words}", f"description {words}", f"caption {words}")
    table = SectionTable(f"table {words}", ("name", "n"), ((words, 1234), ("x", None), ("y", 0.5)))
    section = ReportSection(f"Unit graph {words}", (f"intro {words}", "second"), (picture, picture), (table,), "Graph")
    html = render_report(replace(small, extras=[section, section]))
    page = _check(html)
    assert page.tags["script"] == 0 and "<b>&amp;" not in html and page.rows.count([words, "1,234"]) == 2
    text = "".join(page.text)
    assert page.values("alt") == [f"graph {words}. description {words}"] * 4
    for shown in ("Unit graph", "intro", "caption", "table"):
        assert f"{shown} {words}" in text
    assert ["x", "–"] in page.rows and ["y", "0.5000"] in page.rows
    assert html.count('href="#extra-0"') == html.count('href="#extra-1"') == 1


def test_a_unit_graph_unfolds_into_a_page_of_its_own(small: Run, host: Any) -> None:
    """In a frame that may run its own script and reach nothing: neither the report nor the disk, nor a network."""
    graph, plain_section = section_with_graph(host), ReportSection("Other")
    html = render_report(replace(small, extras=[graph, plain_section]))
    page = _check(re.sub('srcdoc="[^"]*"', "", html))
    assert page.tags["script"] == 0 and page.tags["iframe"] == 1
    (frame,) = [{name: value for tag, name, value in Page(html).attributes if tag == "iframe"}]
    assert frame["sandbox"] == "allow-scripts allow-downloads" and frame["loading"] == "lazy"
    inside = frame["srcdoc"] or ""
    assert graph.graph is not None and inside == graph.graph.page()
    assert inside.startswith("<!doctype html>") and "connect-src" not in inside.replace("default-src 'none'", "")
    assert "default-src 'none'" in inside and "a page of its own inside" in "".join(page.text)
    assert "graph" not in plain_section.as_dict()
    assert ReportSection.from_dict(json.loads(json.dumps(graph.as_dict()))) == graph


def test_a_graph_of_a_run_file_is_read_before_it_is_shown(host: Any) -> None:
    values = json.loads(json.dumps(section_with_graph(host).as_dict()))
    values["graph"]["graph"]["edges"][0]["source"] = "<script>"
    with pytest.raises(ValueError, match="ReportSection"):
        ReportSection.from_dict(values)


def test_a_picture_of_a_run_file_can_only_be_seen(small: Run) -> None:
    """Whatever it holds, it stands in an <img>, where a browser runs no script and loads nothing."""
    svg = '<svg viewBox="0 0 4 4" onload="alert(1)"><script>alert(1)</script><image href="http://example.com/x.png"/></svg>'
    html = render_report(replace(small, extras=[ReportSection("S", pictures=(Picture(svg, "title", "words"),))]))
    page = _check(html)
    assert page.tags["script"] == 0 and page.tags["img"] == 1 and "example.com" not in html
    (image,) = [{name: value for tag, name, value in page.attributes if tag == "img"}]
    head, _, written = (image["src"] or "").partition(",")
    assert head == "data:image/svg+xml;base64" and base64.b64decode(written).decode() == svg
    assert image["alt"] == "title. words"
    for wrong in ("<p/>", "", '<!DOCTYPE svg><svg viewBox="0 0 1 1"/>'):
        with pytest.raises(ValueError, match="<svg> element"):
            Picture(wrong, "title")


def test_loads_nothing(still: str) -> None:
    html, page = still, Page(still)
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
    assert [value for value in page.values(*loading) if not value.startswith("#")] == []
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert "@import" not in html and not re.findall(r"url\((?!#)", html)
    assert "://" not in html


def test_is_small(html: str, still: str) -> None:
    assert len(still.encode()) < 1_500_000
    assert len(html.encode()) < len(library()) + 1_500_000 < 5_000_000


def test_tables_and_pictures_can_be_read_aloud(html: str, page: Page) -> None:
    assert html.count("<caption><span>") == page.tags["table"]
    assert all(page.values("scope"))
    pictures = re.findall(r"<svg [^>]*>", html)
    assert pictures and all('role="img"' in p or 'aria-hidden="true"' in p for p in pictures)
    assert all("<title" in part[:400] for part in html.split("<svg ")[1:] if 'role="img"' in part.split(">")[0])


@pytest.mark.parametrize("method", ["SWD s=0.5", "SVD"])
def test_one_surface_one_task_one_method(run: Run, method: str) -> None:
    surface, by_task = next(iter(run.comparisons.items()))
    task, comparison = next(iter(by_task.items()))
    single = replace(by_task, tasks={task: replace(comparison, curves={method: comparison.curves[method]})})
    replacements = [r for r in run.replacements if (r.surface, r.method) == (surface, method)]
    _check(render_report(replace(run, replacements=replacements, comparisons={surface: single}, cards=[], attention=[])))


def test_many_methods_some_with_odd_curves(small: Run) -> None:
    """Undefined, far below, overshooting while ablation helps, without edges, without a drop; and seven like others."""
    odd: list[dict[str, Any]] = [{"sufficiency": math.nan}, {"sufficiency": -30.0}, {"sufficiency": 40.0, "drop": -2.0}]
    odd += [{"edges": 0}, {"drop": 0.0}, *[{}] * 7]

    def changed(of_task: TaskComparison) -> TaskComparison:
        curve = next(iter(of_task.curves.values()))
        curves = {f"method {i}": replace(curve, rows=curve.rows.assign(**columns)) for i, columns in enumerate(odd)}
        return replace(of_task, curves=curves, scores={})

    replacements = [replace(small.replacements[0], method=f"method {i}") for i in range(len(odd))]
    comparisons = {surface: of_tasks(c, changed) for surface, c in small.comparisons.items()}
    page = _check(render_report(replace(small, replacements=replacements, comparisons=comparisons)))
    assert all(r.method in "".join(page.text) for r in replacements)


def test_nothing_found(run: Run, carded: Run) -> None:
    empty = Run({}, [], {}, [], 0.0)
    assert "nothing to report" in "".join(_check(render_report(empty)).text)
    _check(render_report(replace(run, comparisons={s: Comparison({}) for s in run.comparisons}, cards=[], attention=[])))
    _check(render_report(replace(carded, cards=[replace(card, contexts=(), logits=None) for card in carded.cards])))


def test_sites_that_do_not_write_to_the_residual_stream_say_so(carded: Run) -> None:
    cards = [replace(card, unit=f"blocks.0.mlp_in/{i}", logits=None) for i, card in enumerate(carded.cards)]
    page = _check(render_report(replace(carded, cards=cards)))
    assert "does not write to the residual stream" in "".join(page.text)


def test_a_replacement_that_fell_apart_is_still_reported(run: Run) -> None:
    # Two sites, the first of them beyond all numbers: it has no dot, and a dash in the table.
    its = next(r for r in run.replacements if len(r.fidelity.relmse) == 2)
    sites = list(its.fidelity.relmse)
    broken = replace(its.fidelity, ce=math.inf, kl=math.nan, relmse={sites[0]: math.inf, sites[1]: 0.5})
    replacements = [replace(r, fidelity=broken) if r is its else r for r in run.replacements]
    page = render_report(replace(run, replacements=replacements, comparisons={}, cards=[], attention=[]))
    assert "–</td>" in page and "inf" not in page.split('id="fidelity"')[1].split("</section>")[0]
