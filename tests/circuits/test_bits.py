"""Bits: against binomials of whole numbers, for every kind of unit source, and what a circuit makes of them."""

import math

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits.bits import VALUE_BITS, selection_bits, unit_bits, unit_bits_of
from swd_lens.units import UnitSet
from swd_lens.units.factors import Factors
from tests.contract import UNIT_SOURCES, saelens_sae_on_input, swd_zero_data
from tests.micro import random_split

SITE = "blocks.1.mlp_out"


def by_hand(reads, writes, d_in, d_out):
    """Bits of one unit, its binomials as whole numbers."""
    if reads == 0 or writes == 0:
        return 0.0
    return math.log2(math.comb(d_in, reads)) + math.log2(math.comb(d_out, writes)) + 16 * (reads + writes)


@pytest.mark.parametrize(("d_in", "d_out"), [(7, 3), (512, 128), (3072, 768)])
def test_bits_are_those_of_whole_binomials(d_in, d_out):
    generator = torch.Generator().manual_seed(0)
    reads = torch.cat([torch.tensor([0, 1, 0, d_in, d_in]), torch.randint(0, d_in + 1, (40,), generator=generator)])
    writes = torch.cat([torch.tensor([1, 0, 0, d_out, 1]), torch.randint(0, d_out + 1, (40,), generator=generator)])
    bits = unit_bits(reads, writes, d_in, d_out)
    expected = [by_hand(r, w, d_in, d_out) for r, w in zip(reads.tolist(), writes.tolist(), strict=True)]
    assert bits.dtype == torch.float64 and bits.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-7)
    # A dense unit's support goes without saying.
    assert bits[3] == pytest.approx(VALUE_BITS * (d_in + d_out), rel=1e-12)


@pytest.mark.parametrize(("n", "k"), [(5, 0), (5, 5), (5, 2), (2048, 100), (30_000, 12_345)])
def test_which_units_a_circuit_has(n, k):
    assert selection_bits(n, k) == pytest.approx(math.log2(math.comb(n, k)), rel=1e-10, abs=1e-9)


def test_of_factors_nonzeros_count_and_of_exact_controls_every_entry(model):
    read = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    write = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 5.0]])
    bits = unit_bits_of({"a": Factors(read, write)})["a"]
    assert bits.tolist() == pytest.approx([by_hand(1, 1, 4, 2), 0.0, by_hand(3, 1, 4, 2)])
    svd = baselines.svd(model, SITE)
    assert unit_bits_of(svd)[SITE].tolist() == pytest.approx([16 * (32 + 16)] * 16)
    # An input that writes everything: which one it is, and its row.
    assert unit_bits_of(baselines.neurons(model, SITE))[SITE].tolist() == pytest.approx([by_hand(1, 16, 32, 16)] * 32)
    sparse = swd_zero_data(model, SITE)
    f = sparse[SITE]
    expected = [by_hand(int((f.read[:, i] != 0).sum()), int((f.write[i] != 0).sum()), f.d_in, f.d_out) for i in range(f.n_units)]
    assert unit_bits_of(UnitSet.of(model, sparse))[SITE].tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["transcoder", "vpd_recon", "channels", "saelens_sae_on_input"])
def test_of_encode_decode_pairs_what_their_edges_are_of(model, name):
    if name == "saelens_sae_on_input":
        pytest.importorskip("sae_lens")
        assert UNIT_SOURCES[name] is saelens_sae_on_input
    units = UnitSet.of(model, UNIT_SOURCES[name](model, SITE))[SITE]
    bits = unit_bits_of({SITE: units})[SITE]
    edges = torch.where(units.valid_units, units.edges_per_unit, 0).tolist()
    if name == "channels":  # one support: what W_in and b_in show, and the row of W_out
        places = 16 + 1 + 16
        expected = [math.log2(math.comb(places, e)) + 16 * e for e in edges]
    elif name == "saelens_sae_on_input":  # it writes through W, which is dense; unit 5 writes nothing
        reads = (units.coder.W_enc != 0).sum(0).tolist()
        expected = [by_hand(r, 16 if e else 0, 32, 16) for r, e in zip(reads, edges, strict=True)]
        assert bits[5] == 0
    else:
        expected = [16.0 * e for e in edges]  # dense
    assert bits.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-6)


class Counted:
    """Units of which nothing is known but their edges."""

    d_in, d_out, n_units, edges, sparsity, provenance = 3, 2, 3, 11, 0.0, {}
    edges_per_unit, valid_units = torch.tensor([2, 5, 4]), torch.tensor([True, True, False])


def test_a_source_that_says_its_edges_alone():
    bits = unit_bits_of({"a": Counted()})["a"]
    assert bits.tolist() == pytest.approx([math.log2(10) + 32, 80.0, 0.0])


def test_a_circuit_has_the_bits_of_its_units_and_of_which_they_are(model, tmp_path):
    factors = swd_zero_data(model, [SITE, "blocks.0.mlp_out"])
    scores = swd.attribute(model, factors, random_split(8))
    circuit = swd.Circuit.of(factors, scores, [f"{SITE}/3", "blocks.0.mlp_out/1"])
    bits = unit_bits_of(factors)
    n_units = factors.n_units
    expected = float(bits[SITE][3] + bits["blocks.0.mlp_out"][1]) + math.log2(math.comb(n_units, 2))
    assert circuit.n_bits == pytest.approx(expected)
    assert circuit.table()["bits"].tolist() == [float(bits[SITE][3]), float(bits["blocks.0.mlp_out"][1])]
    circuit.save(tmp_path / "c.safetensors")
    loaded = swd.Circuit.load(tmp_path / "c.safetensors")
    assert loaded.n_bits == circuit.n_bits and loaded.table().equals(circuit.table())
    other = swd.Circuit.of(factors, scores, [f"{SITE}/3"])
    assert (circuit & other).n_bits == other.n_bits and (circuit - other).n_units == 1
    assert (circuit - circuit).n_bits == 0.0
    silent = swd.Circuit(circuit.units, scores, circuit.edges, {"kind": "own"})  # without bits it says nothing of them
    silent.save(tmp_path / "s.safetensors")
    assert swd.Circuit.load(tmp_path / "s.safetensors").n_bits is None and "bits" not in silent.table()
    assert (silent | circuit).n_bits == circuit.n_bits
