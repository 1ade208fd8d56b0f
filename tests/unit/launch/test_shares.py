"""How the cores and GPUs of a machine are shared out among engines, and the settings that nodes and fronts get."""

from __future__ import annotations

import socket
import stat
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from tinkex.errors import ConfigError
from tinkex.launch import ray_cluster
from tinkex.launch.engines import serve_engines
from tinkex.launch.kept_server import ServerState
from tinkex.launch.ray_cluster import Shape, of_training_node, read_shape
from tinkex.launch.ray_node import NodeOrder
from tinkex.launch.settings_of_nodes import free_port, front_settings, node_settings, own_secret
from tinkex.launch.shares import Share, share_out, usable_gpus
from tinkex.settings import ServeConfig, bucket_variables, check_cluster

SHARED = "postgresql://user:the-password@db/tinkex"
SECRET = "s" * 32


@pytest.mark.parametrize(("engines", "cores", "each"), [(2, 2, 1), (2, 7, 3), (3, 16, 5), (4, 4, 1)])
def test_engines_get_equal_shares_of_the_cores(engines: int, cores: int, each: int) -> None:
    """Equal, because the number of threads is in the last bits of a sum, and runs move between engines."""
    assert share_out(engines, "auto", 0, cores, []) == [Share(threads=each)] * engines
    assert share_out(engines, "cpu", 0, cores, ["0", "1", "2", "3"]) == [Share(threads=each)] * engines
    assert share_out(engines, "auto", 9, cores, []) == [Share(threads=9)] * engines, "what was asked for"


def test_each_engine_gets_a_gpu_of_its_own() -> None:
    shares = share_out(2, "auto", 0, 64, ["4", "GPU-5e1b", "6"])
    assert [share.variables for share in shares] == [
        {"CUDA_VISIBLE_DEVICES": "4"},
        {"CUDA_VISIBLE_DEVICES": "GPU-5e1b"},
    ]
    assert {share.threads for share in shares} == {0}


def test_an_engine_of_several_devices_gets_as_many() -> None:
    shares = share_out(2, "cuda", 0, 64, ["0", "1", "2", "3", "4"], devices=2)
    assert [share.variables["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,1", "2,3"]
    assert share_out(2, "cpu", 0, 8, [], devices=2) == [Share(threads=2)] * 2, "of each process"
    with pytest.raises(ConfigError, match="there are 3 GPUs that this process may use, and an engine needs 2"):
        share_out(2, "auto", 0, 64, ["0", "1", "2"], devices=2)


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("auto", ["0"], "there are 1 GPUs that this process may use"),
        ("cuda:1", ["0", "1"], "contradict each other"),
        ("mps", [], "contradict each other"),
        ("cpu", [], "there are 1 cores that this process may use"),
    ],
)
def test_more_engines_than_the_machine_has_room_for_are_rejected(device: str, gpus: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share_out(2, device, 0, 1, gpus)


@pytest.mark.parametrize(("text", "names"), [("0,1", ["0", "1"]), ("", []), ("-1", []), (" GPU-1 ", ["GPU-1"])])
def test_only_the_gpus_that_the_process_may_use_are_shared_out(
    text: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert usable_gpus() == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--engines 2 needs a PostgreSQL that all servers of the cluster share. Set TINKEX_DATABASE_URL"),
        ({"database_url": SHARED, "node_url": "http://10.0.0.5:8642"}, "does not go with --node-url"),
        ({"database_url": SHARED, "no_engine": True}, "does not go with --node-url or --no-engine"),
    ],
)
def test_several_engines_say_what_they_need(given: dict[str, object], message: str, tmp_path: Path) -> None:
    config = ServeConfig(engines=2, data_dir=tmp_path, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        serve_engines(config, on_ready=lambda needs_key, url: None)


def test_a_cluster_makes_its_secret_once_and_for_its_owner_only(tmp_path: Path) -> None:
    folder, found, gate = tmp_path / "data", set[str](), threading.Barrier(8)

    def make() -> None:
        gate.wait(10)
        found.add(own_secret(folder))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    [secret] = found
    assert len(secret) == 64
    [file] = folder.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("cluster-secret", 0o600)


def test_nodes_and_fronts_are_single_servers_with_everything_else_in_common(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    config = ServeConfig(
        engines=3, database_url=SHARED, cluster_secret=SECRET, keys_file=keys, api_keys=("tml-one-key",), max_rows=7
    )
    node = node_settings(config, "127.0.0.1", tmp_path / "node", threads=2)
    assert (node.engines, node.threads, node.max_rows, node.data_dir) == (1, 2, 7, tmp_path / "node")
    assert node.node_url == f"http://127.0.0.1:{node.port}" and node.port and not node.no_engine
    assert (node.keys_file, node.api_keys) == (None, ("tml-one-key",)), "the file may be on another machine"
    front = front_settings(config, "0.0.0.0", 8642)
    assert (front.engines, front.host, front.port, front.no_engine, front.node_url) == (1, "0.0.0.0", 8642, True, None)
    assert front.cluster_secret == node.cluster_secret == SECRET


def test_nodes_with_a_certificate_are_reached_by_tls_and_fronts_need_none(tmp_path: Path) -> None:
    """Before: the node's address began with http:// and the front had a certificate, and neither started."""
    files = {name: tmp_path / name for name in ("node_cert", "node_key", "cluster_ca")}
    config = ServeConfig(engines=2, database_url=SHARED, cluster_secret=SECRET, **files)  # type: ignore[arg-type]
    node, front = node_settings(config, "127.0.0.1", tmp_path), front_settings(config, "0.0.0.0", 8642)
    assert node.node_url == f"https://127.0.0.1:{node.port}" and node.node_cert == files["node_cert"]
    assert (front.node_cert, front.node_key, front.cluster_ca) == (None, None, files["cluster_ca"])
    for server in (node, front):
        check_cluster(server)


def test_a_port_that_is_taken_is_not_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) not in (0, port)
    assert free_port("127.0.0.1", port) == port
    with pytest.raises(ConfigError, match="not an address of this machine"):
        free_port("192.0.2.1")


def test_shapes_are_read_as_they_are_written() -> None:
    assert read_shape("2xCPU:4") == Shape(count=2, kind="CPU", each=4)
    assert read_shape("4xgpu:1").resources == {"CPU": 1, "GPU": 1}
    assert read_shape("0").count == 0
    for wrong in ("2", "2xTPU:1", "2xCPU:0", "xCPU:1", "2xCPU:1.5", ""):
        with pytest.raises(ValueError, match="for example 2xCPU:4"):
            read_shape(wrong)


def test_nodes_that_train_leave_vllm_to_nodes_that_only_sample_and_save_what_it_compares() -> None:
    both = ServeConfig(sampler="vllm")
    alone, beside = (of_training_node(both, has_samplers=has_samplers) for has_samplers in (False, True))
    assert (alone.sampler, beside.sampler, beside.proofs) == ("vllm", "own", True)
    assert of_training_node(ServeConfig(), has_samplers=True) == ServeConfig()


def test_ray_gets_nodes_that_train_nodes_that_only_sample_and_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, tuple[ServeConfig, Shape | None]] = {}

    class Fleet:
        names: ClassVar[set[str]] = {"train-0", "sample-7"}

        def __init__(self, *_: object) -> None: ...

        def retire(self, store: object, names: list[str], wait_s: float) -> list[str]:
            return names

        def launch(self, name: str, config: ServeConfig, shape: Shape | None) -> None:
            launched[name] = (config, shape)

        def wait_until_ready(self, names: list[str], wait_s: float) -> list[ServerState]:
            return [ServerState(name=name, is_ready=True) for name in names]

    store = SimpleNamespace(has_keys=lambda: True, list_nodes=list, shared_secret=lambda name, proposed: SECRET)
    monkeypatch.setattr(ray_cluster, "_Fleet", Fleet)
    monkeypatch.setattr(ray_cluster, "_connected", lambda *_: nullcontext(SimpleNamespace(nodes=list)))
    monkeypatch.setattr(ray_cluster, "_store", lambda _: nullcontext(store))
    config = ServeConfig(database_url=SHARED, sampler="vllm")
    states = ray_cluster.scale(
        "auto", config, Shape(count=2), Shape(count=1, kind="GPU"), 1, wait_s=1, report=lambda _: None
    )
    assert [state.name for state in states] == ["train-0", "train-1", "sample-0", "front-0", "sample-7"]
    assert {name: shape and shape.kind for name, (_, shape) in launched.items()} == {
        "train-1": "CPU", "sample-0": "GPU", "front-0": None,
    }  # fmt: skip
    settings = {name: (given.samples_only, given.sampler) for name, (given, _) in launched.items()}
    assert settings["train-1"] == (False, "own") and settings["sample-0"] == (True, "vllm")
    assert {given.cluster_secret for given, _ in launched.values()} == {SECRET}


def test_what_ray_may_show_of_an_order_has_no_secret() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "the-bucket-key", "AWS_REGION": " ", "HOME": "/root"}
    variables = bucket_variables(environ)
    assert variables == {"AWS_SECRET_ACCESS_KEY": "the-bucket-key"}
    config = ServeConfig(database_url=SHARED, cluster_secret=SECRET, api_keys=("tml-one-key",))
    shown = repr(NodeOrder(name="train-0", version="1", is_front=False, config=config, variables=variables))
    assert "train-0" in shown
    assert not [secret for secret in ("the-password", SECRET, "tml-one-key", "the-bucket-key") if secret in shown]
