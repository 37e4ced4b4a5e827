"""Pictures from anywhere: what draws passes, what acts or loads does not, whatever the case of its letters."""

import pytest

from swd_lens.base.figures import new_figure
from swd_lens.study.section import Picture, ReportSection, drawing


@pytest.mark.parametrize(
    ("svg", "message"),
    [
        # A page's parser turns names of attributes into small letters, and style sheets know no case.
        ('<svg viewBox="0 0 1 1" ONLOAD="go()"/>', "may not act: <svg> has ONLOAD"),
        ('<svg viewBox="0 0 1 1"><image HREF="http://example.org/x.png"/></svg>', "load anything: <image>"),
        ('<svg viewBox="0 0 1 1"><g style="fill: URL(http://example.org)"/></svg>', "load anything: style="),
        ("<svg viewBox=\"0 0 1 1\" style=\"background: -webkit-Image-Set('//example.org' 1x)\"/>", "load anything: style="),
        ('<svg viewBox="0 0 . 1"/>', r"needs a viewBox from 0 0, got '0 0 \. 1'"),
        ('<svg viewBox="0 0 1 1">' + "<g>" * 5000 + "</g>" * 5000 + "</svg>", "nested too deeply"),
    ],
)  # fmt: skip
def test_what_does_more_than_draw_is_refused(svg: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawing(svg)


def test_what_draws_stays() -> None:
    inside = '<g fill="url(#a)" transform="matrix(1 0 0 1 0 0)"><use href="#b" /></g>'
    svg = f'<svg viewBox="0 0 4 2.5" aria-label="the image (src) of f(x)">{inside}</svg>'
    assert drawing(svg) == svg
    figure, axes = new_figure()
    axes[0, 0].imshow([[0, 1]])
    axes[0, 0].set_title("image(x)")
    assert "<image" in Picture.of(figure, "title").svg


def test_a_table_is_as_wide_as_its_columns() -> None:
    section = {"title": "t", "intro": [], "pictures": [], "short": ""}
    table = {"caption": "c", "columns": ["a", "b"], "rows": [[1, 2], [3]]}
    with pytest.raises(ValueError, match="a table of 2 columns has rows of other lengths"):
        ReportSection.from_dict({**section, "tables": [table]})
