"""Renders conversations with the model's own chat template, in jinja's sandbox, as `transformers` would.

Neither the template, which came with the model, nor the messages, which came with a request, can reach anything outside
the sandbox.
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
    """The templates of one model (some have a second one for tools) and the texts of its special tokens."""

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
        """Return the conversation in the form that the model was trained on. `extras` are names the template may read.

        Encode the text with `add_special_tokens=False`: the template has written them.
        """
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
                f"The chat template of {model_name} does not support tools. Describe them in a system message.",
                "unsupported",
            )
        names = {
            **self.special_tokens,
            **(extras or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(names)
        except Exception as error:  # an edge: the template is code that came with the model
            raise bad_request(
                f"The chat template of {model_name} rejects these messages: {str(error)[:500]}", "bad_messages"
            ) from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file, for these files are optional beside a tokenizer."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


def token_text(value: object) -> str | None:
    """Return the text of a special token, which is written as a string or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return template sources by name. Template files win over tokenizer_config.json, as in transformers."""
    sources: dict[str, str] = {}
    file = folder / "chat_template.jinja"
    if file.exists():
        sources["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[extra.stem] = extra.read_text(encoding="utf-8")
    if sources:
        return sources
    entry = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {str(row.get("name")): str(row.get("template", "")) for row in entry if isinstance(row, dict)}
    return {}


class _Generation(Extension):
    """Renders the inside of `{% generation %}`, which marks the model's own words for training masks."""

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
