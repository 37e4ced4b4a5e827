"""Tasks: prompts with right and wrong next tokens, from our generators or public files, and token rows of text."""

from swd_lens.tasks.example import TaskExample
from swd_lens.tasks.loaders import load_task
from swd_lens.tasks.task import Task, TaskError, TaskSplit
from swd_lens.tasks.text import TokenError, pack_text

__all__ = ["Task", "TaskError", "TaskExample", "TaskSplit", "TokenError", "load_task", "pack_text"]
