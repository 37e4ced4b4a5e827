"""The command line, run in process or in a process of its own, and options that make a command small."""

from typer.testing import CliRunner

from swd_lens import cli

SMALL = ["--tokens", "1024", "--heldout-tokens", "1024", "--outer-iterations", "4"]
PROMPTS = ["--n-train", "20", "--n-test", "10"]
FEW = [*SMALL, *PROMPTS, "--preset", "quick", "--controls", "none"]  # where it is no matter what stands beside SWD


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def program(*arguments):
    return f"import sys; sys.argv = {['swd-lens', *map(str, arguments)]}\nfrom swd_lens.cli import main\nmain()\n"
