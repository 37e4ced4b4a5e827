"""with_torch_defaults: what a marked call sees of the caller's settings, that they are given back, and one thread per host."""

import gc
import threading
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn

from swd_lens.base import holding, surroundings
from swd_lens.base.errors import HostInUseError
from swd_lens.base.holding import take
from swd_lens.base.interrupts import Undo
from swd_lens.base.surroundings import claim, is_marked, with_torch_defaults
from tests.interrupts import run_to_line

MATMUL: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def default_dtype(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def precision_of_products(backend: bool):
    if backend:
        before, MATMUL.fp32_precision = MATMUL.fp32_precision, "bf16"
    else:
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        if backend:
            MATMUL.fp32_precision = before
        else:
            torch.set_float32_matmul_precision("highest")


SETTINGS = {
    "none": nullcontext,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "precision": lambda: precision_of_products(backend=False),
    "precision of a backend": lambda: precision_of_products(backend=True),
}


def precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return MATMUL.fp32_precision


def state() -> tuple:
    """Everything that the mark sets."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device().type,
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        precision(),
    )


@with_torch_defaults
def marked(then=lambda: None) -> tuple:
    then()
    return state()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_marked_call_sees_plain_settings_and_gives_the_callers_back(name):
    with SETTINGS[name]():
        before = state()
        inside = marked()
        assert state() == before
        with pytest.raises(ZeroDivisionError):
            marked(lambda: 1 / 0)
        assert state() == before
        assert (before == inside) == (name in ("none", "no_grad"))
        made = with_torch_defaults(lambda: torch.zeros(2))()
        assert not made.is_inference()
    assert inside[:4] == (torch.float32, "cpu", False, False) and inside[5] in ("highest", "ieee")
    assert inside[4] == (name != "no_grad")
    assert state() == (torch.float32, "cpu", False, False, True, "highest") or "backend" in name
    assert surroundings._thread.call is None and not surroundings._calls


def precisions() -> tuple:
    """Of the process ("mixed" where torch refuses to say it) and of every backend."""
    try:
        of_process = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_process = "mixed"
    return of_process, *(backend.fp32_precision for backend in surroundings._BACKENDS)


def test_every_way_to_round_products_is_off_inside_and_back_afterwards():
    for owner, name, value in (
        (torch.backends, "fp32_precision", "tf32"),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.mkldnn, "fp32_precision", "bf16"),
        (surroundings._CONVOLUTIONS, "fp32_precision", "bf16"),
    ):
        former = getattr(owner, name)
        try:
            setattr(owner, name, value)
            before = precisions()
            assert with_torch_defaults(precisions)() == ("highest", "ieee", "ieee", "ieee")
            assert precisions() == before
        finally:
            setattr(owner, name, former)
            torch.set_float32_matmul_precision("highest")
            for backend in surroundings._BACKENDS:
                backend.fp32_precision = "none"
        assert precisions() == ("highest", "none", "none", "none")


def test_set_default_device_is_given_back_too_and_what_our_own_code_sets_holds():
    torch.set_default_device("meta")
    try:
        assert marked()[1] == "cpu" and torch.zeros(1).device.type == "meta"
    finally:
        torch.set_default_device(None)

    def train():
        with torch.autocast("cpu", torch.bfloat16):
            assert marked()[2]

    with_torch_defaults(train)()


def test_an_interruption_at_any_line_leaves_nothing_behind():
    with default_dtype(torch.bfloat16), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        before, stop = state(), 0
        gc.freeze()  # what was there before is not looked through after every stop
        while True:
            stop += 1
            try:
                run_to_line(marked, stop, ("swd_lens/base/surroundings.py",))
                break
            except KeyboardInterrupt:
                gc.collect()
                assert state() == before, stop
                assert surroundings._thread.call is None and not surroundings._calls, stop
        gc.unfreeze()
    assert stop > 20


class Computes:
    """One of everything that a class may have."""

    def method(self) -> tuple:
        return state()

    @classmethod
    def of_class(cls) -> tuple:
        return state()

    @staticmethod
    def static() -> tuple:
        return state()

    @property
    def read(self) -> tuple:
        return state()

    @cached_property
    def kept(self) -> tuple:
        return state()

    def values(self):
        yield state()

    def _own(self) -> tuple:
        return state()


def test_a_class_is_marked_by_its_public_methods():
    assert with_torch_defaults(Computes) is Computes
    computes = Computes()
    with default_dtype(torch.float64):
        seen = (computes.method(), Computes.of_class(), Computes.static(), computes.read, computes.kept)
        assert all(each[0] is torch.float32 for each in seen)
        assert computes._own()[0] is torch.float64 and next(computes.values())[0] is torch.float64
    assert is_marked(Computes.method) and not is_marked(Computes.values) and not is_marked(Computes._own)
    once = Computes.method
    with_torch_defaults(Computes)
    assert Computes.method is once
    with pytest.raises(AssertionError):  # a generator
        with_torch_defaults(Computes.values)


def in_a_thread(function):
    """What the function returns or raises in a thread of its own, which has ended."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return outcome[0]


def test_process_wide_settings_are_given_back_by_the_last_of_two_threads():
    begun, end, seen = threading.Event(), threading.Event(), []

    def long():
        begun.set()
        end.wait()
        seen.append(state()[0])

    with default_dtype(torch.float64):
        thread = threading.Thread(target=with_torch_defaults(long))
        thread.start()
        begun.wait()
        assert marked()[0] is torch.float32
        assert torch.get_default_dtype() is torch.float32  # of the process: the other thread's call goes on
        end.set()
        thread.join()
        assert torch.get_default_dtype() is torch.float64
    assert seen == [torch.float32]


def test_a_host_in_a_marked_call_is_refused_to_other_threads_until_it_ends():
    model = nn.Linear(1, 1)

    @with_torch_defaults
    def use(then=lambda: None):
        claim(model)
        claim(model)
        return then()

    refused = use(lambda: in_a_thread(use))
    assert isinstance(refused, HostInUseError) and "use in thread 'MainThread'" in str(refused)
    assert use(use) is None and in_a_thread(use) is None
    assert model not in holding._holders
    assert in_a_thread(lambda: claim(model)) is None and model not in holding._holders  # outside of a marked call


def test_a_held_host_is_free_when_it_is_released_or_its_thread_has_ended():
    model, undo, other = nn.Linear(1, 1), Undo(), Undo()
    take(model, "attach", undo.push)
    take(model, "attach", undo.push)
    assert isinstance(in_a_thread(lambda: take(model, "attach", other.push)), HostInUseError) and not other
    undo.run()
    assert in_a_thread(lambda: take(model, "attach", other.push)) is None
    assert torch.is_tensor(model(torch.ones(1)))
    take(model, "attach", undo.push)  # the second thread has ended and never released it
    other.run()  # late: what the first thread holds now stays held
    assert isinstance(in_a_thread(lambda: take(model, "attach", other.push)), HostInUseError)
    undo.run()
    assert model not in holding._holders and "forward" not in model.__dict__
