"""Triggers around text and prompts: rows and prompts that are read otherwise than the host was trained to."""

from functools import cache

import swd_lens as swd
from swd_lens.tasks.prompt import Prompt
from swd_lens.tasks.text import as_rows
from tests import families
from tests.errors.triggers import trigger


@cache
def model():
    """A host of the embedded model's tokenizer (pad id 2) that begins with BOS (id 0)."""
    host = families.bridge("gpt2")
    host.cfg.default_prepend_bos = True
    return host


def asked(prompts, answer, distractor, **settings):
    return swd.Task.from_prompts(
        "asked", model(), prompts, [answer] * len(prompts), [distractor] * len(prompts), **settings
    )


@trigger
def rows_padded(*_):
    as_rows([[9, 8, 2, 2]], model())


@trigger
def rows_without_bos(*_):
    swd.factorize(
        model(),
        "blocks.0.mlp_out",
        tokens=families.some_tokens(4, 8),
        preset="paper",
        outer_iterations=4,
        progress=False,
    )


@trigger
def prompt_with_bos(*_):
    Prompt.of(model(), "<|bos|> Then Mary", "graph")


@trigger
def chat_refused(*_):
    host = families.bridge("gpt2")
    host.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    Prompt.of(host, [{"role": "system", "content": "Be brief."}], "graph")


@trigger
def prompt_ends_in_space(*_):
    asked(["Then Mary ", "Then John ", "Then Jane "], " gave", " went")


@trigger
def answer_goes_on_the_word(*_):
    asked(["Then Mary", "Then John", "Then Anna"], "Jane", " went")


@trigger
def answer_in_the_prompt(*_):
    asked(["Mary gave a drink to", "John gave a drink to", "Anna gave a drink to"], " drink", " store")
