"""Learned baselines as a first user takes them in hand: NumPy's numbers, what to keep, states of hosts, folders, printing."""

import numpy as np
import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import TrainError, UnsupportedHostError
from swd_lens.cli.baselines import parsed_settings
from swd_lens.hosts import find_sites
from swd_lens.study.run_study import require_surface
from swd_lens.train.baselines import LearnedUnits
from tests.micro import random_split, random_tokens, toy_model
from tests.train.conftest import everything

pytestmark = pytest.mark.filterwarnings("ignore:the mean margin of")  # of a model with random weights

SITE = "blocks.1.mlp_out"
TOKENS = random_tokens(24, 10)
QUICK = {"n_tokens": 150, "tokens_per_step": 50, "progress": False}


@pytest.fixture(scope="module")
def units(model):
    return baselines.transcoder(model, SITE, TOKENS, **QUICK)


def bits(units):
    return {name: t.numpy().tobytes() for name, t in units.checkpoints[units.tokens].items()}


def test_numbers_of_numpy_are_numbers(model, units):
    """As a sweep over np.arange or np.geomspace gives them; the folder's index holds plain ones."""
    sweep = {**QUICK, "n_tokens": np.int64(150), "seed": np.int64(42), "l1": np.float32(5e-5)}
    made = baselines.transcoder(model, SITE, TOKENS, keep=(n for n in np.array([100])), **sweep)
    assert list(made.checkpoints) == [100, 150] and type(made.provenance["settings"]["n_tokens"]) is int
    assert bits(baselines.transcoder(model, SITE, TOKENS, **{**QUICK, "n_tokens": np.int64(150)})) == bits(units)
    at = units.at(1e2)  # a count written as a float
    assert type(at.tokens) is int and repr(at) == repr(units.at(100)) and at[SITE].provenance["tokens"] == 100


def test_what_is_there_is_named(model, units, tmp_path):
    with pytest.raises(KeyError, match=r"no units for site 'blocks\.0\.mlp_out'; these are of blocks\.1\.mlp_out"):
        units["blocks.0.mlp_out"]
    assert "blocks.0.mlp_out" not in units and units.get("blocks.0.mlp_out") is None
    assert repr(units.checkpoints) == "Trajectory(after 50, 100, 150 tokens, in memory)"
    units.save(tmp_path)
    assert repr(LearnedUnits.load(tmp_path).checkpoints).endswith(f"in {tmp_path})")
    with pytest.raises(TrainError, match=r"units\.json holds no units\.json"):  # the file itself
        LearnedUnits.load(tmp_path / "units.json")


def test_saving_where_something_is(model, units, tmp_path):
    """Units saved into a run's folder would be read as its result by the same call; of other units nothing stays behind."""
    run, saved = tmp_path / "run", tmp_path / "saved"
    trained = baselines.transcoder(model, SITE, TOKENS, out=run, seed=1, **QUICK)
    with pytest.raises(TrainError, match=r"holds a run \(run\.json\); units saved there would pass for its result"):
        units.save(run)
    trained.save(run)  # into its own
    assert bits(baselines.transcoder(model, SITE, TOKENS, out=run, seed=1, **QUICK)) == bits(trained)
    trained.save(saved)
    (saved / "weights" / "mine.pt").write_bytes(b"mine")  # not units': it stays
    other = baselines.transcoder(model, SITE, TOKENS, keep=(), **QUICK)
    other.save(saved)
    assert [path.name.split(".")[0] for path in sorted((saved / "weights").iterdir())] == ["000000000000150", "mine"]
    assert bits(LearnedUnits.load(saved)) == bits(other)
    LearnedUnits.load(saved).save(saved)
    assert bits(LearnedUnits.load(saved)) == bits(other)


def test_a_host_made_in_inference_mode(model, units):
    """What trains beside it works, to the same bits; what trains inside it is refused, and nothing stays on the host."""
    with torch.inference_mode():
        host = toy_model()
    before = everything(host)
    assert bits(baselines.transcoder(host, SITE, TOKENS, **QUICK)) == bits(units)
    recon = baselines.vpd_recon(host, SITE, TOKENS, **QUICK)
    assert bits(recon) == bits(baselines.vpd_recon(model, SITE, TOKENS, **QUICK))
    for train, site in ((baselines.vpd_kl, SITE), (baselines.vpd_recon, "blocks.0.mlp")):
        with pytest.raises(UnsupportedHostError, match=r"made under torch\.inference_mode\(\)"):
            train(host, site, TOKENS, **QUICK)
        assert everything(host) == before


def test_what_is_no_token_rows_is_told(model):
    for text in ("The cat sat.", ["The cat sat.", "The dog ran."], [[1, 2, 3], [1, 2]], None, [torch.ones(3), torch.ones(3)]):
        with pytest.raises(swd.TokenError, match=r"tokens must be \(rows, pos\) integers, and this (str|list|NoneType) cannot"):
            baselines.transcoder(model, SITE, text, **QUICK)
    with pytest.raises(swd.TokenError, match=r"tokens are a generator, .* give TokenStream\(lambda: "):
        baselines.transcoder(model, SITE, (row for row in TOKENS), **QUICK)


def test_a_hosts_dtype_is_kept_and_training_is_in_float32():
    for dtype, train, site in (
        (torch.bfloat16, baselines.transcoder, "blocks.0.mlp"),
        (torch.float16, baselines.vpd_kl, SITE),
        (torch.float64, baselines.vpd_recon, SITE),
    ):
        host = toy_model().to(dtype)
        made = train(host, site, TOKENS, **{**QUICK, "n_tokens": 50})
        assert {t.dtype for t in made.checkpoints[50].values()} <= {torch.float32, torch.int64}
        with torch.no_grad(), swd.attach(host, made):
            logits, cache = host.run_with_cache(TOKENS[:2])
        assert logits.dtype == dtype
        assert {cache[name].dtype for name in cache if "_unit" in name} == {dtype}


def test_several_layers_are_one_surface(model, units):
    """{**a, **b}, with factors among them, too: one ranking, one curve."""
    vpd = baselines.vpd_recon(model, "blocks.0.mlp", TOKENS, **QUICK)
    factors = swd.factorize(model, "blocks.0.attn_o", sparsity=0.5, preset="quick", outer_iterations=4, progress=False)
    everywhere = {**units, **vpd, **factors}
    split = random_split(8)
    scores = swd.attribute(model, everywhere, split)
    curve = swd.evaluate(model, everywhere, split, scores, grid=[0], random_sets=0)
    assert curve.rows["units"].iloc[-1] == sum(one.n_units for one in everywhere.values())
    assert curve.rows["edges"].iloc[-1] == units.edges + vpd.edges + factors.edges
    assert set(vpd) == {"blocks.0.mlp_in", "blocks.0.mlp_out"} and vpd.n_units == 64 and vpd.edges == 64 * (16 + 32)
    # And they are compared with others.
    others = [random_split(8, name=name, seed=seed) for name, seed in (("validation", 2), ("test", 1))]
    task, methods = swd.Task("by hand", split, *others, "by hand", False), {"SVD": baselines.svd(model, SITE), "TC": units}
    table = swd.compare(model, methods, task, tokens=TOKENS, evaluation={"random_sets": 0}).table()
    assert list(table["method"]) == ["SVD", "TC"] and table["CE difference"].notna().all()


def test_one_sites_units_beside_a_study_and_a_setting_given_twice_are_checked(model, units):
    require_surface(model, "Transcoder", units[SITE], find_sites(model, SITE))
    with pytest.raises(ValueError, match=r"Transcoder replaces blocks\.1\.mlp_out, this surface is blocks\.0\.mlp_out"):
        require_surface(model, "Transcoder", units[SITE], find_sites(model, "blocks.0.mlp_out"))
    assert parsed_settings(["l1=1e-4", "width=4x"], 100) == {"n_tokens": 100, "l1": 1e-4, "width": "4x"}
    for given, n_tokens in ((["n_tokens=50"], 100), (["l1=0.1", "l1=0.2"], None)):
        with pytest.raises(ValueError, match=r"--set (n_tokens=50|l1=0\.2): \w+ is given twice"):
            parsed_settings(given, n_tokens)
