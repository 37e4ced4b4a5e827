"""What is known of families by name, and what a model's settings say."""

import pytest

from swd_lens.hosts.families import FAMILIES, facts_of, family_of, module_paths
from swd_lens.hosts.sites import KINDS
from tests import families
from tests.micro import toy_model


def test_records_name_kinds_that_there_are():
    assert all(kind in KINDS for family in FAMILIES.values() for kind in family.modules)
    names = ("mlp.c_proj", "mlp.dense_4h_to_h", "mlp.down_proj", "output.dense")
    assert module_paths(3, "mlp_out") == [f"{blocks}.3.{name}" for blocks in ("h", "layers", "layer") for name in names]
    assert family_of("GPT2LMHeadCustomModel").packed and family_of("GPTNeoXForCausalLM").packed
    assert family_of("BertForPreTraining").encoder and family_of("HubertModel").encoder
    unknown = family_of(None)
    assert not (unknown.packed or unknown.encoder or unknown.modules) and family_of("OlmoForCausalLM") == unknown


@pytest.mark.parametrize(
    ("name", "norm", "positions", "causal", "packed"),
    [
        ("gpt2", "layer", "learned", True, True),
        ("pythia", "layer", "rotary", True, True),
        ("llama", "rms", "rotary", True, False),
        ("bert", "layer", "learned", False, False),
    ],
)
def test_facts_of_bridges(name, norm, positions, causal, packed):
    facts = facts_of(families.bridge(name))
    assert facts.bridge and (facts.norm, facts.positions, facts.causal) == (norm, positions, causal)
    assert facts.reads_out == causal and facts.family.packed == packed


def test_facts_are_read_anew():
    model = toy_model()
    facts = facts_of(model)
    assert not facts.bridge and facts.norm == "layer" and facts.score_cap is None and not facts.mixes_neurons
    model.cfg.normalization_type, model.cfg.act_fn, model.cfg.output_logits_soft_cap = None, "solu_ln", 30.0
    facts = facts_of(model)
    assert facts.norm is None and facts.mixes_neurons and facts.logit_cap == 30.0
