"""What goes wrong with tasks: TaskError for the user, Unusable for one example that can be dropped."""


class TaskError(ValueError):
    """A task that cannot be used: a bad file, or prompts that this host's tokenizer cannot score. The message says why."""


class Unusable(Exception):
    """One example that cannot be scored; it is dropped and counted under `reason`, or refused with the detail."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
