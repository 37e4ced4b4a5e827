"""Circuit: counts and overlap by hand, files that are whole or not there, attached as it was judged."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import swd_lens as swd
from swd_lens.base.errors import UnsealedFileWarning
from swd_lens.circuits import Circuit, UnitScores, attribute, evaluate
from tests.circuits.slow import able_split, last_logits, margin_of
from tests.contract import swd_zero_data
from tests.micro import toy_model

# Edges 5 and 7; 1, 2 and 0. Ranking: b/2 (4), a/0 (3), a/1 (2), b/0 (1), b/1 (0).
SCORES = UnitScores(
    {"a": torch.tensor([3.0, 2.0]), "b": torch.tensor([1.0, 0.0, 4.0])},
    {"a": torch.tensor([0.5, 0.25]), "b": torch.tensor([[9.0, 9.0, 9.0], [1.0, 2.0, 3.0]])},
    {"task": "by hand", "units": {"a": 2, "b": 3}, "factors": {"a": "x", "b": "y"}, "positions": "scoring"},
)
EDGES = {"a": torch.tensor([5, 7]), "b": torch.tensor([1, 2, 0])}


def by_hand(*units, scores=SCORES):
    return Circuit(units, scores, EDGES, {"kind": "own"})


ONE, OTHER = by_hand(("b", 2), ("a", 0), ("b", 0)), by_hand(("a", 0), ("a", 1), ("b", 2))


@pytest.fixture(scope="module")
def toy():
    model, train = toy_model(), able_split(12, seed=3, name="train")
    factors = swd_zero_data(model, "all")
    return model, factors, train


def test_counts_masks_and_names():
    assert (ONE.n_units, ONE.n_edges) == (3, 0 + 5 + 1)
    assert ONE.names == ["b/2", "a/0", "b/0"]
    assert {site: mask.tolist() for site, mask in ONE.masks("ablate").items()} == {"a": [True, False], "b": [True, False, True]}
    assert ONE.masks("keep")["b"].tolist() == [False, True, False]
    assert repr(ONE) == "Circuit(by hand: 3 of 5 units in 2 sites, 6 edges)" and "b" in ONE._repr_html_()


def test_table():
    assert ONE.table().to_dict("list") == {
        "site": ["b", "a", "b"],
        "unit": [2, 0, 0],
        "rank": [1, 2, 4],
        "score": [4.0, 3.0, 1.0],
        "mean z": [3.0, 0.5, 1.0],  # per position: that of the last
        "edges": [0, 5, 1],
    }
    assert by_hand().table().empty


def test_overlap():
    # Shared b/2 (0 edges) and a/0 (5); either has b/0 (1) and a/1 (7), too.
    assert ONE.overlap(OTHER) == {
        "shared": 2.0,
        "jaccard": 2 / 4,
        "edge jaccard": 5 / 13,
        "share of this": 2 / 3,
        "share of other": 2 / 3,
    }
    small = by_hand(("a", 0))
    assert (small.overlap(ONE)["share of this"], small.overlap(ONE)["share of other"]) == (1.0, 1 / 3)
    assert set(ONE.overlap(ONE).values()) == {3.0, 1.0}
    assert by_hand().overlap(ONE)["jaccard"] == 0.0 and by_hand().overlap(by_hand())["jaccard"] == 1.0
    # Another task's scores of the same factors may be compared.
    other_task = UnitScores(SCORES.scores, SCORES.means, {**SCORES.settings, "task": "another"})
    assert ONE.overlap(by_hand(("a", 0), scores=other_task))["shared"] == 1.0


def test_two_circuits_side_by_side():
    # ONE has b/2, a/0, b/0; OTHER a/0, a/1, b/2. By another task's scores a/1 is the best, then a/0.
    scores = {"a": torch.tensor([8.0, 9.0]), "b": torch.tensor([1.0, 2.0, 3.0])}
    other = by_hand(*OTHER.units, scores=UnitScores(scores, SCORES.means, {**SCORES.settings, "task": "another"}))
    assert ONE.side_by_side(other).to_dict("list") == {
        "unit": ["b/2", "a/0", "b/0", "a/1"],
        "in": ["both", "both", "this", "other"],
        "rank": [1, 2, 4, 3],
        "other rank": [3, 2, 5, 1],
        "score": [4.0, 3.0, 1.0, 2.0],
        "other score": [3.0, 8.0, 1.0, 9.0],
        "edges": [0, 5, 1, 7],
    }
    assert (ONE & other).units == (("b", 2), ("a", 0)) and (other & ONE).units == (("a", 0), ("b", 2))
    assert (ONE | other).units == (*ONE.units, ("a", 1)) and (ONE - other).units == (("b", 0),)
    assert (ONE & other).scores is ONE.scores and (ONE & other).table()["rank"].tolist() == [1, 2]
    assert (ONE & other).provenance == {"kind": "and", "this": {"kind": "own"}, "other": {"kind": "own", "task": "another"}}
    assert (ONE - ONE).side_by_side(by_hand()).empty
    elsewhere = UnitScores(SCORES.scores, SCORES.means, {**SCORES.settings, "factors": {"a": "x", "b": "z"}})
    for compared in (Circuit.overlap, Circuit.side_by_side, Circuit.__and__, Circuit.__or__, Circuit.__sub__):
        with pytest.raises(ValueError, match="of different factors"):
            compared(ONE, by_hand(("a", 0), scores=elsewhere))


def test_a_file_gives_back_the_circuit(tmp_path):
    for i, circuit in enumerate((ONE, by_hand())):
        circuit.save(tmp_path / "new folder" / f"{i}.safetensors")
        again = Circuit.load(str(tmp_path / "new folder" / f"{i}.safetensors"))
        assert again.units == circuit.units and dict(again.provenance) == dict(circuit.provenance)
        assert dict(again.scores.settings) == dict(circuit.scores.settings)
        for x, y in ((again.scores.scores, SCORES.scores), (again.scores.means, SCORES.means), (again.edges, EDGES)):
            assert list(x) == list(y) and all(torch.equal(x[site], y[site]) for site in x)
    assert sorted(path.name for path in (tmp_path / "new folder").iterdir()) == ["0.safetensors", "1.safetensors"]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no circuit file"):
        Circuit.load(path)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="is not a circuit file"):
        Circuit.load(path)
    save_file({"w": torch.zeros(2)}, path)
    with pytest.warns(UnsealedFileWarning), pytest.raises(ValueError, match="is not a circuit file"):
        Circuit.load(path)
    save_file({"w": torch.zeros(2)}, path, {"format": "swd_lens circuit", "about": json.dumps({"version": 2})})
    with pytest.warns(UnsealedFileWarning), pytest.raises(ValueError, match="has format 2, newer than this swd_lens"):
        Circuit.load(path)


def test_a_file_without_a_hash_that_is_no_circuit_is_the_one_error(tmp_path):
    """As an earlier version wrote it, with other values."""
    path = tmp_path / "c.safetensors"
    ONE.save(path)
    with safe_open(path, "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["about"])  # noqa: SIM118
    of_units = [{"units": value} for value in ([["b", 3]], [["c", 0]], [["b"]], 3, [["b", "x"]])]
    for changes in (*of_units, {"sites": ["a", "c"]}, {"settings": None}, {"version": {}}, {"version": None}):
        save_file(tensors, path, {"format": "swd_lens circuit", "about": json.dumps({**about, **changes})})
        with (
            pytest.warns(UnsealedFileWarning),
            pytest.raises(ValueError, match=r"c\.safetensors is not a circuit file, or damaged \("),
        ):
            Circuit.load(path)


def test_a_circuit_of_ones_own_choice(toy, tmp_path):
    model, factors, train = toy
    scores = attribute(model, factors, train)
    circuit = Circuit.of(factors, scores, ["blocks.1.mlp_out/3", ("blocks.0.attn_o", 2)], why="a hunch")
    assert circuit.units == (("blocks.1.mlp_out", 3), ("blocks.0.attn_o", 2))
    assert circuit.provenance == {"why": "a hunch"}
    f = factors["blocks.1.mlp_out"]
    assert int(circuit.edges["blocks.1.mlp_out"][3]) == int((f.read[:, 3] != 0).sum() + (f.write[3] != 0).sum())
    # Indices as a table has them.
    frame = circuit.table()
    again = Circuit.of(factors, scores, zip(frame["site"], np.asarray(frame["unit"]).tolist(), strict=True))
    assert again.units == circuit.units
    # attn_o's units have a head, that of their read vector; mlp_out's have none.
    share = factors["blocks.0.attn_o"].read[:, 2].square().view(2, 8).sum(1)
    assert frame["head"].tolist() == ["", f"L0H{int(share.argmax())}"]
    assert frame["head share"].tolist()[1] == pytest.approx(float(share.max() / share.sum()))
    assert set(scores.top(scores.n_units)["head"].str[:4]) >= {"", "L0H0", "L1H1"}
    circuit.save(tmp_path / "circuit.safetensors")
    assert Circuit.load(tmp_path / "circuit.safetensors").table().equals(frame)
    assert Circuit.of(factors, scores, frame).units == Circuit.of(factors, scores, circuit).units == circuit.units
    again.save(tmp_path / "again.safetensors")
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp_out/99 is not among"):
        Circuit.of(factors, scores, ["blocks.1.mlp_out/99"])
    with pytest.raises(ValueError, match=r"unit blocks\.1\.mlp_out/3 is named 2 times"):
        Circuit.of(factors, scores, ["blocks.1.mlp_out/3", ("blocks.1.mlp_out", 3)])
    other = {site: type(f)(f.read.flip(1), f.write.flip(0)) for site, f in factors.items()}
    with pytest.raises(ValueError, match="with other factors of"):
        Circuit.of(other, scores, [])
    with pytest.raises(ValueError, match="with other factors of"), circuit.attach(model, other):
        raise AssertionError("attached")
    assert not hasattr(model.blocks[1], "hook_mlp_out_unit")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("positions", "mean_over", "ablation"),
    [("scoring", "scoring", "mean"), ("all", "all_tokens", "zero"), ("all", "per_position", "mean")],
)
def test_attached_it_does_what_it_was_judged_by_and_leaves_no_trace(toy, positions, mean_over, ablation):
    model, factors, train = toy
    split = able_split()
    scores = attribute(model, factors, train, positions=positions, mean_over=mean_over)
    curve = evaluate(model, factors, split, scores, grid=[20], ablation=ablation)
    circuit = curve.circuit(20)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks, prompt = set(model.hook_dict), split.tokens[0]
    with torch.no_grad():
        before = last_logits(model, prompt)
    for mode in ("keep", "ablate"):
        with circuit.attach(model, factors, mode, ablation=ablation) as attachment, torch.no_grad():
            assert isinstance(attachment, swd.Attachment) and attachment.attached
            slow = [float(margin_of(last_logits(model, p), split, i)) for i, p in enumerate(split.tokens)]
        assert curve.rows[f"q {mode}"][1] == pytest.approx(sum(slow) / len(slow), abs=2e-5)
    with pytest.raises(RuntimeError, match="from within"), circuit.attach(model, factors):
        raise RuntimeError("from within")
    with torch.no_grad():
        assert torch.equal(last_logits(model, prompt), before)
    assert set(model.hook_dict) == hooks and not any(point.fwd_hooks for point in model.hook_dict.values())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="resampled values belong to prompts"):
        circuit.hooks(ablation="resample")
