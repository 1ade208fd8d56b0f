"""A model's own chat template: found among its files, run in jinja's sandbox with the names that templates expect.

It renders what `transformers` renders, without `transformers`. A template is the model's, messages are a stranger's:
neither can reach anything outside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinkex.clock import REAL, Clock
from tinkex.server.http.errors import bad_request


class ChatTemplate:
    """The templates of one model (some have one for conversations with tools) and the texts of its special tokens."""

    def __init__(self, folder: Path, clock: Clock = REAL) -> None:
        config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        self.special_tokens = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := token_text(value))
        }
        environment = _environment(clock)
        self._templates = {
            name: environment.from_string(source) for name, source in _sources(folder, config).items() if source
        }
        self._knows_tools = {name for name, source in _sources(folder, config).items() if "tools" in source}

    def render(
        self,
        model_name: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the text that the model was trained on. `extras` are names that the template may read."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise bad_request(
                f"{model_name} has no chat template, so it cannot take messages. Render the conversation yourself and "
                "send it as the prompt of a completion.",
                "no_chat_template",
            )
        if tools and name not in self._knows_tools:
            raise bad_request(
                f"The chat template of {model_name} has no place for tools. Describe them in a system message.",
                "unsupported",
            )
        given = {
            **self.special_tokens,
            **(extras or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(given)
        except Exception as problem:  # an edge: a template is the model's code, and these are a stranger's messages
            raise bad_request(
                f"The chat template of {model_name} refuses these messages: {str(problem)[:500]}", "bad_messages"
            ) from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no such file. Files like these are optional beside a tokenizer."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


def token_text(value: object) -> str | None:
    """A special token is written as a text, or as a record with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name. Files of their own win over the entry in tokenizer_config.json, as in transformers."""
    found: dict[str, str] = {}
    file = folder / "chat_template.jinja"
    if file.exists():
        found["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = extra.read_text(encoding="utf-8")
    if found:
        return found
    entry = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {str(row.get("name")): str(row.get("template", "")) for row in entry if isinstance(row, dict)}
    return {}


class _Generation(Extension):
    """`{% generation %}` marks what the model itself said, for training masks. Here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012  jinja declares it as a plain attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.fromtimestamp(clock.wall()).strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes <, > and & for HTML: a model would read the escapes.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
