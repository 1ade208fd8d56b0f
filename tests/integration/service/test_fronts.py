"""Fronts: servers without an engine. A client that changes between them notices nothing; and what they protect."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import psycopg
import pytest

import tinkex
from tests.integration.service.cluster import LEASE_S, SECRET, STEP, Cluster, Node, losses
from tests.integration.service.conftest import ALICE, BOB
from tests.integration.service.live import CACHE, LiveServer
from tests.integration.service.raw import Raw, batch, message, post_message
from tests.integration.service.raw import datum as raw_datum
from tests.unit.store.postgres import PostgresServer
from tinkex.engine.models.registry import resolve
from tinkex.server.cluster.signature import HEADER, VALID_S, Signer

pytestmark = pytest.mark.slow


OTHER = "other-model"
"""A base model that the second node alone has."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes and two fronts, with keys for Alice and Bob."""
    postgres = PostgresServer()
    cluster = Cluster(postgres, tmp_path_factory.mktemp("fronts"))
    other = shutil.copytree(resolve("tinkex/tiny", CACHE).folder, cluster.folder / OTHER)
    keys = ("--api-key", ALICE, "--api-key", BOB)
    cluster.node(*keys, "--poll-hold-s", "1")
    cluster.node(*keys, "--poll-hold-s", "1", "--base-model", str(other))
    cluster.front(*keys)
    cluster.front(*keys)
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


# ── Nodes with different models


def test_every_server_lists_the_models_of_all_nodes(cluster: Cluster) -> None:
    for server in cluster.servers:
        client = Raw(server, ALICE)
        rows = client.get("get_server_capabilities").json["supported_models"]
        about = {row["model_name"]: row for row in rows}
        assert {"tinkex/tiny", OTHER} <= about.keys() and len(rows) == len(about)
        assert about[OTHER]["max_context_length"] == about["tinkex/tiny"]["max_context_length"] > 0
        listed = {row["id"]: row["root"] for row in client.get("/v1/models").json["data"]}
        assert listed[OTHER] == OTHER and listed["tinkex/tiny"] == "tinkex/tiny"
        assert OTHER in client.get("service_state").json["models"]


def test_what_needs_a_model_goes_to_a_node_that_has_it(cluster: Cluster) -> None:
    """The first node and half of the tries through a front met "not served here"."""
    near, home = nodes(cluster)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [10, 20]}]}
    for server in cluster.servers:
        client = Raw(server, ALICE)
        for number in range(4):
            body = {"model": OTHER, "prompt": f"hello {number}", "max_tokens": 3, "temperature": 0}
            done = client.post("/v1/completions", body)
            assert done.status == 200 and done.json["model"] == OTHER, done.content
            sampler = client.sampler(base_model=OTHER)
            wanted = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
            assert "error" not in client.done("asample", wanted)
        assert client.get(f"/v1/models/{OTHER}").json["root"] == OTHER
        assert client.get(f"tokenizers/{OTHER}/tokenizer.json").status == 200
        session = {"session_id": client.session(), "model_seq_id": 0, "lora_config": {"rank": 2}}
        run_id = client.done("create_model", {**session, "base_model": OTHER})["model_id"]
        assert cluster.home_of(run_id) is home
        unknown = client.post("/v1/completions", {"model": "nobodys", "prompt": "x"})
        assert unknown.status == 404 and "not known" in unknown.json["error"]["message"]
    assert near.url != home.url


def test_every_server_reports_all_nodes_and_the_home_of_a_run(cluster: Cluster) -> None:
    run = Raw(fronts(cluster)[0], ALICE).run(rank=2)
    home = cluster.home_of(run.id)
    for server in cluster.servers:
        shown = {node["url"]: node for node in Raw(server, ALICE).get("service_state").json["nodes"]}
        assert shown.keys() == {node.url for node in nodes(cluster)}
        assert all(node["state"] in ("busy", "idle") and node["lease_left_s"] > 0 for node in shown.values())
        assert shown[home.url]["runs"] >= 1 and OTHER in shown[nodes(cluster)[1].url]["models"]
        assert [node["url"] for node in shown.values() if node["is_this"]] == [server.url] * (server in nodes(cluster))
        assert Raw(server, ALICE).get(f"training_runs/{run.id}/steps").json["home"] == home.url


def test_the_metrics_of_any_server_have_each_node_and_their_sum(cluster: Cluster) -> None:
    Raw(nodes(cluster)[0], ALICE).run(rank=2)
    for server in (fronts(cluster)[0], nodes(cluster)[1]):
        end = time.monotonic() + 30
        while "tinkex_cluster_home_runs 0.0" in (page := Raw(server, ALICE).get("/metrics").content.decode()):
            assert time.monotonic() < end, "each server looks every five seconds"
            time.sleep(0.1)
        lags = [float(one) for one in re.findall(r'^tinkex_node_lag_seconds\{node="http://[^"]+"\} (\S+)$', page, re.M)]
        assert len(lags) == 2 and all(0 <= lag < LEASE_S + 5 for lag in lags)
        runs = [float(one) for one in re.findall(r'^tinkex_node_home_runs\{node="[^"]+"\} (\S+)$', page, re.M)]
        assert len(runs) == 2 and f"tinkex_cluster_home_runs {sum(runs)}" in page and sum(runs) >= 1
        assert 'tinkex_cluster_nodes{state="gone"} 0.0' in page


def test_a_poll_says_what_the_engines_do(cluster: Cluster) -> None:
    front = Raw(fronts(cluster)[0], ALICE)
    run = front.run(rank=2)
    home = cluster.home_of(run.id)
    engine = home.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    try:
        submitted = front.post("forward", run.named(forward_input=batch())).json["request_id"]
        waiting = front.post("retrieve_future", {"request_id": submitted})
        assert (waiting.status, waiting.json["queue_state"]) == (408, "active")
        assert re.search(r"; \d engines? (busy|idle)", waiting.json["queue_state_reason"]), waiting.content
        for server in cluster.servers:
            state = Raw(server, ALICE).get("service_state").json
            [row] = [row for row in state["queue"] if row["run_id"] == run.id]
            assert re.search(r"; \d engines? (busy|idle)", row["reason"])
            assert state["queued_operations"] == 1 and state["adapters"] >= 1 and state["is_ready"]
    finally:
        os.kill(engine, signal.SIGCONT)
    assert front.poll(submitted).status == 200


def test_a_run_whose_model_no_node_may_have_waits_and_says_for_what(cluster: Cluster) -> None:
    client, drained = Raw(fronts(cluster)[0], ALICE), nodes(cluster)[1]
    created = {"session_id": client.session(), "model_seq_id": 0, "base_model": OTHER, "lora_config": {"rank": 2}}
    run_id = client.done("create_model", created)["model_id"]
    step = {"model_id": run_id, "seq_id": 1, "adam_params": STEP}
    try:
        tinkex_cluster(cluster, "drain", drained.url)
        rejected = client.post("optim_step", step)
        assert (rejected.status, rejected.headers["retry-after"]) == (503, "1"), rejected.content
        assert (
            rejected.text
            == f"{run_id} waits for an engine with {OTHER}: 1 engine draining. It goes on when there is one."
        )
        with psycopg.connect(cluster.url) as connection:  # accepted just before
            connection.execute("UPDATE operations SET state = 'queued' WHERE run_id = %s AND seq_id = 0", (run_id,))
            [[request_id]] = connection.execute("SELECT request_id FROM operations WHERE run_id = %s", (run_id,))
        for server in (nodes(cluster)[0], *fronts(cluster)):  # the other node remembers the result
            waiting = Raw(server, ALICE).post("retrieve_future", {"request_id": request_id})
            assert (waiting.status, waiting.json["queue_state"]) == (408, "paused_capacity"), waiting.content
            assert waiting.json["queue_state_reason"].count(f"{OTHER}: 1 engine draining") == 1
            assert Raw(server, BOB).post("retrieve_future", {"request_id": request_id}).status == 404
    finally:
        with psycopg.connect(cluster.url) as connection:
            connection.execute("UPDATE operations SET state = 'done' WHERE run_id = %s AND seq_id = 0", (run_id,))
        tinkex_cluster(cluster, "drain", drained.url, "--undo")
    end = time.monotonic() + 20
    while (accepted := client.post("optim_step", step)).status == 503:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert client.poll(accepted.json["request_id"]).status == 200


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
