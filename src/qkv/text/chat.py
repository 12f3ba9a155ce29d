"""Conversations: what a message may hold, and how the template gets to see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.errors import TokenizerError
from qkv.text.rewriting import ROLES, Role
from qkv.text.sandbox import Template
from qkv.text.scaffold import Scaffold, Seals, holds_surrogates
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

# Where a model's own marks, such as </think>, may stand in what it said before.
_SPOKEN = frozenset({"content", "reasoning_content", "reasoning", "thinking"})

# A conversation that every template takes.
PROBE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})

_MAX_DEPTH = 64


class Chat:
    """The chat templates of a model and the control tokens they may write."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if "default" not in vocabulary.templates:
            raise TokenizerError(
                "This model has no chat template (tokenizer.chat_template in a GGUF file, "
                "chat_template.jinja in a folder): give it a plain prompt instead."
            )
        self._sources = vocabulary.templates
        self._templates: dict[str, Template] = {}
        controls = {token.text: token.id for token in vocabulary.added if token.id in vocabulary.controls}
        self._seals = Seals(
            controls, {token.text for token in vocabulary.added if not token.special} & set(controls)
        )
        # Templates write these themselves: {{ bos_token }}.
        self._named = {
            f"{name}_token": self._seals.sealed(vocabulary.tokens[id] or "")
            for name, id in vocabulary.named.items()
        }

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, arguments: Mapping[str, Any]
    ) -> Scaffold:
        """Run the template on messages whose every string is ordinary text."""
        if unknown := sorted(set(arguments) - ARGUMENTS):
            raise TokenizerError(
                f"{unknown[0]} is no argument of a chat template here ({', '.join(sorted(ARGUMENTS))})."
            )
        name = "tool_use" if arguments.get("tools") and "tool_use" in self._sources else "default"
        plain = _plain_messages(messages)
        arguments = {key: _plain(value, key) for key, value in arguments.items()}
        template = self._template(name)
        if "text" not in template.words:  # it takes contents to be strings
            plain = [_joined(message, index) for index, message in enumerate(plain)]
        return self._run(template, plain, add_generation_prompt, arguments)

    def _run(
        self,
        template: Template,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> Scaffold:
        rendered = template(
            {"tools": None, "documents": None}
            | self._named
            | dict(arguments)
            | {
                "messages": [self._marked(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return self._seals.split(rendered)

    def _marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with its role as one of the known, and with the model's own marks in what it said."""

        def spoken(value: Any) -> Any:
            if isinstance(value, str):
                return self._seals.spoken(value)
            if isinstance(value, list):
                return [spoken(item) for item in value]
            if isinstance(value, dict):
                return {key: spoken(item) for key, item in value.items()}
            return value

        role = message["role"]
        marked = dict(message) | ({"role": Role(role)} if role in ROLES else {})
        if role == "assistant":
            marked |= {key: spoken(message[key]) for key in _SPOKEN & set(message)}
        return marked

    def _template(self, name: str) -> Template:
        if name not in self._templates:
            template = Template(self._sources[name], seals=self._seals)
            self._check_followed(template)
            self._templates[name] = template
        return self._templates[name]

    def _check_followed(self, template: Template) -> None:
        """A control text put together in a way that is not followed would be ordinary text, unnoticed."""
        try:
            scaffold = self._run(template, PROBE, True, {})
        except TokenizerError:
            return  # it refuses these messages
        if text := self._seals.unsealed(scaffold):
            raise TokenizerError(
                f"The chat template puts {text} together from parts that are not written side by side; "
                "write it as one text."
            )


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
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return _unicode(str.__str__(value), where)  # an enumeration's member is its text
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TokenizerError(f"{where} has a key that is no string: {key!r}.")
            _unicode(key, f"A key of {where}")
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


def _unicode(text: str, where: str) -> str:
    if holds_surrogates(text):
        raise TokenizerError(f"{where} holds a lone surrogate, which is no Unicode.")
    return text
