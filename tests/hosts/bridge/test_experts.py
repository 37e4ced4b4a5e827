"""Mixtures of experts: the matrices of every expert are sites, whose units are there at the tokens that are routed to it."""

import copy
import warnings

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.factorization.grams import collect_grams
from swd_lens.factorization.stages import stages_of
from swd_lens.hosts import find_sites, host_of, matrix_entries
from swd_lens.hosts.sites import Site, execution_key, expert_of, hook_name, is_site_name
from tests import families
from tests.bridge.test_circuits import split_for
from tests.circuits.slow import activations, slow_contributions
from tests.hosts.bridge.conftest import snapshot

TOKENS = families.some_tokens(rows=4, pos=12)
# A stack of (expert, out, in); of (expert, in, out) with biases, gate and up interleaved; shared experts and latent attention;
# tokens sorted by expert, and experts among the attention heads.
NAMES = ("Mixtral", "GptOss", "DeepseekV3", "JetMoe")
LAST = {name: f"blocks.1.mlp_out.{1 if name == 'DeepseekV3' else 2}" for name in NAMES}


def loaded(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return families.loaded(name)


@pytest.fixture(params=NAMES)
def made(request):
    return request.param, loaded(request.param)


def routing(model, layer, tokens=TOKENS):
    """(expert,) lists of (token, weight) of the plain forward, by a hook on Hugging Face's own stack."""
    seen = []
    if type(model.original_model).__name__.startswith("JetMoe"):
        return sorted_routing(model.blocks[layer].mlp.original_component, model, tokens)
    stack = next(
        m for m in model.blocks[layer].modules() if "down_proj" in m._parameters and m._parameters["down_proj"].ndim == 3
    )
    handle = stack.register_forward_pre_hook(lambda _, args: seen.append(args))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    return stack, *seen[0]


def sorted_routing(stack, model, tokens=TOKENS):
    """The same of JetMoe, whose router hands out tokens sorted by expert."""
    seen = []
    handle = stack.router.register_forward_hook(lambda _, args, out: seen.extend((args[0], *out)))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    hidden, order, _, weights, sizes, _ = seen
    experts, by_slot = torch.zeros_like(order), torch.zeros_like(weights)
    experts[order] = torch.tensor([expert for expert, n in enumerate(sizes) for _ in range(n)])
    by_slot[order] = weights
    return stack, hidden, experts.view(len(hidden), -1), by_slot.view(len(hidden), -1)


@pytest.mark.quick_cases(2)
def test_experts_are_sites_with_the_stacks_own_matrices(made):
    name, model = made
    stack, *_ = routing(model, 1)
    host, ours = host_of(model), {site.name: site for site in find_sites(model)}
    for expert in range(4):
        up, gate, down = (host.weight(ours[f"blocks.1.{kind}.{expert}"]) for kind in ("mlp_in", "mlp_gate", "mlp_out"))
        if name == "JetMoe":
            both, out = stack.input_linear.weight[expert], stack.output_linear.weight[expert]
        else:
            both, out = stack.gate_up_proj[expert], stack.down_proj[expert]
        if name == "GptOss":
            assert torch.equal(gate, both[:, ::2]) and torch.equal(up, both[:, 1::2]) and torch.equal(down, out)
        else:
            assert torch.equal(torch.cat([gate, up], 1), both.T) and torch.equal(down, out.T)
    assert sum(site.numel for site in ours.values()) >= 0.99 * matrix_entries(host)


@pytest.mark.quick_cases(2)
def test_exact_factors_change_nothing_and_everything_is_put_back(made):
    _, model = made
    with torch.no_grad():
        dense = model(TOKENS)
    baselines.svd(model, LAST[made[0]])  # leaves are made when sites are first asked for
    before = snapshot(model)
    with swd.attach(model, baselines.svd(model, "all")), torch.no_grad():
        assert (model(TOKENS) - dense).abs().max() < 1e-5 * dense.abs().max()
    assert snapshot(model) == before
    with torch.no_grad():
        assert torch.equal(model(TOKENS), dense)


@pytest.mark.quick_cases(2)
def test_z_is_there_where_tokens_are_routed_and_the_hook_says_which(made):
    name, model = made
    _, hidden, experts, _ = routing(model, 1)
    site = LAST[name].replace("mlp_out", "mlp_in")
    factors, chosen = baselines.svd(model, site), (experts == expert_of(site)).any(1).view(TOKENS.shape)
    assert chosen.any() and not chosen.all()
    with swd.attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        hook = model.hook_dict[hook_name(site)]
        assert torch.equal(hook.routed, chosen)
    z = cache[hook_name(site)]
    assert z.shape == (*TOKENS.shape, factors[site].n_units)
    assert torch.equal(z.any(-1), chosen)
    expected = hidden.view(*TOKENS.shape, -1)[chosen] @ factors[site].read
    torch.testing.assert_close(z[chosen], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(2)
def test_a_hook_at_a_token_of_another_expert_changes_nothing(made):
    name, model = made
    site = LAST[name]
    with swd.attach(model, baselines.svd(model, site)), torch.no_grad():
        plain = model(TOKENS)

        def elsewhere(z, hook):
            return torch.where(hook.routed[..., None], z, torch.full_like(z, 7.0))

        assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[(hook_name(site), elsewhere)]), plain)
        here = model.run_with_hooks(TOKENS, fwd_hooks=[(hook_name(site), lambda z, hook: 0 * z)])
        assert not torch.equal(here, plain)


@pytest.mark.quick_cases(2)
def test_grams_are_means_over_the_routed_tokens(made):
    _, model = made
    _, hidden, experts, _ = routing(model, 1)
    sites = find_sites(model, ["blocks.1.mlp_gate.*", "blocks.1.mlp_in.*"])
    grams = collect_grams(model, sites, TOKENS, dtype="float64")
    for site in sites:
        h = hidden[(experts == site.expert).any(1)].double()
        assert grams.n_routed[site.name] == len(h)
        torch.testing.assert_close(grams[site.name], h.T @ h / max(len(h), 1), rtol=1e-5, atol=1e-8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("calibration", ["sequential", "corrected"])
def test_an_expert_without_tokens_is_made_zero_data_and_said(calibration):
    model, one = loaded("Mixtral"), TOKENS[:1, :3]
    sites = ["blocks.0.attn_q", "blocks.0.mlp_in.*"]
    options = {"preset": "paper", "outer_iterations": 4, "sparsity": 0.3, "progress": False}
    with pytest.warns(UserWarning, match="read fewer of the 3 calibration tokens"):
        factors = swd.factorize(model, sites, tokens=one, calibration=calibration, **options)
    counts = {site: f.provenance["tokens"] for site, f in factors.items() if expert_of(site) is not None}
    assert sum(counts.values()) == 6  # two experts a token
    without = next(site for site, n in counts.items() if n == 0)
    zero = swd.factorize(model, without, calibration="zero-data", **options)
    assert torch.equal(factors[without].read, zero[without].read)


def test_stages_hold_what_no_site_of_them_changes():
    sites = find_sites(loaded("DeepseekV3"), "blocks.1.*")
    stages = [[site.name.split(".", 2)[2] for site in stage] for stage in stages_of(sites, "sequential")]
    experts = [stage for stage in stages if any(name.rpartition(".")[2].isdecimal() for name in stage)]
    assert experts[0] == [f"{kind}.{i}" for kind in ("mlp_gate", "mlp_in") for i in range(4)]
    assert experts[1] == [f"mlp_out.{i}" for i in range(4)]
    order = [name for stage in stages for name in stage]
    assert order.index("attn.q_a_proj") < order.index("attn.q_b_proj") < order.index("attn_o") < order.index("mlp_gate.0")
    room = 4 * 16**2 * 3
    assert max(map(len, stages_of(sites, "sequential", gram_bytes=room))) == 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_circuits_across_experts_are_those_of_whole_prompts(made, positions):
    model = made[1].double()
    # The grouped product of the dense host knows no float64.
    model.original_model.config._experts_implementation = "eager"
    factors = baselines.svd(model, ["blocks.1.mlp_out.*", "blocks.1.mlp_in.1"])
    train = split_for(model, 6, 1, "train")
    fast = swd.attribute(model, factors, train, score="first_order", positions=positions, sign="signed")
    with swd.attach(model, factors):
        slow = [slow_contributions(model, factors, train, i, "first_order", positions, fast.means, 2) for i in range(6)]
        z = [activations(model, factors, tokens) for tokens in train.tokens]
    for site in factors:
        expected = torch.stack([one[site].double() for one in slow]).mean(0).float()
        torch.testing.assert_close(fast.scores[site], expected, rtol=1e-4, atol=1e-5)
        # The mean is over the prompts whose last token is routed to the expert.
        last = torch.stack([one[site][-1] for one in z]).double()
        if positions == "scoring":
            there = last[last.any(1)]
            torch.testing.assert_close(
                fast.means[site].double(), there.mean(0) if len(there) else 0 * last[0], rtol=1e-4, atol=1e-6
            )


@pytest.mark.quick_cases(1)
def test_screen_and_fidelity_name_experts(made):
    _, model = made
    split = split_for(model, 6, 1, "train")
    task = swd.Task("toy", split, split, split, "random", False)
    screen = swd.screen(model, task, sites=["blocks.1.mlp_out.*", "blocks.1.attn_o"])
    assert "all mlp_out" in screen.surfaces and set(screen.sites) >= {f"blocks.1.mlp_out.{i}" for i in range(4)}
    measured = swd.fidelity(model, baselines.svd(model, "blocks.1.mlp_out.*"), TOKENS)
    assert measured.relmse and all(error < 1e-8 for error in measured.relmse.values())


def test_attention_heads_of_experts_have_units_where_they_are_chosen():
    """JetMoe: queries and what is made of the heads' outputs, for the tokens that chose the expert."""
    model, site = loaded("JetMoe"), "blocks.1.attn_q.3"
    experts = model.blocks[1].attn.experts
    _, hidden, chosen, _ = sorted_routing(getattr(experts, "original_component", experts), model)
    chosen = (chosen == 3).any(1).view(TOKENS.shape)
    assert chosen.any() and not chosen.all()
    factors = baselines.svd(model, [site, "blocks.1.attn_o.3"])
    with torch.no_grad():
        dense = model(TOKENS)
        with swd.attach(model, factors):
            logits, cache = model.run_with_cache(TOKENS)
            queries = cache[hook_name(site)]
            removed = model.run_with_hooks(TOKENS, fwd_hooks=[(hook_name("blocks.1.attn_o.3"), lambda z, hook: 0 * z)])
    assert torch.equal(queries.any(-1), chosen) and torch.equal(cache[hook_name("blocks.1.attn_o.3")].any(-1), chosen)
    expected = hidden.view(*TOKENS.shape, -1)[chosen] @ factors[site].read
    torch.testing.assert_close(queries[chosen], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, dense, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(removed[chosen], dense[chosen])  # ... and of the last layer only these tokens' logits change
    torch.testing.assert_close(removed[~chosen], dense[~chosen], rtol=1e-5, atol=1e-5)


def test_a_deep_copy_has_units_of_its_own():
    model = loaded("Mixtral")
    factors = baselines.svd(model, "blocks.1.mlp_out.2")
    with swd.attach(model, factors), torch.no_grad():
        expected, twin = model(TOKENS), copy.deepcopy(model)
    with torch.no_grad():
        stack = next(m for m in twin.blocks[1].modules() if "unit_matrices" in vars(m))
        assert torch.equal(twin(TOKENS), expected)
        assert stack.__dict__["unit_matrices"]["mlp_out.2"].stack is stack


def test_a_changed_stack_is_noticed():
    model = loaded("Mixtral")
    with swd.attach(model, baselines.svd(model, "blocks.1.mlp_out.2")), torch.no_grad():
        stack = next(m for m in model.blocks[1].modules() if "unit_matrices" in vars(m))
        stack.down_proj[2].mul_(2)
        with pytest.raises(swd.AttachError, match=r"blocks\.1\.mlp_out\.2"):
            model(TOKENS)
        stack.down_proj[2].div_(2)


def test_a_graph_of_experts_is_refused():
    from swd_lens.analysis.graph.frozen import require_drawable

    with pytest.raises(UnsupportedHostError, match="expert"):
        require_drawable(host_of(loaded("Mixtral")))


def test_names():
    assert expert_of("blocks.3.mlp_in.12") == 12 and expert_of("blocks.3.mlp_in") is None and expert_of("x.5") is None
    assert hook_name("blocks.3.mlp_in.12") == "blocks.3.hook_mlp_in_12_unit"
    assert is_site_name("blocks.0.attn.kv_a_proj_with_mqa") and is_site_name("blocks.0.mlp.shared_experts.up_proj")
    for name in ("blocks.0.mlp.W_out", "blocks.0.attn_k.3", "blocks.0.mlp_outt", "blocks.0.attn.hook_z", "blocks.0.mlp_in.x_5"):
        assert not is_site_name(name)
    assert execution_key("blocks.0.mlp_in.10") > execution_key("blocks.0.mlp_in.9") > execution_key("blocks.0.mlp_gate.10")
    assert execution_key("blocks.0.mlp.router.gate") < execution_key("blocks.0.mlp_gate.0")
    assert execution_key("blocks.0.attn.experts.router.layer") < execution_key("blocks.0.attn_q.0")
    experts = [Site(0, f"mlp_in.{i}", 4, 4) for i in range(3)]
    chosen = swd.hosts.sites.select_sites(experts, "mlp_in")
    assert chosen == experts and swd.hosts.sites.select_sites(experts, "blocks.0.mlp_in_1") == [experts[1]]
