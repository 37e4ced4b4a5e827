"""Hashes of hosts, tokens and prompts: equal for equal ones, different for what decides results."""

from dataclasses import replace

import torch

from swd_lens.base.fingerprints import host_fingerprint, splits_fingerprint, tokens_fingerprint
from tests.micro import micro_model, split_of


def test_a_host_differs_by_a_weight_and_by_a_setting():
    model, other = micro_model(), micro_model()
    assert host_fingerprint(model) == host_fingerprint(other)
    before = host_fingerprint(model)
    with torch.no_grad():
        model.W_U[0, 0] += 1
    changed = host_fingerprint(model)
    other.cfg.eps = 0.5
    assert len({before, changed, host_fingerprint(other)}) == 3


def test_tokens_differ_by_shape_and_ids_alone_and_prompts_by_tokens_answers_and_name():
    rows = torch.tensor([[1, 2], [3, 4]])
    assert tokens_fingerprint(rows) == tokens_fingerprint(rows.int())
    assert len({tokens_fingerprint(each) for each in (rows, rows.flatten()[None], rows + 1)}) == 3
    split = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
    changes = {"tokens": (torch.tensor([2]), torch.tensor([1]))}, {"answer_ids": ((2,), (1,))}, {"name": "b"}
    others = [[split], [split, split], *([replace(split, **change)] for change in changes)]
    assert splits_fingerprint([split]) == splits_fingerprint([replace(split)])
    assert len({splits_fingerprint(each) for each in others}) == 5
