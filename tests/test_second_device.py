"""Calls of the package on a host that lies on another device than the CPU: nowhere do tensors of both meet.

The device is pretended (second_device.py). A call that mixes devices raises there as it would on a graphics card.
"""

import warnings
from functools import cache

import pytest
import torch

import swd_lens as swd
from tests.second_device import DEVICE, MixedDevicesError, SecondDevice, marked
from tests.test_surroundings import CALLS, HOSTS, QUICK, Kit, in_turns

# torch has no autocast for a device that is pretended; "load" makes a host of its own.
ELSEWHERE = ("finetune under its own autocast", "load")


@cache
def moved(kind: str) -> Kit:
    """Made on the CPU, then with the host on the second device, and factors and scores that were made there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kit = Kit(kind)
        with SecondDevice() as device:
            device.move(kit.model)
            kit.factors, kit.scores = kit.factorize(), kit.attribute()
            kit.attention = swd.factorize(kit.model, ["blocks.*.attn_qkv"], sparsity=0.5, **QUICK)
    return kit


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("call", "kind"), in_turns(name for name in CALLS if name not in ELSEWHERE))
def test_a_call_mixes_no_devices(call, kind):
    kit = moved(kind)
    with SecondDevice(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*calibration tokens")
        CALLS[call](kit)


@pytest.mark.parametrize("kind", HOSTS)
def test_units_run_where_the_host_is(kind):
    kit = moved(kind)
    with SecondDevice(), swd.attach(kit.model, kit.factors), torch.no_grad():
        _, cache = kit.model.run_with_cache(kit.tokens.to(DEVICE))
        for f in kit.factors.values():
            assert f.read.device == DEVICE
        assert all(value.device == DEVICE for name, value in cache.items() if name.endswith("_unit"))


class TestThePretendedDevice:
    def test_mixing_is_an_error(self):
        with SecondDevice():
            there, here = torch.ones(3, device=DEVICE), torch.ones(3)
            assert there.device == DEVICE and marked(here) != DEVICE
            for mix in (torch.add, torch.mul, torch.equal, lambda a, b: torch.cat([a, b]), torch.where, torch.dot):
                with pytest.raises((MixedDevicesError, TypeError)):
                    mix(there, here) if mix is not torch.where else torch.where(there > 0, here, there)
            with pytest.raises(MixedDevicesError):
                here[(there > 0)]
            with pytest.raises(MixedDevicesError):
                there.numpy()
            with pytest.raises(MixedDevicesError):
                torch.nn.functional.linear(torch.ones(2, 3), torch.ones(2, 3, device=DEVICE))

    def test_what_may_cross_crosses(self):
        with SecondDevice():
            there, here = torch.ones(3, device=DEVICE), torch.ones(3)
            assert (there + here.to(there)).device == DEVICE and (there.cpu() + here).device.type == "cpu"
            assert (there * torch.tensor(2.0)).device == DEVICE  # a scalar
            assert there[here > 0].device == DEVICE and there.copy_(here).device == DEVICE
            assert there.new_zeros(2).device == DEVICE and torch.zeros_like(there).device == DEVICE
            assert there.tolist() == [1.0, 1.0, 1.0] and there.detach().view(1, 3).T.device == DEVICE
            assert there.cpu() is not there and there.to(DEVICE) is there

    def test_gradients_lie_where_their_tensors_do(self):
        with SecondDevice():
            there = torch.ones(3, device=DEVICE, requires_grad=True)
            (there * 2).sum().backward()
            assert there.grad.device == DEVICE
            with pytest.raises(MixedDevicesError):
                there.grad + torch.ones(3)
