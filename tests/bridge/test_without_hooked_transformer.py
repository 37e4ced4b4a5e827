"""What must work on every transformer_lens, also on 4.x, which has no HookedTransformer: importing, solving, files, refusals.

CI runs this folder a second time with the newest 4.x.
"""

import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

import swd_lens as swd
from swd_lens import cli
from swd_lens.hosts.load import load_host
from tests import families

HAS_HOOKED_TRANSFORMER = int(metadata.version("transformer_lens").split(".")[0]) < 4


def test_importing_swd_lens_does_not_touch_hooked_transformer():
    code = (
        "import sys, swd_lens, swd_lens.cli; "
        "sys.exit('swd_lens.hosts.hooked' in sys.modules)"  # the only module that needs it at import
    )
    assert subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=False).returncode == 0


@pytest.mark.skipif(HAS_HOOKED_TRANSFORMER, reason="this transformer_lens has HookedTransformer")
def test_asking_for_a_hooked_transformer_says_that_there_is_none(tmp_path):
    for name in ("gpt2", str(families.checkpoint("gpt2"))):
        with pytest.raises(swd.UnsupportedHostError, match=r"has no HookedTransformer; .*kind=\"bridge\""):
            load_host(name, kind="hooked")
    with pytest.raises(ImportError, match=r"has no HookedTransformer; .*kind=\"bridge\""):
        swd.load_default_model(kind="hooked")
    result = CliRunner().invoke(cli.app, ["demo", "--host", "hooked", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1 and "has no HookedTransformer" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(HAS_HOOKED_TRANSFORMER, reason="this transformer_lens has HookedTransformer")
def test_auto_loads_bridges():
    assert type(swd.load_default_model()).__name__ == "TransformerBridge"
    assert type(load_host(str(families.checkpoint("gpt2")))).__name__ == "TransformerBridge"
