"""Records that travel with factors: sketches and hashes of W, and probes, by hand."""

import pytest
import torch

from swd_lens.units.integrity import Offsets, Probe, fingerprint, sketch

# torch's CPU generator, seed 0, float64: the last of three standard normal numbers, then the last of two more.
R2, L1 = -2.1787893820745574, -1.084522342424021


def test_sketch_is_linear_and_fixed(monkeypatch):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    right, left = sketch(weight)
    scale_in, scale_out = torch.rand(7) + 0.5, torch.rand(5) + 0.5
    torch.testing.assert_close(sketch(scale_in[:, None] * weight)[0], scale_in * right)
    torch.testing.assert_close(sketch(weight * scale_out)[1], left * scale_out)
    # One nonzero entry, W[1, 2] = 2, shows the draws themselves: right[1] = 2 r[2], left[2] = 2 l[1].
    single = torch.zeros(2, 3)
    single[1, 2] = 2.0
    right, left = sketch(single)
    assert right.tolist() == pytest.approx([0.0, 2 * R2]) and left.tolist() == pytest.approx([0.0, 0.0, 2 * L1])
    assert right.dtype == left.dtype == torch.float32
    whole = sketch(weight)
    monkeypatch.setattr("swd_lens.units.integrity._TILE", 10)  # two rows at a time
    tiled = sketch(weight)
    torch.testing.assert_close(tiled[0], whole[0])
    torch.testing.assert_close(tiled[1], whole[1])


def test_probe_by_hand(monkeypatch):
    read = torch.tensor([[1.0, 0.0, -3.0, 0.5], [0.0, 1.0, 0.0, 0.5]])
    write = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    h = torch.tensor([1.0, 2.0])
    probe = Probe.of(h, read, write, k=2)  # z = (1, 2, -3, 1.5), y = (1 - 6, 2 + 3)
    assert probe.units.tolist() == [2, 1] and probe.z.tolist() == [-3.0, 2.0]
    assert probe.outputs.tolist() == [0, 1] and probe.y.tolist() == [-5.0, 5.0]
    assert probe.error(read, write) == 0.0
    changed = read.clone()
    changed[1, 1] = 1.25  # unit 1: 2.5 instead of 2; relative to the largest, 3. y_1: 5.5 instead of 5
    assert probe.error(changed, write) == pytest.approx(0.5 / 3)
    assert probe.error(read, write, Offsets(torch.tensor([9.0, 0.0, 0.3, 9.0]), -probe.y)) > 1
    changed = write.clone()
    changed[3, 1] = 3.0  # y_1: 6.5 instead of 5, by a unit that the probe does not look at
    assert probe.error(read, changed) == pytest.approx(1.5 / 5)
    whole = Probe.of(h, read, write, k=9)
    assert whole.units.tolist() == [2, 1, 3, 0] and whole.outputs.tolist() == [0, 1]
    monkeypatch.setattr("swd_lens.units.integrity._TILE", 2)  # one row at a time
    tiled = Probe.of(h, read, write, k=9)
    assert tiled.z.tolist() == [-3.0, 2.0, 1.5, 1.0] and tiled.y.tolist() == [-5.0, 5.0]
    # Zeros that are expected and computed, and zeros that are not; equal |z| in the order of the units.
    nothing = Probe.of(torch.zeros(2), read, write, k=2)
    assert nothing.units.tolist() == [0, 1] and nothing.error(read, write) == 0.0
    shifted = Offsets(torch.ones(4), torch.zeros(2))
    assert nothing.error(read, write, shifted) == float("inf")
    assert not probe.error(read * float("nan"), write) <= 1e-4
    assert not probe.error(read, write * float("nan")) <= 1e-4
    with pytest.raises(ValueError, match="looks at k=0 units"):
        Probe.of(h, read, write, k=0)
    with pytest.raises(ValueError, match="z of unit 0 is not finite"):
        Probe.of(torch.tensor([torch.inf, 0.0]), read, write)
    with pytest.raises(ValueError, match="y of output 1 is not finite"):
        Probe.of(h, read, torch.tensor([[1.0, torch.nan]] * 4))


def test_a_host_s_z_against_the_probe_by_hand():
    read, write = torch.eye(2), torch.tensor([[1.0, 3.0], [-1.0, 4.0]])
    probe = Probe.of(torch.tensor([1.0, 1.0]), read, write, k=2)  # z = (1, 1), y = (0, 7): output 1 first
    assert probe.misfit(torch.tensor([1.0, 1.0]), write) == ("z", 0.0)
    # Unit 1 is off by .1: z by a tenth of 1; y_1 by .4 and y_0 by .1, of 7.
    assert probe.misfit(torch.tensor([1.0, 1.1]), write) == ("z", pytest.approx(0.1))
    assert probe.misfit(torch.tensor([1.0, 1.0]), write * 2) == ("y", pytest.approx(7 / 10))  # terms 6 and 8: 10
    assert probe.misfit(torch.tensor([1.0, torch.nan]), write)[1] == float("inf")


def test_a_probe_does_not_change_with_its_input():
    h = torch.tensor([1.0, 2.0])
    probe = Probe.of(h, torch.eye(2), torch.eye(2))
    h.zero_()
    assert probe.input.tolist() == [1.0, 2.0] and probe.error(torch.eye(2), torch.eye(2)) == 0.0


def test_fingerprint_sees_float32_values_and_shape():
    weight = torch.arange(6.0).view(2, 3)
    for same in (weight.clone(), weight.double(), weight.T.contiguous().T):  # memory order does not matter
        assert fingerprint(weight) == fingerprint(same)
    for other in (weight.view(3, 2), weight + 1e-6, weight[:, :2]):
        assert fingerprint(weight) != fingerprint(other)
