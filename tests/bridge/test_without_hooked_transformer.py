"""What must work on every transformer_lens, also on 4.x, which has no HookedTransformer: importing, solving, files, refusals.

CI runs this folder a second time with the newest 4.x.
"""

import subprocess
import sys
from importlib import metadata

import pytest
import torch

import swd_lens as swd

HAS_HOOKED_TRANSFORMER = int(metadata.version("transformer_lens").split(".")[0]) < 4


def test_importing_swd_lens_does_not_touch_hooked_transformer():
    code = (
        "import sys, swd_lens, swd_lens.cli; "
        "sys.exit('swd_lens.hosts.hooked_transformer' in sys.modules)"  # the only module that needs it at import
    )
    assert subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=False).returncode == 0


def test_solving_and_files_need_no_host(tmp_path):
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    factors = swd.solve(weight, sparsity=0.4, outer_iterations=8)
    assert factors.relative_frobenius() < 0.6
    swd.FactorSet({"blocks.0.mlp_out": factors}).save(tmp_path)
    assert torch.equal(swd.FactorSet.load(tmp_path)["blocks.0.mlp_out"].read, factors.read)


def test_a_host_that_is_no_hooked_transformer_is_refused():
    with pytest.raises(swd.UnsupportedHostError, match="got Linear"):
        swd.find_sites(torch.nn.Linear(2, 2))


@pytest.mark.skipif(HAS_HOOKED_TRANSFORMER, reason="this transformer_lens has HookedTransformer")
def test_what_needs_hooked_transformer_says_so():
    from swd_lens.hosts.load import load_host

    with pytest.raises(swd.UnsupportedHostError, match="has no HookedTransformer"):
        load_host("gpt2")
    with pytest.raises(ImportError, match="HookedTransformer"):
        swd.load_default_model()
