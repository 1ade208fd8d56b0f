"""Reads the messages and tools of a chat in OpenAI's format, and returns them as chat templates expect them. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson

from tinkex.server.openai.errors import BadField


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages as a chat template expects them."""
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "must be a list with at least one message.")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def _message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadField(at, "must be an object with role and content.")
    role = message.get("role")
    if role not in _ROLES:
        raise BadField(f"{at}.role", f"{str(role)[:50]!r} is not one of {', '.join(_ROLES)}.")
    # Newer clients send "developer" where templates know "system".
    rendered: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if message.get("content") is None and not (role == "assistant" and calls):
        raise BadField(f"{at}.content", "is missing.")
    rendered["content"] = _content(message.get("content"), f"{at}.content")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            rendered[name] = message[name]
    if calls:
        if not isinstance(calls, list):
            raise BadField(f"{at}.tool_calls", "must be a list.")
        rendered["tool_calls"] = [_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return rendered


def _content(content: object, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(at, "must be text, or a list of parts.")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise BadField(
                f"{at}[{index}]",
                f"a part of type {str(kind)[:50]!r} is not supported. Only text is, no images, audio or files.",
                "unsupported",
            )
        if not isinstance(part.get("text"), str):
            raise BadField(f"{at}[{index}].text", "must be text.")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: object, at: str) -> dict[str, Any]:
    """Read a tool call that the assistant made earlier. Its arguments come as JSON text; templates expect an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadField(at, "must have a function with a name.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise BadField(f"{at}.function.arguments", "is not JSON.") from None
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_tools(tools: object, choice: object) -> list[dict[str, Any]] | None:
    """Return the tools to show to the model. If it calls one, the call comes back as text in the model's own format."""
    if choice not in ("auto", "none"):
        raise BadField("tool_choice", "a call cannot be forced here. Use auto or none.", "unsupported")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise BadField("tools", "must be a list of functions.")
    return tools if tools and choice == "auto" else None
