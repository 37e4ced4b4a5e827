"""choose_basis: costs by plain loops and TransformerLens' own hooks, and what `factorize` and `allocate` make of the choice."""

import math

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import GradientError
from swd_lens.factorization import basis
from swd_lens.factorization.basis import BasisChoice, SideCosts
from swd_lens.factorization.calibration_text import CalibrationText
from tests import families
from tests.factorization.test_factorize import QUICK, assert_same, bits
from tests.micro import random_tokens, toy_model

TOKENS = random_tokens(12, 9)
# Site -> hook points of what it reads and writes, and its weight.
PLACES = {
    "blocks.1.mlp_out": ("blocks.1.mlp.hook_post", "blocks.1.hook_mlp_out", "mlp.W_out"),
    "blocks.0.attn_o": ("blocks.0.attn.hook_z", "blocks.0.hook_attn_out", "attn.W_O"),
}


def by_loops(model, site: str, share: float) -> tuple[float, float]:
    """Geometric means of the edges on both sides."""
    shown: dict[str, torch.Tensor] = {}
    read, written, name = PLACES[site]

    def keep(value, hook):
        shown[hook.name] = value

    with model.hooks(fwd_hooks=[(read, keep), (written, keep)]):
        log_probs = model(TOKENS).log_softmax(-1)
    loss = -log_probs[:, :-1].gather(-1, TOKENS[:, 1:, None]).sum()
    [gradient] = torch.autograd.grad(loss, [shown[written]])
    weight = model.get_parameter(f"{site.rsplit('.', 1)[0]}.{name}").detach().flatten(0, -2)
    logs: list[tuple[float, float]] = []
    for row in range(TOKENS.shape[0]):
        for pos in range(TOKENS.shape[1] - 1):
            x, g = shown[read][row, pos].detach().flatten(), gradient[row, pos]
            gains = (-x * (weight @ g)).tolist(), (-(x @ weight) * g).tolist()
            counts = (weight != 0).sum(1).add(1).tolist(), (weight != 0).sum(0).add(1).tolist()
            costs = [greedily(*side, share) for side in zip(gains, counts, strict=True)]
            if all(costs):
                logs.append((math.log(costs[0]), math.log(costs[1])))
    means = torch.tensor(logs).mean(0).exp()
    return float(means[0]), float(means[1])


def greedily(gains: list[float], edges: list[int], share: float) -> int:
    helping = sorted(((gain, n) for gain, n in zip(gains, edges, strict=True) if gain > 0), reverse=True)
    total, reached, spent = sum(gain for gain, _ in helping), 0.0, 0
    for gain, n in helping:
        if reached >= share * total:
            break
        reached, spent = reached + gain, spent + n
    return spent


@pytest.mark.parametrize(("site", "share"), [*zip(PLACES, (0.5, 0.8), strict=True)])
def test_costs_are_those_of_plain_loops(model, site: str, share: float):
    choice = swd.choose_basis(model, site, TOKENS, share=share, progress=False)
    costs = choice.sites[site]
    assert (costs.inputs, costs.outputs) == pytest.approx(by_loops(model, site, share), rel=1e-4)
    assert costs.n_predictions <= TOKENS.numel() - len(TOKENS)
    assert choice[site] == (costs.cheaper or "input") and choice.settings["tokens"] == TOKENS.numel()


def test_the_kind_of_matrix_says_it_where_text_is_not_clear():
    for costs, side in (
        (SideCosts(66.0, 100.0, 0.01, 9), "input"),
        (SideCosts(100.0, 66.0, 0.01, 9), "output"),
        (SideCosts(67.0, 100.0, 0.001, 9), None),  # not clear
        (SideCosts(60.0, 100.0, 0.3, 9), None),  # may be chance
        (SideCosts(60.0, 100.0, math.nan, 1), None),
        (SideCosts(math.nan, math.nan, math.nan, 0), None),
    ):
        assert costs.cheaper == side
        choice = BasisChoice(0.5, {}, {f"blocks.0.{kind}": costs for kind in ("mlp_out", "attn_q", "attn_qkv", "attn_k")})
        assert list(choice.values()) == [side or "input", "paper", "paper", side or "paper"]


def test_a_matrix_without_effect_has_the_basis_of_its_kind():
    model = toy_model()
    model.blocks[0].mlp.W_out.data.zero_()
    choice = swd.choose_basis(model, "blocks.0.mlp_out", TOKENS, progress=False)
    assert choice.sites["blocks.0.mlp_out"].n_predictions == 0 and dict(choice) == {"blocks.0.mlp_out": "input"}


def test_it_takes_no_more_rows_than_it_needs_and_other_sites_change_nothing(model):
    gone_through: list[int] = []

    def rows():
        for number, row in enumerate(TOKENS):
            gone_through.append(number)
            yield row

    site = "blocks.1.mlp_out"
    few = swd.choose_basis(model, site, TOKENS[:3], progress=False)
    again = swd.choose_basis(model, "all", swd.TokenStream(rows, len(TOKENS)), n_tokens=25, progress=False)
    assert again.settings["tokens"] == 27 and set(again.sites) > {site}
    assert again.sites[site] == few.sites[site]


def test_memory_is_bounded_by_more_passes(model, monkeypatch):
    sites = swd.find_sites(model, "all")
    together = swd.choose_basis(model, "all", TOKENS, progress=False)
    monkeypatch.setattr(basis, "GROUP_BYTES", 4 * TOKENS.numel() * sum(site.d_in + site.d_out for site in sites[:2]))
    groups: list[int] = []
    monkeypatch.setattr(basis, "gradient_passes", counted(basis.gradient_passes, groups))
    apart = swd.choose_basis(model, "all", TOKENS, progress=False)
    assert groups[0] == 2 and len(groups) > 2 and sum(groups) == len(sites)
    assert apart.sites == together.sites


def counted(passes, groups: list[int]):
    def counting(model, sites, *arguments, **named):
        groups.append(len(sites))
        return passes(model, sites, *arguments, **named)

    return counting


@pytest.mark.parametrize("name", ["pythia", "qwen3_5"])  # test_gradients_output.py has the gradients of every family
def test_families_on_a_bridge(name: str):
    model, tokens = families.bridge(name), families.some_tokens(4, 12)
    logits = model(tokens)
    choice = swd.choose_basis(model, "all", tokens, progress=False)
    assert list(choice) == [site.name for site in swd.find_sites(model, "all")]
    assert all(costs.inputs > 0 and costs.outputs > 0 for costs in choice.sites.values())
    assert torch.equal(model(tokens), logits)


def test_the_embedded_models_neurons_are_found():
    model = swd.load_default_model()
    choice = swd.choose_basis(model, ["mlp_in", "mlp_out"], swd.text_tokens(2_048, split="train"), progress=False)
    assert {site: basis for site, basis in choice.items() if site.endswith("mlp_in")} == {
        f"blocks.{layer}.mlp_in": "output" for layer in range(4)
    }
    assert all(choice[f"blocks.{layer}.mlp_out"] == "input" for layer in range(4))
    # Measured: .15.
    assert choice.sites["blocks.3.mlp_out"].inputs < 0.3 * choice.sites["blocks.3.mlp_out"].outputs
    shown = repr(choice)
    assert "8 matrices: 4 input, 4 output" in shown and "blocks.3.mlp_out" in shown
    assert list(choice.table()["basis"]) == list(choice.values())
    assert type(choice).from_dict(choice.as_dict()).sites == choice.sites


def test_basis_auto_is_what_the_text_says(model, tmp_path):
    how = {**QUICK, "preset": "quick", "sparsity": 0.5, "tokens": TOKENS, "calibration": "dense"}
    auto = swd.factorize(model, "all", basis="auto", out=tmp_path, **how)
    choice = swd.choose_basis(model, "all", TOKENS, progress=False)
    assert {site: f.settings["basis"] for site, f in auto.items()} == dict(choice)
    assert len(set(choice.values())) > 1
    of_choice = swd.factorize(model, "all", basis=choice, **how)
    assert all(bits(f) == bits(auto[site]) for site, f in of_choice.items())
    # Finished matrices are taken over: the recipe names the basis of each.
    assert_same(swd.factorize(model, "all", basis="auto", out=tmp_path, **how), auto)


def test_auto_is_the_default_where_the_number_of_units_is_left_to_us(model):
    how = {**QUICK, "preset": "quick", "sparsity": 0.5, "tokens": TOKENS, "calibration": "dense"}
    told = swd.factorize(model, "all", **how)
    assert_same(told, swd.factorize(model, "all", basis="auto", **how))
    assert "units start as inputs (" in repr(told) and "by text" in repr(told)
    why = told.provenance["basis"]
    costs = swd.choose_basis(model, "all", TOKENS, progress=False).sites
    assert (why["by"], why["inputs over outputs"]) == ("text", {site: of.inputs / of.outputs for site, of in costs.items()})
    for given in ({"units": 16}, {"square_share": 0.2}, {"preset": "paper", "outer_iterations": 4}):
        made = swd.factorize(model, "mlp_out", **{**how, **given})
        assert "basis" not in made.provenance and "units start" not in repr(made)
        assert {f.settings.get("basis", "paper") for f in made.values()} == {"paper"}


def test_a_call_that_goes_on_takes_over_what_the_first_was_told(model, tmp_path, monkeypatch):
    how = {**QUICK, "preset": "quick", "sparsity": 0.5, "tokens": TOKENS}
    made = swd.factorize(model, "mlp_out", out=tmp_path, **how)
    monkeypatch.setattr(basis, "gradient_passes", lambda *_, **__: pytest.fail("the text was asked again"))
    assert_same(swd.factorize(model, "mlp_out", out=tmp_path, **how), made)
    with pytest.raises(swd.ResumeError, match="the tokens"):
        swd.factorize(model, "mlp_out", out=tmp_path, **{**how, "tokens": TOKENS.flip(0)})


def refuse(*_):
    raise swd.UnsupportedHostError("no gradient passes through this host")


def overflow(site, *_):
    raise GradientError(f"the gradients at {site.name} are not finite")


@pytest.mark.parametrize(
    ("step", "failing", "error"), [("require_loss", refuse, "no gradient"), ("_log_costs", overflow, r"blocks\.0")]
)
def test_without_gradients_that_can_be_used_it_is_left_to_the_kind_of_matrix(model, monkeypatch, step, failing, error):
    monkeypatch.setattr(basis, step, failing)
    how = {**QUICK, "preset": "quick", "sparsity": 0.5, "tokens": TOKENS}
    made = swd.factorize(model, ["attn_qkv", "mlp_out"], **how)
    assert {site: f.settings["basis"] for site, f in made.items()} == {
        f"blocks.{layer}.{kind}": side for layer in (0, 1) for kind, side in (("attn_qkv", "paper"), ("mlp_out", "input"))
    }
    assert made.provenance["basis"] == {"by": "kind of matrix"}
    with pytest.raises((swd.UnsupportedHostError, GradientError), match=error):
        swd.factorize(model, "mlp_out", basis="auto", **how)


def test_a_text_of_several_factorizations_is_asked_once(monkeypatch):
    model = toy_model()
    how = {**QUICK, "preset": "quick", "basis": "auto", "calibration": "dense"}
    how.pop("sparsity")
    plain = [swd.factorize(model, "all", tokens=TOKENS, sparsity=s, **how) for s in (0.25, 0.5)]
    passes: list[int] = []
    monkeypatch.setattr(basis, "gradient_passes", counted(basis.gradient_passes, passes))
    text = CalibrationText(TOKENS, model)
    for s, expected in zip((0.25, 0.5), plain, strict=True):
        assert_same(swd.factorize(model, "all", tokens=text, sparsity=s, **how), expected)
    assert passes == [len(plain[0])]
    with torch.no_grad():
        model.blocks[1].mlp.W_out *= 1.01  # another host
    swd.factorize(model, "mlp_out", tokens=text, sparsity=0.5, **how)
    assert passes == [len(plain[0]), 2]


def test_without_text_that_says_something_auto_is_neurons_and_dimensions_of_heads(model):
    how = {**QUICK, "preset": "quick", "sparsity": 0.5, "basis": "auto"}
    blind = swd.factorize(model, ["mlp_out", "attn_o"], calibration="zero-data", **how)
    assert {site.rsplit(".", 1)[1]: f.settings["basis"] for site, f in blind.items()} == {"attn_o": "input", "mlp_out": "input"}
    encoder = swd.factorize(families.bridge("bert"), "blocks.0.mlp_out", tokens=families.some_tokens(4, 12), **how)
    assert encoder["blocks.0.mlp_out"].settings["basis"] == "input"


def test_allocate_takes_and_remembers_a_basis(model):
    how = {"sparsity": 0.5, "tokens": TOKENS, "by": "error", "preset": "quick", "progress": False}
    choice = swd.choose_basis(model, "mlp_out", TOKENS, progress=False)
    by_word, by_choice = (swd.allocate(model, "mlp_out", basis=basis, **how) for basis in ("auto", choice))
    assert by_word.curves == by_choice.curves
    assert by_word.settings["options"] == {"basis": "auto"}
    assert by_choice.settings["options"] == {"basis": dict(choice)}


def test_bad_input(model):
    how = {**QUICK, "preset": "quick", "tokens": TOKENS}
    with pytest.raises(swd.SpecError, match=r"blocks\.0\.mlp_out is given two bases, 'input' and 'output'"):
        swd.factorize(model, "mlp_out", basis={"mlp_out": "input", "blocks.0.mlp_out": "output"}, **how)
    with pytest.raises(swd.UnknownSiteError, match="mlp_oot"):
        swd.factorize(model, "mlp_out", basis={"mlp_oot": "input"}, **how)
    with pytest.raises(swd.TokenError, match="choose_basis needs tokens"):
        swd.choose_basis(model, "mlp_out")
    with pytest.raises(ValueError, match=r"share=1: a share of the effect"):
        swd.choose_basis(model, "mlp_out", TOKENS, share=1)
    with pytest.raises(ValueError, match="n_tokens must be a whole number of at least 1, got 0"):
        swd.choose_basis(model, "mlp_out", TOKENS, n_tokens=0)
    with pytest.raises(swd.UnsupportedHostError, match="does not predict next tokens"):
        swd.choose_basis(families.bridge("bert"), "mlp_out", families.some_tokens(4, 12))
    with pytest.raises(swd.TokenError, match="rows of a single token"):
        swd.choose_basis(model, "mlp_out", TOKENS[:, :1])
