"""Factors on the hub: what needs no network here, and hub_scenarios.py, run against a stand-in, in another process."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.hub import OnHub
from swd_lens.units.storage import StoredSite

SCRIPT = Path(__file__).parent / "hub_scenarios.py"


@pytest.mark.slow
def test_with_the_real_client(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        cwd=SCRIPT.parents[2], env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])  # what became of every scenario: None, or a traceback
    assert len(results) == 10 and not any(results.values()), "\n".join(
        f"{name}: {said}" for name, said in results.items() if said
    )


def toy(model: str | None = "EleutherAI/pythia-70m") -> FactorSet:
    f = Factors(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[2.0, 1.0], [0.0, 3.0]]))
    provenance = {} if model is None else {"model": model}
    return FactorSet({"blocks.0.mlp_out": f, "blocks.1.mlp_out": f}, provenance)


def test_a_folder_needs_no_network(tmp_path):
    # Sockets are refused in this process (pytest-socket).
    toy().save_pretrained(tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} >= {"README.md", "config.json", "factors.json"}
    toy().save(tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b", str(tmp_path / "a")):
        loaded = FactorSet.from_pretrained(folder)
        assert isinstance(loaded, FactorSet) and torch.equal(loaded["blocks.1.mlp_out"].write, toy()["blocks.1.mlp_out"].write)
    assert FactorSet.load(tmp_path / "a").edges == 8
    # Saved over, the card and the configuration stay, and disturb nothing.
    toy().save(tmp_path / "a")
    assert FactorSet.load(tmp_path / "a").edges == 8
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no factors\.json"):
        FactorSet.from_pretrained(tmp_path / "empty")


def test_configuration(tmp_path):
    toy().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"library_name": "swd_lens", "format": 1, "base_model": "EleutherAI/pythia-70m"}
    toy().save_pretrained(tmp_path, config={"mine": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"mine": 1}
    # A loaded set that is saved describes itself, not the folder that it came from.
    other = FactorSet.from_pretrained(tmp_path)
    other.provenance["model"] = "gpt2"
    other.save_pretrained(tmp_path / "other")
    assert json.loads((tmp_path / "other" / "config.json").read_text())["base_model"] == "gpt2"


def test_card(tmp_path, monkeypatch):
    toy().save(tmp_path)
    loaded = FactorSet.load(tmp_path)
    monkeypatch.setattr(StoredSite, "parts", lambda stored: pytest.fail("the card made the factors"))
    card = loaded.generate_model_card(repo_id="user/repo")
    assert card.data.base_model == "EleutherAI/pythia-70m" and card.data.library_name == "swd_lens"
    assert "sparse-weight-decomposition" in card.data.tags
    text = str(card)
    assert "# Sparse factors of EleutherAI/pythia-70m" in text and "2 weight matrices of **EleutherAI/pythia-70m**" in text
    assert "4 units and 8 edges, a sparsity\nof 0.0000" in text  # 1 - 8 / (2 * 2 * 2)
    assert 'factors = swd.FactorSet.from_pretrained("user/repo")\nswd.attach(model, factors)' in text
    lines = text.splitlines()
    table = lines[lines.index("|---|---:|---:|---:|---:|---:|") + 1 :]
    # read holds 1 nonzero, write 3: 4 edges of a 2 x 2 matrix.
    assert table[:3] == ["| `blocks.0.mlp_out` | 2 | 2 | 2 | 4 | 0.0000 |", "| `blocks.1.mlp_out` | 2 | 2 | 2 | 4 | 0.0000 |", ""]


def test_card_of_one_matrix_of_no_known_model():
    f = toy()["blocks.0.mlp_out"]
    card = FactorSet({"matrix": f}).generate_model_card()
    assert card.data.base_model is None
    assert "1 weight matrix of **an unnamed model**" in str(card)
    assert FactorSet({"m": f}, {"model": "my model, v2"}).generate_model_card().data.base_model is None


def test_the_mixin_leaves_a_set_a_set(tmp_path):
    made = toy()
    assert isinstance(made, OnHub) and dict(made).keys() == {"blocks.0.mlp_out", "blocks.1.mlp_out"}
    assert FactorSet({}, {"model": "x"})._hub_mixin_config is None  # the arguments were not searched
    assert FactorSet(factors={}, provenance={"model": "x"}).provenance == {"model": "x"}
    twin = copy.deepcopy(made)
    assert twin.provenance == made.provenance and torch.equal(twin["blocks.0.mlp_out"].read, made["blocks.0.mlp_out"].read)
    assert "2 sites, 4 units, 8 edges" in repr(made)
    with pytest.raises(TypeError, match="unexpected keyword"):
        FactorSet.from_pretrained(tmp_path, revison="main")
