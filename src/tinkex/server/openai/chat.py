"""Messages and tools of a chat in OpenAI's words, turned into what chat templates read. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson

from tinkex.server.openai.errors import BadField


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as a chat template wants them."""
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "must be a list with at least one message.")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def _message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadField(at, "must be an object with role and content.")
    role = message.get("role")
    if role not in _ROLES:
        raise BadField(f"{at}.role", f"{str(role)[:50]!r} is not one of {', '.join(_ROLES)}.")
    # Newer clients say developer where templates know system.
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if message.get("content") is None and not (role == "assistant" and calls):
        raise BadField(f"{at}.content", "is missing.")
    made["content"] = _content(message.get("content"), f"{at}.content")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if calls:
        if not isinstance(calls, list):
            raise BadField(f"{at}.tool_calls", "must be a list.")
        made["tool_calls"] = [_call(call, f"{at}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return made


def _content(content: object, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(at, "must be text, or a list of parts.")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise BadField(
                f"{at}[{place}]",
                f"a part of type {str(kind)[:50]!r} is not supported: text alone is, no images, audio or files.",
                "unsupported",
            )
        if not isinstance(part.get("text"), str):
            raise BadField(f"{at}[{place}].text", "must be text.")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: object, at: str) -> dict[str, Any]:
    """A call that the assistant made earlier. Its arguments come as JSON in a string; templates want the object."""
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
    """The tools to show to the model. It may answer with a call in its own words, which come back as text."""
    if choice not in ("auto", "none"):
        raise BadField("tool_choice", "a call cannot be forced here. Use auto or none.", "unsupported")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise BadField("tools", "must be a list of functions.")
    return tools if tools and choice == "auto" else None
