"""Where the API key goes and never goes, which setting wins, and telemetry that delays nothing."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, datum, prompt, step
from tinkex import settings
from tinkex.redact import redact
from tinkex.testing import Answer, Hang, ScriptedService, Status

KEY = "tml-very-secret-key-0123456789"
Connect = Callable[..., tinkex.ServiceClient]


def client_of(service: ScriptedService, **options: Any) -> tinkex.ServiceClient:
    return tinkex.ServiceClient(base_url=service.url, api_key=KEY, **options)


def everything_sent_to_telemetry(service: ScriptedService) -> str:
    return "".join(request.body.decode() for request in service.requests_to("telemetry"))


def test_no_error_event_log_repr_or_telemetry_carries_the_key(
    proto_service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[object] = []
    stops = [tinkex.on(name, seen.append) for name in ("request", "retry", "poll", "queue", "step")]
    with client_of(proto_service) as client:
        training = client.create_lora_training_client(MODEL)
        proto_service.script.on("retrieve_future", do=Status(403, f"key {KEY} is not allowed"))
        with pytest.raises(tinkex.PermissionDeniedError) as caught:
            training.optim_step(step()).result(20)
        proto_service.wait_for_requests("telemetry")
        proto_service.script.clear()
        config = client._session.config
        traces = [
            repr(client),
            repr(config),
            repr(caught.value.response),
            repr(seen),
            caplog.text,
            repr(training),
            str(caught.value),
        ]
    for stop in stops:
        stop()
    assert KEY not in "".join(traces)
    sent = everything_sent_to_telemetry(proto_service)
    assert "SESSION_START" in sent and "user_error" in sent
    assert KEY not in sent
    assert "x-api-key" not in sent.lower()


def test_errors_pickle_and_hold_no_request_headers(proto_service: ScriptedService) -> None:
    with client_of(proto_service, telemetry=False) as client:
        proto_service.script.on("get_server_capabilities", do=Status(403, "no"))
        with pytest.raises(tinkex.PermissionDeniedError) as caught:
            client.get_server_capabilities()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is tinkex.PermissionDeniedError
    assert copy.status_code == 403 and copy.body == caught.value.body
    assert KEY.encode() not in pickle.dumps(caught.value)


def test_an_explicit_api_key_beats_the_environment(
    proto_service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-from-environment")
    with client_of(proto_service, telemetry=False) as client:
        client.get_server_capabilities()
    assert {request.headers["x-api-key"] for request in proto_service.requests} == {KEY}


def test_a_key_is_never_sent_to_another_host(proto_service: ScriptedService) -> None:
    with ScriptedService() as elsewhere, client_of(proto_service, telemetry=False) as client:
        target = {"location": f"{elsewhere.url}/api/v1/get_server_capabilities"}
        proto_service.script.on("get_server_capabilities", do=Status(307, headers=target))
        with pytest.raises(tinkex.APIResponseValidationError, match="another host"):
            client.get_server_capabilities()
        assert not elsewhere.requests


def test_cloudflare_access_headers_are_sent_when_configured(
    proto_service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "id-1")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "secret-1")
    with client_of(proto_service, telemetry=False) as client:
        client.get_server_capabilities()
    for request in proto_service.requests:
        assert request.headers["cf-access-client-id"] == "id-1"
        assert request.headers["cf-access-client-secret"] == "secret-1"


def test_a_token_service_gets_the_key_once_and_the_token_from_then_on() -> None:
    with ScriptedService(client_config={"pjwt_auth_enabled": True}) as service:
        with client_of(service, telemetry=False) as client:
            client.get_server_capabilities()
        (trade,) = service.requests_to("auth_token")
        assert trade.headers["x-api-key"] == KEY
        (after,) = service.requests_to("get_server_capabilities")
        assert after.headers["x-api-key"] != KEY


def test_a_token_that_ran_out_is_traded_once_and_nothing_is_lost() -> None:
    with ScriptedService(client_config={"pjwt_auth_enabled": True}) as service:
        with client_of(service, telemetry=False) as client:
            training = client.create_lora_training_client(MODEL)
            sampler = client.create_sampling_client(base_model=MODEL)
            old = service.requests_to("create_model")[0].headers["x-api-key"]
            # From now on the service knows only tokens that it gives out later.
            connection = client._session.link()
            service.script.on("auth_token", do=Answer({"jwt": "eyJ.new.token"}))
            service.script.on("*", do=Status(401, "expired"), where=lambda r: r.headers.get("x-api-key") == old)
            steps = [training.optim_step(step()) for _ in range(3)]
            samples = [sampler.sample(prompt(), 1, tinkex.SamplingParams(max_tokens=2)) for _ in range(10)]
            futures: list[tinkex.APIFuture[Any]] = [*steps, *samples]
            assert all(future.result(20) is not None for future in futures)
            assert connection.auth.header == "eyJ.new.token"
        assert len(service.requests_to("auth_token")) == 2
        assert [seq_id for _, seq_id, _ in service.executed] == [1, 2, 3]


@pytest.mark.timing
def test_a_failed_operation_reaches_the_caller_at_once_though_telemetry_is_down(
    proto_service: ScriptedService,
) -> None:
    proto_service.script.on("telemetry", do=Hang())
    with client_of(proto_service) as client:
        training = client.create_lora_training_client(MODEL)
        proto_service.script.on("optim_step", do=Status(400, "bad"))
        started = time.monotonic()
        with pytest.raises(tinkex.BadRequestError):
            training.optim_step(step()).result(20)
        # The official client holds every fatal error back for 30 s here.
        assert time.monotonic() - started < 2


def test_telemetry_tries_once_and_a_404_is_the_end_of_it(proto_service: ScriptedService) -> None:
    proto_service.script.on("telemetry", do=Status(404, "none here"))
    with client_of(proto_service) as client:
        training = client.create_lora_training_client(MODEL)
        training.forward_backward([datum()], "cross_entropy").result(20)
    assert len(proto_service.requests_to("telemetry")) <= 2


def test_telemetry_uses_the_sessions_own_settings_and_is_off_with_one(
    proto_service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(proto_service, default_headers_overrides={"x-team": "blue"}) as client:
        client.create_lora_training_client(MODEL)
    sent = proto_service.requests_to("telemetry")
    assert sent and all(request.headers["x-team"] == "blue" for request in sent)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with client_of(proto_service) as client:
        client.create_lora_training_client(MODEL)
    assert len(proto_service.requests_to("telemetry")) == len(sent)


def test_session_end_is_told_only_when_the_session_ends(proto_service: ScriptedService) -> None:
    client = client_of(proto_service)
    training = client.create_lora_training_client(MODEL)
    proto_service.script.on("optim_step", do=Status(500, headers={"x-should-retry": "false"}))
    with pytest.raises(tinkex.InternalServerError):
        training.optim_step(step()).result(20)
    proto_service.wait_for_requests("telemetry")
    assert "UNHANDLED_EXCEPTION" in everything_sent_to_telemetry(proto_service)
    assert "SESSION_END" not in everything_sent_to_telemetry(proto_service)
    client.close("success").result(20)
    assert "SESSION_END" in everything_sent_to_telemetry(proto_service)


# -- settings --------------------------------------------------------------------------------------------------------


def test_argument_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "tinkex.toml"
    file.write_text('[client]\ntimeout_s = 7.0\ndeadline_s = 70.0\nunreachable_s = 17.0\napi_key = "tml-file"\n')
    environ = {"TINKEX_CONFIG": str(file), "TINKEX_DEADLINE_S": "80", "TINKEX_UNREACHABLE_S": "18"}
    found = settings.resolve(environ, base_url="http://127.0.0.1:1", unreachable_s=19.0)
    assert (found.timeout_s, found.deadline_s, found.unreachable_s, found.max_retries) == (7.0, 80.0, 19.0, 10)
    assert found.api_key == "tml-file"


def test_a_missing_key_says_what_to_do_and_a_local_service_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.client, "_stored_key", lambda: "")
    with pytest.raises(tinkex.ConfigError, match="TINKER_API_KEY"):
        settings.resolve({}, base_url="https://example.invalid")
    assert settings.resolve({}, base_url="http://127.0.0.1:8642").api_key == settings.KEYLESS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"base_url": "ftp://x"}, "not an http"),
        ({"base_url": "http://user:pw@h"}, "must not hold"),
        ({"base_url": "http://127.0.0.1", "timeout_s": 0}, "timeout_s must be above 0"),
        ({"base_url": "http://127.0.0.1", "pools": {"nonsense": 1}}, "Unknown pools"),
        ({"base_url": "http://127.0.0.1", "nonsense": 1}, "Unknown settings"),
    ],
)
def test_bad_settings_are_refused_with_the_name(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(tinkex.ConfigError, match=says):
        settings.resolve({}, **arguments)


def test_one_service_has_one_spelling() -> None:
    spellings = ("http://Example.com:80/api/", "http://example.com/api", "http://EXAMPLE.com/api//")
    assert {settings.normalise_url(url) for url in spellings} == {"http://example.com/api"}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key tml-abcdef123 used", "key *** used"),
        ("https://h/f?X-Amz-Signature=abc123&x=1", "https://h/f?X-Amz-Signature=***&x=1"),
        ("eyJhbGciOi.eyJleHAiOjF9.c2ln", "***"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_redaction_finds_keys_tokens_and_signed_addresses(text: str, clean: str) -> None:
    assert redact(text) == clean
