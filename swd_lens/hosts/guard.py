"""guard_methods: methods of a host that must not be called while units are attached raise, with the reason.

The method is shadowed in the instance's own __dict__ by a `Refusal`, which knows the attachments that want it; the last one
to leave takes it away. Nothing of the host's class is touched.
"""

from collections.abc import Callable, Iterable
from typing import Any


class Refusal:
    """Stands in for a method and raises. A class, not a closure, so that a deep copy of the host copies it too."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason
        self.wanted_by: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.name} was called {self.reason}")


def guard_methods(
    model: Any, names: Iterable[str], reason: str, register: Callable[[Callable[[], None]], None]
) -> None:
    """Shadow those of the named methods that the model has.

    Args:
        reason: ends the sentence "fold_layer_norm was called ...".
        register: is given the undo before anything is done; the undo may be called more than once.
    """
    present = [name for name in names if getattr(type(model), name, None) is not None]
    owner = object()

    def undo() -> None:
        for name in present:
            refusal = model.__dict__.get(name)
            if isinstance(refusal, Refusal):
                refusal.wanted_by.discard(id(owner))
                if not refusal.wanted_by:
                    del model.__dict__[name]

    register(undo)
    for name in present:
        if not isinstance(model.__dict__.get(name), Refusal):
            model.__dict__[name] = Refusal(name, reason)
        model.__dict__[name].wanted_by.add(id(owner))
