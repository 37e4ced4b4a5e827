"""The table of bases: what counts as fair beside a factorization, by hand."""

from tests.benchmarks.bases import methods
from tests.benchmarks.fair import MATCHED, TRIES, matched_rows


def measured(ce_delta, recovered, drop, kl=0.0):
    circuits = {"recovered": [1, recovered, 0.91], "drop": [1, drop, 0.6]}
    return {"ce_delta": ce_delta, "kl": kl, **{of: c if c[1] else [None] * 3 for of, c in circuits.items()}}


def test_rivals_have_as_many_tries_and_all_of_them_are_made():
    assert len({len(tries) for tries in TRIES.values()}) == 1
    assert all(method in methods() for tries in TRIES.values() for method in tries)


def test_the_fewest_edges_at_no_worse_ce_whatever_the_rivals_sparsity():
    """A CE .001 above SWD's counts, .0011 does not; a circuit no prefix reaches counts for nothing, nor a further try."""
    rows = matched_rows(
        "agreement",
        "blocks.0.mlp_out",
        {
            "SWD s=0.5": measured(0.002, 900, None),
            "pruned s=0.5": measured(0.0031, 10, 10),
            "pruned s=0.25": measured(0.003, 70, 60),
            "neurons": measured(0.0, 1, 1),
            "from neurons, 0.01 of K, s=0.75": measured(-0.5, 50, None),
            "from neurons, 0.05 of K, s=0.5": measured(0.001, 60, 40),
            "from neurons, 0.03 of K, s=0.5": measured(0.001, 4, 4),
        },
    )
    [row] = rows  # there is no SWD of s=0.75
    assert dict(zip(MATCHED, row, strict=True)) == {
        "task": "agreement",
        "site": "blocks.0.mlp_out",
        "SWD": "s=0.5, CE +0.0020",
        "recovered 0.9: SWD": "900 [0.91]",
        "recovered 0.9: from neurons": "50 [0.91] (0.01, s=0.75)",
        "recovered 0.9: pruned": "70 [0.91] (s=0.25)",
        "half drop: SWD": "",
        "half drop: from neurons": "40 [0.60] (0.05, s=0.5)",
        "half drop: pruned": "60 [0.60] (s=0.25)",
    }


def test_the_fewest_edges_at_no_worse_kl_whatever_the_ce():
    """A KL .001 above SWD's counts, .0011 does not."""
    [row] = matched_rows(
        "agreement",
        "blocks.0.mlp_out",
        {
            "SWD s=0.75": measured(-0.3, 900, 800, kl=0.0005),
            "pruned s=0.5": measured(0.3, 10, 10, kl=0.0016),
            "pruned s=0.25": measured(0.2, 70, 60, kl=0.0015),
            "from neurons, 0.01 of K, s=0.75": measured(0.1, 50, 40, kl=0.0),
        },
        by="KL",
    )
    assert row[2:] == [
        "s=0.75, KL +0.0005",
        "900 [0.91]",
        "50 [0.91] (0.01, s=0.75)",
        "70 [0.91] (s=0.25)",
        "800 [0.60]",
        "40 [0.60] (0.01, s=0.75)",
        "60 [0.60] (s=0.25)",
    ]
