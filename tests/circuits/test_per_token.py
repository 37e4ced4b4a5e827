"""per_token_use: against plain loops and all subsets, on models of a few units and on the embedded one."""

import importlib
import itertools
import json

import pytest
import torch
import torch.nn.functional as F

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits.per_token import PerTokenUse, fewest_by_output, per_token_use
from swd_lens.units.factors import Factors
from tests.contract import UNIT_SOURCES, swd_zero_data
from tests.micro import random_split, random_tokens

SITE, EARLIER = "blocks.1.mlp_out", "blocks.0.attn_o"
measure = importlib.import_module("swd_lens.circuits.per_token")


def error_of(contributions, chosen):
    left_out = [c for i, c in enumerate(contributions) if i not in chosen]
    return float(torch.stack(left_out).sum(0).square().sum()) if left_out else 0.0


def plain_loop(moved, vectors, recovered, order):
    """One token, in float64: what is taken, one unit at a time."""
    contributions = list(moved.double()[:, None] * vectors.double())
    goal, chosen = (1 - recovered) * error_of(contributions, ()), []
    rank = sorted(range(len(contributions)), key=lambda i: -float(contributions[i].norm()))
    while error_of(contributions, chosen) > goal:
        others = [i for i in rank if i not in chosen]
        greedy = min(others, key=lambda i: error_of(contributions, [*chosen, i]))
        chosen.append(greedy if order == "greedy" else others[0])
    return len(chosen)


def fewest_of_all(moved, vectors, recovered):
    """The minimum, over all subsets."""
    contributions = list(moved.double()[:, None] * vectors.double())
    goal, n = (1 - recovered) * error_of(contributions, ()), len(contributions)
    return next(
        k for k in range(n + 1) if any(error_of(contributions, chosen) <= goal for chosen in itertools.combinations(range(n), k))
    )


@pytest.mark.parametrize("order", ["greedy", "size"])
@pytest.mark.parametrize("recovered", [0.5, 0.9, 0.99])
def test_it_is_the_plain_loop_and_at_least_the_minimum(order, recovered, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    moved, vectors = torch.randn(40, 7, generator=generator), torch.randn(7, 4, generator=generator)
    moved[3] = 0.0
    found = fewest_by_output(moved, vectors, recovered, order).tolist()
    assert found == [plain_loop(token, vectors, recovered, order) for token in moved]
    fewest = [fewest_of_all(token, vectors, recovered) for token in moved]
    assert found[3] == fewest[3] == 0 and all(k >= least for k, least in zip(found, fewest, strict=True))
    assert sum(found) > sum(fewest) or recovered == 0.5  # it is an upper bound, and not always the minimum
    # In pieces, and without the products of all pairs.
    monkeypatch.setattr(measure, "_BYTES", 100)
    assert fewest_by_output(moved, vectors, recovered, order).tolist() == found


def test_orthogonal_vectors_and_contributions_that_cancel():
    generator = torch.Generator().manual_seed(1)
    moved, turned = (torch.randn(30, 7, generator=generator), torch.linalg.qr(torch.randn(9, 7, generator=generator))[0].T)
    fewest = [fewest_of_all(token, turned, 0.9) for token in moved]
    for order in ("greedy", "size"):
        assert fewest_by_output(moved, turned, 0.9, order).tolist() == fewest
    # Two large ones that cancel, and a small one that is all there is left.
    vectors = torch.tensor([[5.0, 0.0], [-5.0, 0.0], [0.0, 1.0]])
    moved = torch.ones(1, 3)
    assert fewest_by_output(moved, vectors, 0.9, "greedy").tolist() == [1]
    assert fewest_by_output(moved, vectors, 0.9, "size").tolist() == [3]


@pytest.mark.parametrize("order", ["greedy", "size"])
def test_sites_of_a_host_each_by_itself(model, order, monkeypatch):
    factors, tokens = swd_zero_data(model, [EARLIER, SITE]), random_tokens(5, 6)
    found = per_token_use(model, factors, tokens, order=order, batch_size=2)
    with torch.no_grad(), swd.attach(model, factors) as attachment:
        _, cache = model.run_with_cache(tokens)
        hooks = {site.name: site.hook_name for site in attachment.sites}
    for site, f in factors.items():
        z = cache[hooks[site]]
        moved = z - z.mean((0, 1))
        expected = [[plain_loop(token, f.write, 0.9, order) for token in row] for row in moved]
        assert found.needed[site].tolist() == expected
    monkeypatch.setattr(measure, "_BYTES", 1000)  # z is not kept, the host runs again
    again = per_token_use(model, factors, tokens, order=order, batch_size=2)
    assert all(torch.equal(again.needed[site], found.needed[site]) for site in factors)


@pytest.mark.parametrize("name", ["transcoder", "channels", "saelens_sae_on_input"])
def test_encode_decode_pairs_count_too(model, name):
    if name.startswith("saelens"):
        pytest.importorskip("sae_lens")
    units, tokens = UNIT_SOURCES[name](model, SITE), random_tokens(3, 6)
    found = per_token_use(model, units, tokens, order="size")
    with torch.no_grad(), swd.attach(model, units) as attachment:
        _, cache = model.run_with_cache(tokens)
        z = cache[attachment.sites[0].hook_name]
        coder = attachment.factors[SITE].coder
    written = coder.W_dec if name != "saelens_sae_on_input" else coder.W_dec @ model.blocks[1].mlp.W_out
    moved = z - z.mean((0, 1))
    expected = [[plain_loop(token, written, 0.9, "size") for token in row] for row in moved]
    assert found.needed[SITE].tolist() == expected


class Squared:
    """Units that write what they are to the power of two."""

    def __init__(self):
        self.W_enc, self.W_dec = torch.eye(32), torch.randn(32, 16, generator=torch.Generator().manual_seed(0))

    def encode(self, x):
        return x @ self.W_enc

    def decode(self, z):
        return z.square() @ self.W_dec


def test_units_that_write_no_sum_are_refused(model):
    with pytest.raises(ValueError, match=r"units of blocks\.1\.mlp_out \(Squared\) do not write a sum of vectors"):
        per_token_use(model, {SITE: Squared()}, random_tokens(2, 5))
    found = per_token_use(model, {SITE: Squared()}, random_tokens(8, 5), by="loss", least=0.01)
    assert found.n_units == {SITE: 32}


def by_loss_by_hand(model, factors, tokens, grid, recovered, least):
    """One position and one k at a time."""
    with swd.attach(model, factors) as attachment:
        names = [site.hook_name for site in attachment.sites]

        def run(**hooks):
            return model.run_with_hooks(tokens, fwd_hooks=list(hooks.items()))

        def ce(logits):
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)

        z, leaves = {}, {}

        def keep(value, hook):
            z[hook.name] = value.detach()
            leaves[hook.name] = value if value.requires_grad else value.requires_grad_(True)
            return leaves[hook.name]

        full = ce(run(**dict.fromkeys(names, keep)))
        gradients = torch.autograd.grad(full.sum(), [leaves[name] for name in names])
        full = full.detach()
        means = {name: value.mean((0, 1)) for name, value in z.items()}
        flat = [
            (name, i, (-(z[name] - means[name]) * g)[:, :, i]) for name, g in zip(names, gradients, strict=True)
            for i in range(g.shape[2])
        ]  # fmt: skip
        kept = {}
        for k in grid:
            masks = {name: torch.zeros_like(z[name], dtype=torch.bool) for name in names}
            for row, pos in itertools.product(*map(range, tokens.shape)):
                for name, i, _ in sorted(flat, key=lambda unit: -float(unit[2][row, pos]))[:k]:
                    masks[name][row, pos, i] = True
            hooks = {n: (lambda v, hook, n=n, masks=masks: torch.where(masks[n], v, means[n])) for n in names}
            with torch.no_grad():
                kept[k] = ce(run(**hooks))
    needed = torch.full(tokens.shape, -1)
    for row, pos in itertools.product(range(tokens.shape[0]), range(tokens.shape[1] - 1)):
        gain = float(kept[0][row, pos] - full[row, pos])
        if gain > least:
            needed[row, pos] = next(
                k for k in grid if k and float(kept[0][row, pos] - kept[k][row, pos]) >= recovered * gain - 1e-6
            )
    return needed


@pytest.mark.parametrize("sites", [[SITE], [EARLIER, SITE]], ids=["one", "two"])
def test_by_loss_it_is_what_single_runs_say(model, sites, monkeypatch):
    factors, tokens = swd_zero_data(model, sites), random_tokens(8, 7)
    state, asked = {name: p.clone() for name, p in model.state_dict().items()}, [p.requires_grad for p in model.parameters()]
    n_units = factors.n_units
    found = per_token_use(model, factors, tokens, by="loss", grid=[1, 3, 8, 12], least=0.002, batch_size=3)
    expected = by_loss_by_hand(model, factors, tokens, [0, 1, 3, 8, 12, n_units], 0.9, 0.002)
    key = SITE if len(sites) == 1 else "all sites"
    assert found.needed[key].tolist() == expected.tolist()
    assert (expected >= 0).sum() > 5 and (expected[:, :-1] < 0).any()
    assert found.settings["grid"] == [1, 3, 8, 12, n_units] and found.n_units == {key: n_units}
    monkeypatch.setattr(measure, "_BYTES", 1000)
    again = per_token_use(model, factors, tokens, by="loss", grid=[1, 3, 8, 12], least=0.002, batch_size=3)
    assert again.needed[key].tolist() == expected.tolist()
    # The host is as it was.
    assert [p.requires_grad for p in model.parameters()] == asked
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


@pytest.fixture(scope="module")
def beside_a_circuit(model):
    factors = swd_zero_data(model, [EARLIER, SITE])
    scores = swd.attribute(model, factors, random_split(8))
    circuit = swd.Circuit.of(factors, scores, [f"{SITE}/3", f"{SITE}/5", f"{EARLIER}/0"])
    return factors, circuit, per_token_use(model, factors, random_tokens(6, 8), circuit=circuit)


def test_the_result_goes_to_json_and_back_and_shows_itself(beside_a_circuit):
    _, _, found = beside_a_circuit
    again = PerTokenUse.from_dict(json.loads(json.dumps(found.as_dict())))
    assert again.as_dict() == found.as_dict() and again.table().equals(found.table())
    table = found.table().set_index("site")
    counts = found.counts(SITE)
    assert len(counts) == 48 == table.loc[SITE, "tokens"]
    assert table.loc[SITE, "mean"] == pytest.approx(float(counts.double().mean()))
    assert table.loc[SITE, "median"] == sorted(counts.tolist())[23]
    assert table.loc[SITE, "circuit units"] == 2 and table.loc[EARLIER, "circuit units"] == 1
    assert table.loc[SITE, "tokens with as many"] == pytest.approx(float((counts <= 2).double().mean()))
    curve = found.curve(SITE)
    assert curve["share"].is_monotonic_increasing and curve["share"].iloc[-1] == 1.0
    for k, share in curve.itertuples(index=False):
        assert share == pytest.approx(found.share_with(SITE, k))
    assert "at the median token" in str(found) and SITE in found._repr_html_()
    (ax,) = found.plot().axes
    assert {SITE, EARLIER} <= {line.get_label() for line in ax.lines} and len(ax.lines) == 4


def test_by_loss_a_circuit_counts_as_a_whole(model, beside_a_circuit):
    factors, circuit, _ = beside_a_circuit
    found = per_token_use(model, factors, random_tokens(6, 8), by="loss", circuit=circuit, least=0.01)
    assert found.circuit_units == {"all sites": 3} and "what the units do to the loss" in found.title()
    plain = per_token_use(model, baselines.svd(model, SITE), random_tokens(4, 7), by="loss", least=0.01)
    assert plain.settings["grid"] == [1, 2, 3, 4, 6, 8, 12, 16]
    alone = swd.Circuit.of(baselines.svd(model, SITE), swd.attribute(model, baselines.svd(model, SITE), random_split(8)), [])
    with pytest.raises(ValueError, match="this circuit"):
        per_token_use(model, factors, random_tokens(6, 8), circuit=alone)


def test_what_cannot_be_counted_is_said(model):
    factors, tokens = baselines.svd(model, SITE), random_tokens(3, 5)
    for how, message in (
        ({"recovered": 1}, r"recovered must be in \(0, 1\), such as 0\.9, got 1"),
        ({"by": "logits"}, "by must be one of"),
        ({"order": "best"}, "order must be one of"),
        ({"by": "loss", "grid": [1, 17]}, "grid= must be a whole number from 1 to 16, got 17"),
        ({"by": "loss", "least": 50.0}, r"no more than 50\.0 nats off the cross-entropy of any token"),
    ):
        with pytest.raises(ValueError, match=message):
            per_token_use(model, factors, tokens, **how)
    with pytest.raises(ValueError, match="rows of at least two tokens"):
        per_token_use(model, factors, tokens[:, :1], by="loss")
    nothing = Factors(torch.zeros(32, 2), torch.zeros(2, 16))
    assert per_token_use(model, {SITE: nothing}, tokens).counts(SITE).tolist() == [0] * 15


def test_on_the_embedded_model_exact_units_agree_on_the_output(default_model):
    site, rows = "blocks.2.mlp_out", swd.text_tokens(512, split="test")
    svd = per_token_use(default_model, baselines.svd(default_model, site), rows)
    assert len(svd.counts(site)) == rows.numel()
    # One token again, from the dense host's own output.
    _, cache = default_model.run_with_cache(rows)
    y = cache["blocks.2.hook_mlp_out"]
    moved = (y - y.mean((0, 1)))[1, 7].double()
    u = torch.linalg.svd(default_model.blocks[2].mlp.W_out.double(), full_matrices=False)[2]
    energy = (u @ moved).square().sort(descending=True).values
    assert int(svd.needed[site][1, 7]) == int((energy.cumsum(0) < 0.9 * energy.sum()).sum()) + 1
