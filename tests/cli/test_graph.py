"""swd-lens graph: the page, the files beside it, resuming, prompts and labels of one's own, and what is refused."""

import json

import pytest

import swd_lens as swd
from swd_lens import cli
from swd_lens.analysis.graph import UnitGraph
from tests import families
from tests.cli.commands import refused, run

SMALL = ["--tokens", "1024", "--heldout-tokens", "512", "--outer-iterations", "4", "--n-train", "24"]
FEW = ["--best", "10", "--edges", "40", "--prompts", "3"]
PRONOUN = ["graph", "--task", "gendered_pronoun", *SMALL, *FEW]


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "out"
    result = run(*PRONOUN, "--export", "circuit-tracer", "--export", "neuronpedia", "--out", folder, "--json")
    assert result.exit_code == 0, result.output
    return folder, result


def test_the_page_and_what_stands_beside_it(made, default_model):
    folder, result = made
    graph, mean = UnitGraph.load(folder / "graph.json"), UnitGraph.load(folder / "task.json")
    printed = json.loads(result.stdout)
    assert printed["page"] == str(folder / "graph.html") and len(printed["edges"]) == len(graph.edges) == 40
    assert len({(row["layer"], row["head"]) for row in printed["attention"]["heads"]}) > 1
    page = (folder / "graph.html").read_text(encoding="utf-8")
    assert len(page) < 5_000_000 and graph.settings["tokens"][1] in page
    assert mean.settings["task_prompts"] == 3 and mean.edges["varies"].notna().all()
    assert mean.settings["token_ids"][-1] == graph.settings["token_ids"][-1]  # the same sentence
    circuit, factors = swd.Circuit.load(folder / "circuit.safetensors"), swd.FactorSet.load(folder / "factors")
    units = set(zip(graph.nodes["site"], graph.nodes["unit"], strict=True)) - {(None, None)}
    assert circuit.n_units == 10 and {unit for unit in units if unit[0]} <= set(circuit.units)
    assert set(graph.settings["factors"]) == set(factors)
    # What the screen found: outputs, and what an attention layer looks and brings with.
    assert any(site.endswith("attn_o") for site in factors)
    for site in factors:
        if site.endswith("attn_o"):
            assert {site.replace("attn_o", part) for part in ("attn_q", "attn_k", "attn_v")} <= set(factors)
    for target in ("circuit-tracer", "neuronpedia"):
        assert [path.name for path in (folder / target).glob("*.json")]
    assert "aligned prompts like:" in result.stderr and "most needed:" in result.stderr


def test_the_same_command_goes_on(made, monkeypatch, tmp_path):
    folder, _ = made
    before = (folder / "graph.json").read_bytes()
    with monkeypatch.context() as patch:
        for name in ("screened_outputs", "scored_units"):
            patch.setattr(cli.graph, name, interrupted)
        patch.setattr("swd_lens.solver.solve", interrupted)
        again = run(*PRONOUN, "--out", folder)
    assert again.exit_code == 0, again.output
    assert (folder / "graph.json").read_bytes() == before and "Units by matrix" in again.stdout
    assert max(map(len, again.stdout.splitlines())) <= 120
    refused("overwrite", *PRONOUN, "--n-train", "30", "--out", folder)
    # Text that cannot be read is said before anything is cleared.
    parts = sorted((folder / "parts").rglob("*"))
    (tmp_path / "short.txt").write_text("too short")
    refused("too few for one row", *PRONOUN, "--text", tmp_path / "short.txt", "--overwrite", "--out", folder)
    assert parts and sorted((folder / "parts").rglob("*")) == parts


def test_a_prompt_and_labels_of_ones_own(made, tmp_path):
    folder, _ = made
    graph = UnitGraph.load(folder / "graph.json")
    site, unit = next((s, u) for s, u in zip(graph.nodes["site"], graph.nodes["unit"], strict=True) if s)
    labels = tmp_path / "labels.jsonl"
    labels.write_text(json.dumps({"unit": f"{site}/{unit}", "label": "she or he"}) + "\n")
    how = ["--factors", folder / "factors", "--prompt", "Mary is a nice cook, isn't", "--labels", labels]
    result = run(*PRONOUN, *how, "--out", tmp_path / "own")
    assert result.exit_code == 0, result.output
    own = UnitGraph.load(tmp_path / "own" / "graph.json")
    assert own.settings["prompt"].endswith("Mary is a nice cook, isn't") and len(own.settings["answers"]) == 3
    assert not (tmp_path / "own" / "task.json").exists() and not (tmp_path / "own" / "factors").exists()
    labelled = own.nodes[own.nodes["label"] == "she or he"]
    assert set(zip(labelled["site"], labelled["unit"], strict=True)) <= {(site, unit)}
    assert "she or he" in (tmp_path / "own" / "graph.html").read_text(encoding="utf-8")


def test_what_is_refused_in_one_line(made, tmp_path):
    folder, _ = made
    for words, message in (
        (["--sites", "mlp_out", "--factors", folder / "factors"], "not both"),
        (["--export", "dot"], "--export must be one of 'circuit-tracer', 'neuronpedia', got 'dot'"),
        (["--labels", tmp_path / "none.jsonl"], "none.jsonl"),
    ):
        refused(message, *PRONOUN, *words, out=tmp_path / "x")


def test_a_host_whose_graph_cannot_be_drawn_is_refused_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr("swd_lens.cli.graph.well_done", interrupted)
    arguments = ["--model", families.checkpoint("bert"), "--sites", "mlp_out"]
    refused("takes the stream itself", *PRONOUN, *arguments, out=tmp_path / "new")


@pytest.mark.slow
def test_a_task_of_a_file_with_spaces_in_its_name(tmp_path, default_model):
    """The name stands in the graph's slug, which has none: refused after all the work."""
    split, tokenizer = (swd.load_task("gendered_pronoun", default_model, n_train=24, n_test=8).train, default_model.tokenizer)
    rows = [
        {
            "prompt": tokenizer.decode(tokens, skip_special_tokens=True),
            "answers": tokenizer.batch_decode([[answer] for answer in answers]),
            "distractors": tokenizer.batch_decode([[wrong] for wrong in distractors]),
        }
        for tokens, answers, distractors in zip(split.tokens, split.answer_ids, split.distractor_ids, strict=True)
    ]
    (tmp_path / "my words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    how = ["--sites", "blocks.2.attn_o", *SMALL[:6], *FEW, "--n-train", "12"]
    result = run("graph", "--task", tmp_path / "my words.jsonl", *how, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "graph.json").read_text())["metadata"]["slug"] == "my-words-units"
