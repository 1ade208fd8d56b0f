"""TLS and HTTP/2: versions by ALPN, certificates of the user's own, large bodies, services and lines that go away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tests.integration.client.wires import Authority, Frames, Front, Pipe
from tinkex.client._calls import poll
from tinkex.testing import Delay, Request, ScriptedService, Status, Work

Connect = Callable[..., tinkex.ServiceClient]
PARAMS = tinkex.SamplingParams(max_tokens=3, seed=1)
SHARED = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "TINKEX_CA_FILE")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No certificates from the environment of whoever runs the tests."""
    for name in SHARED:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def front(proto_service: ScriptedService, authority: Authority) -> Iterator[Front]:
    with Front(proto_service, authority.certify("127.0.0.1")) as running:
        yield running


def test_http2_is_used_where_tls_offers_it_for_every_kind_of_call(
    proto_service: ScriptedService, connect: Connect, front: Front, authority: Authority
) -> None:
    with connect(front, ca_file=authority.file, telemetry=True) as client:
        training = client.create_lora_training_client(MODEL)
        passed = training.forward_backward([datum()], "cross_entropy")
        stepped = training.optim_step(step())
        assert passed.result(20).loss_fn_outputs and stepped.result(20)
        sampler = training.save_weights_and_get_sampling_client()
        assert sampler.sample(prompt(), 2, PARAMS).result(20).sequences
        assert sum(len(chunk.tokens) for chunk in sampler.stream(prompt(), PARAMS)) > 0
        assert client.create_rest_client().list_training_runs().result(20).training_runs
    assert front.versions == {"2"}
    assert [seq_id for _, seq_id, _ in proto_service.executed][:2] == [1, 2]
    # Names are lower case on this wire, and nothing of HTTP/1.1 travels along.
    assert not any({"connection", "transfer-encoding", "keep-alive"} & r.headers.keys() for r in proto_service.requests)


def test_a_service_that_offers_only_http11_is_served_over_tls_too(
    proto_service: ScriptedService, connect: Connect, authority: Authority
) -> None:
    with (
        Front(proto_service, authority.certify("127.0.0.1"), alpn=("http/1.1",)) as front,
        connect(front, ca_file=authority.file) as client,
    ):
        assert client.create_lora_training_client(MODEL).optim_step(step()).result(20) is not None
        assert front.versions == {"1.1"}


@pytest.mark.parametrize("variable", ["TINKEX_CA_FILE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_certificates_named_by_the_environment_are_trusted(
    connect: Connect, front: Front, authority: Authority, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, authority.file)
    with connect(front) as client:
        assert client.get_server_capabilities().supported_models


@pytest.mark.timing
def test_an_untrusted_certificate_fails_at_once_and_names_the_remedy(
    proto_service: ScriptedService, connect: Connect, front: Front
) -> None:
    client = connect(front)
    started = time.monotonic()
    with pytest.raises(
        tinkex.APIConnectionError, match=r"certificate .*not trusted.*ca_file \(TINKEX_CA_FILE\)"
    ) as caught:
        client.create_lora_training_client(MODEL)
    assert time.monotonic() - started < 2
    assert not caught.value.retryable
    assert proto_service.requests == []


def test_a_certificate_for_another_host_is_refused(
    proto_service: ScriptedService, connect: Connect, authority: Authority
) -> None:
    with Front(proto_service, authority.certify("elsewhere.example")) as front:
        with pytest.raises(tinkex.APIConnectionError, match=r"127\.0\.0\.1"):
            connect(front, ca_file=authority.file).get_server_capabilities()
        assert proto_service.requests == []


@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "something else"])
def test_a_ca_file_that_cannot_be_used_is_a_setting_to_mend(
    connect: Connect, front: Front, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(tinkex.ConfigError, match=r"ca_file .*ca\.pem"):
        connect(front, ca_file=str(file)).get_server_capabilities()


def test_a_variable_of_other_programs_that_names_no_file_is_passed_over(
    proto_service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SHARED[:-1]:
        monkeypatch.setenv(name, "/nowhere/ca.pem")
    assert connect(proto_service).get_server_capabilities().supported_models


@pytest.mark.parametrize("alpn", ["h2", "http/1.1", None], ids=["HTTP/2", "HTTP/1.1 with TLS", "HTTP/1.1"])
def test_megabytes_travel_both_ways_unharmed(
    proto_service: ScriptedService, connect: Connect, authority: Authority, alpn: str | None
) -> None:
    certificate = authority.certify("127.0.0.1") if alpn else None
    with (
        Front(proto_service, certificate, alpn=(alpn or "http/1.1",)) as front,
        connect(front, ca_file=authority.file) as client,
    ):
        training = client.create_lora_training_client(MODEL)
        data = [datum(100_000) for _ in range(4)]
        over_front = training.forward_backward(data, "cross_entropy").result(30)
        sent = proto_service.requests_to("forward_backward")
        assert sum(len(request.body) for request in sent) > 4_000_000
        assert [len(output["logprobs"].data) for output in over_front.loss_fn_outputs] == [100_000] * 4
        direct = (
            connect(proto_service).create_lora_training_client(MODEL).forward_backward(data, "cross_entropy").result(30)
        )
        assert over_front.loss_fn_outputs[0]["logprobs"].data == direct.loss_fn_outputs[0]["logprobs"].data


def test_hundreds_of_samples_share_few_http2_connections(
    proto_service: ScriptedService, connect: Connect, front: Front, authority: Authority
) -> None:
    with connect(front, ca_file=authority.file) as client:
        sampler = client.create_sampling_client(base_model=MODEL)
        proto_service.script.on("asample", do=Work(0.3))
        futures = [sampler.sample(prompt(), 1, PARAMS) for _ in range(350)]
        assert all(future.result(30).sequences for future in futures)
        assert len(proto_service.sampled) == 350
        # 100 exchanges at once on each: four for the submissions, four for the polls, one each for the other kinds.
        assert len(front.clients) <= 12


def test_what_the_service_leaves_unanswered_when_it_restarts_is_neither_lost_nor_doubled(
    proto_service: ScriptedService, connect: Connect, front: Front, authority: Authority
) -> None:
    with connect(front, ca_file=authority.file) as client:
        training = client.create_lora_training_client(MODEL)
        sampler = client.create_sampling_client(base_model=MODEL)
        futures: list[tinkex.APIFuture[Any]] = []
        for _ in range(2):
            futures += [training.optim_step(step()) for _ in range(5)]
            futures += [sampler.sample(prompt(), 1, PARAMS) for _ in range(5)]
            front.stop()  # says GOAWAY to every connection
            front.start()
        assert all(future.result(30) for future in futures)
    assert [seq_id for _, seq_id, _ in proto_service.executed] == list(range(1, 11))
    assert len(proto_service.sampled) == len(set(proto_service.sampled)) == 10
    assert front.versions == {"2"}


def test_a_refusal_over_http2_is_typed_and_retries_are_counted_as_over_http11(
    proto_service: ScriptedService, connect: Connect, front: Front, authority: Authority
) -> None:
    with connect(front, ca_file=authority.file) as client:
        training = client.create_lora_training_client(MODEL)
        proto_service.script.on("optim_step", nth=1, do=Status(503, headers={"retry-after-ms": "5"}))
        training.optim_step(step()).result(20)
        assert client.stats()["retries"] == 1
        proto_service.script.on("optim_step", do=Status(403, "not yours"))
        with pytest.raises(tinkex.PermissionDeniedError, match="not yours"):
            training.optim_step(step()).result(20)


def test_a_cancelled_sample_ends_its_exchange_and_not_the_connection(
    proto_service: ScriptedService, connect: Connect, front: Front, authority: Authority
) -> None:
    with connect(front, ca_file=authority.file) as client:
        sampler = client.create_sampling_client(base_model=MODEL)
        proto_service.script.on("asample", nth=1, do=Work(60.0))
        slow = sampler.sample(prompt(), 1, PARAMS)
        proto_service.wait_for_requests("retrieve_future", 1)
        before = len(front.clients)
        assert slow.cancel()
        assert sampler.sample(prompt(), 1, PARAMS).result(20).sequences
        assert len(front.clients) == before


@pytest.mark.timing
def test_samples_over_http11_with_tls_open_their_connections_side_by_side(
    proto_service: ScriptedService, connect: Connect, authority: Authority
) -> None:
    with (
        Front(proto_service, authority.certify("127.0.0.1"), alpn=("http/1.1",)) as front,
        connect(front, ca_file=authority.file, pools={"sample": 6}) as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)
        proto_service.script.on("asample", do=Delay(0.2))
        started = time.monotonic()
        futures = [sampler.sample(prompt(), 1, PARAMS) for _ in range(12)]
        assert all(future.result(20).sequences for future in futures)
        # Two rounds of six; one after the other it would take twelve.
        assert time.monotonic() - started < 1.5


@pytest.mark.timing
def test_nobody_waits_in_line_to_hear_that_a_service_behind_tls_is_gone(
    connect: Connect, front: Front, authority: Authority
) -> None:
    with connect(front, ca_file=authority.file, max_retries=1) as client:
        sampler = client.create_sampling_client(base_model=MODEL)
        front.stop()
        started = time.monotonic()
        futures = [sampler.sample(prompt(), 1, PARAMS) for _ in range(50)]
        assert all(isinstance(future.exception(10), tinkex.APIConnectionError) for future in futures)
        assert time.monotonic() - started < 3
        front.start()


# -- HTTP/2, frame by frame -----------------------------------------------------------------------------------------


class Odd:
    """Says what is odd about the answer to the first requests to one endpoint."""

    def __init__(self, endpoint: str, *oddities: str) -> None:
        self._endpoint = endpoint
        self._left = list(oddities)

    def __call__(self, request: Request) -> str:
        return self._left.pop(0) if self._left and request.path.endswith(self._endpoint) else ""


def test_answers_that_come_after_the_service_said_it_leaves_are_heard(
    proto_service: ScriptedService, connect: Connect, authority: Authority
) -> None:
    oddity = Odd("/optim_step", "goaway", "goaway")
    with (
        Frames(proto_service, authority.certify("127.0.0.1"), oddity) as server,
        connect(server, ca_file=authority.file) as client,
    ):
        training = client.create_lora_training_client(MODEL)
        for _ in range(3):
            training.optim_step(step()).result(20)
        assert len(proto_service.requests_to("optim_step")) == 3  # none was sent twice
        assert len({request.connection for request in proto_service.requests_to("optim_step")}) == 3
        assert client.stats()["retries"] == 0


def test_a_refused_stream_is_sent_again(proto_service: ScriptedService, connect: Connect, authority: Authority) -> None:
    with (
        Frames(proto_service, authority.certify("127.0.0.1"), Odd("/optim_step", "refuse")) as server,
        connect(server, ca_file=authority.file) as client,
    ):
        training = client.create_lora_training_client(MODEL)
        assert training.optim_step(step()).result(20) is not None
        assert len(proto_service.executed) == 1


def test_no_more_exchanges_at_once_than_the_service_allows(
    proto_service: ScriptedService, connect: Connect, authority: Authority
) -> None:
    with (
        Frames(proto_service, authority.certify("127.0.0.1"), Odd(""), streams=4, settings_after_s=0.05) as server,
        connect(server, ca_file=authority.file, pools={"sample": 2, "retrieve_samples": 2}) as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL)
        sampler.sample(prompt(), 1, PARAMS).result(20)
        proto_service.script.on("asample", do=[Delay(0.05), Work(0.05)])
        futures = [sampler.sample(prompt(), 1, PARAMS) for _ in range(40)]
        assert all(future.result(20).sequences for future in futures)
        assert len(proto_service.sampled) == 41
        assert server.most_streams <= 4
        assert client.stats()["retries"] == 0


def test_an_answer_before_the_body_was_read_is_heard_over_http2_and_the_rest_is_not_sent(
    proto_service: ScriptedService, connect: Connect, authority: Authority
) -> None:
    with (
        Frames(proto_service, authority.certify("127.0.0.1"), Odd("/forward_backward", "early")) as server,
        connect(server, ca_file=authority.file) as client,
    ):
        training = client.create_lora_training_client(MODEL)
        with pytest.raises(tinkex.APIStatusError, match="at most 1 MB"):
            training.forward_backward([datum(100_000) for _ in range(4)], "cross_entropy").result(20)
        assert training.optim_step(step()).result(20) is not None
        assert len(server.resets) == 1


def test_an_exchange_without_answer_is_noticed_though_others_on_its_connection_are_lively(
    proto_service: ScriptedService, connect: Connect, authority: Authority
) -> None:
    with (
        Frames(proto_service, authority.certify("127.0.0.1"), Odd("/optim_step", "silent")) as server,
        connect(server, ca_file=authority.file, timeout_s=0.3) as client,
    ):
        training = client.create_lora_training_client(MODEL)
        future = training.optim_step(step())
        deadline = time.monotonic() + 5
        while not future.done() and time.monotonic() < deadline:
            training.get_info()  # the same kind of traffic, so the same connection
        assert future.result(0) is not None
        assert future.status().attempts == 2


# -- dead lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpn", ["h2", "http/1.1"])
def test_a_line_that_went_dead_without_a_word_is_replaced(
    proto_service: ScriptedService,
    connect: Connect,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    alpn: str,
) -> None:
    monkeypatch.setattr(poll, "POLL_TIMEOUT_S", 0.2)
    with (
        Front(proto_service, authority.certify("127.0.0.1"), alpn=(alpn,)) as front,
        Pipe(urlsplit(front.url).port or 0, "https") as line,
        connect(line, ca_file=authority.file, timeout_s=0.2) as client,
    ):
        training = client.create_lora_training_client(MODEL)
        training.optim_step(step()).result(20)
        asked = [client.create_rest_client().list_training_runs() for _ in range(5)]
        assert all(future.result(20) for future in asked)
        line.die()
        future = training.optim_step(step())
        assert future.result(10) is not None
        assert future.status().attempts == 2  # however many lines were open, one is enough to learn it from
    assert [seq_id for _, seq_id, _ in proto_service.executed] == [1, 2]
