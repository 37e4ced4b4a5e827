"""Every architecture of the page "Which models": the host is transformers' model, every matrix a site, or it is refused."""

from importlib import metadata

import pytest

from tests import families
from tests.which_models import PAGE, Tried

# What holds the rest of their matrices' entries: depthwise convolutions and scans; experts that are computed in other ways.
PARTLY_DENSE = {
    *("FalconH1", "FalconMamba", "Jamba", "Lfm2", "Lfm2Moe", "Mamba", "Mamba2", "OlmoHybrid", "Rwkv"),
    *("DeepseekV4", "JetMoe"),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", sorted(families.ARCHITECTURES))
def test_it_is_transformers_model_or_refused(name):
    tried = Tried.of(name)
    if metadata.version("transformer_lens").startswith("3."):
        assert tried.row() in PAGE.read_text().splitlines()
    if tried.refused is None:
        assert tried.logits < 1e-5 and tried.exact < 1e-5 and tried.restored
        assert (tried.share < 0.99) == (name in PARTLY_DENSE)
    else:
        assert "transformers' own model" in tried.refused
