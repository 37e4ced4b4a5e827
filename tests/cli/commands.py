"""The command line, run in process or in a process of its own, and options that make a command small."""

import re

from typer.testing import CliRunner

from swd_lens import cli

SMALL = ["--tokens", "1024", "--heldout-tokens", "1024", "--outer-iterations", "4"]
PROMPTS = ["--n-train", "20", "--n-test", "10"]
FEW = [*SMALL, *PROMPTS, "--preset", "quick", "--controls", "none"]  # where it is no matter what stands beside SWD


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def program(*arguments):
    return f"import sys; sys.argv = {['swd-lens', *map(str, arguments)]}\nfrom swd_lens.cli import main\nmain()\n"


def words(text):
    """What was printed, without line breaks, frames and colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|│", " ", text).split())


def refused(said, *arguments, out=None):
    """Run a command that ends with 1 and one line that says this, and leaves nothing behind."""
    result = run(*arguments, *(["--out", out] if out is not None else []))
    assert result.exit_code == 1 and said in words(result.stderr), result.output
    assert "Traceback" not in result.output and (out is None or not out.exists())
