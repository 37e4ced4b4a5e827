"""Edits in a host: applied and undone bit for bit, saved, exported, refused."""

from dataclasses import replace

import pytest
import torch

from swd_lens.analysis.edit import Edit, edit_unit
from swd_lens.analysis.edit.make import unit_edit
from swd_lens.analysis.edit.target import find_target
from swd_lens.base.errors import AttachError, EditError
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.weights import stored_matrix
from swd_lens.units import attach
from tests.analysis.edit_checks import PROMPT, SITES
from tests.hosts.test_interrupts import everything
from tests.interrupts import run_to_line
from tests.micro import toy_model
from tests.refusals import refuses

EDITS = ("analysis/edit/edited.py", "base/surroundings.py", "hosts/weights.py")


@pytest.mark.parametrize("name", SITES)
def test_the_host_comes_back_bit_for_bit(model, exact, name):
    edit = edit_unit(model, exact, f"{name}/0", PROMPT, 3, 5, 3)
    model(PROMPT[None])
    before, logits = everything(model), model(PROMPT[None])
    parameter = stored_matrix(host_of(model), find_sites(model, name)[0]).parameter
    kept = parameter.detach().clone()
    with edit:
        assert not torch.equal(model(PROMPT[None]), logits)
    with pytest.raises(KeyboardInterrupt), edit.applied(model):
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), edit:
        parameter.data.mul_(2)  # whatever happens in the block
        _ = 1 / 0
    assert edit.apply() is edit
    edit.undo()
    assert everything(model) == before and torch.equal(parameter, kept)
    assert torch.equal(model(PROMPT[None]), logits)
    refuses(EditError, "not applied", edit.undo)


def test_what_is_undone_or_applied_within_a_with_block(model, exact):
    """The block leaves what it entered, however many stand at its end: none (this once never returned), or one elsewhere."""
    edit, other = edit_unit(model, exact, "blocks.0.mlp_out/0", PROMPT, 3, 5, 3), toy_model()
    weights = [one.blocks[0].mlp.W_out for one in (model, other)]
    kept = weights[0].detach().clone()
    with edit:
        edit.undo()
        assert torch.equal(weights[0], kept)
    with edit:
        edit.apply(other)
        assert not torch.equal(weights[0], kept) and not torch.equal(weights[1], kept)
    assert torch.equal(weights[0], kept) and torch.equal(weights[1], kept) and "not applied" in repr(edit)
    edit.apply(other)  # stood before: stays
    with edit, edit.applied(toy_model()):
        pass
    assert torch.equal(weights[0], kept) and not torch.equal(weights[1], kept)
    edit.undo()


@pytest.mark.parametrize("how", ["with", "apply"])
def test_ctrl_c_at_any_line(model, exact, how):
    edit = edit_unit(model, exact, "blocks.0.mlp_out/0", PROMPT, 3, 5, 3)
    logits = model(PROMPT[None])

    def there_and_back():
        if how == "apply":
            edit.apply()
            edit.undo()
        else:
            with edit:
                pass

    lines = run_to_line(there_and_back, None, EDITS)
    assert lines > 40
    for at in range(1, lines + 1):
        with pytest.raises(KeyboardInterrupt):
            run_to_line(there_and_back, at, EDITS)
        assert torch.is_grad_enabled()
        if edit._standing:  # an interrupted undo can be called again
            edit.undo()
        assert torch.equal(model(PROMPT[None]), logits), f"interrupted before line {at} of {lines}"


@pytest.mark.parametrize("base", ["dense", "replacement"])
def test_an_edit_is_checked_without_being_applied(model, exact, base):
    edit, before = edit_unit(model, exact, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1, base=base), everything(model)
    assert edit.check().model is model and everything(model) == before and "not applied" in repr(edit)
    with edit, pytest.raises(ValueError, match="applied already" if base == "dense" else "attached already"):
        edit.check()
    refuses(ValueError, r"it belongs to another model|they belong to another model", edit.check, toy_model(d_mlp=8))


def test_another_weight_is_refused(model, exact):
    edit = edit_unit(model, exact, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1)
    other = toy_model()
    with edit.applied(other):  # the same weights in another object
        assert not torch.equal(other.blocks[0].mlp.W_out, model.blocks[0].mlp.W_out)
        refuses(EditError, "another W than this host has now", edit.apply, other)
    with torch.no_grad():
        other.blocks[0].mlp.W_out[0, 0] += 1
    refuses(EditError, r"made for another W .* make the edit on this host", edit.apply, other)
    with pytest.raises(EditError, match=r"is \(32, 16\), the host's matrix is \(8, 16\): it belongs to another model"):
        edit.apply(toy_model(d_mlp=8))


def test_units_at_the_site_are_refused(model, exact):
    edit = edit_unit(model, exact, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1)
    with attach(model, {"blocks.0.mlp_out": exact["blocks.0.mlp_out"]}):
        for refused in (edit.apply, edit.state_dict):
            refuses(AttachError, r"blocks\.0\.mlp_out is attached already", refused)
        refuses(AttachError, "attached already", edit_unit, model, exact, "blocks.0.mlp_out/0", PROMPT, 3, 5, 1)
    with attach(model, {"blocks.1.mlp_out": exact["blocks.1.mlp_out"]}):  # elsewhere they may stay
        edit.apply().undo()
    with edit, pytest.raises(AttachError, match="made from another W"):
        attach(model, {"blocks.0.mlp_out": exact["blocks.0.mlp_out"]})


def test_edits_of_one_site_come_off_in_reverse_order(model, exact):
    weight, target = model.blocks[0].mlp.W_out, (PROMPT, 3, 5)
    kept = weight.detach().clone()
    site = find_sites(model, "blocks.0.mlp_out")[0]
    first = edit_unit(model, exact, "blocks.0.mlp_out/0", *target, 1)
    second = edit_unit(model, exact, "blocks.0.mlp_out/1", *target, 1)
    first.apply()
    once = weight.detach().clone()
    with pytest.raises(EditError, match="another W"):  # made for the unedited matrix
        second.apply()
    second = unit_edit(model, exact, site, 1, find_target(model, site, *target), 1.0)  # made on the edited one
    second.apply()
    refuses(EditError, "edits come off in reverse order", first.undo)
    second.undo()
    assert torch.equal(weight, once)
    first.undo()
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("name", SITES)
def test_the_state_dict_is_the_hosts_own_with_the_edit_in_it(model, exact, name):
    edit = edit_unit(model, exact, f"{name}/3", PROMPT, 3, 5, 2)
    plain = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = edit.state_dict(model)
    assert {key: t.shape for key, t in state.items()} == {key: t.shape for key, t in plain.items()}
    parameter = {"blocks.0.mlp_out": "blocks.0.mlp.W_out", "blocks.0.attn_o": "blocks.0.attn.W_O"}[name]
    assert [key for key in state if not torch.equal(state[key], plain[key])] == [parameter]
    other = toy_model()
    other.load_state_dict(state)
    with edit:
        logits, again = model(PROMPT[None]), edit.state_dict()
    assert torch.equal(other(PROMPT[None]), logits) and torch.equal(again[parameter], state[parameter])
    assert all(torch.equal(plain[key], tensor) for key, tensor in model.state_dict().items())


def test_files(model, exact, tmp_path):
    edit = edit_unit(model, exact, "blocks.0.attn_o/3", PROMPT, 3, 5, 2)
    path = edit.save(tmp_path / "one.safetensors")
    again = Edit.load(path)
    assert again.settings == dict(edit.settings) and again.target.described() == edit.target.described()
    assert torch.equal(again.delta.dense(), edit.delta.dense()) and again.local_shift == edit.local_shift
    with edit:
        logits = model(PROMPT[None])
    with again.applied(model):
        assert torch.equal(model(PROMPT[None]), logits)
    refuses(EditError, "no model of its own", again.apply)
    refuses(FileNotFoundError, "there is no file", Edit.load, tmp_path / "two.safetensors")
    broken = replace(edit, delta=replace(edit.delta, write=edit.delta.write * float("nan")))
    refuses(EditError, "write holds values that are not finite", Edit.load, broken.save(tmp_path / "nan"))
