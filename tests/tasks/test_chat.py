"""Chats: messages become one prompt by the chat template."""

import warnings

import pytest

import swd_lens as swd
from swd_lens.base.errors import TokenError
from swd_lens.tasks.prompt import Prompt
from tests.tasks.test_task import FakeHost

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}the{% endif %}"
)


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
