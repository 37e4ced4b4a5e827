"""The demo's road on a TransformerBridge, on transformer_lens 3.9 and 4.x; where there is a HookedTransformer, against its
numbers."""

import copy
import json
import warnings
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import swd_lens as swd
from swd_lens import cli
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import Packer
from tests import families
from tests.bridge.compare_runs import compare, compare_factors, main
from tests.embedded import score

SITE = "blocks.3.mlp_out"
needs_hooked_transformer = pytest.mark.skipif(
    int(metadata.version("transformer_lens").split(".")[0]) >= 4, reason="this transformer_lens has no HookedTransformer"
)


def load(kind, dtype=torch.float32):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        return swd.load_default_model(kind=kind, dtype=dtype)


@pytest.fixture(scope="module")
def bridge():
    return load("bridge")


every_kind = pytest.mark.parametrize("kind", ["bridge", pytest.param("hooked", marks=needs_hooked_transformer)])


@pytest.fixture(scope="module")
def walked(bridge):
    """Factors, fidelity, scores and curve of one site."""
    tokens = swd.text_tokens(2048, split="train")
    factors = swd.factorize(load("bridge", torch.float64), SITE, sparsity=0.5, tokens=tokens, outer_iterations=4, progress=False)
    task = swd.load_task("greater_than", bridge, n_train=20, n_test=10)
    scores = swd.attribute(bridge, factors, task)
    found = swd.fidelity(bridge, factors, swd.text_tokens(1024, split="test"))
    return factors[SITE], found, scores, swd.evaluate(bridge, factors, task, scores, random_sets=0)


def test_it_loads_without_a_warning(recwarn, capfd):
    model = swd.load_default_model(kind="bridge")
    assert not recwarn.list and capfd.readouterr() == ("", "")
    assert type(model).__name__ == "TransformerBridge" and not model.training
    cfg = model.cfg
    assert (cfg.model_name, cfg.n_layers, cfg.n_ctx, cfg.act_fn) == ("swd-lens-default", 4, 128, "gelu_new")
    assert cfg.d_vocab == len(model.tokenizer) and {p.dtype for p in model.parameters()} == {torch.float32}


@every_kind
def test_strings_work(kind):
    model = load(kind)
    assert model.to_str_tokens("So Mary isn't") == ["<|bos|>", "So", " Mary", " isn", "'t"]
    assert model.to_tokens("So Mary")[0, 0] == model.tokenizer.bos_token_id
    assert model.to_tokens("So Mary", prepend_bos=False).shape == (1, 2)
    prompts = ["So Mary is", "The war lasted from the year 1741 to the year 17"]
    with torch.no_grad():
        together = model(prompts)[:, -1]  # padded on the left, so that the last position is a word
        alone = torch.cat([model(prompt)[:, -1] for prompt in prompts])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@every_kind
def test_its_matrices_are_those_of_the_file_bit_for_bit(kind):
    model = load(kind)
    stored, host = load_file(WEIGHTS / "model.safetensors"), host_of(model)
    for layer in range(4):
        part = {name.removeprefix(f"blocks.{layer}."): w.float() for name, w in stored.items() if f"s.{layer}." in name}
        qkv = [part[f"attn.W_{letter}"].transpose(0, 1).flatten(1) for letter in "QKV"]
        expected = {"attn_qkv": torch.cat(qkv, 1), "attn_o": part["attn.W_O"].flatten(0, 1)}
        expected |= {"mlp_in": part["mlp.W_in"], "mlp_out": part["mlp.W_out"]}
        found = {site.kind: host.weight(site) for site in host.sites() if site.layer == layer}
        assert found.keys() == expected.keys()
        for kind, weight in expected.items():
            assert torch.equal(found[kind], weight), f"blocks.{layer}.{kind}"


@pytest.mark.quick_cases(1)
@every_kind
def test_it_scores_what_was_reported_when_it_was_trained(kind):
    model = load(kind)
    reported = json.loads((WEIGHTS / "scores.json").read_text())["scores"]["test"]
    packer = Packer(model.tokenizer, "test")
    assert score.cross_entropy(model, packer, score.FILLER) == pytest.approx(reported["filler_ce"], rel=1e-4)
    fresh = score.family_scores(model, packer, "gendered_pronoun", "test", "seen", 1000)
    assert fresh["margin"] == pytest.approx(reported["seen"]["gendered_pronoun"]["margin"], rel=1e-4)


@needs_hooked_transformer
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_logits_are_those_of_the_hooked_transformer(dtype, tolerance):
    tokens = swd.text_tokens(1024, split="test")
    with torch.no_grad():
        expected, found = (load(kind, dtype)(tokens) for kind in ("hooked", "bridge"))
    assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())


@needs_hooked_transformer
def test_grams_of_a_float64_host_are_the_same_bits(bridge):
    tokens = swd.text_tokens(2048, split="train")
    models = {kind: load(kind, torch.float64) for kind in ("hooked", "bridge")}
    grams = {kind: collect_grams(model, find_sites(model), tokens) for kind, model in models.items()}
    for site in find_sites(bridge):
        assert torch.equal(grams["hooked"][site.name], grams["bridge"][site.name]), site.name


def test_the_road_finds_a_circuit(walked):
    f, found, scores, curve = walked
    assert f.provenance["site"] == SITE and 0 < f.provenance["relmse"] < 0.01
    assert abs(found.ce_delta) < 0.01 and found.top1_agreement > 0.9
    rows = curve.rows
    assert rows["sufficiency"].iloc[-1] == pytest.approx(1.0, abs=1e-5)
    assert rows["drop"].iloc[0] == pytest.approx(0.0, abs=1e-4)
    assert rows["drop"].iloc[-1] > 0.3  # logits
    assert float(scores.scores[SITE].max()) > 0.1


def test_units_that_no_hook_sees_are_an_error(bridge, walked, monkeypatch):
    kind = type(host_of(bridge))
    last_logits = kind.last_logits
    monkeypatch.setattr(kind, "last_logits", lambda self, *a, **k: (self.model.reset_hooks(), last_logits(self, *a, **k))[1])
    task = swd.load_task("greater_than", bridge, n_train=4, n_test=4)
    with pytest.raises(swd.UnsupportedHostError, match=r"never showed the units of blocks\.3\.mlp_out"):
        swd.attribute(bridge, walked[0], task)


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_an_unknown_kind_of_host_is_one_line(tmp_path):
    result = run("demo", "--host", "hooks", "--out", tmp_path / "out")
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert "kind must be one of 'auto', 'hooked', 'bridge', got 'hooks'" in " ".join(result.stderr.split())


def test_factorize_a_checkpoint_folder(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(["So Mary is a really great friend, isn't she"] * 400))
    folder = families.checkpoint("llama")
    arguments = ["--sites", "mlp_out", "--text", text, "--tokens", 1024, "--outer-iterations", 4, "--json"]
    result = run("factorize", "--model", folder, "--host", "bridge", "--out", tmp_path / "f", *arguments)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["provenance"]["model"] == folder.name
    assert str(folder.parent) not in (tmp_path / "f" / "factors.json").read_text()
    assert [row["site"] for row in printed["sites"]] == list(swd.FactorSet.load(tmp_path / "f"))


def test_compare_runs_tells_the_same_from_the_different(tmp_path, capsys):
    curve = {"task": "ioi", "q_dense": 10.0, "rows": [{"edges": 12, "sufficiency": 0.5}]}
    made = {"fidelity": [{"ce": 1.0, "seconds": 3.0}], "circuits": [curve], "units": [{"unit": "a/1", "score": 0.25}]}
    names = ("model", "weights", "surfaces", "sparsities", "tasks", "solver settings", "calibration dtype")
    made["settings"] = dict.fromkeys(names, 0)

    def changed(change):
        other = copy.deepcopy(made)
        change(other)
        (tmp_path / "a.json").write_text(json.dumps(made))
        (tmp_path / "b.json").write_text(json.dumps(other))
        code = main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        return code, max(far for far, _ in compare(made, other).values()), capsys.readouterr().out

    assert changed(lambda run: run["fidelity"][0].update(seconds=9.0))[:2] == (0, 0.0)
    code, far, _ = changed(lambda run: run["circuits"][0].update(q_dense=10.0005))
    assert code == 0 and far == pytest.approx(5e-5, rel=1e-3)  # relative above 1
    code, far, said = changed(lambda run: run["circuits"][0]["rows"][0].update(sufficiency=0.5002))
    assert code == 1 and far == pytest.approx(2e-4) and "circuits.0.rows.0.sufficiency: 0.5, 0.5002" in said
    for different in (
        lambda run: run["circuits"][0]["rows"][0].update(edges=13),
        lambda run: run["units"][0].update(unit="a/2"),
        lambda run: run["units"].append({"unit": "a/2", "score": 0.25}),
        lambda run: run["settings"].update(weights=1),
    ):
        assert changed(different)[:2] == (1, float("inf"))


def test_compare_runs_looks_into_the_factors(tmp_path):
    """A value may differ in its last bit; an entry of a support may not, whatever the counts say."""
    read, write = torch.tensor([[1.0, 0.0], [0.5, 2.0]]), torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    rounded, moved = write * (1 + 1e-7), write[:, [1, 0, 2]]
    for name, other in (("a", write), ("b", rounded), ("c", moved)):
        swd.FactorSet({"blocks.0.mlp_out": swd.Factors(read, other)}).save(tmp_path / name / "set")
    near = compare_factors(tmp_path / "a", tmp_path / "b")
    assert len(near) == 2 and 0 < max(far for far, _ in near.values()) < 1e-6
    apart = compare_factors(tmp_path / "a", tmp_path / "c")
    assert apart["factors.set.blocks.0.mlp_out.write"] == (float("inf"), "the supports differ")
    (tmp_path / "c" / "set").rename(tmp_path / "c" / "another")
    assert compare_factors(tmp_path / "a", tmp_path / "c")["factors"][0] == float("inf")
