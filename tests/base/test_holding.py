"""One thread per host: guards stand while a host is held, and only then; forwards that had begun are waited for."""

import copy
import inspect
import pickle
import threading
import time

import pytest
import torch
from torch import nn

from swd_lens.base import holding
from swd_lens.base.errors import HostInUseError
from swd_lens.base.holding import Guard, own_method, set_own_method, take
from swd_lens.base.interrupts import Undo
from tests.base.test_surroundings import in_a_thread


class Model(nn.Module):
    """A host as far as holding it goes."""

    def __init__(self):
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.hung = []

    def forward(self, x):
        self.begun.set()
        assert self.go_on.wait(10)
        return self.inner(x)

    def inner(self, x):
        return x + 1

    def add_hook(self, hook):
        self.hung.append(hook)


class Wrapping(Model):
    """A bridge: another model inside, not as a child."""

    def __init__(self):
        super().__init__()
        self.__dict__["original_model"] = Model()

    def inner(self, x):
        return self.original_model(x)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(holding, "WAIT_FOR_CALL", 0.05)


@pytest.mark.parametrize("kind", [Model, Wrapping])
def test_a_held_host_is_refused_to_forwards_of_other_threads(kind):
    model = kind()
    before, plain = dict(model.__dict__), inspect.signature(model.forward)
    with Undo() as undo:
        take(model, "attach", undo.push)
        assert isinstance(model.__dict__["forward"], Guard) and inspect.signature(model.forward) == plain
        assert model(1) == 2 and model.forward(1) == 2
        uses = [lambda: model(1), lambda: model.forward(1), lambda: model.add_hook(len)]
        if kind is Wrapping:
            uses.append(lambda: model.original_model(1))
        for use in uses:
            refused = in_a_thread(use)
            assert isinstance(refused, HostInUseError) and "attach in thread 'MainThread'" in str(refused)
        assert model.hung == []
        model.add_hook(len)
    assert model.hung == [len] and dict(model.__dict__) == before
    assert in_a_thread(lambda: model(1)) == 2


def test_a_forward_waits_for_a_short_call(monkeypatch):
    monkeypatch.setattr(holding, "WAIT_FOR_CALL", 10.0)
    model, undo, got = Model(), Undo(), []
    take(model, "find_sites", undo.push)
    thread = threading.Thread(target=lambda: got.append(model(1)))
    thread.start()
    time.sleep(0.01)
    assert got == []
    undo.run()
    thread.join()
    assert got == [2]


@pytest.mark.parametrize("kind", [Model, Wrapping])
def test_a_forward_that_has_begun_is_waited_for_and_ends(kind):
    model, order = kind(), []
    model.go_on.clear()
    thread = threading.Thread(target=lambda: order.append(model(1)))
    thread.start()
    assert model.begun.wait(10)
    threading.Timer(0.05, model.go_on.set).start()
    with Undo() as undo:
        take(model, "attach", undo.push)
        order.append("held")
    thread.join()
    assert order == [2, "held"]  # what a bridge calls of its inner model passed the guard, too


def test_a_forward_that_does_not_end_refuses_the_call(monkeypatch):
    monkeypatch.setattr(holding, "WAIT_FOR_FORWARD", 0.05)
    model, undo = Model(), Undo()
    model.go_on.clear()
    thread = threading.Thread(target=lambda: model(1), name="forwarder")
    thread.start()
    assert model.begun.wait(10)
    with pytest.raises(HostInUseError, match="a forward in thread 'forwarder'"):
        take(model, "attach", undo.push)
    undo.run()
    model.go_on.set()
    thread.join()
    assert model not in holding._holders and "forward" not in model.__dict__


def test_what_stood_in_the_host_itself_is_kept_beneath_a_guard():
    model = Model()
    own = model.__dict__["forward"] = lambda x: -x
    with Undo() as undo:
        take(model, "attach", undo.push)
        assert model(1) == -1 and own_method(model, "forward") is own
        set_own_method(model, "forward", lambda x: 7)
        assert model(1) == 7
        set_own_method(model, "forward", None)
        assert model(1) == 2
        set_own_method(model, "forward", own)
    assert model.__dict__["forward"] is own
    set_own_method(model, "forward", None)
    assert model(1) == 2


def test_copies_of_a_held_host_are_free():
    model = nn.Linear(2, 2)
    with Undo() as undo:
        take(model, "attach", undo.push)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        x = torch.ones(2)
        for other in copies:
            with torch.no_grad():
                other.weight.mul_(2)
            wanted = nn.functional.linear(x, 2 * model.weight, model.bias)
            assert torch.equal(in_a_thread(lambda other=other: other(x)), wanted)
            with Undo() as own:
                take(other, "attach", own.push)
                assert isinstance(in_a_thread(lambda other=other: other(x)), HostInUseError)
            assert "forward" not in other.__dict__  # the guard that was copied is gone with the others
