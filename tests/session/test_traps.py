"""The silent traps of a first session: each is said, mended or refused."""

import warnings

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import AttachError, TaskError, UnknownWordsWarning
from swd_lens.tasks.prompt import Prompt

SITE = "blocks.2.mlp_out"


@pytest.fixture(scope="module")
def factors(default_model):
    return swd.baselines.svd(default_model, SITE)


def capitals(model, prompts, **more):
    n = len(prompts)
    return swd.Task.from_prompts("jobs", model, prompts, [" he"] * n, [" she"] * n, **more)


# ---------------------------------------------------------------------------------------------- unknown words

CALLS = {
    "generate": lambda m, f, text: swd.generate(m, f, text, max_new_tokens=1),
    "edit_unit": lambda m, f, text: swd.edit_unit(m, f, f"{SITE}/3", text, " she", " he", shift=1),
    "unit_graph": lambda m, f, text: swd.unit_graph(m, f, [f"{SITE}/3"], prompt=text),
    "pack_text": lambda m, f, text: swd.pack_text(m, text * 40, context=8),
    "load_text": lambda m, f, text: swd.load_text([text * 40], m, 64, context=8),
    "from_prompts": lambda m, f, text: capitals(m, [text, "The man works because", "The man is there because"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_unknown_words_are_named_once_by_whatever_takes_strings(default_model, factors, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[name](default_model, factors, "The queen met a zebra because")
    told = [w for w in caught if issubclass(w.category, UnknownWordsWarning)]
    assert len(told) == 1 and "'queen', 'zebra'" in str(told[0].message) and "'<|unk|>'" in str(told[0].message)


def test_known_words_and_generated_prompts_are_silent(default_model):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownWordsWarning)
        Prompt.of(default_model, "The list is", "test")
        Prompt.of(default_model, "The <|unk|> is", "test")  # asked for by name
        swd.load_task("gendered_pronoun", default_model, n_train=4, n_test=2)


def test_prompts_of_the_same_ids_do_not_straddle_train_and_test(default_model):
    prompts = [f"The {word} works because" for word in ("queen", "zebra", "unicorn", "man", "woman", "girl", "doctor", "teacher")]
    with pytest.raises(TaskError, match=r"to this host it is 'The \w+ works because', of the same ids"):
        capitals(default_model, prompts)
    with pytest.warns(UnknownWordsWarning):
        task = capitals(default_model, prompts, on_bad="drop")
    kept = [tuple(tokens.tolist()) for split in task.splits for tokens in split.tokens]
    assert len(set(kept)) == len(kept) == 6 and task.dropped == {"duplicate prompt": 2}


def test_strings_begin_with_bos_where_the_hosts_own_calls_do(default_model):
    """model("...") and swd_lens read one string as the same ids, whichever way the host is set; results say which."""
    cfg = default_model.cfg
    try:
        for default in (True, False):
            cfg.default_prepend_bos = default
            prompt = Prompt.of(default_model, "The list is", "test")
            assert list(prompt.ids) == default_model.to_tokens("The list is")[0].tolist() and prompt.prepend_bos is default
            task = capitals(default_model, [f"The {word} works because" for word in ("man", "woman", "girl")])
            assert task.prepend_bos is task.train.prepend_bos is default
            assert task.train.tokens[0].tolist() == default_model.to_tokens(task.train.examples[0].prompt)[0].tolist()
    finally:
        cfg.default_prepend_bos = True


def test_forgotten_tokens_are_said(default_model):
    how = {"sparsity": 0.5, "preset": "quick", "outer_iterations": 2, "progress": False}
    with pytest.warns(UserWarning, match=r"no calibration tokens .* zero-data .* Give tokens=") as caught:
        made = swd.factorize(default_model, "blocks.0.attn_o", **how)
    assert len([w for w in caught if "calibration tokens" in str(w.message)]) == 1
    assert "zero-data" in repr(made) and "zero-data" in repr(made["blocks.0.attn_o"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meant = swd.factorize(default_model, "blocks.0.attn_o", calibration="zero-data", **how)
        given = swd.factorize(default_model, "blocks.0.attn_o", tokens=swd.text_tokens(512), **how)
    assert torch.equal(meant["blocks.0.attn_o"].read, made["blocks.0.attn_o"].read)
    assert "zero-data" not in repr(given) and "zero-data" not in repr(given["blocks.0.attn_o"])


# ---------------------------------------------------------------------------------------------- the dense host, attached

ATTACHED = {
    "factorize": lambda m: swd.factorize(m, "blocks.0.attn_o", tokens=swd.text_tokens(512), progress=False),
    "allocate": lambda m: swd.allocate(m, "attn_o", 0.5, swd.text_tokens(512), progress=False),
    "screen": lambda m: swd.screen(m, swd.load_task("gendered_pronoun", m, n_train=4, n_test=2)),
    "training a transcoder": lambda m: swd.baselines.transcoder(m, "blocks.0.mlp_out", swd.text_tokens(2048), progress=False),
}


@pytest.mark.parametrize("name", ATTACHED)
def test_calls_of_the_dense_host_are_refused_while_attached(default_model, factors, name):
    with swd.attach(default_model, factors), pytest.raises(AttachError, match=rf"{name} is of the dense host, .* {SITE}"):
        ATTACHED[name](default_model)


def test_thresholds_are_shares_and_tasks_are_of_their_tokenizer(default_model, factors):
    task = swd.load_task("gendered_pronoun", default_model, n_train=4, n_test=4)
    scores = swd.attribute(default_model, factors, task.train)
    curve = swd.evaluate(default_model, factors, task.test, scores)
    for ask in (curve.cost_at, curve.circuit_at, curve.cost_interval):
        with pytest.raises(ValueError, match=r"sufficiency is a share: sufficiency=0\.9 is 90 %; got 90"):
            ask(sufficiency=90)
    with pytest.raises(ValueError, match=r"necessity is a share"):
        curve.cost_at(necessity=50)
    tokenizer = default_model.tokenizer
    try:
        default_model.tokenizer = shuffled(tokenizer)
        with pytest.raises(TaskError, match=r"tokenized with another vocabulary .* of the same 1366 tokens"):
            swd.attribute(default_model, factors, task.train)
    finally:
        default_model.tokenizer = tokenizer


def shuffled(tokenizer):
    """A tokenizer of as many words, two of which have changed places."""

    class Shuffled:
        bos_token_id, unk_token_id, unk_token = tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.unk_token

        def get_vocab(self):
            words = dict(tokenizer.get_vocab())
            words[" he"], words[" she"] = words[" she"], words[" he"]
            return words

    return Shuffled()
