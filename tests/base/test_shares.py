"""fewest_with: by hand."""

import torch

from swd_lens.base.shares import fewest_with


def test_the_fewest_units_with_a_share_by_hand():
    gains = torch.tensor([[1.0, 6.0, 3.0], [0.0, 0.0, 0.0]])
    edges = torch.tensor([10, 20, 40])
    # 6 of 10 are a share of .6; .7 takes the second (3), .95 the third.
    for share, wanted in ((0.5, [20, 1]), (0.7, [60, 2]), (0.95, [70, 3]), (1.0, [70, 3])):
        assert fewest_with(share, gains, edges).tolist() == [wanted, [0, 0]]
