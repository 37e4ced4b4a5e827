"""Sources: the text and the tasks of a profile, for its host.

1. Text: the first rows are held out, those behind them are fitted on; a smaller request is the beginning of a larger one. Behind
   all that is fitted on lies validation text.
2. Tasks: those of the profile; and those whose circuits are sought on a surface, where a profile says which.
"""

from functools import cached_property, partial
from typing import Any

from jaxtyping import Int
from torch import Tensor

from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.hosts.embedded import text_tokens
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.tasks import load_task, load_text
from swd_lens.tasks.streams import TokenStream
from swd_lens.tasks.task import Task
from swd_lens.tasks.text import stream_rows

EMBEDDED = "embedded"
# Text of more tokens than this is read anew in each pass.
_KEPT_TOKENS = 8_388_608


class Sources:
    """See the module's docstring.

    Args:
        model: the dense host.
        settings: of any item: those that all items share are taken.
        text: a source for `load_text`, in place of the profile's.
    """

    def __init__(self, model: Any, settings: ItemSettings, text: Any = None):
        self.model, self.settings = model, settings
        self.source = settings["text"] if text is None else text
        self._calibration: dict[int, CalibrationText] = {}

    @property
    def context(self) -> int:
        """Tokens in a row of text."""
        return min(int(self.model.cfg.n_ctx), self.settings["context"])

    @cached_property
    def heldout(self) -> Int[Tensor, "rows pos"]:
        """Rows that nothing is fitted on."""
        n_tokens = self._whole_rows(self.settings["heldout_tokens"])
        if self.source == EMBEDDED:
            return text_tokens(n_tokens, split="test")
        return load_text(self.source, self.model, n_tokens, context=self.context, separator=self._separator)

    def fitted_on(self, n_tokens: int) -> Int[Tensor, "rows pos"] | TokenStream:
        """The first so many tokens that are not held out, in whole rows; a stream where they are many."""
        n_tokens = self._whole_rows(n_tokens)
        if self.source == EMBEDDED:
            return text_tokens(n_tokens, split="train")
        how = {"context": self.context, "separator": self._separator, "skip_tokens": self.heldout.numel()}
        if n_tokens <= _KEPT_TOKENS:
            return load_text(self.source, self.model, n_tokens, **how)
        rows = partial(stream_rows, self.source, self.model, **how)
        return TokenStream(rows, n_tokens // self.context, row_length=self.context)

    @cached_property
    def validation(self) -> Int[Tensor, "rows pos"]:
        """As many rows as are held out, behind all that is trained on: settings of baselines are chosen on them."""
        n_tokens = self.heldout.numel()
        if self.source == EMBEDDED:
            return text_tokens(n_tokens, split="validation")
        behind = n_tokens + self._whole_rows(self.settings["training_tokens"])
        how = {"context": self.context, "separator": self._separator, "skip_tokens": behind}
        return load_text(self.source, self.model, n_tokens, **how)

    def calibration(self, n_tokens: int) -> CalibrationText:
        """The same as text that remembers its Grams."""
        if n_tokens not in self._calibration:
            self._calibration[n_tokens] = CalibrationText(self.fitted_on(n_tokens), self.model)
        return self._calibration[n_tokens]

    @cached_property
    def tasks(self) -> list[Task]:
        """The profile's tasks, tokenized for the host."""
        of_profile = self.settings["tasks"].items()
        return [load_task(name, self.model, n_train=train, n_test=test) for name, (train, test) in of_profile]

    def task(self, name: str) -> Task:
        """One of them."""
        return next(task for task in self.tasks if task.name == name)

    def _whole_rows(self, n_tokens: int) -> int:
        return -(-n_tokens // self.context) * self.context

    @property
    def _separator(self) -> str | None:
        return "eos" if self.model.tokenizer.eos_token_id is not None else None
