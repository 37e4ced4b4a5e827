"""Two processes give what one gives: the same batches, losses and values, whichever way the rows divide; one writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from swd_lens.base.errors import FinetuneError
from swd_lens.cli import app
from swd_lens.train.finetune.run import require_shares
from swd_lens.train.rows import Processes
from swd_lens.units.factors import FactorSet
from tests.train.conftest import ROWS


class FakeState:
    """What accelerate says of one process of several."""

    def __init__(self, index, n):
        self.process_index, self.num_processes, self.device = index, n, torch.device("cuda", index)


def processes(monkeypatch, index, n):
    monkeypatch.setenv("WORLD_SIZE", str(n))
    monkeypatch.setattr("accelerate.PartialState", lambda: FakeState(index, n))
    return Processes()


def test_shares_are_all_rows_once_and_what_cannot_be_shared_is_refused(monkeypatch):
    shares = [processes(monkeypatch, index, 3).share(ROWS[:8]) for index in range(3)]
    assert [len(share) for share in shares] == [3, 3, 2]
    assert sorted(torch.cat(shares).tolist()) == sorted(ROWS[:8].tolist())
    assert [processes(monkeypatch, index, 2).main for index in (0, 1)] == [True, False]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Processes().main
    with pytest.raises(FinetuneError, match=r"batch_size=2 has no row for each of 3 processes"):
        require_shares(processes(monkeypatch, 0, 3), torch.device("cpu"), 2)
    with pytest.raises(FinetuneError, match=r"process 1 has its host on cuda:0, but cuda:1 is its device"):
        require_shares(processes(monkeypatch, 1, 2), torch.device("cuda:0"), 2)


@pytest.mark.slow
def test_two_processes_of_accelerate_give_what_one_gives(tmp_path):
    """`accelerate launch` on the CPU (gloo). Batches of 3 rows: one process has two of them, the other one."""
    import swd_lens as swd

    how = {"sparsity": 0.6, "preset": "quick", "outer_iterations": 2, "progress": False}
    swd.factorize(swd.load_default_model(), "blocks.*.mlp_*", **how).save(tmp_path / "given")
    command = [
        *("finetune", "--json", "--factors", str(tmp_path / "given"), "--tokens", "2048", "--heldout-tokens", "256"),
        *("--eval-every", "5", "--set", "batch_size=3", "--set", "steps=5"),
    ]
    port = 20_000 + os.getpid() % 20_000  # its own, where tests run side by side
    launch = [*("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1")]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "PYTHONPATH": str(Path.cwd())}
    launched = [sys.executable, *launch, "-m", "swd_lens.cli", *command, "--out", str(tmp_path / "two")]
    done = subprocess.run(launched, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    here = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "one")], catch_exceptions=False)
    # Printed once, by the main process.
    outs = [json.loads(printed[printed.index("{") :]) for printed in (here.stdout, done.stdout)]
    logs = ((tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("one", "two"))
    one, two = ([json.loads(line) for line in lines] for lines in logs)
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            # Sums of float32 in another order: losses agree to 1e-5, gradients to 1e-4.
            assert a[key] == pytest.approx(b[key], rel=1e-4 if key == "grad_rms" else 1e-5), (a["step"], key)
    assert outs[0]["tokens"] == outs[1]["tokens"] == 5 * 3 * 128
    given, first, second = (FactorSet.load(tmp_path / name) for name in ("given", "one/factors", "two/factors"))
    for site, f in first.items():
        for a, b, start in ((f.read, second[site].read, given[site].read), (f.write, second[site].write, given[site].write)):
            assert float((a - b).norm() / a.norm()) < 1e-4
            moved = float((a - start).norm() / start.norm())
            assert moved > 1e-3  # far more than they differ by
            assert torch.equal(a != 0, start != 0) and torch.equal(b != 0, start != 0)
