"""circuit with finished and tuned factors, several interventions, hosts in half precision; --best finds, saves and takes over."""

import json
import re
import shutil
import sys
from functools import cache

import pytest

import swd_lens as swd
from swd_lens import cli
from swd_lens.study.best import BestCircuit
from tests.cli.commands import FEW, PROMPTS, SMALL, refused, run, words

TEXT = ["--heldout-tokens", "1024"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What `replace` leaves of two matrices: factors, and tuned ones."""
    folder = tmp_path_factory.mktemp("made") / "whole"
    made = run("replace", "--out", folder, "--sites", "blocks.[23].mlp_out", "-s", "0.6", *SMALL, "--budgets", "uniform")
    assert made.exit_code == 0, made.output
    return folder


@pytest.mark.slow
def test_finished_and_tuned_factors_are_compared_without_solving(tmp_path, whole, monkeypatch, default_model):
    module = sys.modules["swd_lens.study.run_study"]
    monkeypatch.setattr(module, "factorize", lambda *_, **__: pytest.fail("something was factorized"))
    given = ["--factors", whole, "--factors", whole / "factors"]
    refused("rename one of them", "circuit", *given[2:], *given[2:], "--task", "ioi", out=tmp_path / "x")
    modes = ["--controls", "svd", "--ablation", "mean", "--ablation", "zero", "--positions", "scoring", "--positions", "all"]
    result = run("circuit", *given, "--task", "ioi", *TEXT, *PROMPTS, *modes, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    read = swd.Run.load(tmp_path / "run")
    assert [r.method for r in read.replacements] == ["SWD s=0.6, tuned (whole)", "SWD s=0.6 (whole)", "SVD"]
    assert read.settings["calibration tokens"] == 0 and read.settings["held-out tokens"] == 1024
    (surface,) = read.comparisons
    assert surface == "blocks.2.mlp_out, blocks.3.mlp_out" == ", ".join(read.settings["surfaces"][surface])
    tuned = swd.FactorSet.load(whole / "finetune" / "factors")
    assert read.replacements[0].fidelity.kl == swd.fidelity(default_model, tuned, swd.text_tokens(1024, split="test")).kl
    table = read.circuit_table()
    assert table[["positions", "ablation"]].drop_duplicates().values.tolist() == [
        [positions, ablation] for positions in ("scoring", "all") for ablation in ("mean", "zero")
    ]
    assert "Circuits in blocks.2.mlp_out" in result.stdout and max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_factors_beside_new_ones_and_random_b_seeds(tmp_path, whole):
    words = ["--factors", whole, "--sites", "blocks.[23].mlp_out", "-s", "0.5", "--controls", "random_b"]
    words += ["--preset", "quick", "--random-b-seeds", "2", "--task", "ioi", *SMALL, *PROMPTS]
    result = run("circuit", *words, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    methods = [curve["method"] for curve in json.loads(result.stdout)["circuits"]]
    assert methods == ["SWD s=0.5", "SWD s=0.6, tuned (whole)", *(f"Random-B/{seed}" for seed in range(2))]


def test_factors_of_another_model_are_refused_before_any_text_is_read(tmp_path, default_model, gpt2_folder):
    swd.baselines.svd(default_model, "blocks.2.mlp_out").save(tmp_path / "svd")
    other = ["--model", gpt2_folder, "--text", tmp_path / "missing.txt", "--task", "ioi"]
    refused("blocks.2.mlp_out", "circuit", "--factors", tmp_path / "svd", *other, out=tmp_path / "x")
    refused("nothing", "circuit", "--factors", tmp_path / "nothing", "--task", "ioi", out=tmp_path / "x")
    refused("--sites, finished factors (--factors), or both", "circuit", "--task", "ioi", out=tmp_path / "x")


def test_circuit_in_bfloat16(tmp_path, gpt2_folder):
    host = ["--model", gpt2_folder, "--sites", "blocks.1.mlp_out", "--task", "gendered_pronoun", "-s", "0.5"]
    small = ["--text", __file__, *FEW, "--tokens", "256", "--heldout-tokens", "64"]
    result = run("circuit", *host, *small, "--dtype", "bfloat16", "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    settings = json.loads(result.stdout)["settings"]
    assert settings["calibration dtype"] == "bfloat16" and settings["host"] == "HookedTransformer"
    for placed, message in (
        (["--model", gpt2_folder, "--text", __file__, "--host", "hooked", "--device-map", "auto"], "it does not go with"),
        (["--device-map", "auto"], "the embedded one is small"),
    ):
        refused(message, "circuit", "--sites", "mlp_out", "--task", "ioi", *placed, out=tmp_path / "x")


@pytest.mark.slow
def test_circuit_writes_report_numbers_and_factors(tmp_path, monkeypatch):
    arguments = ["circuit", "--out", tmp_path, "--sites", "blocks.[23].mlp_out", "-s", "0.5", "--preset", "quick"]
    arguments += ["--task", "ioi", "--task", "gendered_pronoun"]
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
    assert len(swd.FactorSet.load(tmp_path / "factors" / "blocks._23_.mlp_out-SWD_s=0.5")) == 2
    screened = swd.Run.load(tmp_path).screen
    assert len(screened.sites) == 2 and list(screened.surfaces) == ["all mlp_out"]
    assert "The margin without a site or surface" in result.stderr
    assert "none of these sites costs ioi a tenth of the margin" in result.stderr  # of the MLPs: names are copied by attention
    numbers = [(int(i), int(n)) for i, n in re.findall(r"^ *\S+ (?:s|min)  (\d+)/(\d+) ", result.stderr, re.MULTILINE)]
    assert len(numbers) > 12 and numbers == [(i + 1, len(numbers)) for i in range(len(numbers))]
    for said, least in (("memory: at most", 1), ("peak memory", 100)):  # MB
        size, unit = re.search(rf"{said} ([\d.]+) (MB|GB)", result.stderr).groups()
        assert float(size) * {"MB": 1, "GB": 1000}[unit] > least
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
    refused("--overwrite", *arguments, *SMALL, *prompts, "--outer-iterations", "5")


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
    undone = run("circuit", "--out", tmp_path / "b", "--sites", "auto", "--task", "succession", *SMALL, *PROMPTS)
    said = words(undone.stderr)
    assert undone.exit_code == 1 and "the model does none of these tasks (succession)" in said
    assert "succession: the dense model does not do this task" in said


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """A study with these controls: its folder, and what was printed."""

    @cache
    def make(*how):
        folder = tmp_path_factory.mktemp("study")
        arguments = ["circuit", "--out", folder, "--sites", "blocks.3.mlp_out", "--task", "gendered_pronoun"]
        made = run(*arguments, "--ablation", "zero", "--controls", *how, *SMALL, "--n-train", "8", "--n-test", "6")
        assert made.exit_code == 0, made.output
        return folder, made

    return make


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
def test_controls_ablation_and_tables(beside, controls, sparsities, wanted):
    folder, result = beside(controls, *sparsities)
    saved = json.loads((folder / "run.json").read_text())
    assert sorted(curve["method"] for curve in saved["circuits"]) == sorted(wanted)
    assert saved["settings"]["ablation"] == "zero" and {c["settings"]["ablation"] for c in saved["circuits"]} == {"zero"}
    page = (folder / "report.html").read_text(encoding="utf-8")
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
    arguments = ["circuit", "--model", gpt2_folder, "--out", tmp_path / "out"]
    arguments += ["--sites", "h.1.mlp.c_proj", "--sites", "attn_qkv"]
    result = run(*arguments, "--task", tmp_path / "names.json", "--text", text, "-s", "0.5", *FEW, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    surfaces = next(iter(printed["settings"]["surfaces"].values()))
    assert surfaces == ["blocks.0.attn_qkv", "blocks.1.attn_qkv", "blocks.1.mlp_out"]
    assert printed["settings"]["tasks"]["names"]["source"] == "auto-circuit JSON file names.json, seed 42"


@pytest.mark.slow
def test_a_failing_step_fails_the_command(tmp_path, monkeypatch):
    def broken(run, path):
        raise OSError("disk full")

    monkeypatch.setattr(cli.circuits, "write_report", broken)
    refused("disk full", "circuit", "--sites", "blocks.3.mlp_out", "--task", "ioi", "-s", "0.5", *FEW, "--out", tmp_path)


def test_a_report_that_cannot_be_written_is_refused_before_the_run_is_read(tmp_path):
    refused("is a folder; give the name of a file in it", "report", tmp_path / "nothing", "--out", tmp_path)


def test_report_is_made_again_without_a_model(beside, tmp_path, monkeypatch):
    shutil.copytree(beside("svd,random_b")[0], tmp_path, dirs_exist_ok=True)
    page, numbers = (tmp_path / "report.html").read_bytes(), json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "report.html").unlink()

    for module, name in ((cli.circuits, "load_default_model"), (cli.options, "load_default_model"), (cli.options, "load_host")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a model was loaded"))
    again = run("report", tmp_path)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "report.html").read_bytes() == page
    assert "Fidelity of blocks.3.mlp_out" in again.stdout and "report.html" in again.stdout
    elsewhere = run("report", tmp_path, "--out", tmp_path / "new" / "r.html", "--json")
    assert (tmp_path / "new" / "r.html").read_bytes() == page and len(list((tmp_path / "new").iterdir())) == 1
    del numbers["files"], numbers["sha256"]
    assert json.loads(elsewhere.stdout) == {**numbers, "report": str(tmp_path / "new" / "r.html")}


def test_report_of_what_is_no_run(tmp_path):
    refused("there is no run.json", "report", tmp_path)
    (tmp_path / "run.json").write_text('{"settings": {}')
    refused("is not a run, or damaged", "report", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_circuit_best_finds_saves_and_takes_over(tmp_path, monkeypatch):
    arguments = ["circuit", "--best", "--task", "gendered_pronoun", "--sites", "blocks.2.attn_o", "--minutes", "1e-6"]
    arguments += ["--out", tmp_path, *["--tokens", "1024", "--heldout-tokens", "1024", "--n-train", "48", "--n-test", "40"]]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    best = BestCircuit.load(tmp_path / "gendered_pronoun")
    assert f"{best.n_edges:,} edges" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80

    def searched(*_, **__):
        raise AssertionError("it was there")

    monkeypatch.setattr("swd_lens.study.best._Search", searched)
    again = run(*arguments)
    assert again.exit_code == 0 and again.stdout == result.stdout
    for said, *more in (
        ("kl 0.001 then, 0.01 now", "--kl", "0.01"),
        ("leave out --controls", "--controls", "svd"),
        ("leave out --positions, options of the solver", "--positions", "all", "--preset", "quick"),
        ("needs tokens", "--tokens", "0"),
        ("leave out --ce", "--ce", "0.01"),
    ):
        refused(said, *arguments, *more)


@pytest.mark.parametrize("name", ["factors", "words"])
def test_folders_of_tasks_take_no_place_of_ours_or_of_each_other(name, tmp_path):
    """A task of a file has the file's name: two of one name took each other's folder."""
    rows = [{"prompt": f"She {verb}", "answers": [" to"], "distractors": [" of"]} for verb in ("went", "ran", "came")]
    tasks = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        tasks += ["--task", tmp_path / folder / f"{name}.jsonl"]
    arguments = ["circuit", "--best", "--sites", "blocks.2.attn_o", "--minutes", "1e-6"]
    arguments += ["--tokens", "256", "--heldout-tokens", "256"]
    refused(f"task '{name}'", *arguments, *(tasks if name == "words" else tasks[:2]), out=tmp_path / "out")
