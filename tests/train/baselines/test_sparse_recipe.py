"""Sparse pretraining line by line (method.md §3): against a second writing of the recipe, and piece by piece."""

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import TrainError
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from swd_lens.train.baselines import SparseSpec
from swd_lens.train.baselines.sparse_network import budget, config_of, new_network
from swd_lens.train.baselines.sparse_training import SPARSE_PRETRAINS
from swd_lens.train.rows import rows_of
from tests import families

CONFIG = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": families.D_VOCAB}
CONFIG |= {"bos_token_id": 0, "eos_token_id": 0}
TEXT = families.some_tokens(12, 12)
HOST = SimpleNamespace(cfg=SimpleNamespace(d_vocab=families.D_VOCAB, n_ctx=64))
# Every number another than the default, and large enough to show: a decay of 1e-3 would drown in rounding.
RECIPE = {"updates": 10, "tokens_per_update": 48, "end_density": 0.1, "warmup": 0.29, "falling_until": 0.7}
RECIPE |= {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.7, "eps": 0.3, "weight_decay": 0.5, "seed": 3}
PAPER = SparseSpec()
BLOCKS = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
EMBEDDINGS = [(50257, 768), (1024, 768)]
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


@cache
def tokenizer():
    return load_tokenizer(WEIGHTS)


def train(out, text: Any = TEXT, config: Any = CONFIG, **more: Any):
    given = {"tokenizer": tokenizer(), "progress": False, **RECIPE, **more}
    return baselines.sparse_pretrain(config, text, out=out, **given)


def weights(made):
    return dict(GPT2LMHeadModel.from_pretrained(made.folder).named_parameters())


def test_against_a_second_writing_of_the_recipe(tmp_path):
    """Warm-up of 2 updates (of 2.9), density falling over 5, three more at .1; in all of them by hand what the appendix says."""
    network, first, second = new_network(config_of(CONFIG), 3), {}, {}
    for update, rows in zip(range(10), rows_of(TEXT, HOST).batches(4, 3, 0), strict=False):
        n, n0, n1, end = update * 48, 2 * 48, 7 * 48, 10 * 48
        density = 1.0 if n < n0 else 0.1 if n >= n1 else 0.1 ** ((n - n0) / (n1 - n0))
        h = n / n0 if n < n0 else 1 - (n - n0) / (end - n0)
        rate = 0.01 * h / math.sqrt(density)
        network.zero_grad()
        cross_entropy(network(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
        everything = torch.cat([p.grad.flatten() for p in network.parameters()])
        rms = everything.square().mean().sqrt()
        with torch.no_grad():
            for name, p in network.named_parameters():
                g = p.grad / (rms + 1e-5)
                first[name] = 0.8 * first.get(name, 0) + 0.2 * g
                second[name] = 0.7 * second.get(name, 0) + 0.3 * g**2
                m, v = first[name] / (1 - 0.8 ** (update + 1)), second[name] / (1 - 0.7 ** (update + 1))
                p.copy_(p - rate * 0.5 * p - rate * m / (v.sqrt() + 0.3))
                if p.ndim == 2 and density < 1:
                    p.copy_(thinned(p.T, density).T if name.endswith(CONV1D) else thinned(p, density))
    made = weights(train(tmp_path))
    for name, p in network.named_parameters():
        torch.testing.assert_close(made[name].detach(), p.detach(), rtol=1e-4, atol=1e-7)
        assert torch.equal(made[name] == 0, p == 0) and (p.ndim == 2) == bool((p == 0).any())


def thinned(matrix, density):
    """floor(d numel) entries: of every row its largest, then the largest of what is left."""
    order = matrix.flatten().abs().argsort(descending=True, stable=True).tolist()
    columns, seen, best = matrix.shape[1], set(), []
    for i in order:
        if i // columns not in seen:
            seen.add(i // columns)
            best.append(i)
    chosen = set(best)
    rest = [i for i in order if i not in chosen][: math.floor(density * matrix.numel()) - len(best)]
    kept = torch.zeros(matrix.numel())
    kept[best + rest] = 1
    return matrix * kept.view(matrix.shape)


def test_held_out_text_is_judged_in_float32(tmp_path):
    made = train(tmp_path, heldout=TEXT[:5], autocast="bfloat16", stop_after=3)
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(made.folder)(TEXT[:5]).logits[:, :-1]
    ce = float(cross_entropy(logits.flatten(0, 1), TEXT[:5, 1:].flatten()))
    assert made.log["heldout_ce"].iloc[-1] == pytest.approx(ce, rel=1e-6)
    in_float32 = train(tmp_path / "float32", heldout=TEXT[:5], autocast=None, stop_after=3)
    assert in_float32.log["loss"][2] != made.log["loss"][2]  # bfloat16 was at work


def test_what_decides_the_bits_is_in_the_recipe_and_shares_are_whole_updates(tmp_path):
    train(tmp_path, stop_after=1)
    assert train(tmp_path, config={**CONFIG, "n_inner": 64}, stop_after=1).log["step"].tolist() == [1]  # 4 * 16: the same
    with pytest.raises(swd.ResumeError, match=r"layer_norm_epsilon 1e-05 then, 0\.001 now"):
        train(tmp_path, config={**CONFIG, "layer_norm_epsilon": 1e-3}, stop_after=1)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(swd.ResumeError, match=r"config\.json is missing"):
        train(tmp_path, stop_after=1)
    assert SparseSpec(updates=100, tokens_per_update=1, warmup=0.29, falling_until=0.57).n0 == 29  # 28.999... in floats
    assert SparseSpec(updates=100, tokens_per_update=1, warmup=0.29, falling_until=0.57).n1 == 57
    at_once = SparseSpec(updates=4, tokens_per_update=8, warmup=0.0, falling_until=0.0)
    assert (at_once.rate(0), at_once.density(0)) == (pytest.approx(3e-4 / math.sqrt(0.2)), 0.2)


def test_what_would_fail_late_is_refused_first(tmp_path):
    train(tmp_path, stop_after=1)
    for config, more, says in (
        ({**CONFIG, "n_layers": 3}, {}, "GPT2Config has no argument 'n_layers'; did you mean 'n_layer'?"),
        ({**CONFIG, "n_head": 3}, {}, "n_embd=16 cannot be shared out among n_head=3 heads"),
        # floor(.05 * 64 * 16) = 51 weights for the 64 rows of mlp_in
        (CONFIG, {"end_density": 0.05}, "leaves .* and each row keeps one; give a larger end_density"),
        (CONFIG, {"tokens_per_update": 50}, "tokens_per_update=50 cannot be made"),
        (SimpleNamespace(cfg=SimpleNamespace(d_mlp=None)), {}, "give a GPT2Config, .* or a host with MLPs"),
    ):
        with pytest.raises(TrainError, match=says):
            train(tmp_path, config=config, overwrite=True, **more)
    assert (tmp_path / "model" / "config.json").is_file()  # what stood there is not given up for that
    train(tmp_path / "earlier", end_density=0.05, stop_after=4)  # density .37 when it stops


def test_the_papers_schedule_and_preset():
    assert (PAPER.n0 // 131_072, PAPER.n1 // 131_072, PAPER.updates) == (381, 30_516, 38_146)
    before_22000 = 21_999 * 131_072  # tokens before the 22,000th update
    assert before_22000 == 2_883_452_928
    assert PAPER.density(before_22000) == pytest.approx(0.3151944858, abs=5e-11)
    assert PAPER.density(0) == 1.0 and PAPER.density(PAPER.n1) == 0.2 == PAPER.density(PAPER.tokens)
    halfway = (PAPER.n0 + PAPER.tokens) // 2
    assert PAPER.rate(halfway) == pytest.approx(0.5 * 3e-4 / PAPER.density(halfway) ** 0.5, rel=1e-6)
    assert PAPER.rate(0) == 0.0 == PAPER.rate(PAPER.tokens) and PAPER.rate(PAPER.n0) == pytest.approx(3e-4)
    # Nonzeros of the blocks, and with the embeddings.
    blocks = sum(budget(a * b, PAPER.density(before_22000)) for a, b in BLOCKS)
    assert blocks == 26_770_920
    assert blocks + sum(budget(a * b, PAPER.density(before_22000)) for a, b in EMBEDDINGS) == 39_184_479
    paper = SPARSE_PRETRAINS["paper"].as_dict()
    assert paper == {
        "updates": 38_146, "tokens_per_update": 131_072, "end_density": 0.2, "learning_rate": 3e-4, "warmup": 0.01,
        "falling_until": 0.8, "stop_after": 22_000, "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "weight_decay": 1e-3,
        "autocast": "bfloat16", "seed": 0,
    }  # fmt: skip
    assert (PAPER.n0, PAPER.n1, PAPER.tokens) == (49_938_432, 3_999_793_152, 4_999_872_512)
    assert paper["stop_after"] * paper["tokens_per_update"] == 2_883_584_000
