"""The model's chat template: choosing it, applying it, naming it. Knows no model and no lm-eval."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from mlx_eval.errors import InvalidOptionError, unknown_name
from mlx_eval.harness.encoding import hf_tokenizer

logger = logging.getLogger(__name__)


OURS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "truncation",
    }
)
"""Arguments of transformers' `apply_chat_template` that are not the template's own."""


class ChatTemplate:
    """Writes conversations in the form that a model was trained on."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        """Use the template of `tokenizer`.

        Args:
            tokenizer: mlx-lm's wrapper, which knows templates written in Python too.
            arguments: passed to the template, such as `enable_thinking`.
        """
        if not isinstance(arguments, Mapping):
            raise InvalidOptionError(f"chat_template_args={arguments!r}: give names and values")
        for name in arguments:
            if name in OURS:
                raise InvalidOptionError(f"chat_template_args: {name} is not for the template to be given")
        self._wrapper = tokenizer
        self._tokenizer = hf_tokenizer(tokenizer)
        self._arguments = dict(arguments)
        self._name: str | None = None
        self._warned = False

    @property
    def source(self) -> str | None:
        """The template's text; None when the model has none or a Python one."""
        template = self._tokenizer.chat_template
        source: str | None = template.get(self._name or "default") if isinstance(template, dict) else template
        return source

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return bool(getattr(self._wrapper, "has_chat_template", self._tokenizer.chat_template is not None))

    def select(self, choice: bool | str | None) -> str | None:
        """Choose a template by name, or the default by True; None when `choice` is False.

        Raises:
            InvalidOptionError: the model has no chat template.
            UnknownNameError: it has several, and none of that name.
        """
        if choice is False or choice is None:
            return None
        if not self.exists:
            raise InvalidOptionError(
                "the model has no chat template: leave --apply_chat_template out, or give it a tokenizer with one"
            )
        templates = self._tokenizer.chat_template
        self._name = None
        if choice is True and isinstance(templates, dict) and "default" not in templates:
            raise InvalidOptionError(
                "the model has several chat templates and no default: "
                f"give --apply_chat_template one of {', '.join(sorted(templates))}"
            )
        if isinstance(choice, str):
            if not isinstance(templates, dict):
                logger.warning("the model has one chat template only; the name %r is ignored", choice)
            elif choice not in templates:
                raise unknown_name("chat template", choice, templates)
            else:
                self._name = choice
        return self.source

    def apply(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Write `messages` as one text.

        A template that refuses the system message gets the conversation without it, with one warning.

        Args:
            messages: `{"role": …, "content": …}` each.
            add_generation_prompt: whether the assistant's turn is opened at the end; False leaves the
                last message open to be continued.
        """
        from jinja2.exceptions import TemplateError

        try:
            return self._render(messages, add_generation_prompt)
        except TemplateError as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise InvalidOptionError(f"the chat template cannot be written: {error}") from error
            if not self._warned:
                logger.warning("the chat template refuses a system message; it was left out")
                self._warned = True
            return self._render(others, add_generation_prompt)

    def digest(self) -> str:
        """Names template and arguments: 16 hexadecimal digits."""
        parts = json.dumps([self.source, self._arguments], sort_keys=True, default=str)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        # mlx-lm's wrapper switches thinking on by itself, so it is only asked when the template is Python
        renders = self._wrapper if getattr(self._wrapper, "_chat_template", None) else self._tokenizer
        named = {} if self._name is None else {"chat_template": self._name}
        text: str = renders.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **named,
            **self._arguments,
        )
        return text
