"""Activations of a site: run once, shared between trainings, and what happens without room."""

import errno
from types import SimpleNamespace

import pytest
import torch

from swd_lens.train import activations
from tests.forwards import block_runs
from tests.train.baselines.test_methods import METHODS, SAME, TOKENS
from tests.train.conftest import bits_of_units as bits
from tests.train.conftest import everything, interrupt


@pytest.mark.parametrize("name", ["transcoder of an MLP", "vpd_recon"])
def test_several_passes_over_a_text_run_the_host_once(model, name, tmp_path, monkeypatch):
    text = torch.cat([TOKENS[:17], TOKENS[:3]])  # 20 rows, three of them twice, in two blocks; the last is short
    function, site, settings = METHODS[name]
    how = {**SAME, **settings, "n_tokens": 500}
    before = everything(model)
    with block_runs(model, 0) as runs:
        whole = function(model, site, text, **how)
    bias = 1 if name == "vpd_recon" else 0  # one row shows a site's bias
    assert runs.rows == 20 + bias
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            function(model, site, text, out=tmp_path / "out", **how)
    assert bits(function(model, site, text, out=tmp_path / "out", **how)) == bits(whole)
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["log.jsonl", "run.json", "units.json", "weights"] and everything(model) == before
    # Fewer passes, a stream, or more than the bound: batch by batch, and the same up to rounding.
    monkeypatch.setattr("swd_lens.train.activations.MOST_BYTES", 8)
    with block_runs(model, 0) as runs:
        plain = function(model, site, text, **how)
    assert runs.rows == 50 + 5 + bias  # the first batch once more, by which units begin
    assert plain.log["loss"].tolist() == pytest.approx(whole.log["loss"].tolist(), rel=1e-3)


def test_baselines_of_a_site_share_its_activations(model, tmp_path, monkeypatch):
    text, folder = TOKENS[:20], tmp_path / "activations"
    transcoder, site, settings = METHODS["transcoder"]
    how = {**SAME, **settings, "n_tokens": 500}
    whole = transcoder(model, site, text, **how)
    # Stopped within the second of two blocks: the first is there, and is not run again.
    record, blocks = activations.record, []

    def stop(*args, **named):
        blocks.append(args)
        if len(blocks) > 1:
            raise KeyboardInterrupt
        return record(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(activations, "record", stop)
        with pytest.raises(KeyboardInterrupt):
            transcoder(model, site, text, activations=folder, **how)
    with block_runs(model, 0) as runs:
        assert bits(transcoder(model, site, text, activations=folder, **how)) == bits(whole)
    assert runs.rows in (4, 16)  # the block that was asked for second
    # Another baseline finds all of them, with fewer passes, too; another text or another host does not.
    recon, site, others = METHODS["vpd_recon"]
    with block_runs(model, 0) as runs:
        recon(model, site, text, activations=folder, **{**SAME, **others, "n_tokens": 100})
    assert runs.rows == 1  # one row shows the site's bias
    with block_runs(model, 0) as runs:
        transcoder(model, site, text.flip(0), activations=folder, **how)
    assert runs.rows == 20
    assert len(list(folder.glob("*.f32"))) == len(list(folder.glob("*.rows"))) == 2


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("asked", "answer"), [("shutil.disk_usage", lambda folder: SimpleNamespace(free=1)), ("os.posix_fallocate", full)]
)
def test_activations_without_room_are_run_each_time_with_a_warning(model, monkeypatch, asked, answer):
    monkeypatch.setattr(asked, answer)
    function, site, settings = METHODS["transcoder"]
    with pytest.warns(UserWarning, match="activations of the text need .* GB of disk"):
        function(model, site, TOKENS[:5], **SAME, **settings)
