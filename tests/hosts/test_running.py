"""Runs that start at a block, stop before one, unembed a few tokens, and prefixes of some layers only: numbers of the whole run.

Runs on transformer_lens 3.9 (HookedTransformer and bridge) and on 4.x (bridge only).
"""

import warnings
from contextlib import contextmanager, nullcontext
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import SiteDidNotRunWarning
from swd_lens.factorization.grams import collect_grams
from swd_lens.factorization.residuals import Residuals
from swd_lens.hosts import Start, host_of
from swd_lens.hosts.sites import hook_name, split_name
from tests import families
from tests.hosts.test_families import HAS_HOOKED, HOSTS, relative, shared, svd_of
from tests.hosts.test_interrupts import everything
from tests.interrupts import run_to_line

TOYS = [("hooked", "toy"), ("hooked", "capped")] if HAS_HOOKED else []
every_host = pytest.mark.parametrize(("kind", "family"), [*HOSTS, *TOYS])
two_hosts = pytest.mark.parametrize(("kind", "family"), [("bridge", "llama"), ("hooked", "gpt2")][: 1 + HAS_HOOKED])
both_ways = pytest.mark.parametrize("kept", [False, True], ids=["whole prompts", "kept prefix"])
IDS = torch.tensor([7, 2, 19, 2])


def load(kind, family):
    if (kind, family) in TOYS:
        from tests.micro import toy_model  # needs HookedTransformer

        return toy_model(output_logits_soft_cap=5.0 if family == "capped" else -1.0)
    return getattr(families, kind)(family)


@cache
def loaded(kind, family):
    """A model that its tests leave as they found it, SVD factors at every site, and tokens."""
    model = load(kind, family) if (kind, family) in TOYS else shared(kind, family)
    return (
        model,
        baselines.svd(model, "all") if (kind, family) in TOYS else svd_of(kind, family),
        families.some_tokens(2, 9) % (20 if family in ("toy", "capped") else 10**6),
    )


@contextmanager
def changed(model, layers, seen=None):
    """Hooks on every unit's z that note the layer; the last unit of some layers is scaled, at the last position."""
    sites = [site.name for site in host_of(model).sites()]
    last = {split_name(name)[0]: name for name in sites}

    def hook_of(name):
        layer = split_name(name)[0]

        def hook(z, hook):
            if seen is not None:
                seen.add(layer)
            if layer in layers and name == last[layer]:
                return torch.cat([z[:, :-1], z[:, -1:] * 0.25 + 0.5], dim=1)
            return z

        return hook

    with model.hooks(fwd_hooks=[(hook_name(name), hook_of(name)) for name in sites]), warnings.catch_warnings():
        warnings.simplefilter("error", SiteDidNotRunWarning)
        yield


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.quick_cases(4)
@every_host
@both_ways
def test_a_run_that_starts_at_a_block_ends_as_the_whole_run(kind, family, kept):
    model, factors, tokens = loaded(kind, family)
    host, n_layers, ids = host_of(model), len(model.blocks), IDS
    with torch.no_grad(), swd.attach(model, factors):
        dense = host.run(tokens)[:, -1]
        prefix = host.freeze_prefix(tokens) if kept else None
        with changed(model, {0, n_layers - 1}):
            whole = host.run(tokens)[:, -1]
            assert relative(whole, dense) > 1e-2  # the hooks matter
            assert relative(host.last_logits(tokens, prefix), whole) < 1e-5
            assert relative(host.last_logits(tokens, prefix, token_ids=ids), whole[:, ids]) < 1e-5
        for layer in range(n_layers + 1):
            seen = set()
            with changed(model, {0, n_layers - 1}, seen):
                resid = host.residual(tokens, layer, prefix)
            assert seen == set(range(layer))
            assert resid.shape[:2] == (2, 1 if prefix is not None else 9) and type(resid) is torch.Tensor
            seen.clear()
            with changed(model, {0, n_layers - 1}, seen):
                start = Start(layer, resid)
                logits = host.last_logits(tokens, prefix, start=start)
                some = host.last_logits(tokens, prefix, start=start, token_ids=ids)
                assert seen == set(range(layer, n_layers))
                assert relative(logits, whole) < 1e-5
                assert some.shape == (2, 4) and relative(some, logits[:, ids]) < 1e-6
                alone = host.repeat_prefix(prefix, 1, from_layer=layer)
                assert relative(host.last_logits(tokens, alone, start=start), whole) < 1e-5
                thrice = host.repeat_prefix(prefix, 3, from_layer=layer)
                start = Start(layer, resid.repeat(3, 1, 1))
                for _ in range(2):  # the prefix is left as it was
                    logits = host.last_logits(tokens.repeat(3, 1), thrice, start=start)
                    assert relative(logits, whole.repeat(3, 1)) < 1e-5
                six = host.repeat_prefix(thrice, 2, from_layer=layer)
                start = Start(layer, resid.repeat(6, 1, 1))
                logits = host.last_logits(tokens.repeat(6, 1), six, start=start, token_ids=ids)
                assert relative(logits, whole.repeat(6, 1)[:, ids]) < 1e-5


@pytest.mark.quick_cases(3)
@every_host
@both_ways
def test_gradients_are_those_of_the_whole_run(kind, family, kept):
    model, factors, tokens = loaded(kind, family)
    host, layer = host_of(model), len(model.blocks) - 1
    names = [site.hook_name for site in host.sites() if site.layer == layer]
    entry = f"blocks.{layer}.hook_resid_pre" if kind == "hooked" else f"blocks.{layer}.hook_in"

    def gradients(run):
        kept_z = {}

        def keep(z, hook):
            kept_z[hook.name] = z if z.requires_grad else z.requires_grad_()
            kept_z[hook.name].retain_grad()
            return kept_z[hook.name]

        with model.hooks(fwd_hooks=[(name, keep) for name in [*names, entry]]):
            logits = run()
            (logits[:, 0] - logits[:, 1]).sum().backward()
        model.zero_grad()
        return {name: z.grad[:, -1] for name, z in kept_z.items()}

    with swd.attach(model, factors):
        prefix = host.freeze_prefix(tokens) if kept else None
        whole = gradients(lambda: host.run(tokens)[:, -1][:, IDS])
        resid = host.residual(tokens, layer, prefix).detach().requires_grad_()
        short = host.repeat_prefix(prefix, 1, from_layer=layer)
        got = gradients(lambda: host.last_logits(tokens, short, start=Start(layer, resid), token_ids=IDS))
        assert got.keys() == whole.keys() == {*names, entry}
        assert all(relative(got[name], whole[name]) < 1e-5 for name in whole)
        assert resid.grad is not None and relative(resid.grad[:, -1], whole[entry]) < 1e-5

        end = host.residual(tokens, layer + 1, prefix).detach().requires_grad_()
        logits = host.last_logits(tokens, prefix, start=Start(layer + 1, end), token_ids=IDS)
        (logits[:, 0] - logits[:, 1]).sum().backward()
        assert end.grad is not None and end.grad[:, -1].abs().max() > 0
        twice = host.repeat_prefix(prefix, 2, from_layer=layer)
        both = resid.detach().repeat(2, 1, 1).requires_grad_()
        logits = host.last_logits(tokens.repeat(2, 1), twice, start=Start(layer, both), token_ids=IDS)
        (logits[:, 0] - logits[:, 1]).sum().backward()
        assert both.grad is not None and relative(both.grad[:, -1], whole[entry].repeat(2, 1)) < 1e-5
    model.zero_grad()


@pytest.mark.quick_cases(5)
@every_host
def test_another_residual_is_taken_up(kind, family):
    model, _, tokens = loaded(kind, family)
    host, n_layers = host_of(model), len(model.blocks)
    pre, post = ("hook_resid_pre", "hook_resid_post") if kind == "hooked" else ("hook_in", "hook_out")
    with torch.no_grad():
        for layer in range(n_layers + 1):
            point = f"blocks.{layer}.{pre}" if layer < n_layers else f"blocks.{layer - 1}.{post}"
            with model.hooks(fwd_hooks=[(point, lambda x, hook: x.flip(0) * 0.5)]):
                whole = host.run(tokens)[:, -1]
            start = Start(layer, host.residual(tokens, layer).flip(0) * 0.5)
            assert relative(host.last_logits(tokens, start=start), whole) < 1e-5


def early(factors, layer):
    """The units before a block."""
    return {name: factors[name] for name in factors if split_name(name)[0] < layer}


def reads(host, sites, run):
    """What each site reads in a run."""
    seen = {}
    with host.inputs(sites, lambda site, h: seen.update({site.name: h.clone()})):
        run()
    assert seen.keys() == {site.name for site in sites}
    return seen


@pytest.mark.quick_cases(5)
@every_host
def test_blocks_that_are_run_from_a_start_read_what_they_read_in_a_whole_run_to_the_bit(kind, family):
    model, factors, tokens = loaded(kind, family)
    host, n_layers = host_of(model), len(model.blocks)
    with torch.no_grad():
        resid = host.residual(tokens, 0)
        for layer in range(n_layers):
            with swd.attach(model, early(factors, layer)) if layer else nullcontext():
                # From the block before to this one, then on to the last one.
                resid = host.residual(tokens, layer, start=Start(max(layer - 1, 0), resid))
                sites = [site for site in host.sites() if site.layer >= layer]
                whole = reads(host, sites, lambda: host.run_blocks(tokens, n_layers))
                start = Start(layer, resid.clone())
                got = reads(host, sites, lambda start=start: host.run_blocks(tokens, n_layers, start))
                assert all(torch.equal(got[name], whole[name]) for name in whole), layer
                assert torch.equal(start.residual, resid)
                assert relative(host.residual(tokens, n_layers, start=start), host.residual(tokens, n_layers)) < 1e-5
        seen = set()
        with swd.attach(model, factors), changed(model, set(), seen):
            host.run_blocks(tokens, n_layers, Start(n_layers - 1, resid))
        assert seen == {n_layers - 1}
        assert torch.equal(host.residual(tokens, 1, start=Start(1, resid)), resid)


@pytest.mark.quick_cases(5)
@every_host
def test_residuals_kept_on_disk_are_used_on_every_host_and_give_the_same_grams(kind, family):
    model, factors, tokens = loaded(kind, family)
    host, tokens = host_of(model), torch.cat([tokens, tokens.flip(1), tokens[:1]])
    # A bridge notes a few things in its first forward, and in the first that stops early (upstream: _stop_at_layer_idx).
    host.run(tokens)
    host.run_blocks(tokens, 1)
    before = everything(model)
    with Residuals(model, tokens, 2) as residuals:
        for layer in range(len(model.blocks)):
            sites = [site for site in host.sites() if site.layer == layer]
            with swd.attach(model, early(factors, layer)) if layer else nullcontext():
                residuals.advance(layer)
                whole = collect_grams(model, sites, tokens, batch_size=2)
                got = collect_grams(model, sites, None, residuals=residuals)
            assert residuals.kept and residuals.layer == layer, residuals.why_not
            assert all(torch.equal(got[site.name], whole[site.name]) for site in sites)
    assert everything(model) == before


# ---------------------------------------------------------------------------------------------- what is not done


@pytest.mark.quick_cases(10)
@every_host
@both_ways
def test_few_tokens_do_not_cost_the_vocabulary(kind, family, kept):
    model, _, tokens = loaded(kind, family)
    host, n_layers = host_of(model), len(model.blocks)
    prefix = host.freeze_prefix(tokens) if kept else None

    def operations(**how):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            host.last_logits(tokens, prefix, **how)
        return counter.get_total_flops()

    with torch.no_grad():
        start = Start(n_layers, host.residual(tokens, n_layers, prefix))
    d_model, d_vocab = host.readout()[1].shape if family != "bert" else (16, families.D_VOCAB)
    vocabulary = 2 * 2 * d_model * d_vocab
    assert operations() - operations(token_ids=IDS) >= vocabulary * (1 - 4 / d_vocab)
    assert operations(start=start) >= vocabulary
    few = operations(start=start, token_ids=IDS)
    assert few <= 2 * 2 * d_model * (4 + (d_model if family == "bert" else 0))  # BERT's head has a matrix of its own


# ---------------------------------------------------------------------------------------------- nothing is left behind


@pytest.mark.quick_cases(5)
@every_host
def test_an_interrupt_inside_leaves_the_host_as_it_was(kind, family):
    model, factors, tokens = loaded(kind, family)
    host, n_layers = host_of(model), len(model.blocks)

    def fail(z, hook):
        raise KeyboardInterrupt

    def failing(layer):
        return model.hooks(fwd_hooks=[(next(s.hook_name for s in host.sites() if s.layer == layer), fail)])

    with torch.no_grad(), swd.attach(model, factors):
        whole = host.run(tokens)
        resid = host.residual(tokens, 1)
        host.last_logits(tokens, start=Start(1, resid), token_ids=IDS)
        before = everything(model)
        with failing(n_layers - 1), pytest.raises(KeyboardInterrupt):
            host.last_logits(tokens, start=Start(1, resid), token_ids=IDS)
        with failing(n_layers - 1), pytest.raises(KeyboardInterrupt):
            host.residual(tokens, n_layers)
        assert everything(model) == before
        assert torch.equal(host.run(tokens), whole)


@pytest.mark.slow
@two_hosts
def test_ctrl_c_at_any_line_leaves_the_host_as_it_was(kind, family):
    model, factors, tokens = loaded(kind, family)
    host = host_of(model)
    with torch.no_grad(), swd.attach(model, factors):
        prefix = host.freeze_prefix(tokens)

        def there_and_back():
            resid = host.residual(tokens, 1, prefix)
            host.last_logits(tokens, prefix, start=Start(1, resid), token_ids=IDS)

        there_and_back()
        before = everything(model)
        lines = run_to_line(there_and_back, None)
        assert lines > 20 and everything(model) == before
        for at in range(1, lines + 1):
            with pytest.raises(KeyboardInterrupt):
                run_to_line(there_and_back, at)
            assert everything(model) == before, f"interrupted before line {at} of {lines}"


def test_a_run_within_a_run_of_a_bridge_is_refused():
    model, _, tokens = loaded("bridge", "llama")
    host = host_of(model)
    with torch.no_grad():
        host.run(tokens)  # upstream wires a block's hooks in its first forward
        resid, before = host.residual(tokens, 1), everything(model)
        for inside in (lambda: host.last_logits(tokens), lambda: host.residual(tokens, 0)):
            again = [("blocks.1.hook_in", lambda z, hook, inside=inside: inside())]
            with model.hooks(fwd_hooks=again), pytest.raises(RuntimeError, match="in the middle of one of its runs"):
                host.last_logits(tokens, start=Start(1, resid), token_ids=IDS)
            assert everything(model) == before


@pytest.mark.quick_cases(5)
@every_host
def test_a_short_last_block_gives_the_same_logits_and_leaves_nothing_behind(kind, family):
    model, factors, tokens = loaded(kind, family)
    host = host_of(model)
    host.run(tokens)  # a bridge notes a few things in its first forward
    before = everything(model)
    with torch.no_grad(), swd.attach(model, factors):
        plain = host.last_logits(tokens)
        for layer in range(model.cfg.n_layers):
            start = Start(layer, host.residual(tokens, layer))
            assert relative(host.last_logits(tokens, start=start, short=True), plain) < 1e-5, layer
        assert relative(host.last_logits(tokens, short=True), plain) < 1e-5
        assert relative(host.last_logits(tokens[:, :1], short=True), host.last_logits(tokens[:, :1])) < 1e-5
    assert everything(model) == before
