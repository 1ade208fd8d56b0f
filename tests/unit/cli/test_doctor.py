"""`tinkex doctor`: every kind of trouble is found, named, and told what to do about."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tinkex import settings
from tinkex.cli.commands import probes
from tinkex.testing import Answer, Delay, Drop, Hang, ScriptedService, Status

from .conftest import KEY, Ran, Saved, Tinkex


def findings(ran: Ran) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in ran.json["findings"]}


def failures(ran: Ran) -> list[str]:
    return [check for check, finding in findings(ran).items() if finding["status"] == "FAIL"]


def test_all_is_well(run: Tinkex, service: ScriptedService) -> None:
    ran = run("doctor")
    assert ran.code == 0
    assert ran.out.endswith("No errors found.\n")
    for text in (service.url, "TINKER_BASE_URL", "accepted", "protobuf", "1024 datums", "tinkex/tiny", "stream"):
        assert text in ran.out
    assert "FAIL" not in ran.out


def test_json_says_the_same(run: Tinkex, service: ScriptedService) -> None:
    ran = run("doctor", "-o", "json")
    assert ran.code == 0
    assert ran.json["ok"] is True
    assert ran.json["models"][0]["model_name"] == "tinkex/tiny"
    assert ran.json["settings"]["base_url"] == {"value": service.url, "from": "TINKER_BASE_URL"}
    assert set(findings(ran)) >= {
        "DNS",
        "TCP",
        "HTTP",
        "clock",
        "dialect",
        "limits",
        "key",
        "models",
        "open files",
        "extras",
    }


def test_the_key_is_never_shown(run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "cf-secret")
    for words in (["doctor"], ["doctor", "-o", "json"], ["doctor", "--api-key", "tml-another-secret"]):
        ran = run(*words)
        for secret in (KEY, KEY[:5], "tml-another-secret", "cf-secret"):
            assert secret not in ran.out + ran.err
    assert f"tml-… ({len(KEY)} characters) (from: TINKER_API_KEY)" in run("doctor").out


def test_where_each_setting_came_from(
    run: Tinkex, service: ScriptedService, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = environment / "mine.toml"
    file.write_text('[client]\ntimeout_s = 7.0\nproject_id = "blue"\n')
    monkeypatch.setenv("TINKEX_CONFIG", str(file))
    monkeypatch.setenv("TINKEX_DEADLINE_S", "99")
    shown = run("doctor", "--base-url", service.url, "-o", "json").json["settings"]
    assert shown["base_url"]["from"] == "argument"
    assert shown["timeout_s"] == {"value": "7.0", "from": str(file)}
    assert shown["project_id"] == {"value": "blue", "from": str(file)}
    assert shown["deadline_s"] == {"value": "99.0", "from": "TINKEX_DEADLINE_S"}
    assert shown["max_retries"] == {"value": "10", "from": "default"}


def test_the_official_clients_login_and_a_credential_command_are_named(environment: Path) -> None:
    at_home = {"TINKER_BASE_URL": "https://tinker.invalid"}
    assert settings.sources(at_home)["api_key"] == "default"
    assert settings.sources({**at_home, "TINKER_CREDENTIAL_CMD": "pass tinker"})["api_key"] == "TINKER_CREDENTIAL_CMD"
    folder = environment / ".tinker"
    folder.mkdir()
    (folder / "credentials.json").write_text('{"default": "me", "keys": {"me": {"key": "tml-stored"}}}')
    assert settings.sources(at_home)["api_key"] == "the official client's login"


def test_no_key_is_needed_on_this_machine(run: Tinkex) -> None:
    with ScriptedService() as service:
        ran = run("doctor", "--base-url", service.url)
    assert ran.code == 0
    assert "none needed on this machine" in ran.out


def test_a_missing_key_is_found_and_the_rest_is_looked_at(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setattr(settings.client, "is_loopback", lambda url: False)
    ran = run("doctor", "-o", "json")
    assert ran.code == 1
    assert findings(ran)["key"]["remedy"] == "Set TINKER_API_KEY."
    assert "api_key" not in findings(ran), "one row about it, not an ok beside a FAIL"
    assert findings(ran)["HTTP"]["status"] == "ok"


def test_a_refused_key_fails(run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    ran = run("doctor", "-o", "json")
    assert ran.code == 1
    assert any("TINKER_API_KEY" in finding["remedy"] for finding in findings(ran).values())


def test_a_key_that_only_the_account_refuses_fails(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("list_training_runs", do=Status(401))
    ran = run("doctor", "-o", "json")
    assert failures(ran) == ["key"]
    assert findings(ran)["key"]["detail"] == "rejected (HTTP 401)"


def test_bad_settings_stop_the_visit(run: Tinkex) -> None:
    ran = run("doctor", "--base-url", "ftp://somewhere", "-o", "json")
    assert ran.code == 1
    assert "ftp://somewhere" in findings(ran)["settings"]["detail"]
    assert "DNS" not in findings(ran)


def test_an_unknown_host_fails_at_dns(run: Tinkex) -> None:
    ran = run("doctor", "--base-url", "http://no-such-host.invalid", "--api-key", "tml-x", "-o", "json")
    assert failures(ran) == ["DNS"]
    assert "base_url" in findings(ran)["DNS"]["remedy"]
    assert "TCP" not in findings(ran)


def test_a_closed_port_fails_at_tcp(run: Tinkex, service: ScriptedService) -> None:
    service.kill()
    ran = run("doctor", "-o", "json")
    assert ran.code == 1
    assert failures(ran) == ["TCP"]
    assert "Is the service running" in findings(ran)["TCP"]["remedy"]


def test_something_that_is_no_http_fails_at_http(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("*", do=Drop())
    ran = run("doctor", "-o", "json")
    assert failures(ran) == ["HTTP"]
    assert len(service.requests) == 1


def test_a_service_that_is_not_well_fails(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("healthz", do=Status(503))
    assert failures(run("doctor", "-o", "json")) == ["HTTP"]


def test_a_service_without_a_health_check_is_well(run: Tinkex) -> None:
    with ScriptedService(missing=("healthz",)) as service:
        assert run("doctor", "--base-url", service.url).code == 0


@pytest.mark.timing
def test_a_silent_service_takes_no_longer_than_the_limit(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PROBE_S", 0.3)
    service.script.on("healthz", do=Hang())
    started = time.monotonic()
    ran = run("doctor", "-o", "json")
    assert time.monotonic() - started < 3
    assert failures(ran) == ["HTTP"]


def test_a_slow_handshake_takes_no_longer_than_the_limit(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PROBE_S", 0.3)
    service.script.on("client_config", do=Delay(2))
    ran = run("doctor", "-o", "json")
    assert failures(ran) == ["dialect"]


def test_an_old_service_speaks_json(run: Tinkex) -> None:
    with ScriptedService(dialect="json") as old:
        ran = run("doctor", "--base-url", old.url, "-o", "json")
    assert ran.code == 0
    assert findings(ran)["dialect"]["detail"].startswith("JSON")


def test_an_address_that_is_no_tinker_api_is_found_out(run: Tinkex, service: ScriptedService) -> None:
    service.script.on("client_config", do=Answer("<html>", content_type="text/html"))
    ran = run("doctor", "-o", "json")
    assert failures(ran) == ["dialect"]
    assert "before /api/v1" in findings(ran)["dialect"]["remedy"]


@pytest.mark.parametrize(
    ("skew_s", "status", "words"),
    [(0, "ok", "agrees"), (10, "ok", "10 s behind"), (-90, "warn", "90 s ahead of"), (4000, "FAIL", "4000 s behind")],
)
def test_the_clock_is_compared_with_the_services(skew_s: int, status: str, words: str) -> None:
    found = probes.clock(formatdate(1_800_000_000 + skew_s, usegmt=True), 1_800_000_000)
    assert (found.status, words in found.detail) == (status, True)
    assert bool(found.remedy) == (status != "ok")


def test_a_clock_far_off_is_found_on_the_way(run: Tinkex, service: ScriptedService) -> None:
    date = formatdate(time.time() + 7200, usegmt=True)
    service.script.on("healthz", do=Answer({"status": "ok"}, headers={"date": date}))
    assert failures(run("doctor", "-o", "json")) == ["clock"]


def test_a_service_without_a_date_is_no_trouble() -> None:
    assert probes.clock(None, 0).status == probes.clock("yesterday", 0).status == "ok"


def test_limits_and_models_are_the_services_own(run: Tinkex) -> None:
    limits = {
        "fwdbwd_max_chunk_len": 77,
        "fwdbwd_max_chunk_bytes_count": 2_000_000,
        "sample_max_concurrent_requests": 33,
    }
    with ScriptedService(client_config=limits, base_models=[f"m/{n}" for n in range(10)]) as service:
        ran = run("doctor", "--base-url", service.url, "-o", "json")
    assert findings(ran)["limits"]["detail"] == "chunks of 77 datums or 2.0 MB; 33 samples in flight"
    assert findings(ran)["models"]["detail"].endswith("m/7 (32,768 tokens) and 2 more")
    assert len(ran.json["models"]) == 10


def test_a_tight_file_limit_is_a_warning_with_a_remedy(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    ran = run("doctor", "-o", "json")
    assert ran.code == 0
    found = findings(ran)["open files"]
    assert (found["status"], "ulimit -n" in found["remedy"]) == ("warn", True)


def test_missing_extras_are_named_with_the_way_to_install_them(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    shown = run("doctor").out
    for extra in ("tokenizers", "torch", "local", "otel"):
        assert f"pip install 'tinkex[{extra}]'" in shown


def test_an_extra_is_installed_when_all_of_it_is(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    (found,) = [line for line in run("doctor").out.splitlines() if "extras" in line]
    assert "installed: tokenizers, torch, otel; not installed: local (for a service on this machine:" in found


def test_a_proxy_is_what_is_looked_at_and_its_password_stays_here(
    run: Tinkex, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
    monkeypatch.setenv("TINKEX_PROXY", f"http://me:hunter2@127.0.0.1:{port}")
    ran = run("doctor", "-o", "json")
    assert failures(ran) == ["TCP"]
    assert f"the proxy 127.0.0.1:{port}" in findings(ran)["TCP"]["detail"]
    assert "hunter2" not in ran.out


def test_no_session_is_opened(run: Tinkex, service: ScriptedService, saved: Saved) -> None:
    run("doctor")
    assert not service.sessions


# -- encryption -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of three days for localhost, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    both = folder / "both.pem"
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


@pytest.fixture
def tls_port(certificate: Path) -> Iterator[int]:
    """A server that shakes hands and hangs up."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                    with plain, context.wrap_socket(plain, server_side=True):
                        pass
                except ssl.SSLError:
                    continue
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def network(port: int, **changes: Any) -> dict[str, probes.Finding]:
    config = settings.resolve(base_url=f"https://localhost:{port}", api_key="tml-x", **changes)
    found, _ = probes.network(config)
    return {finding.check: finding for finding in found}


def test_a_certificate_nobody_trusts_fails_and_names_the_setting(tls_port: int) -> None:
    found = network(tls_port)["TLS"]
    assert found.status == "FAIL"
    assert "TINKEX_CA_FILE" in found.remedy


def test_a_trusted_certificate_that_ends_soon_is_a_warning(tls_port: int, certificate: Path) -> None:
    found = network(tls_port, ca_file=str(certificate))["TLS"]
    assert found.status == "warn"
    assert "h2" in found.detail and "certificate valid for 3 days" in found.detail


def test_a_file_of_certificates_that_is_none_is_named(tls_port: int, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    found = network(tls_port, ca_file=str(tmp_path / "ca.pem"))["TLS"]
    assert found.status == "FAIL"
    assert "ca.pem" in found.detail


def test_a_service_without_encryption_fails_at_tls(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PROBE_S", 0.3)  # it waits for the rest of what it takes for a request
    port = int(service.url.rpartition(":")[2])
    assert network(port)["TLS"].status == "FAIL"
