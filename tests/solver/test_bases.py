"""The table of bases: what counts as fair beside a factorization, by hand."""

from tests.benchmarks.fair import MATCHED, matched_rows


def measured(ce_delta, sufficiency, drop, kl=0.0):
    return {"ce_delta": ce_delta, "kl": kl, "sufficiency": [1, sufficiency], "drop": [1, drop]}


def test_the_fewest_edges_at_no_worse_ce_whatever_the_rivals_sparsity():
    """A CE .001 above SWD's counts, .0011 does not; a circuit that no prefix reaches counts for nothing."""
    rows = matched_rows(
        "agreement",
        "blocks.0.mlp_out",
        {
            "SWD s=0.5": measured(0.002, 900, None),
            "pruned s=0.5": measured(0.0031, 10, 10),
            "pruned s=0.25": measured(0.003, 70, 60),
            "neurons": measured(0.0, 1, 1),
            "from neurons, 0.01 of K, s=0.75": measured(-0.5, 50, None),
            "from neurons, 0.15 of K, s=0.5": measured(0.001, 60, 40),
            "from neurons, weighed, 0.03 of K, s=0.5": measured(0.001, 45, 41),
            "weighed, pruned s=0.375": measured(0.001, 69, 61),
        },
    )
    [row] = rows  # there is no SWD of s=0.75
    assert dict(zip(MATCHED, row, strict=True)) == {
        "task": "agreement",
        "site": "blocks.0.mlp_out",
        "SWD": "s=0.5, CE +0.0020",
        "suff. 0.9: SWD": "900",
        "suff. 0.9: from neurons": "45 (weighed, 0.03, s=0.5)",
        "suff. 0.9: pruned": "70 (s=0.25)",
        "suff. 0.9: weighed, pruned": "69 (s=0.375)",
        "half drop: SWD": "",
        "half drop: from neurons": "40 (0.15, s=0.5)",
        "half drop: pruned": "60 (s=0.25)",
        "half drop: weighed, pruned": "61 (s=0.375)",
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
        "900",
        "50 (0.01, s=0.75)",
        "70 (s=0.25)",
        "",
        "800",
        "40 (0.01, s=0.75)",
        "60 (s=0.25)",
        "",
    ]
