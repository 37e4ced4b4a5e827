"""What each matrix gets (matrices.py): a sparsity, a basis."""

import pytest
import torch

import swd_lens as swd
from tests.factorization.test_basis import TOKENS
from tests.factorization.test_factorize import QUICK, assert_same


def test_a_long_side_with_fewer_edges_than_its_units_need_keeps_the_short_side(model):
    how = {**QUICK, "preset": "quick", "tokens": TOKENS, "calibration": "dense"}
    sides = {}
    for s in (0.8, 0.9):  # 102 and 51 edges for the 32 neurons of a matrix of 32 x 16
        [f] = swd.factorize(model, "blocks.1.mlp_out", **{**how, "sparsity": s}).values()
        sides[s] = f.settings["basis"]
    assert sides == {0.8: "input", 0.9: "paper"}


def test_a_basis_for_some_matrices_by_pattern(model):
    how = {**QUICK, "preset": "quick", "sparsity": 0.5, "tokens": TOKENS, "calibration": "dense"}
    made = swd.factorize(model, ["mlp_in", "mlp_out"], basis={"mlp_in": "output", "blocks.1.mlp_out": "neurons"}, **how)
    assert {site: f.settings["basis"] for site, f in made.items()} == {
        "blocks.0.mlp_in": "output",
        "blocks.0.mlp_out": "paper",
        "blocks.1.mlp_in": "output",
        "blocks.1.mlp_out": "input",
    }


def test_basis_neurons_is_their_side_and_the_papers_elsewhere(model, tmp_path):
    how = {"preset": "quick", "sparsity": 0.5, "tokens": TOKENS, "calibration": "dense", "progress": False}
    made = swd.factorize(model, "all", basis="neurons", out=tmp_path, **how)
    sides = {"mlp_in": "output", "mlp_out": "input"}
    for site, f in made.items():
        assert f.settings["basis"] == sides.get(site.rsplit(".", 1)[1], "paper")
    assert made["blocks.0.mlp_out"].n_units == made["blocks.0.mlp_out"].d_in
    # Finished matrices are taken over: the recipe names the basis of each.
    again = swd.factorize(model, "all", basis="neurons", out=tmp_path, **how)
    assert_same(made, again)


def test_a_wrong_basis_lists_all_that_there_are(model):
    how, sides = {**QUICK, "preset": "quick", "sparsity": 0.5, "tokens": TOKENS}, "'paper', 'input', 'output', 'neurons'"
    for basis in ("neuron", "Input", ""):
        with pytest.raises(swd.SpecError, match=rf"mapping.* must be one of {sides}, 'auto', got"):
            swd.factorize(model, "mlp_out", basis=basis, **how)
    for basis in ("neuron", "auto"):
        with pytest.raises(swd.SpecError, match=f"basis of mlp_out in a mapping must be one of {sides}, got"):
            swd.factorize(model, "mlp_out", basis={"mlp_out": basis}, **how)
    with pytest.raises(swd.SpecError, match="basis"):  # the solver alone knows no neurons
        swd.solve(torch.randn(8, 4), None, 0.5, basis="auto")
