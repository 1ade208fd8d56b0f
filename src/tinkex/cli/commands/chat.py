"""`tinkex chat`: a conversation with a base model or an adapter, at the terminal or one message through a pipe."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tinkex.cli.arguments import count, temperature
from tinkex.terminal import output
from tinkex.terminal.format import aware, clean

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from tinkex.cli.main import Words
    from tinkex.client._runtime.link import Connection

LATEST = "latest"
PROMPT = "> "
MORE = """\
MODEL is a base model that the service serves, a checkpoint (tinker://…/sampler_weights/…), or
`latest` for the checkpoint you saved last with save_weights_for_sampler. Left out, it is the base
model, if the service has only one. The service applies the model's own chat template.

At the prompt, a line that begins with / is for this command; /help tells which there are. Ctrl-C
stops an answer, Ctrl-D ends. With a message on stdin, one answer is written and that is all."""
HELP = """\
/reset             forget the conversation
/system TEXT       tell the model what it is, and begin anew; without TEXT: nothing
/temperature X     0: always the likeliest word; 1: as the model has learned it
/save FILE         write the conversation as JSON, as data for training has it
/help              this list
/exit              end, as Ctrl-D does
Write // for a message that begins with /."""


def add(words: Words, about: str) -> None:
    made = words.add(
        "chat", chat, about, "tinkex chat", "tinkex chat latest",
        'tinkex chat tinker://RUN/sampler_weights/0001 --system "You are a pirate."',
        "tinkex chat smollm2-135m --temperature 0 < question.txt", more=MORE,
    )  # fmt: skip
    made.add_argument("model", nargs="?", metavar="MODEL", help="a base model, tinker://…/sampler_weights/…, or latest")
    made.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    made.add_argument("--temperature", type=temperature, metavar="T", help="0: always the likeliest word (default 1)")
    made.add_argument("--max-tokens", type=count, default=512, metavar="N", help="the longest answer (default 512)")
    made.add_argument("--seed", type=int, metavar="N", help="the same seed and the same words, the same answer")


def chat(args: argparse.Namespace) -> int:
    from tinkex.cli.connect import announce_retries, config_for
    from tinkex.client._runtime.link import connection_for
    from tinkex.errors import ValidationError

    is_conversation = sys.stdin.isatty()
    if is_conversation and args.output == "json":
        raise ValidationError("-o json is for one message on stdin: echo 'Who are you?' | tinkex chat -o json")
    announce_retries()
    model, about = choose(args)
    talk = Conversation(connection_for(config_for(args)), model, args)
    return converse(talk, about) if is_conversation else answer_one(talk, as_json=args.output == "json")


class Conversation:
    """What was said, and how the next answer is asked for."""

    def __init__(self, connection: Connection, model: str, args: argparse.Namespace) -> None:
        self._connection = connection
        self.model = model
        self.system: str | None = args.system
        self.temperature: float | None = args.temperature
        self._limits = {"max_tokens": args.max_tokens, "seed": args.seed}
        self.messages: list[dict[str, str]] = []
        self._files: set[Path] = set()

    def reset(self) -> None:
        self.messages.clear()

    @property
    def whole(self) -> list[dict[str, str]]:
        """The messages as the model gets them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str, *, is_shown: bool = True) -> str | None:
        """Add a message and the answer to it; says why the answer ended, None if Ctrl-C ended it.

        A message that got no answer is forgotten, so that it can be sent again.
        """
        from tinkex.cli.commands.answers import stream

        body = {
            "model": self.model,
            "messages": [*self.whole, {"role": "user", "content": text}],
            "temperature": self.temperature,
            **self._limits,
        }
        # Only what was given is sent: for the rest the service's own defaults hold.
        given = {name: value for name, value in body.items() if value is not None}
        said: list[str] = []
        reason: str | None = None
        try:
            with closing(stream(self._connection, given)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    said.append(piece.text)
                    reason = piece.finish_reason or reason
                    if is_shown:
                        output.stream(piece.text)
            reason = reason or "stop"
        except KeyboardInterrupt:
            reason = None
        if said or reason:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(said)}]
        return reason

    def save(self, name: str) -> str:
        """Write the conversation to a file that is not there yet, or that this conversation wrote before."""
        import json
        from pathlib import Path

        file = Path(name).expanduser()
        if file.exists() and file not in self._files:
            return f"{file} is already there. Name another file."
        if not self.messages:
            return "Nothing was said yet."
        try:
            file.write_text(
                json.dumps({"model": self.model, "messages": self.whole}, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        except OSError as problem:
            return f"{file} cannot be written: {problem.strerror}."
        self._files.add(file)
        return f"{len(self.messages)} messages are in {file}."


def answer_one(talk: Conversation, *, as_json: bool) -> int:
    """One message in, one answer out."""
    from tinkex.errors import ValidationError

    text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise ValidationError("There is no message on stdin. At a terminal, start `tinkex chat` without a pipe.")
    reason = talk.ask(text, is_shown=not as_json)
    if reason is None:
        raise KeyboardInterrupt
    if as_json:
        output.write_json({"model": talk.model, "answer": talk.messages[-1]["content"], "finish_reason": reason})
        return 0
    output.stream("\n")
    if reason == "length" and sys.stderr.isatty():
        output.remark("(cut at --max-tokens)")
    return 0


def converse(talk: Conversation, about: str) -> int:
    """A message a line, until Ctrl-D. Nothing that goes wrong with one answer ends the conversation."""
    from tinkex.cli.main import sentence
    from tinkex.errors import TinkexError

    try:
        import readline  # input() then has a history, and keys that edit the line

        assert readline
    except ImportError:
        pass
    output.remark(f"{about} /help shows what you can type, Ctrl-D ends.")
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            output.remark("")
            return 0
        except KeyboardInterrupt:
            output.remark("\n(Ctrl-D ends.)")
            continue
        if line.startswith("/") and not line.startswith("//"):
            said = obey(talk, line)
            if said is None:
                return 0
            output.remark(said)
        elif line.strip():
            try:
                reason = talk.ask(line.removeprefix("/"))
            except TinkexError as problem:
                output.remark(f"tinkex: {sentence(problem)}{_remedy(problem)}")
                continue
            output.stream("\n")
            if reason != "stop":
                output.remark("(stopped)" if reason is None else "(cut at --max-tokens)")


def _remedy(problem: Exception) -> str:
    body = getattr(problem, "body", None)
    error = body.get("error") if isinstance(body, dict) else None
    is_full = isinstance(error, dict) and error.get("code") == "context_length_exceeded"
    return " The conversation fills the model's context: /reset begins anew." if is_full else ""


def obey(talk: Conversation, line: str) -> str | None:
    """Do what a line with a slash asks for and say what was done; None ends the conversation."""
    import argparse

    word, _, rest = line.partition(" ")
    rest = rest.strip()
    match word:
        case "/help":
            return HELP
        case "/exit" | "/quit":
            return None
        case "/reset":
            talk.reset()
            return "The conversation is forgotten."
        case "/system":
            talk.system = rest or None
            talk.reset()
            return "The model is told this, and the conversation begins anew." if rest else "The model is told nothing."
        case "/temperature":
            try:
                talk.temperature = temperature(rest)
            except argparse.ArgumentTypeError as problem:
                return f"{problem}."
            return f"The temperature is {talk.temperature:g}."
        case "/save":
            return talk.save(rest) if rest else "Name a file: /save conversation.json"
    return f"There is no {word}. /help shows what there is; write // for a message that begins with /."


def choose(args: argparse.Namespace) -> tuple[str, str]:
    """The model to talk to, and a sentence about it."""
    name = args.model
    if name == LATEST:
        name = _newest_sampler(args)
    if name is not None and name.startswith("tinker://"):
        return name, f"Talking to {clean(name)}{_base_of(args, name)}."
    from tinkex.cli.commands.models import offered
    from tinkex.errors import ValidationError

    models = offered(args)
    names = [str(entry["model_name"]) for entry in models if entry.get("sampleable") is not False]
    own = [str(entry["model_name"]) for entry in models if entry["model_name"] in names and not entry.get("alias_of")]
    listed = ", ".join(own) or "none"
    if name is None and len(own) != 1:
        raise ValidationError(
            f"Name a model: tinkex chat MODEL. The service offers {listed}; `latest` is a checkpoint."
        )
    if name is not None and name not in names:
        raise ValidationError(f"The service has no model {name!r}. It offers {listed}.")
    name = name or own[0]
    return name, f"Talking to {clean(name)}, as it is. `tinkex chat latest` talks to what you trained last."


def _newest_sampler(args: argparse.Namespace) -> str:
    from tinkex.cli.commands.checkpoint import listed
    from tinkex.cli.connect import rest_client
    from tinkex.errors import ValidationError

    found = [saved for saved in listed(rest_client(args), None, 0) if saved.checkpoint_type == "sampler"]
    if not found:
        raise ValidationError(
            "There is no checkpoint to talk to. training.save_weights_for_sampler(name) saves one; "
            "`tinkex chat` without `latest` talks to the base model."
        )
    return max(found, key=lambda saved: aware(saved.time)).tinker_path


def _base_of(args: argparse.Namespace, path: str) -> str:
    """Which model a checkpoint is an adapter of, if the service tells."""
    from tinkex.cli.connect import rest_client
    from tinkex.errors import APIStatusError, ValidationError
    from tinkex.types import ParsedCheckpointTinkerPath

    if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type != "sampler":
        raise ValidationError(
            f"{path} is no checkpoint to sample from. Those are tinker://…/sampler_weights/…: `tinkex checkpoint list`."
        )
    try:
        weights: Any = rest_client(args).get_weights_info_by_tinker_path(path).result()
    except APIStatusError:
        return ""  # not every service has the call; whether the path is right, the first message tells
    return f", an adapter of {clean(weights.base_model)}"
