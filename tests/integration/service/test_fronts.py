"""Fronts: servers without an engine. A client that changes between them notices nothing; and what they protect."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest

import tinkex
from tests.integration.service.cluster import SECRET, STEP, Cluster, Node, losses
from tests.integration.service.conftest import ALICE, BOB
from tests.integration.service.live import LiveServer
from tests.integration.service.raw import Raw, batch, message, post_message
from tests.integration.service.raw import datum as raw_datum
from tests.unit.store.postgres import PostgresServer
from tinkex.server.cluster.signature import HEADER, VALID_S, Signer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes and two fronts, with keys for Alice and Bob."""
    postgres = PostgresServer()
    cluster = Cluster(postgres, tmp_path_factory.mktemp("fronts"))
    keys = ("--api-key", ALICE, "--api-key", BOB)
    for start in (cluster.node, cluster.node, cluster.front, cluster.front):
        start(*keys)
    cluster.wait()
    yield cluster
    cluster.stop()
    postgres.stop()


def nodes(cluster: Cluster) -> list[Node]:
    return cluster.servers[:2]


def fronts(cluster: Cluster) -> list[Node]:
    return cluster.servers[2:]


@contextmanager
def balancer(servers: list[Node]) -> Iterator[str]:
    """A load balancer for connections: each new one goes to the next server. Its address."""
    turns, loop = cycle(servers), asyncio.new_event_loop()
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", next(turns).port)
        pipes.update((asyncio.create_task(pipe(reader, back)), asyncio.create_task(pipe(there, writer))))

    async def end() -> None:
        for task in pipes:
            task.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def datum(*tokens: int) -> tinkex.Datum:
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs={"target_tokens": list(tokens[1:])}
    )


def flow(url: str) -> list[Any]:
    """What a program does with our client; everything that it reads."""
    with tinkex.ServiceClient(base_url=url, api_key=ALICE) as client:
        training = client.create_lora_training_client(base_model="tinkex/tiny", rank=4, seed=3)
        found: list[Any] = [client.get_server_capabilities().supported_models[0].model_name]
        for _ in range(3):
            passed = training.forward_backward([datum(10, 20, 30, 40)], "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result(60)
            found.append(passed.result(60).metrics["loss:sum"])
        path = training.save_state("state").result(60).path
        sampler = training.save_weights_and_get_sampling_client()
        prompt, params = tinkex.ModelInput.from_ints([10, 20]), tinkex.SamplingParams(max_tokens=6, temperature=0.0)
        sampled = sampler.sample(prompt, num_samples=2, sampling_params=params).result(60)
        found += [sequence.tokens for sequence in sampled.sequences]
        again = client.create_training_client_from_state_with_optimizer(path)
        found.append(again.forward([datum(10, 20, 30, 40)], "cross_entropy").result(60).metrics["loss:sum"])
        rest = client.create_rest_client()
        found.append(sorted(row.checkpoint_type for row in rest.list_user_checkpoints().result(60).checkpoints))
        return found


def test_a_clients_whole_flow_works_through_fronts_in_turn(cluster: Cluster) -> None:
    """And what it reads is what it reads from one node."""
    with balancer(fronts(cluster)) as url:
        found = flow(url)
    assert found[0] == "tinkex/tiny" and found[1] > found[3] > 0
    assert [len(tokens) for tokens in found[4:6]] == [6, 6]
    expected = flow(nodes(cluster)[0].url)
    assert found[:-1] == expected[:-1]


def test_requests_of_one_run_to_two_fronts_in_turn_give_the_losses_of_one_server(
    cluster: Cluster, live: LiveServer
) -> None:
    turns = [Raw(front, ALICE) for front in fronts(cluster)]
    assert losses(turns) == losses([Raw(live)])


def test_runs_are_spread_over_the_nodes_and_a_front_finds_each(cluster: Cluster) -> None:
    first, second = (Raw(front, ALICE) for front in fronts(cluster))
    runs = [first.run(rank=2) for _ in range(4)]
    assert {cluster.home_of(run.id).url for run in runs} == {node.url for node in nodes(cluster)}
    for run in runs:
        run.client = second
        assert run.done("forward_backward", forward_backward_input=batch())["metrics"]["loss:sum"] > 0


def test_another_tenants_run_is_not_known_wherever_it_is_at_home(cluster: Cluster) -> None:
    run = Raw(nodes(cluster)[0], ALICE).run(rank=2)
    submitted = run.client.post("forward", run.named(forward_input=batch())).json["request_id"]
    for server in cluster.servers:
        stranger = Raw(server, BOB)
        unknown = stranger.post("optim_step", {"model_id": "no:train:0", "seq_id": 5, "adam_params": STEP})
        foreign = stranger.post("optim_step", {"model_id": run.id, "seq_id": 5, "adam_params": STEP})
        assert (unknown.status, foreign.status) == (404, 404)
        assert foreign.text == unknown.text.replace("no:train:0", run.id)
        assert stranger.post("retrieve_future", {"request_id": submitted}).status == 404
        assert Raw(server, "tml-nobody-000000000").post("optim_step", {"model_id": run.id}).status == 401
        assert Raw(server, ALICE).poll(submitted).status == 200


def test_what_no_server_of_the_cluster_signed_is_refused(cluster: Cluster) -> None:
    run = Raw(nodes(cluster)[0], ALICE).run(rank=2)
    home = cluster.home_of(run.id)
    path, body, now = "/internal/api/v1/get_info", {"model_id": run.id}, time.time()
    [tenant] = cluster.rows("SELECT tenant FROM runs WHERE id = %s", run.id)[0]
    signer = Signer(SECRET)

    def ask(signature: bytes | None, path: str = path, key: str | None = None) -> int:
        headers = {} if signature is None else {HEADER.decode(): signature.decode()}
        return Raw(home, key).post(path, body, headers=headers).status

    good = signer.sign(tenant, "POST", path.encode(), now)
    assert ask(good) == 200
    assert ask(None) == ask(None, key=ALICE) == ask(b"") == ask(b"x.y.z") == 403
    assert ask(Signer("f" * 64).sign(tenant, "POST", path.encode(), now)) == 403
    assert ask(signer.sign(tenant, "POST", path.encode(), now - VALID_S - 5)) == 403
    assert ask(signer.sign(tenant, "GET", path.encode(), now)) == 403
    assert ask(good, path="/internal/api/v1/optim_step") == 403
    assert ask(good.replace(b".", b"A.", 1)) == 403
    assert ask(None, path="/internal") == ask(None, path="/internal/metrics") == 403
    assert ask(signer.sign(None, "POST", path.encode(), now)) == 403, "somebody must have sent it"


def test_samples_are_polled_streamed_and_cancelled_through_any_front(cluster: Cluster) -> None:
    first, second = (Raw(front, ALICE) for front in fronts(cluster))
    sampler = first.sampler()
    wanted = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10, 20, 30]}]},
        "sampling_params": {"max_tokens": 8, "temperature": 0.0},
        "num_samples": 1,
    }
    request_id = first.post("asample", wanted).json["request_id"]
    polled = second.poll(request_id)
    assert polled.status == 200, polled.content
    tokens = polled.json["sequences"][0]["tokens"]
    assert len(tokens) == 8
    streamed = second.post("sample_stream", {**wanted, "seq_id": 2})
    assert streamed.status == 200 and streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.content.count(b"event: token") == 8 and b"event: done" in streamed.content
    again = second.post("asample", wanted).json["request_id"]
    assert again == request_id, "a repeated request meets its first attempt, whichever front it comes through"
    long = first.post("asample", {**wanted, "seq_id": 3, "sampling_params": {"max_tokens": 1000}}).json["request_id"]
    assert second.post("cancel_future", {"request_id": long}).status == 200
    assert second.poll(long).status == 200
    lost = f"sample-{'0' * 16}-{'0' * 32}"
    assert [Raw(server, ALICE).poll(lost).status for server in cluster.servers] == [410] * 4


def test_a_link_leads_to_the_front_that_was_asked(cluster: Cluster) -> None:
    """The address of a node may be one that only other servers reach."""
    front = Raw(fronts(cluster)[0], ALICE)
    saved = front.run(rank=2).done("save_weights", path="kept")["path"]
    checkpoint = saved.removeprefix("tinker://").replace("/weights/", "/checkpoints/weights/")
    found = front.ask("GET", f"training_runs/{checkpoint}/archive?redirect=false")
    assert found.status == 200, found.content
    assert found.json["url"].startswith(f"{front.server.url}/api/v1/files/")
    link = found.json["url"].removeprefix(front.server.url)
    assert [Raw(server).ask("GET", link).status for server in cluster.servers] == [200] * 4


def test_the_openai_interface_works_through_a_front(cluster: Cluster) -> None:
    body = {"model": "tinkex/tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    responses = [Raw(server, ALICE).post("/v1/completions", body) for server in cluster.servers]
    texts = {response.json["choices"][0]["text"] for response in responses}
    assert len(texts) == 1, [response.content for response in responses]


def test_a_large_pass_reaches_its_home_whichever_way_it_is_encoded(cluster: Cluster) -> None:
    """Beyond 256 KiB the run is read past the datums."""
    for home_of_run, other in (nodes(cluster), nodes(cluster)[::-1]):
        run = Raw(home_of_run, ALICE).run(rank=2)
        client = run.client = Raw(other, ALICE)
        rows = 600
        small = run.done("forward", forward_input=batch())["metrics"]["loss:sum"]
        padded = [{**raw_datum(), "x": "y" * 500}] * rows
        big = run.done("forward", forward_input=batch(padded))
        assert big["metrics"]["loss:sum"] == pytest.approx(rows * small, rel=1e-4)
        request = message(run, run.take(), forward_only=True)
        request.data[0].model_input_spans.add().prompt_tokens.sequence_id = "y" * 500
        request.data.extend([request.data[0]] * (rows - 1))
        long = post_message(client, request)
        assert long.status == 200, long.content
        done = client.poll(long.json["request_id"])
        assert done.json["metrics"]["loss:sum"] == pytest.approx(rows * small, rel=1e-4)


def test_a_drained_node_gives_its_runs_to_the_others_and_takes_no_more(cluster: Cluster) -> None:
    near, drained = nodes(cluster)
    runs = [Raw(front, ALICE).run(rank=2) for front in fronts(cluster) * 2]
    for run in runs:
        run.done("forward_backward", forward_backward_input=batch())
    before = {run.id: cluster.home_of(run.id) for run in runs}
    assert drained in before.values()
    try:
        said = tinkex_cluster(cluster, "drain", drained.url)
        assert "has no runs any more" in said
        shown = {node["url"]: node for node in json.loads(tinkex_cluster(cluster, "status", "-o", "json"))["nodes"]}
        assert (shown[drained.url]["is_draining"], shown[drained.url]["runs"]) == (True, 0)
        assert (shown[near.url]["is_draining"], shown[near.url]["is_alive"]) == (False, True)
        for run in runs:
            # The gradient of the pass before went with the run: the snapshot has it.
            metrics = run.done("optim_step", adam_params=STEP)["metrics"]
            assert metrics.get("no_gradient:max", 0.0) == 0.0
            assert cluster.home_of(run.id) is near
        assert cluster.home_of(Raw(drained, ALICE).run(rank=2).id) is near
        assert "draining" in tinkex_cluster(cluster, "status")
    finally:
        assert "takes runs again" in tinkex_cluster(cluster, "drain", drained.url, "--undo")
    homes = [cluster.home_of(Raw(drained, ALICE).run(rank=2).id) for _ in range(3)]
    assert drained in homes


def tinkex_cluster(cluster: Cluster, *words: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "tinkex", "cluster", *words, "--database-url", cluster.url]
    done = subprocess.run(
        [*command, "--data-dir", str(cluster.folder / "cli")], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
