"""Pickles of an attached bridge are refused in words; deep copies are as they were.

transformers and transformer_lens keep functions of functions in a bridge, as hooks, so none can be pickled, attached or not:
`pickle`, `torch.save` and a process that is spawned end in "Can't pickle local object". `copy.deepcopy` asks the same question as
they do (`__reduce_ex__`); what only a pickle looks at is a `_Ticket` among the arguments of the answer.
"""

from typing import Any

from swd_lens.base.errors import AttachError
from swd_lens.hosts.weights import Shadow


class OnlyCopied(Shadow):
    """`__reduce_ex__` of a bridge that can be copied and not pickled."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = object.__reduce_ex__(self.model, 4)
        return _empty, (type(self.model), _Ticket()), *state


class _Ticket:
    """Copied, not pickled."""

    def __deepcopy__(self, memo: Any) -> "_Ticket":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AttachError(
            "a TransformerBridge cannot be pickled, saved by torch.save or sent to a process: transformers and "
            "transformer_lens keep local functions in it. Save the factors (factors.save(folder)), send that folder and "
            "what the host was loaded from, and attach there: swd.attach(load_host(name), FactorSet.load(folder))"
        )


def _empty(kind: Any, _: _Ticket) -> Any:
    return kind.__new__(kind)
