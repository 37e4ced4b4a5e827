"""How sites of a set and units are named."""

import numpy as np
import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.hosts.sites import Site
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.keys import read_unit, read_units

NAMES = ["blocks.0.attn_o", "blocks.0.mlp_out", "blocks.1.mlp_in", "blocks.1.mlp_out"]


def some(*names: str) -> FactorSet:
    made = {name: Factors(torch.eye(2), torch.eye(2), provenance={"site": name}) for name in names}
    return FactorSet(made, {"preset": "by hand", "probe_tokens": [1], "probe_sites": list(names)})


SET = some(*NAMES)


@pytest.mark.parametrize(
    "key",
    [
        "blocks.1.mlp_out",
        "blocks.1.mlp.W_out",
        "h.1.mlp.c_proj",
        "transformer.h.1.mlp.c_proj",
        "blocks.1.hook_mlp_out_unit",
        ("mlp_out", 1),
        ("mlp_out_unit", 1),
        ("mlp_out", np.int64(1)),
        Site(1, "mlp_out", 2, 2),
    ],
)
def test_a_name_of_one_matrix_gives_its_factors(key):
    assert SET[key] is SET["blocks.1.mlp_out"] and key in SET


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("mlp_out", ["blocks.0.mlp_out", "blocks.1.mlp_out"]),
        ("*mlp_*", NAMES[1:]),
        ("blocks.0.*", NAMES[:2]),
        ("blocks.*.mlp.W_in", ["blocks.1.mlp_in"]),
        ("all", NAMES),
        ([("mlp_out", 1), "attn_o"], ["blocks.0.attn_o", "blocks.1.mlp_out"]),
        (["blocks.1.mlp_in"], ["blocks.1.mlp_in"]),
        (("attn_o", "mlp_in"), ["blocks.0.attn_o", "blocks.1.mlp_in"]),
    ],
)
def test_what_names_several_gives_a_subset(key, names):
    subset = SET[key]
    assert isinstance(subset, FactorSet) and list(subset) == names
    assert all(subset[name] is SET[name] for name in names)
    assert subset.provenance["preset"] == "by hand" and ("probe_tokens" in subset.provenance) == (names == NAMES)


@pytest.mark.parametrize("key", ["blocks.7.mlp_out", ("mlp_out", 7), "blocks.*.attn_q", "mlp_gate", ["mlp_out", "mlp_gate"]])
def test_a_key_that_names_nothing_is_answered_with_the_nearest(key):
    with pytest.raises(KeyError, match=r"no factors for site '.*' among this set's 4 sites\. Nearest: .*blocks\."):
        SET[key]
    if isinstance(key, str):
        assert key not in SET and SET.get(key) is None


def test_a_subset_is_saved_loaded_and_attached(tmp_path, default_model):
    whole = swd.factorize(
        default_model, ["blocks.2.mlp_out", "blocks.3.mlp_out"], sparsity=0.9, preset="quick", outer_iterations=2, progress=False
    )
    whole.save(tmp_path / "whole")
    subset = FactorSet.load(tmp_path / "whole")[["mlp_out"]]["*.3.*"]  # of what still lies in files
    subset.save(tmp_path / "part")
    loaded = FactorSet.load(tmp_path / "part")
    assert list(loaded) == ["blocks.3.mlp_out"] and loaded.provenance == subset.provenance != whole.provenance
    assert loaded["mlp_out", 3].provenance == whole["mlp_out", 3].provenance
    with swd.attach(default_model, loaded):
        _, cache = default_model.run_with_cache("The list is")
    assert "blocks.3.hook_mlp_out_unit" in cache.cache_dict and "blocks.2.hook_mlp_out_unit" not in cache.cache_dict


def test_a_set_of_a_matrix_without_a_host_has_its_name_alone():
    plain = FactorSet({"matrix": Factors(torch.eye(2), torch.eye(2))})
    assert plain["matrix"].edges == 4 and "matrix" in plain
    with pytest.raises(KeyError, match=r"no factors for site 'all' among this set's 1 sites\. Nearest: matrix"):
        plain["all"]


@pytest.mark.parametrize(
    "given",
    [
        "blocks.1.mlp_out/5",
        ("blocks.1.mlp_out", 5),
        ("blocks.1.mlp_out", np.int64(5)),
        ["blocks.1.mlp_out", torch.tensor(5)],
        (Site(1, "mlp_out", 2, 2), 5),
        {"unit": "blocks.1.mlp_out/5", "score": 1.0},
        pd.Series({"site": "blocks.1.mlp_out", "unit": 5}),
    ],
)
def test_the_forms_of_a_unit(given):
    assert read_unit(given) == ("blocks.1.mlp_out", 5) and type(read_unit(given)[1]) is int
    assert read_units(given) == [("blocks.1.mlp_out", 5)]


def test_among_known_sites_other_names_and_short_ones_are_read():
    for given in ("blocks.1.mlp.W_out/5", "h.1.mlp.c_proj/5", ("h.1.mlp.c_proj", 5), ("blocks.1.hook_mlp_out_unit", 5)):
        assert read_unit(given, NAMES) == ("blocks.1.mlp_out", 5)
    for given in (5, "5", np.int64(5), "mlp_in/5", ("mlp_in", 5)):
        assert read_unit(given, NAMES[2:3]) == ("blocks.1.mlp_in", 5)
    with pytest.raises(
        ValueError, match=r"unit 5 does not say of which site; there are blocks\.0\.attn_o, .*, blocks\.1\.mlp_out"
    ):
        read_unit(5, NAMES)
    for given in (3.5, True, None, ("blocks.1.mlp_out", 1.5)):
        with pytest.raises(ValueError, match="is no unit; a unit is"):
            read_unit(given, NAMES)


def test_several_units_come_as_lists_tables_and_what_has_units():
    pairs = [("blocks.0.mlp_out", 3), ("blocks.1.mlp_out", 5)]
    names = ["blocks.0.mlp_out/3", "blocks.1.mlp_out/5"]
    tables = pd.DataFrame({"unit": names, "cosine": 0.0}), pd.DataFrame(pairs, columns=["site", "unit"])
    for given in (pairs, names, iter(names), *tables, pd.Series(names)):
        assert read_units(given) == pairs
