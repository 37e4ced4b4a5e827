"""Edits along a unit's read vector: calibration, controls, units changed at run time, errors."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from swd_lens.analysis.edit import edit_unit, unit_hooks
from swd_lens.analysis.edit.make import oracle_edit, random_unit
from swd_lens.analysis.edit.target import find_target
from swd_lens.base.errors import AttachError, EditError
from swd_lens.hosts import find_sites, host_of
from swd_lens.units import attach
from swd_lens.units.factors import Factors, FactorSet, fingerprint
from tests.analysis.edit_checks import PROMPT, SITES
from tests.micro import identity_factors, micro_model
from tests.refusals import refuses


def output_at_the_end(model, name, tokens=PROMPT):
    """What a site writes at the last position, as the host runs now."""
    host, found = host_of(model), []
    site = find_sites(model, name)[0]
    with torch.no_grad(), host.outputs([site], lambda site, y: found.append(y[0, -1].double())):
        host.run(tokens[None])
    return found[0]


def test_by_hand():
    """Token 2 enters mlp_out as h* = (4, 6); d = u_1 - u_0 = (-1, 1); unit 0 reads h_0. A shift of 2 asks for
    4 alpha sqrt(2) = 2, so row 0 of W gains alpha d / sqrt(2) = (-1/4, 1/4), and the margin goes from 10 to 12."""
    model = micro_model()
    edit = edit_unit(model, identity_factors(), "blocks.0.mlp_out/0", torch.tensor([0, 2]), 1, 0, 2)
    assert edit.target.input.tolist() == [4, 6] and edit.target.direction.tolist() == [-1, 1]
    assert edit.target.margin == 10 and edit.settings["z"] == 4
    assert edit.settings["alpha"] == pytest.approx(2 / (4 * 2**0.5), rel=1e-12)
    assert torch.allclose(edit.delta.dense(), torch.tensor([[-0.25, 0.25], [0.0, 0.0]]), atol=1e-7)
    assert edit.delta.norm == pytest.approx((2 * 0.25**2) ** 0.5)
    assert edit.table()["relative norm"][0] == pytest.approx((0.125 / 30) ** 0.5)
    with edit:
        logits = model(torch.tensor([[0, 2]]))[0, -1].detach()
        assert torch.allclose(model.blocks[0].mlp.W_out, torch.tensor([[0.75, 2.25], [3.0, 4.0]]))
    assert float(logits[1] - logits[0]) == pytest.approx(12, abs=1e-5)
    assert model.blocks[0].mlp.W_out.tolist() == [[1, 2], [3, 4]]


def test_a_units_scale_changes_alpha_and_not_the_edits_size():
    """As by hand; read vector times 3, write vector over 3: z = 12, alpha a third, alpha |a| = 2 / (4 sqrt(2)) as before."""
    sizes = []
    for by in (1.0, 3.0):
        factors = identity_factors()["blocks.0.mlp_out"]
        scaled = {"blocks.0.mlp_out": Factors(factors.read * by, factors.write / by)}
        edit = edit_unit(micro_model(), scaled, "blocks.0.mlp_out/0", torch.tensor([0, 2]), 1, 0, 2)
        assert edit.settings["alpha"] == pytest.approx(2 / (4 * 2**0.5) / by, rel=1e-12)
        assert edit.size == edit.table()["alpha |a|"].item() == pytest.approx(2 / (4 * 2**0.5), rel=1e-6)
        sizes.append(edit.delta.dense())
    assert torch.allclose(*sizes, atol=1e-7)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("method", ["unit", "random", "oracle", "replacement"])
@pytest.mark.parametrize("shift", [-2, 0.5])
def test_what_the_site_writes_moves_along_d_by_the_requested_shift(model, exact, name, method, shift):
    """h* dW d = shift, by running the host: (y' - y) . d at the target's last position."""
    site = find_sites(model, name)[0]
    target = find_target(model, site, PROMPT, 3, 5)
    if method == "oracle":
        edit = oracle_edit(model, site, target, float(shift))
    else:
        index = random_unit(exact[name], target, but=2) if method == "random" else 2
        base = "replacement" if method == "replacement" else "dense"
        edit = edit_unit(model, exact, f"{name}/{index}", PROMPT, 3, 5, shift, base=base)
    with attach(model, exact) if method == "replacement" else torch.no_grad():
        before = output_at_the_end(model, name)
    with edit:
        after = output_at_the_end(model, name)
    assert edit.local_shift == pytest.approx(shift, rel=1e-6)
    # y is float32 of this size.
    assert float((after - before) @ target.direction.double()) == pytest.approx(shift, abs=2e-6 * float(before.abs().sum()))
    assert edit.delta.rank == 1 and edit.shift == shift


def test_the_dense_increment_is_the_one_that_the_write_row_induces(model, exact):
    """A B' - A B = dW, also where alpha is computed from another h*."""
    one = FactorSet({"blocks.1.mlp_out": exact["blocks.1.mlp_out"]})
    dense, within = (
        edit_unit(model, one, "blocks.1.mlp_out/4", PROMPT, 3, 5, 1.5, base=base) for base in ("dense", "replacement")
    )
    before, after = (f["blocks.1.mlp_out"].product() for f in (within.replaced, within.factors))
    assert torch.allclose(after - before, dense.delta.dense(), atol=1e-5)
    changed = within.factors["blocks.1.mlp_out"].write != one["blocks.1.mlp_out"].write
    assert changed.any(1).nonzero().flatten().tolist() == [4]
    assert "blocks.1.mlp_out/4" in dense._repr_html_()
    assert dense.settings["weight_sha256"] == fingerprint(model.blocks[1].mlp.W_out) and not dense.settings["final_norm_folded"]


def test_an_edited_replacement_counts_the_edges_it_gained(model):
    weight = host_of(model).weight(find_sites(model, "blocks.0.mlp_out")[0])
    mask = (torch.arange(weight.numel()).view_as(weight) % 3 == 0).float()
    sparse = Factors(torch.eye(32), weight * mask, provenance={"site": "blocks.0.mlp_out"})
    edit = edit_unit(model, sparse, "blocks.0.mlp_out/7", PROMPT, 3, 5, 1, base="replacement")
    assert edit.factors is not None
    after = edit.factors["blocks.0.mlp_out"]
    kept = int((sparse.write[7] != 0).sum())
    assert after.edges - sparse.edges == 16 - kept == edit.settings["edges_added"] > 0
    assert after.settings["edited_edges_added"] == 16 - kept and after.settings["edited_unit"] == 7
    refuses(EditError, r"its factors; save them: edit\.factors\.save", edit.save, "nowhere")
    refuses(EditError, "changes no weight", edit.state_dict)
    with edit:
        assert host_of(model).is_swapped(find_sites(model, "blocks.0.mlp_out")[0])
    assert not host_of(model).is_swapped(find_sites(model, "blocks.0.mlp_out")[0])


def test_the_random_unit_is_neither_silent_nor_extreme(model, exact):
    site, f = find_sites(model, "blocks.0.mlp_out")[0], exact["blocks.0.mlp_out"]
    target = find_target(model, site, PROMPT, 3, 5)
    z = (target.input.double() @ f.read.double()).abs()
    drawn = {random_unit(f, target, seed=seed) for seed in range(60)}
    low, high = torch.quantile(z, 0.35), torch.quantile(z, 0.85)
    inside = set(((z >= low) & (z <= high)).nonzero().flatten().tolist())
    assert drawn == inside and 0.4 * len(z) < len(inside) < 0.6 * len(z)
    first = random_unit(f, target)
    assert random_unit(f, target) == first != random_unit(f, target, but=first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift": float("nan")}, "shift must be a finite number .* got nan"),
        ({"unit": ("blocks.0.mlp_out", -1)}, "has 16 units, 0 to 15"),
        ({"unit": "blocks.0.mlp_out/32"}, r"blocks\.0\.mlp_out has 16 units, 0 to 15"),
        ({"unit": "blocks.0.mlp_in/0"}, r"blocks\.0\.mlp_in does not write to the residual stream; an edit takes units"),
        ({"unit": "blocks.5.mlp_out/0"}, r"these factors hold blocks\.0\.attn_o, .* not blocks\.5\.mlp_out"),
        ({"answer": 20}, "an answer 20 is no token of this host; ids go from 0 to 19"),
        ({"foil": 3}, "the same unembedding"),
        ({"base": "sparse"}, "base must be one of 'dense', 'replacement', got 'sparse'"),
        ({"direction": "up"}, "direction must be one of .* got 'up'"),
        ({"prompt": [[1, 2], [3, 4]]}, "one row of token ids, got 2 rows"),
    ],
)
def test_errors_say_what_was_wrong(model, exact, changes, message):
    given = {"unit": "blocks.0.mlp_out/0", "prompt": PROMPT, "answer": 3, "foil": 5, "shift": 1} | changes
    refuses(ValueError, message, edit_unit, model, exact, **given)


def test_silent_and_invalid_units_and_those_of_no_site_are_refused(model, exact):
    f = exact["blocks.0.mlp_out"]
    h = find_target(model, find_sites(model, "blocks.0.mlp_out")[0], PROMPT, 3, 5).input
    read, write = f.read.clone(), f.write.clone()
    read[:, 1] -= h * (h @ read[:, 1]) / (h @ h)  # unit 1 reads nothing of h*
    write[2] = 0
    changed = {"blocks.0.mlp_out": replace(f, read=read, write=write)}
    with pytest.raises(EditError, match=r"unit blocks\.0\.mlp_out/1 is silent on .*: z = "):
        edit_unit(model, changed, "blocks.0.mlp_out/1", PROMPT, 3, 5, 1)
    with pytest.raises(EditError, match=r"unit blocks\.0\.mlp_out/2 is not valid: its read or its write vector is empty"):
        edit_unit(model, changed, "blocks.0.mlp_out/2", PROMPT, 3, 5, 1)
    alone = Factors(torch.eye(32), torch.randn(32, 16))
    refuses(AttachError, "does not know its site", edit_unit, model, alone, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1)
    coder = SimpleNamespace(encode=abs, decode=abs)
    with pytest.raises(EditError, match=r"an edit takes Factors; blocks\.0\.mlp_out holds a SimpleNamespace"):
        edit_unit(model, {"blocks.0.mlp_out": coder}, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1)


def test_unit_hooks_scale_and_clamp(model, exact):
    name, f = "blocks.0.mlp_out", exact["blocks.0.mlp_out"]
    tokens, scaled = PROMPT[None], f.write.clone()
    scaled[5] *= 2.5
    with attach(model, {name: replace(f, write=scaled)}):
        expected = model(tokens)
    with attach(model, exact) as attachment, torch.no_grad():
        plain, cache = model.run_with_cache(tokens)
        hooks = unit_hooks({f"{name}/5": ("scale", 2.5)}, attachment.factors)
        assert torch.allclose(model.run_with_hooks(tokens, fwd_hooks=hooks), expected, atol=1e-4)
        found = {}
        for positions in ("all", "scoring", 0, [1, -2]):
            hooks = unit_hooks({f"{name}/5": ("clamp", 7), f"{name}/6": ("scale", 0)}, positions=positions)
            with model.hooks(fwd_hooks=hooks):
                found[str(positions)] = model.run_with_cache(tokens)[1]["blocks.0.hook_mlp_out_unit"]
        z = cache["blocks.0.hook_mlp_out_unit"]
        for key, places in {"all": range(6), "scoring": [5], "0": [0], "[1, -2]": [1, 4]}.items():
            wanted = z.clone()
            for place in places:
                wanted[:, place, 5], wanted[:, place, 6] = 7, 0
            assert torch.equal(found[key], wanted)
        assert torch.equal(model(tokens), plain)


def test_adding_to_a_unit_writes_its_write_vector_that_many_times(model, exact):
    site, f = "blocks.0.mlp_out", exact["blocks.0.mlp_out"]
    with attach(model, exact):
        plain = model.run_with_cache(PROMPT[None])[1]["mlp_out", 0]
        with model.hooks(fwd_hooks=unit_hooks({(site, 5): ("add", 3.0)}, exact, positions=[1, -1])):
            steered = model.run_with_cache(PROMPT[None])[1]["mlp_out", 0]
    moved = torch.zeros_like(plain)
    moved[:, [1, 5]] = 3.0 * f.write[5]
    torch.testing.assert_close(steered - plain, moved, atol=1e-5, rtol=1e-5)


def test_a_unit_is_edited_by_any_of_its_names(model, exact):
    by_name = edit_unit(model, exact, "blocks.0.mlp_out/2", PROMPT, 3, 5, 1)
    for unit in (("blocks.0.mlp_out", 2), "blocks.0.mlp.W_out/2", {"unit": "blocks.0.mlp_out/2"}):
        again = edit_unit(model, exact, unit, PROMPT, 3, 5, 1)
        assert again.settings["unit"] == "blocks.0.mlp_out/2" and torch.equal(again.delta.write, by_name.delta.write)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "there are no units to change"),
        ({"blocks.0.mlp_out/5": ("double", 2)}, r'a change is \("scale", factor\), \("clamp", value\) or \("add", value\), got'),
        ({"blocks.0.mlp_out/5": ("scale", float("inf"))}, "the value of 'scale' must be a finite number"),
        ({"blocks.0.mlp_out/99": ("scale", 2)}, "has 16 units, 0 to 15"),
        ({"blocks.7.mlp_out/0": ("scale", 2)}, r"not blocks\.7\.mlp_out"),
    ],
)
def test_unit_hooks_errors(exact, changes, message):
    refuses(ValueError, message, unit_hooks, changes, exact)


def test_unit_hooks_find_out_late_without_factors(model, exact):
    hooks = unit_hooks({"blocks.0.mlp_out/99": ("scale", 2)})
    with attach(model, exact), pytest.raises(EditError, match="has 16 units, 0 to 15"):
        model.run_with_hooks(PROMPT[None], fwd_hooks=hooks)
    refuses(EditError, "positions must be", unit_hooks, {"blocks.0.mlp_out/1": ("scale", 2)}, positions="last")
