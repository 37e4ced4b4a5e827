"""One prompt as text or ids."""

import warnings

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import TextWarning, TokenError
from swd_lens.tasks.prompt import Prompt, decoded, token_strings
from swd_lens.tasks.text import same_length
from tests.micro import toy_model
from tests.tasks.test_task import FakeHost

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}the{% endif %}"
)


def test_a_text_and_its_ids_are_one_prompt_and_what_it_lacks_is_said_in_fields():
    host = FakeHost()
    prompt = Prompt.of(host, "the cat sat", "test")
    assert prompt == Prompt((2, 3, 5), "the cat sat", prepend_bos=False)
    assert prompt.row(host).tolist() == [2, 3, 5]
    assert Prompt.of(host, [2, 3, 5], "test") == Prompt((2, 3, 5))
    assert Prompt.of(host, torch.tensor([[2, 3], [5, 6]]), "test") == Prompt((2, 3), n_rows=2)
    with_bos = Prompt.of(host, "the cat", "test", prepend_bos=True)
    assert with_bos.ids == (1, 2, 3) and with_bos.prepend_bos
    host = FakeHost(n_ctx=2)
    assert Prompt.of(host, "", "test").unusable == "empty prompt: ''"
    assert Prompt.of(host, "", "test", prepend_bos=True).ids == (1,)
    long = Prompt.of(host, "the cat sat", "test")
    assert long.unusable == "prompt longer than the context: 3 tokens, n_ctx is 2"
    with pytest.raises(TokenError, match="rows of 3 tokens do not fit"):
        long.row(host)
    with pytest.raises(TokenError, match="outside the vocabulary"):
        Prompt.of(host, [99], "test")


def test_several_prompts():
    host = FakeHost()
    for one in ("the cat", [2, 3], torch.tensor([2, 3])):
        assert [p.ids for p in Prompt.several(host, one, "test")] == [(2, 3)]
    assert [p.ids for p in Prompt.several(host, torch.tensor([[2], [3]]), "test")] == [(2,), (3,)]
    assert [p.ids for p in Prompt.several(host, ["the", [5, 6]], "test")] == [(2,), (5, 6)]
    assert Prompt.several(host, [], "test") == []
    # Those of one length run together.
    assert same_length([3, 2, 3, 3, 2], lambda n: 2) == [[0, 2], [3], [1, 4]]
    assert same_length([4, 4], lambda n: 0) == [[0], [1]]


def test_without_a_tokenizer_there_are_ids_only():
    model = toy_model()
    with pytest.raises(TokenError, match="this host has no tokenizer, so strings cannot be its prompts"):
        Prompt.of(model, "the cat", "test")
    prompt = Prompt.of(model, [4, 5], "test")
    assert decoded(model, prompt.ids) == "4 5" and token_strings(model, prompt.ids) == ("4", "5")
    assert token_strings(FakeHost(), (2, 3)) == ("the", "cat")


def test_a_text_with_bos_gets_no_second_one():
    host = FakeHost()
    with pytest.warns(TextWarning, match="test: 2 prompts begin with '<bos>'.*: '<bos> the cat', '<bos> dog'$"):
        read = Prompt.several(host, ["<bos> the cat", "cat", "<bos> dog"], "test", prepend_bos=True)
    assert [prompt.ids for prompt in read] == [(1, 2, 3), (1, 3), (1, 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Prompt.of(host, "<bos> the cat", "test", prepend_bos=False).ids == (1, 2, 3)
    with pytest.warns(TextWarning):
        assert Prompt.of(host, "<bos>", "test", prepend_bos=True).unusable == "empty prompt: '<bos>'"


@pytest.mark.filterwarnings("ignore:.*an answer stands:swd_lens.base.errors.TextWarning")
def test_messages_go_through_the_chat_template_and_get_one_bos():
    host = FakeHost(n_ctx=16)
    host.tokenizer.chat_template = TEMPLATE
    chat = [{"role": "user", "content": "cat sat"}, {"role": "assistant", "content": "dog ran"}]
    for prepend_bos, begins in ((True, True), (False, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prompt = Prompt.of(host, chat, "test", prepend_bos=prepend_bos)
        assert prompt.ids == (1, 3, 5, 4, 6, 2)  # the template's own where the host puts none
        assert prompt.text == ("" if begins else "<bos>") + "cat sat dog ran the"
    one, two = Prompt.several(host, [chat, "the cat"], "test")
    assert one.ids == (1, 3, 5, 4, 6, 2) and two.ids == (2, 3)
    assert [p.ids for p in Prompt.several(host, chat, "test")] == [one.ids]
    prompts = [[{"role": "user", "content": text}] for text in ("cat", "dog", "sat")]
    task = swd.Task.from_prompts("t", host, prompts, ["sat"] * 3, ["ran"] * 3, prepend_bos=True)
    assert sorted(split.tokens[0].tolist() for split in task.splits) == [[1, 3, 2], [1, 4, 2], [1, 5, 2]]


def test_chats_that_no_template_reads():
    host = FakeHost()
    chat = [{"role": "user", "content": "the cat"}]
    with pytest.raises(TokenError, match="has no chat template"):
        Prompt.of(host, chat, "test")
    host.tokenizer.chat_template = "{{ messages[0]['content'] + nothing.here }}"
    with pytest.raises(TokenError, match="refuses these messages: UndefinedError"):
        Prompt.of(host, chat, "test")
    host.tokenizer = None
    with pytest.raises(TokenError, match="no tokenizer"):
        Prompt.of(host, chat, "test")
