"""The compiled host does its tasks, its circuits are its circuits, and SWD finds the units that it was made of."""

import pytest
import torch

from swd_lens.circuits.attribution import attribute
from swd_lens.hosts import find_sites, host_of
from swd_lens.solver import solve
from swd_lens.truth.compiled import PROGRAMS, SITES, compiled
from swd_lens.truth.scores import circuit_aurocs, mmcs, support_f1
from swd_lens.units.factors import Factors


@pytest.fixture(scope="module")
def hosts():
    return {rotated: compiled(rotated=rotated) for rotated in (False, True)}


def logits(host, split):
    with torch.no_grad():
        return torch.stack([host.model(row[None])[0, -1] for row in split.tokens])


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_host_does_its_tasks(hosts, rotated, program):
    for split in hosts[rotated].tasks[program].splits:
        for row, right, wrong in zip(logits(hosts[rotated], split), split.answer_ids, split.distractor_ids, strict=True):
            assert float(row[list(right)].min() - row[list(wrong)].max()) > 0.3


def test_a_rotation_changes_no_logit(hosts):
    for program in PROGRAMS:
        rows = [logits(hosts[rotated], hosts[False].tasks[program].test) for rotated in (False, True)]
        torch.testing.assert_close(*rows, atol=1e-4, rtol=0)
    assert bool((hosts[True].truths[SITES[0]].write != 0).all()) and hosts[False].rotation is None


def test_the_matrices_are_the_units(hosts):
    for host in hosts.values():
        for site in find_sites(host.model, list(SITES)):
            truth = host.truths[site.name]
            torch.testing.assert_close(host_of(host.model).weight(site), truth.read @ truth.write, atol=1e-5, rtol=0)


def test_noise_is_a_share_of_the_matrix():
    host = compiled(noise=0.05, prompts=12)
    truth = host.truths[SITES[0]]
    weight, clean = host.model.blocks[0].attn.W_O.flatten(0, 1), truth.read @ truth.write
    assert float((weight - clean).norm() / clean.norm()) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("rotated", [False, True])
def test_ablation_tells_every_circuit_from_the_rest(hosts, rotated):
    host = hosts[rotated]
    found = {site: (truth.read, truth.write) for site, truth in host.truths.items()}
    units = {site: Factors(*pair, weight=pair[0] @ pair[1]) for site, pair in found.items()}
    for program in PROGRAMS:
        scores = attribute(host.model, units, host.tasks[program], score="ablation", positions="all").scores
        assert circuit_aurocs(host.truths, host.circuits[program], found, scores) == (1, 1), program


def test_a_saturated_attention_hides_units_from_gradients(hosts):
    """The known limit of first-order scores: what the second layer's keys read has no gradient."""
    host = hosts[False]
    found = {site: (truth.read, truth.write) for site, truth in host.truths.items()}
    units = {site: Factors(*pair, weight=pair[0] @ pair[1]) for site, pair in found.items()}
    scores = attribute(host.model, units, host.tasks["induction"]).scores
    assert circuit_aurocs(host.truths, host.circuits["induction"], found, scores)[0] == pytest.approx(0.75)


@pytest.mark.parametrize("noise", [0.0, 0.01, pytest.param(0.1, marks=pytest.mark.slow)])
def test_swd_finds_the_units_of_a_compiled_host(noise):
    """The known answer: on the axes, at small noise, every unit and every entry, by the solver's defaults."""
    host = compiled(noise=noise, prompts=12)
    for layer, site in enumerate(SITES):
        truth = host.truths[site]
        weight = host.model.blocks[layer].attn.W_O.detach().flatten(0, 1)
        found = solve(weight, edges=truth.edges, units=truth.n_units)
        assert support_f1(truth, found.read, found.write) == 1.0
        assert mmcs(truth, found.read, found.write) > (0.999 if noise < 0.1 else 0.99)
