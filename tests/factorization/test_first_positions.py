"""First positions of rows: their part of a Gram, and the relMSE at the others."""

import pytest
import torch

import swd_lens as swd
from swd_lens.factorization.grams import FirstPositions, collect_grams
from swd_lens.factorization.workers.parcel import pack_solved, pack_task, unpack_solved, unpack_task
from swd_lens.hosts import find_sites, host_of
from tests.micro import random_tokens, toy_model

TOKENS = random_tokens(6, 8)
SITES = ["blocks.0.mlp_out", "blocks.1.attn_o"]
OPTIONS = {"sparsity": 0.5, "preset": "paper", "outer_iterations": 4, "progress": False}


def with_a_sink():
    """A host whose first position is far larger than any other at what blocks.0.mlp_out reads."""
    model = toy_model()
    model.add_hook("blocks.0.mlp.hook_post", lambda h, hook: torch.cat([300 * h[:, :1], h[:, 1:]], 1), is_permanent=True)
    return model


def read_by(model, site):
    """(row, pos, d_in), what a site reads."""
    seen = []
    host = host_of(model)
    with torch.no_grad(), host.inputs(find_sites(model, site), lambda _, h: seen.append(h.clone())):
        host.run(TOKENS)
    return seen[0].double()


def error_at(f, weight, h):
    lost = h @ (weight - f.read @ f.write).double()
    return float(lost.square().sum() / (h @ weight.double()).square().sum())


def test_the_part_of_first_positions_is_theirs():
    model = toy_model()
    grams = collect_grams(model, find_sites(model, SITES), TOKENS, batch_size=4, dtype="float64")
    for site in SITES:
        h = read_by(model, site)[:, 0]
        first = grams.first[site].double()
        torch.testing.assert_close(first.T @ first, h.T @ h / TOKENS.numel(), rtol=1e-5, atol=1e-8)
        share = float((first.square().sum() / grams[site].diagonal().sum()).item())
        assert abs(share - grams.first_share[site]) < 1e-6


@pytest.mark.parametrize("calibration", ["sequential", "dense", "corrected"])
def test_relmse_of_others_is_measured_without_first_positions(calibration):
    model = with_a_sink()
    factors = swd.factorize(model, SITES, tokens=TOKENS, calibration=calibration, gram_dtype="float64", **OPTIONS)
    f, weight = factors[SITES[0]], host_of(model).weight(find_sites(model, SITES[0])[0])
    h = read_by(model, SITES[0])
    assert f.provenance["first_position_share"] > 0.999
    assert f.provenance["relmse"] == pytest.approx(error_at(f, weight, h), rel=1e-4)
    assert f.provenance["relmse_of_others"] == pytest.approx(error_at(f, weight, h[:, 1:]), rel=1e-3)
    assert f.provenance["relmse_of_others"] > 3 * f.provenance["relmse"]
    assert factors.table()["relMSE of others"][0] == f.provenance["relmse_of_others"]
    if calibration == "sequential":  # rows of one token have no others
        alone = swd.factorize(model, SITES[0], tokens=random_tokens(40, 1), **OPTIONS)[SITES[0]].provenance
        assert alone["relmse_of_others"] == alone["relmse"]


def test_a_process_hands_it_back():
    model = toy_model()
    site = find_sites(model, SITES[0])[0]
    grams = collect_grams(model, [site], TOKENS)
    task = swd.factorization.solve_task.SolveTask(
        site.name, host_of(model).weight(site), grams[site.name], preset="paper", first=grams.first[site.name]
    )
    solved = swd.factorization.solve_task.solve_task(unpack_task(pack_task(task)))
    assert solved.relmse_of_others is not None
    assert unpack_solved(pack_solved(solved)).relmse_of_others == solved.relmse_of_others


def test_many_rows_take_no_more_than_twice_d_in_vectors():
    kept, seen = FirstPositions(), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        h = torch.randn(7, 5, generator=generator)
        seen.append(h.double())
        kept.add(h)
    vectors, all_seen = kept.vectors(140).double(), torch.cat(seen)
    assert len(vectors) <= 10 + 7
    torch.testing.assert_close(vectors.T @ vectors, all_seen.T @ all_seen / 140, rtol=1e-5, atol=1e-6)
    assert kept.squares == pytest.approx(float(all_seen.square().sum()), rel=1e-6)
