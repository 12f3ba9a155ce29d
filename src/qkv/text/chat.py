"""Conversations: what a message may hold, and how the template gets to see it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkv.errors import TokenizerError
from qkv.text.sandbox import Template
from qkv.text.scaffold import Scaffold, Shield
from qkv.text.vocabulary import Vocabulary

# What a caller may pass to a template beside the messages.
ARGUMENTS = frozenset(
    {
        "builtin_tools",
        "custom_tools",
        "date_string",
        "documents",
        "enable_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "tools",
        "tools_in_user_message",
    }
)

# Roles that templates turn into control text ('<|' + role + '|>'). Any other is a string like the rest.
ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"})

# Where a model's own marks, such as </think>, may stand in what it said before.
_SPOKEN = frozenset({"content", "reasoning_content", "reasoning", "thinking"})

_MAX_DEPTH = 64
_READS_PARTS = re.compile(r"""['"]text['"]|\.text\b""")


class Chat:
    """The chat templates of a model and the control tokens they may write."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if "default" not in vocabulary.templates:
            raise TokenizerError(
                "This model has no chat template (tokenizer.chat_template in a GGUF file, "
                "chat_template.jinja in a folder): give it a plain prompt instead."
            )
        self._sources = vocabulary.templates
        self._compiled: dict[str, tuple[Template, Shield]] = {}
        self._controls = {
            token.text: token.id for token in vocabulary.added if token.id in vocabulary.controls
        }
        self._own = {token.text for token in vocabulary.added if not token.special} & set(self._controls)
        # Templates write these themselves: {{ bos_token }}.
        self._named = {f"{name}_token": vocabulary.tokens[id] for name, id in vocabulary.named.items()}

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, arguments: Mapping[str, Any]
    ) -> Scaffold:
        """Run the template on messages whose every string is kept from being control text."""
        if unknown := sorted(set(arguments) - ARGUMENTS):
            raise TokenizerError(
                f"{unknown[0]} is no argument of a chat template here ({', '.join(sorted(ARGUMENTS))})."
            )
        name = "tool_use" if arguments.get("tools") and "tool_use" in self._sources else "default"
        source = self._sources[name]
        template, shield = self._template(name)
        plain = _plain_messages(messages)
        arguments = {key: _plain(value, key) for key, value in arguments.items()}
        if not _READS_PARTS.search(source):
            plain = [_joined(message, index) for index, message in enumerate(plain)]
        sentinel = shield.sentinel(_strings([plain, arguments]))

        def broken(value: Any, assistant: bool = False) -> Any:
            if isinstance(value, str):
                return shield.broken(value, sentinel, assistant)
            if isinstance(value, list):
                return [broken(item, assistant) for item in value]
            if isinstance(value, dict):
                return {broken(key): broken(item, assistant) for key, item in value.items()}
            return value

        def kept_apart(message: dict[str, Any]) -> dict[str, Any]:
            role, apart = message["role"], {}
            for key, value in message.items():
                known = key == "role" and role in ROLES
                apart[broken(key)] = value if known else broken(value, role == "assistant" and key in _SPOKEN)
            return apart

        rendered = template(
            {"tools": None, "documents": None}
            | self._named
            | {key: broken(value) for key, value in arguments.items()}
            | {
                "messages": [kept_apart(message) for message in plain],
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return shield.split(rendered, sentinel)

    def _template(self, name: str) -> tuple[Template, Shield]:
        if name not in self._compiled:
            source = self._sources[name]
            self._compiled[name] = Template(source), Shield(self._controls, self._own, source)
        return self._compiled[name]


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fresh copies, checked, without what is None and with reasoning under the name templates read."""
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise TokenizerError("messages must be a list of messages, with at least one.")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(f'messages[{index}] must be an object with a "role" that is a string.')
        known = {key: value for key, value in message.items() if value is not None}
        for older in ("thinking", "reasoning"):
            if older in known:
                known.setdefault("reasoning_content", known[older])
        plain.append(_plain(known, f"messages[{index}]"))
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of nothing but JSON's own types, which is all that a template gets to see."""
    if depth > _MAX_DEPTH:
        raise TokenizerError(f"{where.split('[')[0]} is nested deeper than {_MAX_DEPTH} levels.")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's member is its text
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TokenizerError(f"{where} has a key that is no string: {key!r}.")
        return {str.__str__(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise TokenizerError(
        f"{where} is a {type(value).__name__}; strings, numbers, lists and objects can be sent."
    )


def _joined(message: dict[str, Any], index: int) -> dict[str, Any]:
    """For a template that reads only strings: the text parts of a content as lines of one."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) != len(content):
        raise TokenizerError(
            f"messages[{index}].content has a part that is no text; this chat template takes text only."
        )
    return message | {"content": "\n".join(texts)}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
