"""Every architecture of the page "Which models": the host is transformers' model, every matrix a site, or it is refused."""

from importlib import metadata

import pytest
import torch

from swd_lens.base.errors import HostDiffersError
from swd_lens.hosts import host_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.held import norms_behind
from swd_lens.hosts.recording import recording
from swd_lens.hosts.sites import KINDS
from tests import families
from tests.which_models import PAGE, Tried

# Depthwise convolutions, scans and hyper-connections, which weigh much in these tiny checkpoints.
PARTLY_DENSE = {*("DeepseekV4", "FalconH1", "FalconMamba", "Jamba", "Lfm2", "Lfm2Moe", "Mamba", "Mamba2", "OlmoHybrid", "Rwkv")}
# Also at full size: the step sizes of their scans are a fiftieth of all.
SCANS = {"Mamba", "FalconMamba"}
# Their MLPs read a mix of what the norm makes of this position and of the one before, which a frozen run finds out.
MIXED = {"Rwkv"}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", sorted(families.ARCHITECTURES))
def test_it_is_transformers_model_or_refused(name):
    tried = Tried.of(name)
    if metadata.version("transformer_lens").startswith("3."):
        assert tried.row() in PAGE.read_text().splitlines()
    if tried.refused is None:
        assert tried.logits < 1e-5 and tried.exact < 1e-5 and tried.restored
        assert (tried.share < 0.99) == (name in PARTLY_DENSE)
        assert tried.full_share is None or (tried.full_share < 0.99) == (name in SCANS)
    else:
        assert "transformers' own model" in tried.refused


@pytest.mark.filterwarnings("ignore:.*hold matrices that are no sites")
@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", sorted(families.ARCHITECTURES))
def test_norms_stand_where_the_host_says(name):
    """A norm behind a matrix is given its output; a norm before one makes what it reads; both by the scale that we name."""
    try:
        model = families.loaded(name)
    except HostDiffersError:
        return  # of which the test above says that it is refused
    host, tokens = host_of(model), families.some_tokens(2, 6)
    known = [site for site in host.sites() if site.kind in KINDS]
    readers = [site for site in known if host.norm_before(site) is not None and name not in MIXED]
    writers = [site for site in known if site.kind in ("attn_o", "mlp_out")]
    norms = {id(norm): norm for site in writers if (norm := host.norm_behind(site)) is not None}
    with norms_behind(host, writers) as behind, recording(host, inputs=readers, outputs=writers) as seen:
        host.run(tokens)
    for site, (given, made) in behind.items():
        norm = host.norm_behind(next(writer for writer in writers if writer.name == site))
        torch.testing.assert_close(given.flatten(0, -2), seen.outputs[site].flatten(0, -2))
        weight, shift = host.norm_affine(norm).scale, host.norm_affine(norm).shift
        plain = (made - (0 if shift is None else shift)) / (1 if weight is None else weight)
        ratio = plain / given
        torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio), rtol=1e-3, atol=1e-3)
    centred = facts_of(model).norm == "layer"
    for site in readers if not norms else ():
        # With weight and shift taken off, RMSNorm leaves a mean square of 1, LayerNorm a mean of 0, too.
        affine, h = host.norm_before(site), seen.inputs[site.name].flatten(0, -2)
        plain = (h - (0 if affine.shift is None else affine.shift)) / (1 if affine.scale is None else affine.scale)
        torch.testing.assert_close(plain.square().mean(-1), torch.ones(len(plain)), rtol=1e-2, atol=1e-2)
        assert not centred or float(plain.mean(-1).abs().max()) < 1e-3
