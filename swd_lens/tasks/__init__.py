"""Tasks: prompts with right and wrong next tokens, from our generators or public files, and token rows of text."""

from swd_lens.base.errors import TaskError, TokenError
from swd_lens.tasks.loaders import load_task
from swd_lens.tasks.split import Bucket, TaskExample, TaskSplit
from swd_lens.tasks.task import Task
from swd_lens.tasks.text import load_text, pack_text, stream_rows

__all__ = [
    "Bucket",
    "Task",
    "TaskError",
    "TaskExample",
    "TaskSplit",
    "TokenError",
    "load_task",
    "load_text",
    "pack_text",
    "stream_rows",
]
