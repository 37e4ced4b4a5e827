"""A second device without one: tensors on the CPU that are marked as lying elsewhere, and an error where devices are mixed.

    with SecondDevice() as device:
        device.move(model)
        swd.attribute(model, factors, task)          # RuntimeError where a tensor of the CPU meets one of the model's

1. Every call of torch goes through `__torch_function__`. What a marked tensor is computed from is marked; what is made on no
   device, or on the CPU, is marked as the CPU's. A tensor of unknown origin (a gradient that autograd hands over) mixes with all.
2. `.device` says `DEVICE` of marked tensors, and `device=`, `.to(...)` and `.cpu()` mark their results and copy.
3. As on a real second device: scalars of the CPU mix with everything, indices may lie on the CPU, `copy_` crosses, and `numpy`
   of a marked tensor is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("privateuseone", 0)
CPU = torch.device("cpu")
_CROSSING = ("copy_", "__getitem__", "__setitem__", "index_put_", "index_put", "set_", "is_set_to", "__set__", "swap_tensors")
_FREE = ("size", "dim", "numel", "__len__", "__repr__", "data_ptr", "is_floating_point", "requires_grad_", "backward")


class MixedDevicesError(RuntimeError):
    """What torch says where tensors of two devices meet in an operation."""


def marked(tensor: Tensor) -> torch.device | None:
    """Where a tensor lies as far as is known."""
    return getattr(tensor, "_lies_on", None)


def mark(value: Any, device: torch.device) -> Any:
    """Every tensor in a result as one that lies on the device."""
    for tensor in _tensors(value):
        if marked(tensor) is None:
            tensor._lies_on = device
    return value


class SecondDevice(TorchFunctionMode):
    """See the module. `strict` is False while something is looked at that belongs to no run."""

    def move(self, model: nn.Module) -> Any:
        """Mark a host's parameters and buffers, and its setting, as those of a host on the second device."""
        for tensor in (*model.parameters(), *model.buffers()):
            tensor._lies_on = DEVICE
            if tensor.grad is not None:
                tensor.grad._lies_on = DEVICE
        if hasattr(model, "cfg"):
            model.cfg.device = str(DEVICE)
        return model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args, kwargs)
        if func == torch.Tensor.data.__set__ and marked(args[1]) is not None:  # how modules move their parameters
            args[0]._lies_on = marked(args[1])
        if name in ("to", "cpu", "cuda", "type_as", "pin_memory"):
            return self._moved(func, name, args, kwargs)
        tensors = list(_tensors((args, kwargs)))
        if name == "numpy" and marked(tensors[0]) == DEVICE:
            raise MixedDevicesError("can't convert a tensor of the second device to numpy")
        wanted = _device_of(kwargs.get("device")) if kwargs.get("device") is not None else None
        if "device" in kwargs:
            kwargs["device"] = None if wanted is None else CPU
        if wanted == DEVICE and kwargs.get("generator") is not None:
            raise MixedDevicesError(f"{name}: a generator of the CPU for a tensor of the second device")
        if wanted is None:
            wanted = self._common(name, tensors, args)
        result = func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "asarray") and wanted == DEVICE:
            result = result.clone() if isinstance(result, Tensor) and marked(result) == CPU else result
        return mark(result, wanted or CPU) if wanted is not None or not tensors else result

    def _attribute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.device`, `.grad`, `.T`, `.data` and the like."""
        value = func(*args, **kwargs)
        device = marked(args[0])
        if isinstance(value, torch.device):
            return value if device is None else device
        if isinstance(value, Tensor) and device is not None:
            mark(value, device)
        return value

    def _moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        source, others = args[0], [*args[1:], *kwargs.values()]
        wanted = CPU if name == "cpu" else None
        for other in others:
            if isinstance(other, Tensor):
                wanted = marked(other) or wanted
            elif isinstance(other, torch.device | str):
                wanted = _device_of(other)
        plain_args = [CPU if isinstance(a, torch.device | str) else a for a in args]
        plain = {key: CPU if isinstance(a, torch.device | str) else a for key, a in kwargs.items()}
        with torch._C.DisableTorchFunction():
            result = func(*plain_args, **plain)
        present = marked(source)
        wanted = wanted or present
        if wanted is not None and wanted != present:
            result = result.clone() if result is source else result  # another tensor lies there
        return mark(result, wanted) if wanted is not None else result

    def _common(self, name: str, tensors: list[Tensor], args: Any) -> torch.device | None:
        """The device of an operation's tensors; its result lies there.

        Raises:
            MixedDevicesError: they lie on two.
        """
        if not tensors:
            return None
        first = marked(tensors[0])
        if name in _FREE or name in _CROSSING:
            if name == "__getitem__" and first == CPU and any(marked(t) == DEVICE for t in tensors[1:]):
                raise MixedDevicesError(f"{name}: indices of the second device into a tensor of the CPU")
            return first
        known = {marked(t) for t in tensors if marked(t) is not None and (t.ndim > 0 or marked(t) == DEVICE)}
        if len(known) > 1:
            shapes = ", ".join(f"{tuple(t.shape)} on {marked(t)}" for t in tensors)
            raise MixedDevicesError(f"{name}: expected all tensors to be on the same device, found {shapes}")
        return next(iter(known), first)


def _device_of(given: Any) -> torch.device:
    device = torch.device(given) if isinstance(given, str) else given
    return DEVICE if device.type == DEVICE.type else CPU


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors(each)
