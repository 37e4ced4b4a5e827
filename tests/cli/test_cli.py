"""The command line, run in process: results, JSON, files, exit codes and what an interruption leaves behind."""

import inspect
import subprocess
import sys

import pytest

import swd_lens as swd
from swd_lens import cli
from tests.cli.commands import program, run
from tests.forks import run_forked


def test_version_and_help():
    assert swd.__version__ in run("--version").stdout
    for command in ("demo", "factorize", "circuit", "report"):
        assert command in run("--help").stdout


def test_the_help_is_the_whole_apps_and_loads_no_torch():
    """`swd-lens --help` reads a table; the commands' own first lines are the truth."""
    lines = {command.name or command.callback.__name__: command for command in cli.app.registered_commands}
    whole = {name: inspect.getdoc(command.callback).split("\n\n")[0] for name, command in lines.items()}
    whole |= {group.name: group.typer_instance.info.help for group in cli.app.registered_groups}
    assert whole == cli.COMMANDS
    code = (
        "import sys; sys.argv = ['swd-lens', '--help']\n"
        "from swd_lens.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "assert not {'torch', 'transformer_lens', 'pandas', 'matplotlib'} & set(sys.modules), 'too much is loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize(("words", "times"), [(["report", "nowhere"], 1), (["--help"], 0)])
def test_a_command_has_the_allocator_keep_what_it_frees(words, times, monkeypatch):
    calls = []
    monkeypatch.setattr("swd_lens.base.machine.keep_freed_memory", lambda: calls.append(None))
    monkeypatch.setattr(sys, "argv", ["swd-lens", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert len(calls) == times


def test_an_unknown_command_is_refused_with_the_known_ones():
    done = run_forked(program("circuits"))
    assert done.returncode == 2 and "No such command 'circuits'" in done.stderr and "circuit" in done.stderr


def test_ctrl_c_before_a_command_has_begun_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_all_commands", interrupted)
    monkeypatch.setattr(sys, "argv", ["swd-lens", "report", "nowhere"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
