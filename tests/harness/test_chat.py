from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from mlx_eval.errors import InvalidOptionError, UnknownNameError
from mlx_eval.harness.chat import ChatTemplate
from mlx_eval.models.load import wrap_tokenizer
from tests.tiny import BOS, bpe_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if not loop.last or m.role != 'assistant' %}"
    "[end]{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
TALK = [{"role": "user", "content": "hi"}]
SYSTEM = [{"role": "system", "content": "be kind"}, *TALK]


def chat(template: str | dict[str, str] | None, **arguments: Any) -> ChatTemplate:
    tokenizer = copy.deepcopy(bpe_tokenizer(adds_bos=True))
    tokenizer.chat_template = template
    return ChatTemplate(wrap_tokenizer(tokenizer, None), arguments)


def test_a_conversation_is_opened_for_the_answer() -> None:
    assert chat(TEMPLATE).apply(SYSTEM, True) == f"{BOS}[system]be kind[end][user]hi[end][assistant]"


def test_the_last_message_is_left_open_without_a_generation_prompt() -> None:
    text = chat(TEMPLATE).apply([*TALK, {"role": "assistant", "content": "The answer is"}], False)
    assert text == f"{BOS}[user]hi[end][assistant]The answer is"


@pytest.mark.parametrize("thinking", [True, False])
def test_arguments_reach_the_template_and_are_not_made_up(thinking: bool) -> None:
    assert chat(TEMPLATE, enable_thinking=thinking).apply(TALK, True).endswith(f"<{thinking}>")
    assert "<" not in chat(TEMPLATE).apply(TALK, True).removeprefix(BOS)


def test_a_refused_system_message_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    own = chat(STRICT)
    assert own.apply(SYSTEM, True) == own.apply(SYSTEM, True) == own.apply(TALK, True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_template_that_fails_for_another_reason_says_why() -> None:
    with pytest.raises(InvalidOptionError, match="cannot be written: never"):
        chat("{{ raise_exception('never') }}").apply(TALK, True)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages"])
def test_arguments_that_are_not_for_the_template(name: str) -> None:
    with pytest.raises(InvalidOptionError, match=name):
        chat(TEMPLATE, **{name: True})


def test_the_default_comes_back_after_another_was_chosen() -> None:
    own = chat({"default": TEMPLATE, "tool": "tools"})
    own.select("tool")
    assert own.select(True) == TEMPLATE
    assert own.apply(TALK, True) != "tools"


def test_several_templates_without_a_default() -> None:
    with pytest.raises(InvalidOptionError, match="one of rag, tool"):
        chat({"rag": TEMPLATE, "tool": "tools"}).select(True)


def test_choosing_among_several() -> None:
    own = chat({"default": TEMPLATE, "tool": "tools"})
    assert own.select(True) == TEMPLATE
    assert own.select("tool") == own.source == own.apply(TALK, True) == "tools"
    with pytest.raises(UnknownNameError, match="'toll'; did you mean tool"):
        own.select("toll")


def test_one_template_and_a_name(caplog: pytest.LogCaptureFixture) -> None:
    own = chat(TEMPLATE)
    assert own.select(False) is None
    assert own.select(None) is None
    assert own.select(True) == TEMPLATE
    assert own.select("tool") == TEMPLATE
    assert "'tool' is ignored" in caplog.text


def test_no_template() -> None:
    own = chat(None)
    assert not own.exists
    assert own.source is None
    assert own.select(False) is None
    with pytest.raises(InvalidOptionError, match="no chat template"):
        own.select(True)


def test_the_digest_names_template_and_arguments() -> None:
    digests = [
        chat(TEMPLATE).digest(),
        chat(STRICT).digest(),
        chat(None).digest(),
        chat(TEMPLATE, a=1).digest(),
    ]
    assert len(set(digests)) == 4
    assert chat(TEMPLATE).digest() == digests[0]
    assert chat(TEMPLATE, a=1, b=2).digest() == chat(TEMPLATE, b=2, a=1).digest()
