"""What lies on the disk of a real service: who can read it, whether it is still what was written, how much it is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from tests.integration.service.conftest import ALICE, BOB
from tests.integration.service.live import LiveServer

QUOTA_BYTES = 4_000_000
RANK = 8
ATTEMPT = """
import os, sys
os.setgid(65534); os.setuid(65534)
for folder, _, names in os.walk(sys.argv[1], onerror=lambda error: print("no list of", error.filename)):
    for name in names:
        try:
            open(os.path.join(folder, name), "rb").read(1)
            print("READ", os.path.join(folder, name))
        except PermissionError:
            print("denied", name)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A service on a folder that existed before it, and that everybody may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        data = Path(above) / "data"
        data.mkdir()
        for folder in (Path(above), data):
            folder.chmod(0o755)
        flags = ("--api-key", ALICE, "--api-key", BOB, "--tenant-quota-gb", str(QUOTA_BYTES / 1e9), "--threads", "1")
        with LiveServer(data, *flags) as live:
            yield live


@pytest.fixture(scope="module")
def alice(server: LiveServer) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=server.url, api_key=ALICE) as client:
        yield client


@pytest.fixture(scope="module")
def trained(alice: tinkex.ServiceClient) -> tinkex.TrainingClient:
    training = alice.create_lora_training_client("tinkex/tiny", rank=RANK)
    training.save_state("good").result(60)
    return training


def damage(server: LiveServer, path: str, file: str = "adapter_model.safetensors") -> None:
    """Change the last bit of a file, as a disk does: neither its size nor its time tells."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    target = server.data_dir / "checkpoints" / run / kind / name / file
    content, status = bytearray(target.read_bytes()), target.stat()
    content[-1] ^= 1
    target.write_bytes(content)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="to become another user needs root")
def test_another_user_cannot_read_a_data_folder_that_existed_with_0755(
    server: LiveServer, trained: tinkex.TrainingClient
) -> None:
    words = [sys.executable, "-I", "-c", ATTEMPT, str(server.data_dir)]
    saw = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout
    assert "denied tinkex.db" in saw
    assert "denied tinkex.db-wal" in saw
    assert "no list of" in saw  # the folder of checkpoints
    assert "READ" not in saw
    assert f"chmod 700 {server.data_dir}" in server.log()


def test_a_run_does_not_load_a_checkpoint_that_the_disk_has_changed(
    server: LiveServer, trained: tinkex.TrainingClient
) -> None:
    path = trained.save_state("rotten").result(60).path
    trained.load_state(path).result(60)
    for file in ("optimizer.safetensors", "adapter_model.safetensors"):
        damage(server, path, file)
        with pytest.raises(
            tinkex.TinkexError, match=f"{file} of tinker://.*was damaged on the service's disk"
        ) as raised:
            trained.load_state_with_optimizer(path).result(60)
        assert "server" in str(getattr(raised.value, "category", ""))
    trained.load_state(f"{path.rpartition('/')[0]}/good").result(60)  # the run is unharmed


def test_a_sampler_does_not_use_weights_that_the_disk_has_changed(
    server: LiveServer, alice: tinkex.ServiceClient, trained: tinkex.TrainingClient
) -> None:
    path = trained.save_weights_for_sampler("rotten").result(60).path
    damage(server, path)
    with pytest.raises(tinkex.TinkexError, match=r"was damaged on the service's disk"):
        alice.create_sampling_client(model_path=path).sample(
            tinkex.ModelInput.from_ints([1, 2, 3]), 1, tinkex.SamplingParams(max_tokens=2)
        ).result(60)


def test_one_tenant_above_its_quota_does_not_stop_the_service(
    server: LiveServer, trained: tinkex.TrainingClient
) -> None:
    with tinkex.ServiceClient(base_url=server.url, api_key=BOB) as bob:
        hungry = bob.create_lora_training_client("tinkex/tiny", rank=RANK)
        with pytest.raises(tinkex.TinkexError, match="--tenant-quota-gb"):
            for number in range(100):
                hungry.save_state(f"n{number}").result(60)
        rest = bob.create_rest_client()
        saved = rest.list_user_checkpoints(limit=1000).result(60).checkpoints
        assert 1 < len(saved) < 100
        stored = sum(checkpoint.size_bytes or 0 for checkpoint in saved)
        assert QUOTA_BYTES // 2 < stored <= QUOTA_BYTES
        assert server.is_ready()
        trained.optim_step(tinkex.AdamParams()).result(60)  # alice goes on
        rest.delete_checkpoint_from_tinker_path(saved[0].tinker_path).result(60)
        hungry.save_state("again").result(60)
