"""Each fault of the script, as a client meets it; and which requests a rule picks."""

from __future__ import annotations

import http.client
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinkex.testing import (
    Answer,
    Delay,
    Drop,
    Expire,
    Hang,
    Pending,
    Request,
    Script,
    ScriptedService,
    Status,
)

from .http_client import Client, optim_body, sample_body


def picked(script: Script, count: int, endpoint: str = "asample") -> list[int]:
    """Which of so many requests a script acts on, counted from 1."""
    acted = []
    for number in range(1, count + 1):
        request = Request("POST", f"/api/v1/{endpoint}", {})
        request.endpoint = endpoint
        if script.decide(request, at_head=False):
            acted.append(number)
    return acted


def test_a_rule_alone_picks_every_request_of_its_endpoint() -> None:
    script = Script()
    rule = script.on("asample", do=Status(500))
    assert picked(script, 3) == [1, 2, 3] and picked(script, 3, "optim_step") == []
    assert (rule.seen, rule.fired) == (3, 3)


def test_nth_picks_one_and_times_limits() -> None:
    script = Script()
    script.on("asample", nth=2, do=Status(500))
    assert picked(script, 4) == [2]
    script.clear()
    script.on(["asample", "optim_step"], times=2, do=Status(500))
    assert picked(script, 4) == [1, 2]
    script.clear()
    script.on(nth=2, times=2, do=Status(500))
    assert picked(script, 5) == [2, 3]


def test_every_rule_counts_though_only_the_first_acts() -> None:
    script = Script()
    first, second = script.on(nth=1, do=Status(500)), script.on(nth=2, do=Status(429))
    assert picked(script, 3) == [1, 2] and first.seen == second.seen == 3


def test_chance_follows_from_the_seed() -> None:
    def draw(seed: int) -> list[int]:
        script = Script()
        script.on(probability=0.3, seed=seed, do=Status(500))
        return picked(script, 200)

    assert draw(1) == draw(1) != draw(2) and 30 < len(draw(1)) < 90


def test_chaos_keeps_its_odds() -> None:
    script = Script()
    script.chaos(seed=3, p_500=0.1, p_429=0.1, p_408=0.1, p_reset=0.2, p_delay=0.5)
    kinds: Counter[str] = Counter()
    for _ in range(2000):
        for action in script.decide(Request("GET", "/", {}), at_head=False):
            kinds[str(action.status) if isinstance(action, Status) else type(action).__name__] += 1
    expected = {"500": 200, "429": 200, "408": 200, "Drop": 400, "Delay": 1000}
    assert kinds.keys() == expected.keys()
    assert all(abs(kinds[kind] - count) < 0.25 * count for kind, count in expected.items())


def test_an_action_is_needed() -> None:
    with pytest.raises(ValueError, match="at least one action"):
        Script().on(do=[])


def test_a_misspelt_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="no endpoint is named forward_backwards"):
        Script().on("forward_backwards", do=Status(500))


def test_a_status_without_a_body_leaves_the_connection_usable(client: Client, service: ScriptedService) -> None:
    service.script.on("healthz", nth=1, do=Status(204))
    assert [client.get("healthz").status for _ in range(2)] == [204, 200]
    assert service.connections == 1


def test_a_status_comes_with_its_headers_and_nothing_ran(client: Client, service: ScriptedService) -> None:
    model = client.model()
    service.script.on("optim_step", nth=1, do=Status(429, headers={"retry-after-ms": "20"}))
    refused = client.post("optim_step", optim_body(model, 1))
    assert (refused.status, refused.headers["retry-after-ms"]) == (429, "20") and service.executed == []
    assert client.post("optim_step", optim_body(model, 1)).status == 200
    assert [request.status for request in service.requests_to("optim_step")] == [429, 200]


def test_a_status_after_acceptance_hides_work_that_ran(client: Client, service: ScriptedService) -> None:
    model = client.model()
    service.script.on("optim_step", nth=1, do=Status(502, when="after_accept"))
    assert client.post("optim_step", optim_body(model, 1)).status == 502
    assert service.executed == [(model, 1, "optim_step")]


@pytest.mark.parametrize("body", [b"\x00raw", "text", {"any": ["json"]}])
def test_an_answer_is_given_as_it_is(client: Client, service: ScriptedService, body: object) -> None:
    service.script.on("healthz", do=Answer(body, content_type="text/weird", status=299))
    got = client.get("healthz")
    assert (got.status, got.headers["content-type"]) == (299, "text/weird")
    assert got.body in (b"\x00raw", b"text", b'{"any":["json"]}')


def test_a_delay_holds_one_request_and_no_other(client: Client, service: ScriptedService) -> None:
    service.script.on("healthz", nth=1, do=Delay(30.0))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(Client(service).get, "healthz")
        service.wait_for_requests("healthz")
        assert client.get("healthz").status == 200 and not slow.done()
        service.kill()
        assert isinstance(slow.exception(timeout=5), ConnectionResetError)


def test_actions_follow_each_other(client: Client, service: ScriptedService) -> None:
    service.script.on("healthz", nth=1, do=[Delay(0.01), Status(503)])
    assert [client.get("healthz").status for _ in range(2)] == [503, 200]


@pytest.mark.parametrize("when", ["before", "after_accept"])
def test_a_dropped_connection_is_a_reset(client: Client, service: ScriptedService, when: str) -> None:
    model = client.model()
    service.script.on("optim_step", nth=1, do=Drop(when=when))  # type: ignore[arg-type]
    with pytest.raises(ConnectionResetError) as dropped:
        client.post("optim_step", optim_body(model, 1))
    assert dropped.type is ConnectionResetError, "a reset, not a polite close"
    ran = [(model, 1, "optim_step")]
    assert service.executed == ([] if when == "before" else ran)
    assert service.requests_to("optim_step")[0].status is None
    again = Client(service)
    again.result("optim_step", optim_body(model, 1))
    assert service.executed == ran, "the retry is the same operation"


def test_a_drop_before_the_body_does_not_wait_for_it(client: Client, service: ScriptedService) -> None:
    service.script.on("telemetry", do=Drop(when="before"))
    client.connection.putrequest("POST", "/api/v1/telemetry")
    client.connection.putheader("Content-Length", "1000000000")
    client.connection.endheaders()
    with pytest.raises(ConnectionResetError):
        client.connection.getresponse()


def test_an_answer_may_break_off_half_way(client: Client, service: ScriptedService) -> None:
    model = client.model()
    service.script.on("optim_step", nth=1, do=Drop(when="mid_answer"))
    with pytest.raises(http.client.IncompleteRead):
        client.post("optim_step", optim_body(model, 1))
    assert service.executed == [(model, 1, "optim_step")]


def test_a_rule_may_look_into_the_request(client: Client, service: ScriptedService) -> None:
    model = client.model()
    service.script.on("optim_step", where=lambda request: request.json["seq_id"] == 2, do=Drop(when="before"))
    assert client.post("optim_step", optim_body(model, 1)).status == 200
    with pytest.raises(ConnectionResetError):
        client.post("optim_step", optim_body(model, 2))
    assert service.executed == [(model, 1, "optim_step")]


def test_a_hanging_request_hangs_until_the_service_stops(service: ScriptedService) -> None:
    service.script.on("healthz", do=Hang())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Client(service).get, "healthz")
        service.wait_for_requests("healthz")
        assert not waiting.done()
        service.stop()
        assert isinstance(waiting.exception(timeout=5), ConnectionResetError)


def test_pending_polls_say_why_then_give_the_result(client: Client, service: ScriptedService) -> None:
    service.script.on("asample", do=Pending("paused_rate_limit", "slow down", times=2))
    service.script.on("retrieve_future", nth=3, do=Pending("active", try_again=True))
    request_id = client.post("asample", sample_body(client.sampler())).json["request_id"]
    polls = [client.poll(request_id) for _ in range(4)]
    assert [poll.status for poll in polls] == [408, 408, 200, 200]
    assert polls[0].json == {"queue_state": "paused_rate_limit", "queue_state_reason": "slow down"}
    assert polls[2].json == {"type": "try_again", "queue_state": "active"}
    assert "sequences" in polls[3].json


def test_an_expired_sample_is_gone_and_can_be_asked_for_again(client: Client, service: ScriptedService) -> None:
    service.script.on("asample", nth=1, do=Expire())
    sampler = client.sampler()
    lost = client.post("asample", sample_body(sampler)).json["request_id"]
    assert client.poll(lost).status == 410
    found = client.post("asample", sample_body(sampler)).json["request_id"]
    assert found != lost and client.poll(found).status == 200


def test_chaos_hurts_no_operation_that_is_retried(service: ScriptedService) -> None:
    service.script.chaos(
        5, p_500=0.1, p_429=0.1, p_408=0.1, p_reset=0.2, p_delay=0.1, delay_s=0.002, endpoint="optim_step"
    )
    client = Client(service)
    model = client.model()
    failures = 0
    for seq_id in range(1, 101):
        while True:
            try:
                if client.post("optim_step", optim_body(model, seq_id)).status == 200:
                    break
            except (OSError, http.client.HTTPException):
                client = Client(service)
            failures += 1
    assert failures > 50 and service.executed == [(model, seq_id, "optim_step") for seq_id in range(1, 101)]
