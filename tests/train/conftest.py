"""Small hosts with all their matrices factorized, and what must not change about a host."""

from functools import cache

import pytest
import torch

import swd_lens as swd
from swd_lens.hosts import host_of
from swd_lens.train.engine import Engine
from tests import families
from tests.micro import random_tokens, toy_model

ROWS = random_tokens(24, 10)
HELD = random_tokens(6, 10, seed=1)


@cache
def factorized(kind: str):
    """(model, FactorSet) of a kind of host; the model is left as it was found."""
    model = {
        "hooked": toy_model,
        "bridge": lambda: families.bridge("gpt2"),
        "bridge bf16": lambda: families.bridge("llama").to(torch.bfloat16),
        "hooked bf16": lambda: toy_model().to(torch.bfloat16),
    }[kind]()
    return model, swd.factorize(model, "all", sparsity=0.6, preset="quick", outer_iterations=2, progress=False)


@pytest.fixture(scope="module")
def toy():
    return factorized("hooked")


@pytest.fixture(scope="module")
def model():
    return toy_model()


def interrupt(monkeypatch, after):
    """Ctrl-C after this many steps of any training (and their log lines)."""
    one = Engine.advance

    def stopping(self, rows):
        if self.step == after:
            raise KeyboardInterrupt
        return one(self, rows)

    monkeypatch.setattr(Engine, "advance", stopping)


def text_for(model, rows: int = 24, pos: int = 10, seed: int = 0):
    return random_tokens(rows, pos, int(model.cfg.d_vocab), seed)


def everything(model):
    """Bits, flags, modes, hooks and classes of a host, to be compared before and after."""
    modules = [
        (name, id(m), type(m), m.training, list(m._forward_hooks), list(m._forward_pre_hooks), sorted(m.__dict__))
        for name, m in model.named_modules()
    ]
    parameters = [
        (name, id(p), p.requires_grad, p.grad is None, p.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, p in model.named_parameters()
    ]
    state = [(name, t.dtype, t.data_ptr()) for name, t in model.state_dict().items()]
    return modules, parameters, state, list(model.hook_dict.items())


def logits(model, rows=None):
    with torch.no_grad():
        return host_of(model).run(text_for(model, 2) if rows is None else rows)


def bits_of_units(units):
    return {tokens: {name: t.numpy().tobytes() for name, t in kept.items()} for tokens, kept in units.checkpoints.items()}


def bits(factors):
    return {site: (f.read.numpy().tobytes(), f.write.numpy().tobytes()) for site, f in factors.items()}


def supports(factors):
    return {site: ((f.read != 0).numpy().tobytes(), (f.write != 0).numpy().tobytes(), f.edges) for site, f in factors.items()}
