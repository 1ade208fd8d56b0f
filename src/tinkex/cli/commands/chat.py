"""`tinkex chat`: a conversation with a base model or an adapter, on a terminal, or one message through a pipe."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import tinkex
from tinkex.cli.arguments import count, temperature
from tinkex.cli.connect import announce_retries, config_for, rest_client, service_for
from tinkex.cli.error_text import describe
from tinkex.cli.named import weights_named
from tinkex.cli.parser import CommandParser
from tinkex.errors import APIStatusError, TinkexError, ValidationError
from tinkex.terminal import output
from tinkex.terminal.format import clean

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "> "
MORE = """\
MODEL is a base model of the service, a checkpoint (tinker://…/sampler_weights/…), a run (its name,
its id or the beginning of it: what it saved last with save_weights_for_sampler), or `latest` for
what you saved last of all. Without MODEL, the base model is used, if the service has only one. The
service applies the model's chat template. If no service runs on this machine and none is set, one
is started; it ends some seconds after the chat.

At the prompt, a line that begins with / is a command of the chat; /help lists them. Ctrl-C stops a
reply, Ctrl-D ends the chat. With a message on stdin, one reply is printed and the command ends."""
HELP = """\
/reset             clear the conversation
/system TEXT       set the system message and clear the conversation; without TEXT: none
/temperature X     0: always the most likely token; 1: sample as the model has learned
/save FILE         save the conversation as JSON, in the form of training data
/help              show this list
/exit              end the chat, like Ctrl-D
Write // for a message that begins with /."""


def add(parser: CommandParser, about: str) -> None:
    command = parser.add_command(
        "chat", chat, about, "tinkex chat", "tinkex chat latest",
        'tinkex chat tinker://RUN/sampler_weights/0001 --system "You are a pirate."',
        "tinkex chat smollm2-135m --temperature 0 < question.txt", more=MORE,
    )  # fmt: skip
    command.add_argument(
        "model", nargs="?", metavar="MODEL", help="a base model, tinker://…/sampler_weights/…, a run, or latest"
    )
    command.add_argument("--system", metavar="TEXT", help="the system message")
    command.add_argument(
        "--temperature", type=temperature, metavar="T", help="0: always the most likely token (default 1)"
    )
    command.add_argument(
        "--max-tokens", type=count, default=512, metavar="N", help="maximum length of a reply (default 512)"
    )
    command.add_argument("--seed", type=int, metavar="N", help="the same seed and messages give the same reply")


def chat(args: argparse.Namespace) -> None:
    is_conversation = sys.stdin.isatty()
    if is_conversation and args.output == "json":
        raise ValidationError("-o json is for one message on stdin: echo 'Who are you?' | tinkex chat -o json")
    announce_retries()
    with service_for(args, args.model):
        model, about = choose(args)
        talk = Conversation(config_for(args), model, args)
        if is_conversation:
            converse(talk, about)
        else:
            reply_once(talk, as_json=args.output == "json")


class Conversation:
    """The messages so far, and how the next reply is requested."""

    def __init__(self, config: tinkex.Config, model: str, args: argparse.Namespace) -> None:
        self._config = config
        self.model = model
        self.system: str | None = args.system
        self.temperature: float | None = args.temperature
        self._limits = {"max_tokens": args.max_tokens, "seed": args.seed}
        self.messages: list[dict[str, str]] = []
        self._files: set[Path] = set()

    @property
    def whole(self) -> list[dict[str, str]]:
        """Return the messages as the model gets them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str, *, is_shown: bool = True) -> str | None:
        """Add a message and the reply to it; return why the reply ended, None if Ctrl-C ended it.

        A message without a reply is dropped, so that it can be sent again.
        """
        from tinkex.client.chat_stream import stream_chat

        body = {
            "model": self.model,
            "messages": [*self.whole, {"role": "user", "content": text}],
            "temperature": self.temperature,
            **self._limits,
        }
        # Options that were not set are left out: the service has its own defaults.
        request = {name: value for name, value in body.items() if value is not None}
        texts: list[str] = []
        reason: str | None = None
        try:
            with closing(stream_chat(self._config, request)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    texts.append(piece.text)
                    reason = piece.finish_reason or reason
                    if is_shown:
                        output.stream(piece.text)
            reason = reason or "stop"
        except KeyboardInterrupt:
            reason = None
        if texts or reason:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(texts)}]
        return reason

    def save(self, name: str) -> str:
        """Write the conversation to a new file, or to one that this conversation wrote before; return a remark."""
        import json
        from pathlib import Path

        file = Path(name).expanduser()
        if file.exists() and file not in self._files:
            return f"{file} already exists. Name another file."
        if not self.messages:
            return "There are no messages yet."
        try:
            file.write_text(
                json.dumps({"model": self.model, "messages": self.whole}, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        except OSError as error:
            return f"{file} cannot be written: {error.strerror}."
        self._files.add(file)
        return f"Saved {len(self.messages)} messages to {file}."


def reply_once(talk: Conversation, *, as_json: bool) -> None:
    """Send the message on stdin and print the reply."""
    text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise ValidationError(
            "There is no message on stdin. To chat on a terminal, start `tinkex chat` without a pipe."
        )
    reason = talk.ask(text, is_shown=not as_json)
    if reason is None:
        raise KeyboardInterrupt
    if as_json:
        output.write_json({"model": talk.model, "answer": talk.messages[-1]["content"], "finish_reason": reason})
        return
    output.stream("\n")
    if reason == "length" and sys.stderr.isatty():
        output.remark("(cut at --max-tokens)")


def converse(talk: Conversation, about: str) -> None:
    """Send one message per line, until Ctrl-D. An error in one reply does not end the conversation."""
    try:
        import readline  # gives input() a history and line editing

        assert readline
    except ImportError:
        pass
    output.remark(f"{about} /help lists the commands, Ctrl-D ends the chat.")
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            output.remark("")
            return
        except KeyboardInterrupt:
            output.remark("\n(Ctrl-D ends the chat.)")
            continue
        if line.startswith("/") and not line.startswith("//"):
            remark = run_slash_command(talk, line)
            if remark is None:
                return
            output.remark(remark)
        elif line.strip():
            try:
                reason = talk.ask(line.removeprefix("/"))
            except TinkexError as error:
                output.remark(f"tinkex: {describe(error)}{_remedy(error)}")
                continue
            output.stream("\n")
            if reason != "stop":
                output.remark("(stopped)" if reason is None else "(cut at --max-tokens)")


def _remedy(error: Exception) -> str:
    body = getattr(error, "body", None)
    detail = body.get("error") if isinstance(body, dict) else None
    is_full = isinstance(detail, dict) and detail.get("code") == "context_length_exceeded"
    return " The conversation is longer than the model's context: /reset clears it." if is_full else ""


def run_slash_command(talk: Conversation, line: str) -> str | None:
    """Run a command such as /reset and return a remark about it; None ends the conversation."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    match word:
        case "/help":
            return HELP
        case "/exit" | "/quit":
            return None
        case "/reset":
            talk.messages.clear()
            return "Cleared the conversation."
        case "/system":
            talk.system = rest or None
            talk.messages.clear()
            return f"{'Set' if rest else 'Removed'} the system message and cleared the conversation."
        case "/temperature":
            try:
                talk.temperature = temperature(rest)
            except argparse.ArgumentTypeError as error:
                return f"{error}."
            return f"Set the temperature to {talk.temperature:g}."
        case "/save":
            return talk.save(rest) if rest else "Name a file: /save conversation.json"
    return f"Unknown command {word}. /help lists the commands; write // for a message that begins with /."


def choose(args: argparse.Namespace) -> tuple[str, str]:
    """Return the model to chat with, and a sentence about it."""
    name = args.model
    if name is not None and name.startswith("tinker://"):
        return name, f"Chatting with {clean(name)}{_base_of(args, name)}."
    from tinkex.cli.commands.models import offered

    models = [entry for entry in offered(args) if entry.get("sampleable") is not False]
    names = [str(entry["model_name"]) for entry in models]
    base_names = [str(entry["model_name"]) for entry in models if not entry.get("alias_of")]
    listed = ", ".join(base_names) or "none"
    if name is None and len(base_names) != 1:
        raise ValidationError(
            f"Name a model: tinkex chat MODEL. The service offers {listed}; `latest` is your newest checkpoint."
        )
    if name is not None and name not in names:
        name = weights_named(args, name, base_names)
        return name, f"Chatting with {clean(name)}{_base_of(args, name)}."
    name = name or base_names[0]
    return name, f"Chatting with the base model {clean(name)}. `tinkex chat latest` uses your newest checkpoint."


def _base_of(args: argparse.Namespace, path: str) -> str:
    """Return ", an adapter of BASE" for a checkpoint, or "" if the service does not say."""
    if tinkex.ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type != "sampler":
        raise ValidationError(
            f"{path} cannot be sampled from. Use a path with /sampler_weights/; `tinkex checkpoint list` shows them."
        )
    try:
        weights: Any = rest_client(args).get_weights_info_by_tinker_path(path).result()
    except APIStatusError:
        return ""  # not every service has the call; a wrong path is reported with the first message
    return f", an adapter of {clean(weights.base_model)}"
