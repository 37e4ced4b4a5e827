"""Figures of the report: a colour for a family and a line style for each member; an SVG that is a good neighbour in a page."""

import re
from dataclasses import replace

import pytest

from swd_lens.base.figures import new_figure
from swd_lens.report.plots import Look, inline_svg, looks_of, pattern_grid, relmse_dots, swatch
from swd_lens.study import Run


def test_ids_are_its_own_and_it_can_be_read_aloud() -> None:
    figure, axes = new_figure()
    axes[0, 0].plot([1, 2])
    svg = inline_svg(figure, "one", "a <title>", "words & more")
    ids = set(re.findall(r' id="([^"]+)"', svg))
    assert ids >= {"one-title", "one-desc"} and all(name.startswith("one-") for name in ids)
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg)) and "<style" not in svg and "<metadata" not in svg
    assert "a &lt;title&gt;" in svg and "words &amp; more" in svg and 'role="img"' in svg
    assert 'aria-hidden="true"' in swatch(Look(0, 0), "key") and 'id="key' in swatch(Look(0, 0), "key", marker=True)
    with pytest.raises(ValueError, match="an id prefix takes letters"):
        inline_svg(figure, "1 2", "title", "")


def test_patterns_are_a_pixel_per_pair_of_positions(run: Run) -> None:
    view = run.attention[0]
    svg = pattern_grid(view)
    assert svg.count("data:image/png;base64,") == svg.count("<rect") == len(view.names)
    assert all(f">{name}</text>" in svg for name in view.names)


def test_dots_of_errors_that_can_be_seen(run: Run) -> None:
    looks = looks_of(run)
    several = [r for r in run.replacements if len(r.fidelity.relmse) > 1]
    figure = relmse_dots(several, looks)
    assert figure is not None and [len(ax.get_yticks()) for ax in figure.axes] == [len(several[0].fidelity.relmse)]
    assert relmse_dots([r for r in several if r.exact], looks) is None
    one = replace(several[0], fidelity=replace(several[0].fidelity, relmse={"blocks.0.mlp_out": 0.5}))
    assert relmse_dots([one], looks) is None


def test_a_family_has_one_colour_and_its_members_differ(run: Run) -> None:
    looks = looks_of(run)
    families = [["SWD s=0.5", "SWD s=0.75"], ["SWD (paper) s=0.5", "SWD (paper) s=0.75"]]
    families += [["Neurons pruned s=0.5", "Neurons pruned s=0.75"], ["neurons"], ["SVD"]]
    drawn = [[name for name in family if name in looks] for family in families]
    assert sorted(name for family in drawn for name in family) == sorted(looks)
    colours = [{looks[name].line["color"] for name in family} for family in drawn if family]
    assert all(len(colour) == 1 for colour in colours) and len(set().union(*colours)) == len(colours)
    for family in drawn:
        assert len({str(looks[name].line["linestyle"]) for name in family}) == len(family)
        assert len({looks[name].marker for name in family}) == len(family)


def test_finished_factors_are_families_of_their_own(run: Run) -> None:
    given = replace(run, settings={**run.settings, "factors": ["SWD s=0.75"]})
    looks = looks_of(given)
    assert looks["SWD s=0.75"].family != looks["SWD s=0.5"].family and looks["SWD s=0.75"].member == 0
