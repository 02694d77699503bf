r"""Conversations as training data: a tokenizer's chat template makes each one a text.

A line of a .jsonl has {"messages": [{"role": ..., "content": ...}, ...]}. Losses count the
assistant's words alone, and what the template puts behind them, such as an end of the turn:

    <|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n
                                       ^^^^^^^^^^^^^^^^

The template is Jinja, as Hugging Face's transformers reads it from chat_template.jinja or
tokenizer_config.json. It is run in Jinja's sandbox. What an assistant says begins where the
template ends for the messages before it and for the beginning of a reply; a template that writes a
message in another way once others follow, or that needs more than Jinja, is refused.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnmpi.base.errors import DataError, UsageError, shortened
from nnmpi.data.json_lines import json_objects
from nnmpi.data.tokenizer import (
    CONFIG_FILE,
    TEMPLATE,
    TEMPLATE_FILE,
    find_tokenizer,
    read_words,
)

MESSAGES = "messages"  # the column
ASSISTANT = "assistant"

ChatMessage = Mapping[str, str]
SpokenText = tuple[str, bool]  # a text, and whether the assistant says it


class ChatTemplate:
    """A chat template.

    Args:
        source: the folder that errors name.
        text: of the template, in Jinja.
        tokens: the special tokens that it may name, such as bos_token.

    Raises:
        UsageError: without the library jinja2, and for a template that needs more than Jinja.
    """

    def __init__(self, source: Path, text: str, tokens: Mapping[str, str]) -> None:
        self.text, self.tokens, self._source = text, dict(tokens), source
        try:
            jinja, sandbox = map(importlib.import_module, ("jinja2", "jinja2.sandbox"))
        except ImportError:
            raise UsageError(
                f"{source}: its chat template is read by the library jinja2, which is not"
                " installed; pip install jinja2"
            ) from None
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=jinja.Undefined
        )
        environment.globals["raise_exception"] = self._refuse
        self._errors = jinja.TemplateError
        try:
            self._template = environment.from_string(text)
        except jinja.TemplateError as error:
            raise UsageError(
                f"{source}: its chat template needs more than Jinja ({error}); write the"
                " conversations as texts"
            ) from None

    def _refuse(self, message: str) -> None:
        raise DataError(f"{self._source}: its chat template says: {message}")

    def render(self, messages: Sequence[ChatMessage], begins_reply: bool = False) -> str:
        """Return the text of messages, perhaps with the beginning of the assistant's reply.

        Raises:
            UsageError: when the template needs something that only transformers gives it.
            DataError: when it refuses the messages.
        """
        try:
            return str(
                self._template.render(
                    messages=messages, add_generation_prompt=begins_reply, **self.tokens
                )
            )
        except (self._errors, TypeError, ValueError, KeyError) as error:
            raise UsageError(
                f"{self._source}: its chat template needs more than Jinja ({error}); write the"
                " conversations as texts"
            ) from None

    def segments(self, messages: Sequence[ChatMessage]) -> list[SpokenText]:
        """Return the text of a conversation in order, by who says it.

        Raises:
            UsageError: as `render`, and when the template writes a message in another way once
                others follow.
        """
        result, written = list[SpokenText](), ""
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            ends = self.render(messages[:i], begins_reply=True), self.render(messages[: i + 1])
            for text, says in zip(ends, (False, True), strict=True):
                result.append((self._rest(written, text), says))
                written = text
        result.append((self._rest(written, self.render(messages)), False))
        return [segment for segment in result if segment[0]]

    def _rest(self, written: str, text: str) -> str:
        if not text.startswith(written):
            raise UsageError(
                f"{self._source}: its chat template writes a message in another way once others"
                " follow, so it is not known what the assistant says; write the conversations as"
                " texts"
            )
        return text[len(written) :]


def read_template(tokenizer: str) -> ChatTemplate:
    """Return the chat template beside a saved tokenizer.

    Args:
        tokenizer: its file or folder.

    Raises:
        UsageError: without one, or as `ChatTemplate`.
        DataError: for an unreadable file.
    """
    found = find_tokenizer(tokenizer)
    folder = Path(tokenizer) if found is None else found.parent
    return template_of(read_words(folder), folder)


def template_of(words: Mapping[str, Any], folder: Path) -> ChatTemplate:
    """Return the chat template among what stands beside a tokenizer; see `read_words`.

    Args:
        folder: of the tokenizer, which errors name.

    Raises:
        UsageError: without one, or as `ChatTemplate`.
    """
    text = words.get(TEMPLATE)
    if isinstance(text, list):  # several, by name
        text = next((item["template"] for item in text if item.get("name") == "default"), None)
    if not isinstance(text, str):
        raise UsageError(
            f"tokenizer {folder} has no chat template, which makes {MESSAGES} a text; give one"
            f" that has, in {TEMPLATE_FILE} or {CONFIG_FILE}"
        )
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in words.items()
        if key != TEMPLATE
    }
    return ChatTemplate(
        folder, text, {key: value for key, value in tokens.items() if isinstance(value, str)}
    )


def conversations(path: Path) -> Iterator[list[ChatMessage]]:
    """Yield the messages of each line of a .jsonl.

    Raises:
        DataError: for lines without messages of a role and a text, or without an assistant's.
    """
    for line, row in json_objects(path):
        messages = row.get(MESSAGES)
        if not (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(item, dict)
                and isinstance(item.get("role"), str)
                and isinstance(item.get("content"), str)
                for item in messages
            )
        ):
            raise DataError(
                f"{path}, line {line}: {MESSAGES} is {shortened(repr(messages))}; give a list of"
                ' {"role": ..., "content": TEXT}'
            )
        if not any(item["role"] == ASSISTANT for item in messages):
            raise DataError(f"{path}, line {line}: no message has the role {ASSISTANT}")
        yield messages
