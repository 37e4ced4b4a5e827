"""Arguments in the wrong place are named before a call begins."""

import pytest

from swd_lens.base.arguments import check_arguments


def call(model, sites, *, tokens=None, progress=True):
    pass


def anything(*values):
    pass


Task = type("Task", (), {})


def test_too_many_by_position_and_kinds_that_belong_elsewhere():
    check_arguments(call, ("m", "s"), {"tokens": 3})
    check_arguments(anything, (1, 2, 3), {})
    with pytest.raises(TypeError, match=r"takes 2 arguments by position; pass 0.5 by keyword: call\(model, sites, tokens="):
        check_arguments(call, ("m", "s", 0.5), {})
    with pytest.raises(TypeError, match=r"pass a Task by keyword"):
        check_arguments(call, ("m", "s", Task()), {})
    for args, kwargs in (((Task(), "s"), {}), (("m",), {"sites": Task()})):
        with pytest.raises(TypeError, match=r"call\(model, sites\) takes its arguments in this order; \w+ was given a task"):
            check_arguments(call, args, kwargs)
