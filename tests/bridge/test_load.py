"""load_host(kind="bridge"): folders of every family compute what transformers computes, on transformer_lens 3.9 and 4.x."""

import pytest
import torch

from swd_lens.hosts.load import load_host
from tests import families


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_folder_as_a_bridge_computes_what_transformers_computes(family):
    tokens, model = families.some_tokens(), families.bridge(family)
    with torch.no_grad():
        expected, found = families.reference(family)(tokens).logits, model(tokens)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert type(model).__name__ == "TransformerBridge" and not model.training
    assert model.cfg.model_name == families.checkpoint(family).name  # and not where the folder lies


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give a Hugging Face checkpoint folder"):
        load_host(str(tmp_path), kind="bridge")
