"""`tinkex sample`: text and ids, streamed."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.terminal.emulator import TerminalFile
from tinkex.cli.commands.sample import TextWriter, ids_as_text
from tinkex.testing import Hang, ScriptedService, Status

from .conftest import KEY, Saved, Tinkex, start


def tokenizer_json() -> bytes:
    """A thousand words, w0 to w999, which is what the service samples from."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    made = Tokenizer(WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0"))
    made.pre_tokenizer = Whitespace()
    text: str = made.to_str()
    return text.encode()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedService]:
    files = {"tinkex/tiny": {"tokenizer.json": tokenizer_json()}}
    with ScriptedService(api_key=KEY, tokenizers=files) as running:
        monkeypatch.setenv("TINKER_BASE_URL", running.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        yield running


def test_a_text_prompt_gives_text(run: Tinkex, service: ScriptedService) -> None:
    ran = run("sample", "-m", "tinkex/tiny", "w1 w2", "--max-tokens", "5", "--seed", "1")
    assert ran.code == 0
    assert len(ran.out.split()) == 5
    assert all(word.startswith("w") for word in ran.out.split())
    sent = service.requests_to("sample_stream")[0].json
    assert sent["prompt"]["chunks"][0]["tokens"] == [1, 2]
    assert sent["sampling_params"]["max_tokens"] == 5


def test_token_ids_need_no_tokenizer(run: Tinkex, service: ScriptedService) -> None:
    ran = run("sample", "-m", "tinkex/tiny", "--prompt-ids", "[1, 2]", "--ids", "--max-tokens", "5", "--seed", "1")
    assert [word.isdigit() for word in ran.out.split()] == [True] * 5
    assert not service.requests_to("tokenizer_file")
    as_text = run("sample", "--prompt-ids", "1,2", "--max-tokens", "5", "--seed", "1")
    assert [f"w{word}" for word in ran.out.split()] == as_text.out.split()


def test_the_prompt_may_come_from_stdin(run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\n"))
    assert run("sample", "--max-tokens", "2").code == 0
    assert service.requests_to("sample_stream")[0].json["prompt"]["chunks"][0]["tokens"] == [7, 8]


def test_json_has_text_tokens_and_logprobs(run: Tinkex, service: ScriptedService) -> None:
    found = run("sample", "w1", "-n", "2", "--max-tokens", "3", "-o", "json").json
    assert found["prompt_tokens"] == 1
    assert len(found["sequences"]) == 2
    for sequence in found["sequences"]:
        assert len(sequence["tokens"]) == len(sequence["logprobs"]) == 3
        assert sequence["text"].split() == [f"w{token}" for token in sequence["tokens"]]
        assert sequence["stop_reason"] == "length"


def test_several_samples_are_not_mixed(run: Tinkex, service: ScriptedService) -> None:
    ran = run("sample", "w1", "-n", "3", "--max-tokens", "4")
    parts = ran.out.split("--- sample ")[1:]
    assert sorted(part.splitlines()[0] for part in parts) == ["1 (length)", "2 (length)", "3 (length)"]
    assert [len(part.splitlines()[1].split()) for part in parts] == [4, 4, 4]


def test_saved_weights_can_be_sampled_from(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    assert run("sample", "-m", saved.sampler, "--prompt-ids", "1", "--ids", "--max-tokens", "2").code == 0
    refused = run("sample", "-m", saved.state, "--prompt-ids", "1", "--ids")
    assert refused.code == 1
    assert "sampler_weights" in refused.err


def test_several_models_and_no_choice_lists_them(run: Tinkex, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedService(base_models=["a/one", "b/two"]) as service:
        ran = run("sample", "--base-url", service.url, "--prompt-ids", "1", "--ids")
    assert ran.code == 1
    assert ran.err == "tinkex: Name a model with -m. The service offers a/one, b/two.\n"


def test_options_that_were_not_set_are_not_sent(run: Tinkex, service: ScriptedService) -> None:
    words = ["--temperature", "0", "--top-p", "0.9", "--top-k", "5", "--stop", "w3", "--stop", "w4"]
    assert run("sample", "w1", *words, "--max-tokens", "1").code == 0
    params = service.requests_to("sample_stream")[0].json["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0, 0.9, 5)
    assert params["stop"] == ["w3", "w4"]
    assert params.get("seed") is None


def test_a_bad_parameter_is_rejected_before_it_is_sent(run: Tinkex, service: ScriptedService) -> None:
    ran = run("sample", "w1", "--temperature", "-1")
    assert ran.code == 1
    assert "temperature" in ran.err
    assert not service.requests_to("sample_stream")


def test_the_session_is_closed(run: Tinkex, service: ScriptedService) -> None:
    run("sample", "w1", "--max-tokens", "1")
    service.script.on("sample_stream", do=Status(400, "no"))
    run("sample", "w1", "--max-tokens", "1")
    ends = [session.finished["reason"]["type"] for session in service.sessions.values() if session.finished]
    assert ends == ["success", "errored"]


def test_text_is_printed_as_it_arrives(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedService(stream_token_s=0.2) as slow:
        running = start("sample", "--base-url", slow.url, "--prompt-ids", "1", "--ids", "--max-tokens", "200")
        assert running.stdout is not None
        assert running.stdout.read(1).isdigit()
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=10)
        assert running.returncode == 130
        assert err.strip() == "tinkex: stopped."
        slow.wait_for_requests("finish_session")
        assert [s.finished["reason"]["type"] for s in slow.sessions.values() if s.finished] == ["interrupted"]


def test_a_service_without_streams_gives_the_whole_sample(run: Tinkex) -> None:
    with ScriptedService(dialect="json") as old:
        ran = run("sample", "--base-url", old.url, "--prompt-ids", "1", "--ids", "--max-tokens", "6")
    assert len(ran.out.split()) == 6


def test_ctrl_c_does_not_wait_for_a_silent_service(service: ScriptedService) -> None:
    service.script.on("sample_stream", do=Hang())
    service.script.on("finish_session", do=Hang())
    running = start("sample", "--prompt-ids", "1", "--ids")
    service.wait_for_requests("sample_stream")
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=10)
    assert running.returncode == 130
    assert err.strip() == "tinkex: stopped."


def test_another_tokenizer_can_be_named(run: Tinkex, service: ScriptedService, tmp_path: Path) -> None:
    changed = json.loads(tokenizer_json())
    changed["model"]["vocab"] = {f"x{number}": number for number in range(1000)}
    changed["model"]["unk_token"] = "x0"
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    ran = run("sample", "x4", "--max-tokens", "2", "--tokenizer", str(tmp_path))
    assert [word[0] for word in ran.out.split()] == ["x", "x"]
    assert not service.requests_to("tokenizer_file")


def test_a_prompt_is_either_text_or_ids(run: Tinkex, service: ScriptedService) -> None:
    assert run("sample", "w1", "--prompt-ids", "1").code == 1
    assert run("sample", "--prompt-ids", "one").code == 2
    assert not service.sessions


def test_sampled_text_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinkex.terminal.output import stream

    stdout = TerminalFile()
    monkeypatch.setattr(sys, "stdout", stdout)
    stream("safe\n\ttext\x1b[2J")
    assert stdout.getvalue() == "safe\n\ttext [2J"


# -- tokens to text ---------------------------------------------------------------------------------------------------


def decode_bytes(tokens: list[int], skip_special_tokens: bool) -> str:
    """One token per byte, so that letters are split; 0 is a special token."""
    return bytes(token for token in tokens if token).decode("utf-8", "replace")


def test_a_character_split_over_tokens_is_written_once() -> None:
    writer = TextWriter(decode_bytes)
    pieces = [writer.feed([byte]) for byte in "né€𝄞!".encode()]
    assert [piece for piece in pieces if piece] == ["n", "é", "€", "𝄞", "!"]
    assert writer.flush() == ""
    assert writer.text == "né€𝄞!"


def test_an_incomplete_character_is_written_at_the_end() -> None:
    writer = TextWriter(decode_bytes)
    assert writer.feed([*b"a", 0xE2, 0x82]) == ""
    assert writer.flush() == "a\ufffd"


def test_tokens_without_text_write_nothing() -> None:
    writer = TextWriter(decode_bytes)
    assert writer.feed([]) == writer.feed([0]) == ""
    assert writer.feed(list(b"x")) == "x"


def test_decoding_costs_the_same_for_the_thousandth_token() -> None:
    lengths: list[int] = []

    def decode(tokens: list[int], skip_special_tokens: bool) -> str:
        lengths.append(len(tokens))
        return decode_bytes(tokens, skip_special_tokens)

    writer = TextWriter(decode)
    for _ in range(1000):
        writer.feed([97])
    assert max(lengths) <= 2


def test_ids_are_separated_by_spaces() -> None:
    writer = TextWriter(ids_as_text)
    assert writer.feed([1, 2]) + writer.feed([]) + writer.feed([3]) + writer.flush() == "1 2 3"
    assert writer.text == "1 2 3"
