"""Sources: the text and the tasks of a profile, for its host, and the folder in which everything made of them lies.

1. Text: the first rows are held out, those behind them are fitted on; a smaller request is the beginning of a larger one. Behind
   all that is fitted on lies validation text.
2. Tasks: those of the profile; and those whose circuits are sought on a surface, where a profile says which, without those that
   the dense host hardly does.
3. The folder's finished parts (base/step_cache.py), which know what they were made of.
"""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.record import checked
from swd_lens.base.step_cache import StepCache
from swd_lens.circuits.screen import WELL_DONE, skill
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts.embedded import text_tokens
from swd_lens.hosts.recording import standing_hooks
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.resume import task_fingerprint
from swd_lens.tasks import load_task, load_text
from swd_lens.tasks.streams import TokenStream, as_stream
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
        folder: of all items; held by the caller (`swd_lens.base.writer.writing`).
        text: a source for `load_text`, in place of the profile's.
        on_step: called with a line of text before each step; progress: bars within them.

    Raises:
        ResumeError: (of `parts`) the folder holds what was made of another host, text, profile or version.
    """

    def __init__(
        self,
        model: Any,
        settings: ItemSettings,
        folder: Path,
        *,
        text: Any = None,
        on_step: Callable[[str], None] = lambda text: None,
        progress: bool = False,
    ):
        self.model, self.settings, self.folder = model, settings, folder
        self.on_step, self.progress = on_step, progress
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
        """Give `fitted_on` as text that remembers its Grams."""
        if n_tokens not in self._calibration:
            self._calibration[n_tokens] = CalibrationText(self.fitted_on(n_tokens), self.model)
        return self._calibration[n_tokens]

    @cached_property
    def tasks(self) -> list[Task]:
        """The profile's tasks, tokenized for the host."""
        of_profile = self.settings["tasks"].items()
        return [load_task(name, self.model, n_train=train, n_test=test) for name, (train, test) in of_profile]

    def task(self, name: str) -> Task:
        """Find one of the tasks."""
        return next(task for task in self.tasks if task.name == name)

    def judged(self, surface: str) -> list[Task]:
        """The tasks whose circuits are sought on a surface, without those that the dense host hardly does. surface: what is
        replaced; behind a comma what tells it from others of the same."""
        asked = self.settings["judged"].get(surface.split(",")[0])
        least = self.settings["least_accuracy"]
        return [task for task in self.tasks if (asked is None or task.name in asked) and self.accuracy[task.name] >= least]

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """Task -> share of its test prompts that the dense host does."""

        def measured() -> dict[str, Any]:
            self.on_step("what the dense model does of each task")
            return {row["task"]: float(row["right"]) for row in skill(self.model, self.tasks).to_dict("records")}

        names = {task.name: float for task in self.tasks}
        return self.parts.values(("dense", "accuracy"), measured, lambda values: checked("accuracy", values, names))

    def left_out_in_words(self) -> list[str]:
        """Say in sentences which tasks are left out, or are no fair test; none where the dense host does all of them."""
        least, sentences = self.settings["least_accuracy"], []
        weak = {name: right for name, right in self.accuracy.items() if right < max(least, WELL_DONE)}
        for what, names in (
            (f"Left out, as the dense model does less than {least:.0%}", [n for n in weak if weak[n] < least]),
            (f"Below {WELL_DONE:.0%}, and so no fair test of circuits", [n for n in weak if weak[n] >= least]),
        ):
            if names:
                sentences.append(f"{what}: {', '.join(f'{name} ({weak[name]:.0%} right)' for name in names)}.")
        return sentences

    def _whole_rows(self, n_tokens: int) -> int:
        return -(-n_tokens // self.context) * self.context

    @property
    def _separator(self) -> str | None:
        return "eos" if self.model.tokenizer.eos_token_id is not None else None

    def provenance(self) -> dict[str, Any]:
        """Model, fingerprints of weights and text, version: what stands in every result."""
        return {
            "swd_lens": __version__,
            "model": str(self.model.cfg.model_name),
            "host_sha256": self._host,
            "text": str(self.source),
            "heldout_sha256": self._heldout,
            **as_stream(self.heldout, self.model).about(self.model),
            **standing_hooks(self.model),
        }

    @cached_property
    def _host(self) -> str:
        return host_fingerprint(self.model, self.model.cfg)

    @cached_property
    def _heldout(self) -> str:
        return as_stream(self.heldout, self.model).fingerprint()

    @cached_property
    def parts(self) -> StepCache:
        """The finished parts of the folder."""
        asked = {"swd_lens": __version__, "profile": self.settings.profile, **standing_hooks(self.model)}
        asked |= {"the host": self._host, "held-out tokens": self._heldout}
        asked |= {"text": str(self.source), "tasks": {task.name: task_fingerprint(task) for task in self.tasks}}
        shared = ("calibration_tokens", "outer_iterations", "context")
        return StepCache(self.folder, asked | {name: self.settings[name] for name in shared})
