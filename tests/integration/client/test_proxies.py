"""Proxies: from the environment, or named as a setting; never in the way of a service on this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tinkex
from tests.integration.client.conftest import MODEL, prompt, step
from tests.integration.client.wires import Authority, Front, Proxy
from tinkex.settings import proxy_for, resolve, sources
from tinkex.testing import ScriptedService

Connect = Callable[..., tinkex.ServiceClient]
PARAMS = tinkex.SamplingParams(max_tokens=3, seed=1)
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "TINKEX_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of whoever runs the tests."""
    for name in (*VARIABLES, *map(str.lower, VARIABLES)):
        monkeypatch.delenv(name, raising=False)


class Elsewhere:
    """A service under an address that reaches this machine and is not known to be its own."""

    def __init__(self, service: ScriptedService | Front) -> None:
        self.url = service.url.replace("127.0.0.1", "0.0.0.0")


def work(client: tinkex.ServiceClient) -> None:
    training = client.create_lora_training_client(MODEL)
    assert training.optim_step(step()).result(20) is not None
    assert client.create_sampling_client(base_model=MODEL).sample(prompt(), 1, PARAMS).result(20).sequences


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_requests_take_the_proxy_of_the_environment(
    service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with Proxy() as proxy:
        monkeypatch.setenv(variable, proxy.url)
        place = Elsewhere(service)
        with connect(place) as client:
            work(client)
    assert len(proxy.seen) == service.accepted_connections > 0
    assert all(line.startswith((f"POST {place.url}/api/v1/", f"GET {place.url}/api/v1/")) for line in proxy.seen)


def test_https_goes_through_a_tunnel_and_the_proxy_sees_nothing_of_it(
    proto_service: ScriptedService,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with Proxy() as proxy, Front(proto_service, authority.certify("0.0.0.0", "127.0.0.1")) as front:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        place = Elsewhere(front)
        with connect(place, ca_file=authority.file) as client:
            work(client)
        assert front.versions == {"2"}
    assert len(proxy.seen) == len(front.clients) > 0
    assert set(proxy.seen) == {f"CONNECT {place.url.removeprefix('https://')} HTTP/1.1"}


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_password_is_shown_to_the_proxy_and_not_through_a_tunnel(
    proto_service: ScriptedService, connect: Connect, tmp_path_factory: pytest.TempPathFactory, scheme: str
) -> None:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with Proxy("user:pa ss") as proxy, Front(proto_service, authority.certify("127.0.0.1")) as front:
        target = front if scheme == "https" else proto_service
        named = proxy.url.replace("://", "://user:pa%20ss@")
        with connect(target, proxy=named, ca_file=authority.file) as client:
            assert client.get_server_capabilities().supported_models
            assert "pa%20ss" not in repr(client._session.config)
    if scheme == "https":
        assert not any("proxy-authorization" in request.headers for request in proto_service.requests)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_refuses_is_named_without_its_password(
    proto_service: ScriptedService, connect: Connect, tmp_path_factory: pytest.TempPathFactory, scheme: str
) -> None:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with Proxy("user:right") as proxy, Front(proto_service, authority.certify("127.0.0.1")) as front:
        target = front if scheme == "https" else proto_service
        client = connect(target, proxy=proxy.url.replace("://", "://user:wrong@"), max_retries=1)
        with pytest.raises(tinkex.APIError, match=r"(?i)407|proxy") as caught:
            client.get_server_capabilities()
        assert "wrong" not in str(caught.value)
        assert proto_service.requests == []


def test_a_service_on_this_machine_is_not_reached_through_a_proxy_of_the_environment(
    service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        with connect(service) as client:
            work(client)
    assert proxy.seen == []


def test_a_proxy_that_was_set_later_is_used_by_clients_made_later(
    proto_service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> tinkex.ServiceClient:
        return tinkex.ServiceClient(base_url=Elsewhere(proto_service).url, api_key=f"tml-{id(proto_service)}")

    with make() as before, Proxy() as proxy:
        assert before.get_server_capabilities().supported_models
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with make() as after:
            assert after.get_server_capabilities().supported_models
        assert before.get_server_capabilities().supported_models
        assert len(proxy.seen) > 0


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_proxy_that_was_meant_for_us_is_used_for_every_address(
    service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with Proxy() as proxy:
        if how == "variable":
            monkeypatch.setenv("TINKEX_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "*")  # a word to other programs
        with connect(service, **({"proxy": proxy.url} if how == "argument" else {})) as client:
            work(client)
    assert len(proxy.seen) == service.accepted_connections > 0


def test_hosts_in_no_proxy_are_reached_directly(
    service: ScriptedService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "example.org, 0.0.0.0")
        with connect(Elsewhere(service)) as client:
            work(client)
    assert proxy.seen == []


@pytest.mark.parametrize(
    ("no_proxy", "exempt", "proxied"),
    [
        ("", [], ["a.example"]),
        ("*", ["a.example", "10.0.0.1"], []),
        ("a.example", ["a.example", "b.a.example"], ["aa.example", "a.example.org"]),
        (".a.example", ["a.example", "b.a.example"], ["aa.example"]),
        ("*.a.example,", ["b.a.example"], ["aa.example"]),
        ("A.Example:8080", ["a.example"], ["b.example"]),
        ("10.0.0.0/8, 192.168.1.7", ["10.1.2.3", "192.168.1.7"], ["11.0.0.1", "192.168.1.8", "a.example"]),
        ("fd00::/8", ["[fd00::1]"], ["[fe00::1]"]),
        ("10.0.0.0/nonsense", [], ["10.0.0.1"]),
    ],
)
def test_no_proxy_is_read_as_curl_reads_it(no_proxy: str, exempt: list[str], proxied: list[str]) -> None:
    environ = {"HTTPS_PROXY": "proxy.example:3128", "NO_PROXY": no_proxy, "TINKER_API_KEY": "tml-x"}
    config = resolve(environ, base_url="https://service.example")
    assert {host: proxy_for(f"https://{host}/x", config) for host in exempt} == dict.fromkeys(exempt)
    assert {proxy_for(f"https://{host}/x", config) for host in proxied} <= {"http://proxy.example:3128"}
    assert all(proxy_for(f"https://{host}/x", config) for host in proxied)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_loopback_addresses_need_no_entry_in_no_proxy(host: str) -> None:
    config = resolve({"HTTP_PROXY": "http://proxy.example"}, base_url=f"http://{host}:8642")
    assert proxy_for(config.base_url, config) is None
    assert proxy_for("http://elsewhere.example/file", config) == "http://proxy.example"


def test_what_is_meant_for_us_comes_before_what_is_meant_for_everybody(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for name in ("ours.pem", "theirs.pem"):
        (folder / name).write_text("")
    theirs, ours = str(folder / "theirs.pem"), str(folder / "ours.pem")
    (folder / "tinkex.toml").write_text(f'[client]\nca_file = "{ours}"\n')
    environ = {"REQUESTS_CA_BUNDLE": theirs, "http_proxy": "http://low", "HTTP_PROXY": "http://high"}
    local = {"base_url": "http://127.0.0.1:1"}
    assert resolve(environ, **local).ca_file == theirs
    assert sources(environ, **local)["ca_file"] == "REQUESTS_CA_BUNDLE"
    assert resolve({**environ, "TINKEX_CONFIG": str(folder / "tinkex.toml")}, **local).ca_file == ours
    assert resolve({**environ, "TINKEX_CA_FILE": ours}, **local).ca_file == ours
    assert resolve(environ, **local, ca_file=ours).ca_file == ours
    assert resolve(environ, **local).http_proxy == "http://low"
    assert sources(environ, **local)["http_proxy"] == "http_proxy"


def test_under_cgi_a_proxy_that_a_visitor_sent_is_not_believed() -> None:
    environ = {"HTTP_PROXY": "http://evil.example", "REQUEST_METHOD": "GET"}
    assert resolve(environ, base_url="http://127.0.0.1:1").http_proxy is None


@pytest.mark.parametrize("proxy", ["socks5://user:secret@proxy.example", "ftp://user:secret@proxy.example"])
def test_a_proxy_of_an_unknown_kind_is_refused_without_showing_its_password(proxy: str) -> None:
    with pytest.raises(tinkex.ConfigError, match="http:// proxy") as caught:
        resolve({}, base_url="http://127.0.0.1:1", proxy=proxy)
    assert "secret" not in str(caught.value)
