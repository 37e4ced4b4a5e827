"""Attached to the embedded model, whose other tests stand in tests/hosts/test_families.py for hosts of every kind."""

import torch

import swd_lens as swd
from swd_lens import baselines


def test_a_batch_is_its_rows(default_model):
    """Task prompts of one length in a batch give what single prompts give (no padding is ever involved)."""
    task = swd.load_task("ioi", default_model, n_train=10, n_test=40)
    with torch.no_grad(), swd.attach(default_model, baselines.svd(default_model, "mlp_out")):
        for bucket in task.test.buckets():
            together = default_model(bucket.tokens)[:, -1]
            for row, tokens in zip(together, bucket.tokens, strict=True):
                torch.testing.assert_close(row, default_model(tokens[None])[0, -1], rtol=1e-4, atol=1e-4)
