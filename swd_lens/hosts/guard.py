"""shadow_methods: methods of a host that must not be called while units are attached raise, with the reason.

A method is shadowed in the instance's own __dict__ by a `Shadow`, which knows the attachments that want it; the last one to
leave takes it away. Nothing of the host's class is touched. What a shadow does is up to its class: a `Refusal` raises; a
host may bring others (bridge/host.py: stacked weights).
"""

from collections.abc import Callable, Iterable
from typing import Any


class Shadow:
    """Stands in for a method. A class, not a closure, so that a deep copy of the host copies it too."""

    def __init__(self) -> None:
        self.wanted_by: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Refusal(Shadow):
    """Raises RuntimeError, saying why."""

    def __init__(self, name: str, reason: str):
        super().__init__()
        self.name, self.reason = name, reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.name} was called {self.reason}")


def refusals(names: Iterable[str], reason: str) -> dict[str, Callable[[], Shadow]]:
    """For `shadow_methods`: each of the names raises RuntimeError; reason ends "fold_layer_norm was called ..."."""
    return {name: lambda name=name: Refusal(name, reason) for name in names}


def shadow_methods(
    model: Any, make: dict[str, Callable[[], Shadow]], register: Callable[[Callable[[], None]], None]
) -> None:
    """Put shadows before those of the named methods that the model has; one that is there already is shared.

    Args:
        make: method name -> what makes its shadow.
        register: is given the undo before anything is done; the undo may be called more than once.
    """
    present = [name for name in make if getattr(type(model), name, None) is not None]
    owner = object()

    def undo() -> None:
        for name in present:
            shadow = model.__dict__.get(name)
            if isinstance(shadow, Shadow):
                shadow.wanted_by.discard(id(owner))
                if not shadow.wanted_by:
                    del model.__dict__[name]

    register(undo)
    for name in present:
        if not isinstance(model.__dict__.get(name), Shadow):
            model.__dict__[name] = make[name]()
        model.__dict__[name].wanted_by.add(id(owner))
