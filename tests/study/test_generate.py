"""Samples: continuations of the dense and the replaced host, against writing on by hand."""

import json
import shutil
from importlib import metadata

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts.load import load_host
from swd_lens.study.generate import DENSE, generate
from swd_lens.tasks.encoding import stop_tokens
from tests import families
from tests.analysis import audit_models
from tests.micro import random_tokens, toy_model
from tests.refusals import refuses


class Letters(audit_models.Letters):
    """Token i is the i-th letter; "t", the last, ends a text."""

    eos_token_id, bos_token_id, unk_token_id = 19, None, None

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [ord(c) - ord("a") for c in text]}


@pytest.fixture(scope="module")
def model():
    model = toy_model()
    model.tokenizer = Letters()
    return model


@pytest.fixture(scope="module")
def rough(model):
    """Factors that change what the host says."""
    return swd.factorize(model, "mlp_out", sparsity=0.8, preset="quick", outer_iterations=4, progress=False)


PROMPTS = ["abc", "hij", "dcba", "fgfg", "mmm", "pqrs", "kil", "onm"]


def written_by_hand(model, row: list[int], n: int) -> list[int]:
    """Greedy, on whole logits."""
    row, start = list(row), len(row)
    while len(row) < start + n and len(row) < model.cfg.n_ctx and (len(row) == start or row[-1] != 19):
        with torch.no_grad():
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[start:]


def test_greedy_continuations_are_those_written_by_hand(model, rough):
    prompts = [row.tolist() for row in random_tokens(5, 6)] + [row.tolist() for row in random_tokens(3, 4, seed=1)]
    made = generate(model, rough, prompts, max_new_tokens=12, batch_size=2)
    assert [sample.prompt_tokens for sample in made.samples] == [tuple(prompt) for prompt in prompts]
    dense = [written_by_hand(model, prompt, 12) for prompt in prompts]
    with swd.attach(model, rough):
        replaced = [written_by_hand(model, prompt, 12) for prompt in prompts]
    assert any(a != b for a, b in zip(dense, replaced, strict=True))
    for sample, one, other in zip(made.samples, dense, replaced, strict=True):
        assert list(sample.by_host) == [DENSE, "replaced"]
        assert sample.by_host[DENSE].tokens == tuple(one) and sample.by_host[DENSE].departs is None
        assert sample.by_host["replaced"].tokens == tuple(other)
        first = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        assert sample.by_host["replaced"].departs == (first[0] if first else None)


def test_exact_factors_write_what_the_dense_host_writes_where_it_is_drawn(model, rough):
    made = generate(model, {"SVD": baselines.svd(model, "all"), "SWD": rough}, PROMPTS, temperature=1.5, max_new_tokens=15)
    assert all(sample.by_host["SVD"].departs is None for sample in made.samples)
    assert any(sample.by_host["SWD"].departs is not None for sample in made.samples)


def test_sampling_draws_from_the_softmax():
    """One step, 4,000 prompts that are the same: frequencies against probabilities."""
    model = toy_model()
    row = [3, 1, 4]
    made = generate(model, baselines.svd(model, "mlp_out"), [row] * 4000, temperature=2, max_new_tokens=1, batch_size=4000)
    with torch.no_grad():
        probability = (model(torch.tensor([row]))[0, -1] / 2).softmax(-1)
    drawn = torch.tensor([sample.by_host[DENSE].tokens[0] for sample in made.samples])
    frequency = torch.bincount(drawn, minlength=20) / 4000
    # Five standard deviations of a share of 4,000 draws.
    assert ((frequency - probability).abs() <= 5 * (probability * (1 - probability) / 4000).sqrt() + 1e-3).all()


def test_seeds_decide_and_batches_do_not(model, rough):
    prompts = ["abc", "dcba", "jih"]
    first = generate(model, rough, prompts, temperature=1, seed=4, max_new_tokens=10)
    again = generate(model, rough, prompts, temperature=1, seed=4, max_new_tokens=10, batch_size=1)
    other = generate(model, rough, prompts, temperature=1, seed=5, max_new_tokens=10)
    assert first.as_dict() == again.as_dict()
    assert first.as_dict()["samples"] != other.as_dict()["samples"]


def test_ties_go_to_the_lowest_id(model):
    flat = toy_model(d_vocab=20)
    with torch.no_grad():
        flat.unembed.W_U.zero_()
        flat.unembed.b_U.zero_()
        flat.unembed.b_U[[7, 11, 3]] = 1.0
    made = generate(flat, baselines.svd(flat, "mlp_out"), [[1, 2]], max_new_tokens=4)
    assert made[0].by_host[DENSE].tokens == (3, 3, 3, 3)


def test_where_a_continuation_ends():
    ends = toy_model()
    ends.tokenizer = Letters()
    long = list(range(10)) * 3  # 30 of 32 tokens
    made = generate(ends, baselines.svd(ends, "mlp_out"), [long, [1, 2], [1] * 32], max_new_tokens=5)
    stops = [sample.by_host[DENSE].stop for sample in made.samples]
    lengths = [len(sample.by_host[DENSE].tokens) for sample in made.samples]
    assert stops[0] in ("context", "eos") and lengths[0] <= 2
    assert (stops[2], lengths[2]) == ("context", 0)
    with torch.no_grad():
        ends.unembed.b_U[19] = 1000.0  # EOS, whatever comes before
    made = generate(ends, baselines.svd(ends, "mlp_out"), [[1, 2]], max_new_tokens=5)
    assert made[0].by_host[DENSE].tokens == (19,)
    assert made[0].by_host[DENSE].text == "" and made[0].by_host[DENSE].stop == "eos"


def test_rows_that_ended_do_not_change_the_others(model, rough):
    """A prompt's continuation is the same alone and beside one that ends early."""
    prompts = [row.tolist() for row in random_tokens(6, 5, seed=2)]
    together = generate(model, rough, prompts, max_new_tokens=20)
    assert len({len(sample.by_host[DENSE].tokens) for sample in together.samples}) > 1, "none ended early"
    for prompt, sample in zip(prompts, together.samples, strict=True):
        assert generate(model, rough, [prompt], max_new_tokens=20)[0] == sample


def test_what_is_shown(model, rough):
    made = generate(model, {"SWD": rough, "SVD": baselines.svd(model, "mlp_out")}, PROMPTS, max_new_tokens=12)
    table = made.table()
    assert list(table["host"]) == [DENSE, "SWD", "SVD"] * 8
    assert list(table["text"]) == [one.text for sample in made.samples for one in sample.by_host.values()]
    # Exact factors depart nowhere, rough ones somewhere.
    assert table["departs at"].isna()[table["host"] != "SWD"].all() and table["departs at"].notna().any()
    assert json.loads(json.dumps(made.as_dict()))["settings"]["max_new_tokens"] == 12
    text = made.side_by_side(width=100)
    assert all(len(line) <= width for width in (100, 40) for line in made.side_by_side(width=width).splitlines())
    assert "[0] abc" in text and "[7] onm" in text and text.splitlines()[0].startswith("Samples: 8 prompts, greedy")
    one = next(sample.by_host["SWD"] for sample in made.samples if sample.by_host["SWD"].departs is not None)
    assert f"departs at {one.departs}" in text and f"{one.text[: one.departs]}»{one.text[one.departs :]}" in text
    assert "same; " in text and str(made) == text and len(repr(made).splitlines()) == 15 and len(made) == 8


def test_several_replacements_or_one(model, rough):
    one = dict(rough)
    for given, labels in (
        (one, ["replaced"]),
        ({"blocks.0.mlp.W_out": rough["blocks.0.mlp_out"]}, ["replaced"]),
        (rough["blocks.1.mlp_out"], ["replaced"]),
        ({"SWD": rough["blocks.1.mlp_out"]}, ["SWD"]),
        ({"mlp_out": rough, "mine": one}, ["mlp_out", "mine"]),
    ):
        assert list(generate(model, given, [[1, 2]], max_new_tokens=1)[0].by_host) == [DENSE, *labels]
    refuses(ValueError, "give your factors another label", generate, model, {"dense": rough}, [[1]])


def test_units_are_in_only_while_they_write(model, rough, monkeypatch):
    before = {name: id(hook) for name, hook in model.hook_dict.items()}
    generate(model, rough, [[1, 2]], max_new_tokens=2)
    assert {name: id(hook) for name, hook in model.hook_dict.items()} == before
    from swd_lens.hosts.hooked import HookedTransformerHost

    def broken(self, tokens, *args, **named):
        seen.append("blocks.0.hook_mlp_out_unit" in self.model.hook_dict)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return logits(self, tokens, *args, **named)

    seen, logits = [], HookedTransformerHost.last_logits
    monkeypatch.setattr(HookedTransformerHost, "last_logits", broken)
    with pytest.raises(KeyboardInterrupt):
        generate(model, rough, [[1, 2]], max_new_tokens=2)
    assert seen == [False, False, True]
    assert {name: id(hook) for name, hook in model.hook_dict.items()} == before


def test_refusals(model, rough):
    for named, complaint in (
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"temperature": float("nan")}, "temperature=nan: give"),
    ):
        refuses(ValueError, complaint, generate, model, rough, ["abc"], **named)
    for prompts, complaint in (([], "no prompts"), ([""], "nothing to continue"), ([[1] * 33], "do not fit")):
        refuses(swd.TokenError, complaint, generate, model, rough, prompts)
    refuses(swd.TokenError, "no tokenizer", generate, toy_model(), rough, ["abc"])
    refuses(swd.UnsupportedHostError, "attends both ways", generate, families.bridge("bert"), {}, [[1]])
    broken = toy_model()
    with torch.no_grad():
        broken.unembed.b_U[3] = float("nan")
    refuses(ValueError, "logits at position 1 are not finite", generate, broken, rough, [[1, 2]])


@pytest.mark.parametrize("family", ["gpt2", "qwen3_5"])
def test_on_a_bridge(family):
    """Beside Hugging Face's own greedy continuation, token by token."""
    bridge, reference = families.bridge(family), families.reference(family)
    prompts = families.some_tokens(2, 7)
    factors = swd.factorize(bridge, "blocks.0.mlp_out", sparsity=0.5, preset="paper", outer_iterations=4, progress=False)
    made = generate(bridge, factors, prompts, max_new_tokens=6)
    row = prompts
    with torch.no_grad():
        for _ in range(6):
            row = torch.cat([row, reference(row).logits[:, -1:].argmax(-1)], 1)
    for sample, expected in zip(made.samples, row[:, 7:].tolist(), strict=True):
        written = sample.by_host[DENSE].tokens
        assert list(written) == expected[: len(written)] and (len(written) == 6 or written[-1] == 0)
        assert sample.by_host["replaced"].tokens


def test_every_stop_token_of_the_generation_config_ends_a_text(tmp_path):
    """A bridge's own network names them, and what lies beside the tokenizer of a HookedTransformer does."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(families.checkpoint("llama"), folder)
    plain = load_host(str(folder), kind="bridge")
    prompt = families.some_tokens(1, 5)
    factors = swd.factorize(plain, "blocks.0.mlp_out", calibration="zero-data", preset="quick", progress=False)
    written = generate(plain, factors, prompt, max_new_tokens=8)[0].by_host[DENSE].tokens
    stop = written[3]
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [1, stop]}))
    kinds = ("bridge", "hooked") if metadata.version("transformer_lens") < "4" else ("bridge",)
    for kind in kinds:
        host = load_host(str(folder), kind=kind)
        assert stop_tokens(host) == tuple(sorted({1, stop}))
        made = generate(host, factors, prompt, max_new_tokens=8)[0].by_host[DENSE]
        assert made.tokens == written[: written.index(stop) + 1] and made.stop == "eos"
        assert made.text == host.tokenizer.decode(list(made.tokens[:-1]))
        assert made.stopped_by == host.tokenizer.decode([stop]) and made.course(True).startswith(made.stopped_by)
