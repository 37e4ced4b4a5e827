"""save_checkpoint: what transformers loads from the folder gives the host's logits, whatever the host and its architecture."""

from importlib import metadata

import pytest
import torch
import transformers

import swd_lens as swd
from tests import families

pytestmark = pytest.mark.filterwarnings("ignore:.* calibration tokens for")  # few, to be quick
QUICK = {"preset": "quick", "outer_iterations": 2, "refine_rounds": 0, "progress": False}
KINDS = ("bridge", "hooked") if metadata.version("transformer_lens") < "4" else ("bridge",)
ROW = families.some_tokens(2, 12)
HOOKED = {"gpt2", "pythia", "llama"}
CASES = [(name, kind) for name in ("gpt2", "pythia", "llama", "qwen3", "gemma2", "opt") for kind in KINDS]


def logits_of(folder):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ROW).logits


def near(found, expected, share=1e-5):
    return (found - expected).abs().max() < share * expected.abs().max()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[1] == "bridge" or case[0] in HOOKED])
def test_transformers_loads_the_replaced_model(name, kind, tmp_path):
    model = getattr(families, kind)(name)
    factors = swd.factorize(model, "all", sparsity=0.5, tokens=families.some_tokens(4, 32), **QUICK)
    assert swd.study.save_checkpoint(model, factors, tmp_path / "replaced") == tmp_path / "replaced"
    with torch.no_grad(), swd.attach(model, factors):
        expected = model(ROW)
    with torch.no_grad():
        dense = model(ROW)
    found = logits_of(tmp_path / "replaced")
    assert near(found, expected) and not near(found, dense, 1e-3)
    # A host of the folder is a host like any other.
    again = swd.load_host(str(tmp_path / "replaced"), kind)
    with torch.no_grad():
        assert near(again(ROW), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_host_in_half_precision_keeps_its_precision(dtype, tmp_path):
    """Its products are rounded once where the host's are rounded twice: equal to the steps of the dtype."""
    model = swd.load_host(str(families.checkpoint("llama")), "bridge", dtype=dtype)
    factors = swd.factorize(model, "mlp_out", sparsity=0.5, tokens=families.some_tokens(4, 32), **QUICK)
    swd.study.save_checkpoint(model, factors, tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert network.dtype == dtype
    with torch.no_grad(), swd.attach(model, factors):
        assert near(network.eval()(ROW).logits.float(), model(ROW).float(), 8 * torch.finfo(dtype).eps)


def circuit_of(model, factors, positions="all", mean_over="all_tokens"):
    """Half of the units of each site, by their scores on a task."""
    task = swd.load_task("gendered_pronoun", model, n_train=12, n_validation=8, n_test=8)
    scores = swd.attribute(model, factors, task, positions=positions, mean_over=mean_over)
    units = [(site, i) for site, of in scores.scores.items() for i in of.abs().argsort(descending=True)[: len(of) // 2].tolist()]
    return swd.Circuit.of(factors, scores, units)


@pytest.mark.filterwarnings("ignore")  # a random model does no task
# With biases, and with none until the configuration asks.
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("name", "ablation"), [("gpt2", "zero"), ("llama", "mean"), ("gpt2", "mean")])
def test_a_circuit_becomes_its_units_and_a_constant(name, ablation, tmp_path):
    model = families.bridge(name)
    factors = swd.factorize(model, ["attn_o", "mlp_out"], sparsity=0.5, tokens=families.some_tokens(4, 32), **QUICK)
    circuit = circuit_of(model, factors)
    swd.study.save_checkpoint(model, factors, tmp_path, circuit=circuit, ablation=ablation)
    with torch.no_grad(), circuit.attach(model, factors, ablation=ablation):
        expected = model(ROW)
    with torch.no_grad(), swd.attach(model, factors):
        whole = model(ROW)
    assert near(logits_of(tmp_path), expected) and not near(whole, expected, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_model_has_a_checkpoint_of_its_own(kind, tmp_path):
    model = swd.load_default_model(kind=kind)
    factors = swd.baselines.svd(model, "mlp_out")
    swd.study.save_checkpoint(model, factors, tmp_path)
    with torch.no_grad():
        assert near(logits_of(tmp_path), model(ROW))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).vocab_size == model.cfg.d_vocab


@pytest.mark.filterwarnings("ignore")
def test_what_no_checkpoint_can_hold_is_refused_and_nothing_is_written(tmp_path):
    model = families.bridge("gemma2")
    factors = swd.factorize(model, "mlp_out", sparsity=0.5, tokens=families.some_tokens(4, 32), **QUICK)
    with pytest.raises(swd.UnsupportedHostError, match=r"mlp_out has no bias in Gemma2ForCausalLM.*ablation=\"zero\""):
        swd.study.save_checkpoint(model, factors, tmp_path / "new", circuit=circuit_of(model, factors))
    one_position = circuit_of(model, factors, "scoring", "scoring")
    with pytest.raises(ValueError, match="a checkpoint ablates at every position"):
        swd.study.save_checkpoint(model, factors, tmp_path / "new", circuit=one_position)
    edited = families.bridge("gemma2")
    with torch.no_grad():
        edited.blocks[1].mlp.out.original_component.weight.mul_(2.0)
    with pytest.raises(swd.UnsupportedHostError, match=r"blocks\.1\.mlp_out is no matrix of the checkpoint"):
        swd.study.save_checkpoint(edited, swd.baselines.svd(edited, "mlp_out"), tmp_path / "new")
    with torch.no_grad():
        edited.blocks[1].mlp.out.original_component.weight.div_(2.0)
        edited.unembed.original_component.weight.mul_(2.0)
    with pytest.raises(swd.UnsupportedHostError, match="the checkpoint's logits are off by"):
        swd.study.save_checkpoint(edited, swd.baselines.svd(edited, "mlp_out"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
