"""Import of PEFT adapters: what is accepted, what is rejected, and that no file is left behind."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.unit.server.conftest import Answer, Served
from tinkex.archive import BLOCK
from tinkex.client.download import download_checkpoint
from tinkex.engine.contract import EngineFault
from tinkex.engine.frames import Frame
from tinkex.server.http.errors import RequestRejected
from tinkex.server.upkeep.adapter_files import INCOMING, unpack

PLACE = "import_weights?base_model=tiny&name=mine"
LAYER = "base_model.model.model.layers.0"
CONFIG = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 16}).encode()


def safetensors(*names: str) -> bytes:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(names)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))


WEIGHTS = safetensors(f"{LAYER}.self_attn.q_proj.lora_A.weight", f"{LAYER}.self_attn.q_proj.lora_B.weight")


def tar(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return packed.getvalue()


ADAPTER = tar(adapter_config__json=CONFIG, adapter_model__safetensors=WEIGHTS)


class Engine:
    """Takes commands; says no when told to."""

    def __init__(self, served: Served) -> None:
        self.state, self.ran, self.refusal = served.engine.state, [], ""
        served.service.engine = self  # type: ignore[assignment]

    async def ready(self) -> None: ...

    async def run(self, command: Frame) -> Frame:
        self.ran.append(command.head)
        if command.head["op"] == "load":
            assert (Path(command.head["folder"]) / "adapter_model.safetensors").read_bytes() == WEIGHTS
            if self.refusal:
                raise EngineFault(self.refusal)
        return Frame({})


@pytest.fixture
def engine(served: Served) -> Engine:
    return Engine(served)


def test_an_imported_adapter_is_a_checkpoint_like_any_other(served: Served, engine: Engine, tmp_path: Path) -> None:
    path = served.ask("POST", PLACE, ADAPTER).json["tinker_path"]
    rest = tinkex.RestClient(base_url=served.base_url, api_key="tml-x")
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank) == ("tinkex/tiny", 4)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, False)
    files = download_checkpoint(rest, path, tmp_path / "out").result()
    assert {file.read_bytes() for file in files} == {CONFIG, WEIGHTS}
    # 0.4.1 reads the run to make a training client of the checkpoint.
    assert rest.get_training_run_by_tinker_path(path).result().lora_rank == 4
    assert [command["op"] for command in engine.ran] == ["create", "load", "drop"]


def test_an_adapter_that_the_engine_rejects_is_rejected_with_its_message(served: Served, engine: Engine) -> None:
    engine.refusal = "The adapter uses DoRA, which tinkex has not."
    answer = served.ask("POST", PLACE, ADAPTER)
    assert (answer.status, answer.json["detail"]) == (400, engine.refusal)
    assert engine.ran[-1]["op"] == "drop"
    _nothing_is_left(served)


def _nothing_is_left(served: Served) -> None:
    assert served.ask("GET", "checkpoints").json["checkpoints"] == []
    assert served.ask("GET", "training_runs").json["training_runs"] == []
    assert list((served.config.data_dir / INCOMING).iterdir()) == []
    assert not list(served.config.data_dir.glob("checkpoints/**/*.safetensors"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no tar", "cannot be unpacked as a tar"),
        (ADAPTER[:700], "cannot be unpacked as a tar"),
        (tar(adapter_config__json=CONFIG), "no adapter_model.safetensors"),
        (tar(adapter_model__bin=b"x", adapter_config__json=CONFIG), "no adapter_model.safetensors"),
        (tar(adapter_config__json=b"[]", adapter_model__safetensors=WEIGHTS), "not a JSON object"),
        (tar(adapter_config__json=b'{"r": 0}', adapter_model__safetensors=WEIGHTS), "r = 0"),
        (tar(adapter_config__json=b'{"r": 100000}', adapter_model__safetensors=WEIGHTS), "r = 100000"),
        (tar(adapter_config__json=CONFIG, adapter_model__safetensors=b"\x80\x04pickle"), "not a safetensors"),
        (tar(adapter_config__json=CONFIG, adapter_model__safetensors=safetensors("embed")), "no LoRA weights"),
    ],
)
def test_a_body_that_is_not_an_adapter_is_rejected_and_leaves_no_file(
    served: Served, engine: Engine, body: bytes, reason: str
) -> None:
    answer = served.ask("POST", PLACE, body)
    assert answer.status == 400, answer
    assert reason in answer.json["detail"]
    assert engine.ran == []
    _nothing_is_left(served)


@pytest.mark.parametrize("where", ["config", "header"])
def test_deeply_nested_json_in_an_adapter_is_rejected(served: Served, engine: Engine, where: str) -> None:
    deep = b"[" * 100_000
    config = deep if where == "config" else CONFIG
    weights = len(deep).to_bytes(8, "little") + deep if where == "header" else WEIGHTS
    answer = served.ask("POST", PLACE, tar(adapter_config__json=config, adapter_model__safetensors=weights))
    assert (answer.status, answer.json["code"]) == (400, "bad_adapter")


def test_a_tar_with_a_negative_size_does_not_stop_the_server(served: Served, engine: Engine) -> None:
    """`tarfile` reads the same header for ever, in a thread that nothing can end."""
    member = tarfile.TarInfo("README.md")
    header = bytearray(member.tobuf())
    header[124:136] = (-BLOCK).to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    hostile = tar(adapter_config__json=CONFIG)[: 2 * BLOCK] + header + bytes(20 * BLOCK)
    for _ in range(8):  # more than there are threads
        answer = served.ask("POST", PLACE, hostile)
        assert (answer.status, answer.json["code"]) == (400, "bad_archive")


def test_paths_and_links_in_an_archive_are_ignored(served: Served, engine: Engine, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as opened:
        for name in ("../escaped", "/tmp/escaped-too", "../adapter_config.json", "x/adapter_config.json"):
            member = tarfile.TarInfo(name)
            member.size = len(CONFIG)
            opened.addfile(member, io.BytesIO(CONFIG))
        link = tarfile.TarInfo("adapter_config.json")
        link.type, link.linkname = tarfile.SYMTYPE, str(served.config.data_dir / "tinkex.db")
        opened.addfile(link)
    answer = served.ask("POST", PLACE, packed.getvalue())
    assert (answer.status, answer.json["code"]) == (400, "bad_archive")
    assert not list(served.config.data_dir.rglob("*escaped*"))
    assert not list(served.config.data_dir.rglob("adapter_config.json"))


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("base_model=tiny", "bad_name"),
        ("base_model=tiny&name=../x", "bad_name"),
        ("base_model=other&name=x", "unknown_base_model"),
        ("name=x", "unknown_base_model"),
        ("base_model=tiny&name=x&ttl_seconds=-1", "bad_ttl"),
    ],
)
def test_a_wrong_query_of_an_import_is_rejected(served: Served, engine: Engine, query: str, code: str) -> None:
    answer: Answer = served.ask("POST", f"import_weights?{query}", ADAPTER)
    assert (answer.status, answer.json["code"]) == (400, code)


def test_an_archive_that_is_too_large_is_rejected_before_it_is_read(served: Served, engine: Engine) -> None:
    answer = served.ask("POST", PLACE, b"x", headers={"content-length": str(10**11)})
    assert answer.status == 413


def test_a_file_in_an_archive_that_is_too_large_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(ADAPTER)
    with pytest.raises(RequestRejected, match="larger than"):
        unpack(tmp_path / "a.tar", tmp_path / "out", max_bytes=len(CONFIG))


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        (["self_attn.q_proj"], (True, False, False)),
        (["self_attn.o_proj", "mlp.up_proj"], (True, True, False)),
        (["mlp.down_proj"], (False, True, False)),
    ],
)
def test_the_tensor_names_of_an_adapter_tell_which_layers_it_trains(
    tmp_path: Path, names: list[str], flags: Any
) -> None:
    weights = safetensors(*(f"{LAYER}.{name}.lora_A.weight" for name in names))
    (tmp_path / "a.tar").write_bytes(tar(adapter_config__json=CONFIG, adapter_model__safetensors=weights))
    found = unpack(tmp_path / "a.tar", tmp_path / "out")
    assert (found.train_attn, found.train_mlp, found.train_unembed) == flags


def test_an_adapter_on_the_unembedding_is_recognized(tmp_path: Path) -> None:
    weights = safetensors("base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight")
    (tmp_path / "a.tar").write_bytes(tar(adapter_config__json=CONFIG, adapter_model__safetensors=weights))
    assert unpack(tmp_path / "a.tar", tmp_path / "out").train_unembed


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux says which file a descriptor is")
def test_an_import_and_a_copy_are_on_the_disk_before_their_rows(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, a row must not refer to files that are empty."""
    steps: list[str] = []
    fsync, add_stored_run = os.fsync, served.store.add_stored_run

    def note_fsync(fd: int) -> None:
        steps.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), served.config.data_dir))
        fsync(fd)

    def note_rows(*args: Any, **more: Any) -> None:
        steps.append("rows")
        add_stored_run(*args, **more)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(served.store, "add_stored_run", note_rows)
    imported = served.ask("POST", PLACE, ADAPTER).json["tinker_path"]
    copied = served.ask("POST", "copy_weights", {"source_path": imported}).json["tinker_path"]
    for path in (imported, copied):
        ended = steps.index("rows")
        done, steps = steps[:ended], steps[ended + 1 :]
        folder = f"checkpoints/{path.removeprefix('tinker://')}"
        parents = [str(parent) for parent in Path(folder).parents]
        assert set(done[:2]) == {f"{folder}/adapter_config.json", f"{folder}/adapter_model.safetensors"}
        assert done[2:] == [folder, *parents]
