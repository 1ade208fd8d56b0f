"""Which tokenizer, from where, and what it does with a text."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tinkex.client import tokenizer as room
from tinkex.client.tokenizer import ServiceFiles, Tokenizer, load, tokenizer_id
from tinkex.errors import ConfigError, MissingExtra
from tinkex.types.inputs import ModelInput


def tokenizer_json(*, limit: int | None = None) -> bytes:
    """A small but complete tokenizer: byte-level words, a start token that the model adds, an end token."""
    words = {"<s>": 0, "</s>": 1, "hello": 2, "Ġworld": 3, "Ġagain": 4, "?": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if limit is not None:
        backend.enable_truncation(limit)
        backend.enable_padding(length=limit)
    return backend.to_str().encode()


CONFIG = json.dumps(
    {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "tokenizer_class": "X"}
).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_bytes(CONFIG)
    return tmp_path


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    room._loaded.clear()
    yield
    room._loaded.clear()


@pytest.mark.parametrize(
    ("model", "info", "expected"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "some/other", "some/other"),
        ("Qwen/Qwen3-8B/variant", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:extra", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", None, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        ("meta-llama/Llama-3.2-1B/base", None, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-2-7b", None, "meta-llama/Llama-2-7b"),
        ("gpt2", None, "gpt2"),
        ("/models/a/b/c", None, "/models/a/b/c"),
    ],
)
def test_the_tokenizer_follows_from_the_info_else_from_the_models_name(
    model: str, info: str | None, expected: str
) -> None:
    assert tokenizer_id(model, info) == expected


def test_a_text_survives_encoding_and_decoding(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(folder)
    ids = tokenizer.encode("hello world again")
    assert ids == [0, 2, 3, 4]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world again"
    assert tokenizer.decode(ids) == "<s>hello world again", "special tokens show unless they are skipped"
    assert tokenizer.encode("hello", add_special_tokens=False) == [2]
    assert tokenizer.decode(3) == " world"


def test_a_file_a_folder_and_a_local_name_give_the_same_tokenizer(folder: Path) -> None:
    made = [
        Tokenizer.from_file(folder),
        Tokenizer.from_file(folder / "tokenizer.json"),
        Tokenizer.from_pretrained(str(folder)),
    ]
    assert [(t.encode("hello world"), t.eos_token_id, t.bos_token_id) for t in made] == [([0, 2, 3], 1, 0)] * 3


def test_calling_a_tokenizer_gives_input_ids_of_one_text_or_of_many(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(folder)
    assert tokenizer("hello world")["input_ids"] == tokenizer("hello world").input_ids == [0, 2, 3]
    assert tokenizer("hello").attention_mask == [1, 1]
    many = tokenizer(["hello", "hello world"], add_special_tokens=False)
    assert many.input_ids == [[2], [2, 3]], "no padding"
    assert many.attention_mask == [[1], [1, 1]]


def test_start_and_end_tokens_are_read_from_the_files_next_to_it(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(folder)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 1)
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.from_file(folder).eos_token_id is None
    (folder / "special_tokens_map.json").write_bytes(b'{"eos_token": "</s>"}')
    assert Tokenizer.from_file(folder).eos_token_id == 1


def test_a_broken_neighbour_file_only_costs_the_names_of_the_tokens(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_bytes(b"{half")
    assert Tokenizer.from_file(folder).eos_token is None
    (folder / "tokenizer_config.json").write_bytes(b"[1]")
    assert Tokenizer.from_file(folder).encode("hello") == [0, 2]


def test_a_file_that_asks_for_truncation_does_not_cut_a_prompt(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(tokenizer_json(limit=2))
    tokenizer = Tokenizer.from_file(folder)
    assert tokenizer.encode("hello world again again") == [0, 2, 3, 4, 4]
    assert tokenizer.encode("", add_special_tokens=False) == [], "and no padding"


def test_vocabulary_and_pickling(folder: Path) -> None:
    tokenizer = pickle.loads(pickle.dumps(Tokenizer.from_file(folder)))
    assert len(tokenizer) == tokenizer.vocab_size == 6
    assert tokenizer.convert_tokens_to_ids("hello") == 2
    assert tokenizer.convert_tokens_to_ids(["</s>", "absent"]) == [1, None]
    assert tokenizer.encode("hello") == [0, 2] and tokenizer.eos_token_id == 1
    assert repr(tokenizer).endswith("6 tokens)")


def test_a_prompt_is_made_from_text_without_a_chat_template(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(folder)
    assert ModelInput.from_text("hello world", tokenizer).to_ints() == [0, 2, 3]


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_file(tmp_path)
    with pytest.raises(ConfigError, match="absent"):
        Tokenizer.from_file(tmp_path / "absent")


def service(
    tmp_path: Path, files: dict[str, bytes], scope: str = "http://a", asked: list[str] | None = None
) -> ServiceFiles:
    """A service that hands out these files and notes what it was asked for."""

    def fetch(file: str) -> bytes | None:
        if asked is not None:
            asked.append(file)
        return files.get(file)

    return ServiceFiles(fetch, tmp_path / "cache", scope)


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


FILES = {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": CONFIG}


@pytest.mark.usefixtures("no_transformers")
def test_the_services_own_files_need_no_hub_and_are_fetched_once(tmp_path: Path) -> None:
    asked: list[str] = []
    files = service(tmp_path, FILES, asked=asked)
    tokenizer = load("tiny/model", files)
    assert tokenizer.encode("hello") == [0, 2] and tokenizer.eos_token_id == 1
    assert tokenizer.name_or_path == "tiny/model"
    assert load("tiny/model", files) is tokenizer, "one tokenizer per id"
    assert asked.count("tokenizer.json") == 1
    room._loaded.clear()  # as a new process would start
    assert load("tiny/model", files).encode("hello") == [0, 2]
    assert asked.count("tokenizer.json") == 1, "the second process found the file on disk"


@pytest.mark.usefixtures("no_transformers")
def test_two_services_that_use_one_name_keep_their_own_files(tmp_path: Path) -> None:
    other = {"tokenizer.json": tokenizer_json().replace(b'"hello"', b'"goodbye"')}
    first = load("tiny", service(tmp_path, FILES, "http://a"))
    second = load("tiny", service(tmp_path, other, "http://b"))
    assert first.encode("hello", add_special_tokens=False) == [2]
    assert second.encode("hello", add_special_tokens=False) == [5]


@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize("name", ["..", "a/../../b", "/etc", "a\\b", "C:x"])
def test_no_name_leads_out_of_the_cache_folder(tmp_path: Path, name: str) -> None:
    load(name, service(tmp_path, FILES))
    kept = list(tmp_path.rglob("tokenizer.json"))
    assert len(kept) == 1 and kept[0].parent.parent == tmp_path / "cache" / "tokenizers"


@pytest.mark.usefixtures("no_transformers")
def test_an_interrupted_fetch_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    def fetch(file: str) -> bytes | None:
        if file != "tokenizer.json":
            raise ConnectionError("gone")
        return FILES[file]

    with pytest.raises(ConnectionError):
        load("tiny", ServiceFiles(fetch, tmp_path / "cache", "http://a"))
    assert load("tiny", service(tmp_path, FILES)).eos_token_id == 1


@pytest.mark.usefixtures("no_transformers")
def test_eight_threads_that_need_one_tokenizer_load_it_once(tmp_path: Path) -> None:
    arrived, all_here, got = itertools.count(1), threading.Event(), []

    def fetch(file: str) -> bytes | None:
        assert all_here.wait(10), "the first holds the others up until all eight have asked"
        return FILES.get(file)

    def work() -> None:
        if next(arrived) == 8:
            all_here.set()
        got.append(load("tiny", ServiceFiles(fetch, tmp_path / "cache", "http://a")))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(got) == 8 and all(tokenizer is got[0] for tokenizer in got)


@pytest.mark.usefixtures("no_transformers")
def test_a_slow_tokenizer_does_not_hold_up_another(tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow(file: str) -> bytes | None:
        asked.set()
        go_on.wait(10)
        return FILES.get(file)

    waiting = threading.Thread(target=load, args=("slow", ServiceFiles(slow, tmp_path / "cache", "http://a")))
    waiting.start()
    try:
        assert asked.wait(10)
        assert load("quick", service(tmp_path, FILES)).encode("hello") == [0, 2]
        assert not go_on.is_set()
    finally:
        go_on.set()
        waiting.join(10)


def test_a_forked_child_loads_what_the_parent_was_loading(tmp_path: Path) -> None:
    script = f"""
        import os, signal, sys, threading
        from pathlib import Path
        sys.modules["transformers"] = None
        from tinkex.client.tokenizer import ServiceFiles, load
        asked, go_on = threading.Event(), threading.Event()
        def slow(file):
            asked.set(); go_on.wait(10)
            return None
        cache, content = Path({str(tmp_path)!r}), {tokenizer_json()!r}
        thread = threading.Thread(target=lambda: load("tiny", ServiceFiles(slow, cache, "")), daemon=True)
        thread.start(); asked.wait(10)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            ids = load("tiny", ServiceFiles({{"tokenizer.json": content}}.get, cache, "")).encode("hello")
            os._exit(0 if ids == [0, 2] else 1)
        print(os.waitpid(child, 0)[1], flush=True)
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "0", done.stderr


def fake_transformers(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    module: Any = types.ModuleType("transformers")
    module.AutoTokenizer = types.SimpleNamespace(from_pretrained=make)
    monkeypatch.setitem(sys.modules, "transformers", module)


def test_transformers_is_preferred_where_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformers(monkeypatch, lambda source, **options: (source, options))
    assert load("org/model") == ("org/model", {"use_fast": True, "trust_remote_code": False})
    source, _ = load("tiny", service(tmp_path, FILES))
    assert (Path(source) / "tokenizer_config.json").read_bytes() == CONFIG


def test_a_slow_tokenizer_is_used_where_there_is_no_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(source: str, use_fast: bool, **options: Any) -> str:
        if use_fast:
            raise ValueError("no fast tokenizer")
        return "slow"

    fake_transformers(monkeypatch, make)
    assert load("org/model") == "slow"


def test_a_tokenizer_that_is_code_is_not_run_and_the_error_says_how_to_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def make(source: str, **options: Any) -> Any:
        asked.append(options["trust_remote_code"])
        raise ValueError("The repository contains custom code. Please pass `trust_remote_code=True`.")

    fake_transformers(monkeypatch, make)
    with pytest.raises(ConfigError, match=r"org/anything.*runs no code.*from_pretrained\('org/anything', trust_remote"):
        load("org/anything")
    with pytest.raises(ConfigError, match=r"from_pretrained\('moonshotai/Kimi-K2.5', revision='4d01dfe0"):
        load("moonshotai/Kimi-K2.5-Text-Only")
    assert set(asked) == {False}


def test_a_services_tokenizer_does_not_ask_the_user_to_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt="": questions.append(prompt) or "n")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    files = {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config).encode()}
    assert load("tiny", service(tmp_path, files)).encode("hello") == [0, 2]
    assert not questions


def test_a_lone_tokenizer_file_is_enough_even_if_transformers_wants_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, use_fast: bool, **options: Any) -> str:
        raise ValueError("no config.json")

    fake_transformers(monkeypatch, refuse)
    assert load("tiny", service(tmp_path, {"tokenizer.json": tokenizer_json()})).encode("hello") == [0, 2]
    with pytest.raises(ConfigError, match=r"org/model.*no config\.json"):
        load("org/model")


def test_a_failed_load_is_tried_again_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError("down"), OSError("down"), "up"]

    def make(source: str, use_fast: bool, **options: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake_transformers(monkeypatch, make)
    with pytest.raises(ConfigError):
        load("org/model")
    assert load("org/model") == "up"


def test_a_tokenizer_that_is_not_public_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tml_tokenizers", None)
    with pytest.raises(ConfigError, match="tml-renderers"):
        load("thinkingmachines/Inkling")


@pytest.mark.usefixtures("no_transformers")
def test_without_the_library_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for attempt in (lambda: Tokenizer.from_file(folder), lambda: load("org/model")):
        with pytest.raises(MissingExtra, match=r"tinkex\[tokenizers\]"):
            attempt()


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as one tokenizer needs."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        content = FILES.get(self.path.removeprefix("/org/model/resolve/main/").partition("?")[0])
        missing = content is None or not self.path.startswith("/org/model/")
        content = content if content is not None and not missing else b"{}"
        self.send_response(404 if missing else 200)
        if missing:
            self.send_header("X-Error-Code", "EntryNotFound" if "/org/model/" in self.path else "RepoNotFound")
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.slow
def test_a_tokenizer_comes_from_the_hub_by_its_id(tmp_path: Path) -> None:
    script = """
        import sys
        sys.modules["transformers"] = None
        from tinkex.client.tokenizer import load
        from tinkex.errors import ConfigError
        tokenizer = load("org/model")
        print(tokenizer.encode("hello world"), tokenizer.eos_token_id, tokenizer.name_or_path)
        try:
            load("org/absent")
        except ConfigError as problem:
            print(problem)
    """
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=60
        )
    finally:
        server.shutdown()
        server.server_close()
    lines = done.stdout.splitlines()
    assert lines[0] == "[0, 2, 3] 1 org/model", done.stderr
    assert "org/absent" in lines[1] and "Tokenizer.from_file" in lines[1]
