"""Names that users give to files and folders which stand beside ours: the slug of an exported graph, tasks as folders.

`require_names` refuses one that would take the place of a file of ours, hide it, or lead out of the folder. `OURS` is the one
list of what readers of the package look for by name.
"""

from collections.abc import Iterable

from swd_lens.base.errors import quoted

OURS = frozenset(
    {
        *("factors", "parts", "finetune", "trials", "shards", "weights", "model", "features", "screen"),  # folders
        *("run.json", "factors.json", "units.json", "best.json", "goal.json", "call.json", "result.json"),
        *("replacement.json", "graph-metadata.json", "source.json", "config.json"),
        *("log.jsonl", "checkpoint.safetensors", "circuit.safetensors", "samples.txt", "report.html", "paper.html"),
        "index.html",
    }
)


def require_names(what: str, names: Iterable[str], ending: str = "") -> None:
    """Require names that files or folders may have beside ours and beside each other; capitals count as small letters, as on
    some disks.

    Args:
        what: they name, for the message: "slug".
        ending: of the files: ".json".

    Raises ValueError: one is that of a file of ours, or none that a file can have; or two are alike.
    """
    taken: dict[str, str] = {}
    for name in names:
        file = f"{name}{ending}"
        if not file or file.startswith(".") or any(sign in file for sign in "/\\\0"):
            raise ValueError(f"{what} {quoted(name)} is to name a file or folder: no separators, no leading dot, not empty")
        if file.casefold() in OURS:
            raise ValueError(
                f"{what} {quoted(name)}: a file or folder {quoted(file.casefold())} has a meaning of its own beside it, "
                "and would be lost; give another name"
            )
        if file.casefold() in taken:
            raise ValueError(
                f"{what} {quoted(name)} and {quoted(taken[file.casefold()])} would be the same file or folder; give one "
                "of them another name"
            )
        taken[file.casefold()] = name
