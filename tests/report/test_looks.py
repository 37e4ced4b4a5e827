"""How methods are drawn: a colour for a family, a line style for each of its members."""

from swd_lens.report.looks import looks_of
from swd_lens.study import Run


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
    from dataclasses import replace

    given = replace(run, settings={**run.settings, "factors": ["SWD s=0.75"]})
    looks = looks_of(given)
    assert looks["SWD s=0.75"].family != looks["SWD s=0.5"].family and looks["SWD s=0.75"].member == 0
