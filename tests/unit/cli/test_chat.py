"""`tinkex chat`, against a service that answers as it is told. With a real model: test_live.py."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tinkex.testing import ScriptedService

from .conftest import KEY, Saved, Tinkex
from .typed_command import Terminal

MODELS = [{"model_name": "org/one"}, {"model_name": "one", "alias_of": "org/one"}]


def chunk(text: str, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


class Speaker:
    """What `tinkex chat` needs of a service, in the oldest dialect: its models, and the endpoint under /oai."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = MODELS
        self.answers: list[tuple[int, list[str]]] = []
        """Status and events, one of them for each message; when they run out: "Yes."."""
        self.heard: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def serve(self) -> ThreadingHTTPServer:
        speaker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/api/v1/get_server_capabilities":
                    self._send(200, json.dumps({"supported_models": speaker.models}))
                else:
                    self._send(404, '{"detail": "not here"}')

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path != "/oai/api/v1/chat/completions":
                    self._send(404, '{"detail": "not here"}')
                    return
                speaker.heard.append(json.loads(body))
                speaker.headers.append({name.lower(): value for name, value in self.headers.items()})
                answers = speaker.answers
                status, events = answers.pop(0) if answers else (200, [chunk("Yes."), chunk("", "stop"), "[DONE]"])
                self._send(status, events[0] if status != 200 else "".join(f"data: {event}\n\n" for event in events))

            def _send(self, status: int, body: str) -> None:
                self.send_response(status)
                if status == 429:
                    self.send_header("retry-after-ms", "10")
                self.send_header("content-length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Speaker]:
    made = Speaker()
    server = made.serve()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_one_message_on_stdin_gets_one_reply(run: Tinkex, speaker: Speaker, says: Any) -> None:
    speaker.answers = [(200, [chunk("Hel"), chunk("lo"), chunk("", "stop"), "[DONE]"])]
    says("Hi there\n")
    ran = run("chat", "--system", "Be kind.", "--temperature", "0", "--seed", "7")
    assert (ran.code, ran.out, ran.err) == (0, "Hello\n", "")
    assert speaker.heard == [
        {
            "model": "org/one",
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there"}],
            "max_tokens": 512,
            "temperature": 0.0,
            "seed": 7,
            "stream": True,
        }
    ]
    assert speaker.headers[0]["authorization"] == f"Bearer {KEY}"


def test_a_json_reply_says_why_it_ended(run: Tinkex, speaker: Speaker, says: Any) -> None:
    speaker.answers = [(200, [chunk("Hel", "length"), "[DONE]"])]
    says("Hi")
    ran = run("chat", "one", "-o", "json")
    assert ran.json == {"model": "one", "answer": "Hel", "finish_reason": "length"}
    assert "temperature" not in speaker.heard[0], "what was not given is left to the service"


def test_without_a_name_the_only_model_is_used(run: Tinkex, speaker: Speaker, says: Any) -> None:
    speaker.models = [*MODELS, {"model_name": "org/two"}, {"model_name": "org/mute", "sampleable": False}]
    says("Hi")
    ran = run("chat")
    assert (ran.code, speaker.heard) == (1, [])
    assert ran.err == (
        "tinkex: Name a model: tinkex chat MODEL. The service offers org/one, org/two; "
        "`latest` is your newest checkpoint.\n"
    )
    assert (
        "has no model 'three', and you have no run with this id or name. It offers org/one, org/two;"
        in run("chat", "three").err
    )


def test_latest_is_the_newest_checkpoint_for_sampling(run: Tinkex, service: ScriptedService, says: Any) -> None:
    says("Hi")
    assert "There is no checkpoint to sample from" in run("chat", "latest").err


def test_a_checkpoint_that_cannot_be_sampled_is_rejected_with_advice(run: Tinkex, saved: Saved, says: Any) -> None:
    says("Hi")
    ran = run("chat", saved.state)
    assert ran.code == 1 and "sampler_weights" in ran.err and "tinkex checkpoint list" in ran.err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, ['{"error": {"message": "max_tokens: too many."}}']), "request (HTTP 400: max_tokens: too many)"),
        ((404, ['{"detail": "no such call"}']), "Not found (HTTP 404: no such call)"),
        ((200, [chunk("Hel"), '{"error": {"message": "The engine died."}}']), "The engine died."),
        ((200, [chunk("Hel")]), "The reply broke off"),
        ((200, ["[1, 2]"]), "The stream brought no text"),
    ],
)  # fmt: skip
def test_an_error_is_one_sentence(
    run: Tinkex, speaker: Speaker, says: Any, answer: tuple[int, list[str]], said: str
) -> None:
    speaker.answers = [answer]
    says("Hi")
    ran = run("chat")
    assert ran.code == 1
    assert said in ran.err and len(ran.err.splitlines()) == 1 and KEY not in ran.err


def test_a_full_queue_is_waited_out(run: Tinkex, speaker: Speaker, says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_MAX_RETRIES", "2")
    speaker.answers = [(429, ['{"error": {"message": "The queue is full."}}'])] * 4
    says("Hi")
    ran = run("chat")
    assert (ran.code, ran.out.strip()) == (0, "Yes.") and len(speaker.heard) == 5


def test_an_empty_message_is_rejected(run: Tinkex, speaker: Speaker, says: Any) -> None:
    says("\n")
    assert run("chat").err.startswith("tinkex: There is no message on stdin.")


@pytest.mark.parametrize("value", ["-1", "warm", "nan", "inf"])
def test_a_temperature_is_a_number_from_0(run: Tinkex, value: str) -> None:
    ran = run("chat", f"--temperature={value}")
    assert ran.code == 2 and "is not a temperature" in ran.err


def test_a_conversation_keeps_its_messages_and_runs_slash_commands(speaker: Speaker, tmp_path: Path) -> None:
    full = '{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    file = tmp_path / "talk.json"
    with Terminal("chat") as terminal:
        terminal.wait_for("Chatting with the base model org/one")
        for typed, answered in [
            ("Is it so?", "Yes."),
            ("/temperature 0.5", "Set the temperature to 0.5."),
            ("/temperature hot", "is not a temperature"),
            ("//etc", "Yes."),
            (f"/save {file}", "Saved 4 messages to"),
            (f"/save {file}", "Saved 4 messages to"),
            ("/nothing", "Unknown command /nothing."),
            ("/help", "/reset"),
            ("/system Be brief.", "Set the system message and cleared"),
            ("And now?", "Yes."),
        ]:
            terminal.wait_for("> ")
            terminal.type(f"{typed}\n")
            terminal.wait_for(answered)
        terminal.wait_for("> ")
        speaker.answers = [(400, [full])]
        terminal.type("More?\n")
        terminal.wait_for("/reset clears it")
        terminal.wait_for("> ")
        terminal.interrupt_until("(Ctrl-D ends the chat.)")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert [len(heard["messages"]) for heard in speaker.heard] == [1, 3, 2, 4]
    assert speaker.heard[1]["messages"][2] == {"role": "user", "content": "/etc"}
    assert speaker.heard[1]["temperature"] == 0.5
    assert speaker.heard[2]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in json.loads(file.read_text())["messages"]] == ["user", "assistant"] * 2


def test_an_existing_file_is_not_overwritten(speaker: Speaker, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("mine")
    with Terminal("chat") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hi\n")
        terminal.wait_for("> ")
        terminal.type(f"/save {file}\n")
        terminal.wait_for("already exists")
        terminal.type("/save /no/such/folder/file\n")
        terminal.wait_for("cannot be written")
        terminal.type("/exit\n")
        assert terminal.end() == 0
    assert file.read_text() == "mine"


def test_a_models_text_cannot_control_the_terminal(speaker: Speaker) -> None:
    speaker.answers = [(200, [chunk("a\x1b[2Jb\x07c"), chunk("", "stop"), "[DONE]"])]
    with Terminal("chat") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hi\n")
        terminal.wait_for("> ")
        assert "a [2Jb c" in terminal.raw


def test_json_is_for_one_message_only(speaker: Speaker) -> None:
    with Terminal("chat", "-o", "json") as terminal:
        assert terminal.end() == 1
        assert "-o json is for one message on stdin" in terminal.text
