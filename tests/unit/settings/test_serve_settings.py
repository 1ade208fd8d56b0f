"""A service's settings: where each comes from, what is refused and with which words, what never shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.settings import (
    SERVE,
    ServeConfig,
    bucket_access,
    bucket_variables,
    check_cluster,
    check_keys,
    is_loopback_host,
    private_environment,
    resolve,
    resolve_serve,
    write_private_file,
)

KEY = "tml-0123456789abcdef"


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    """Writes a [serve] table and returns an environment that names the file."""

    def write(*lines: str) -> dict[str, str]:
        file = tmp_path / "tinkex.toml"
        file.write_text("\n".join(("[serve]", *lines)) + "\n", encoding="utf-8")
        return {"TINKEX_CONFIG": str(file)}

    return write


def test_every_setting_has_a_row_and_every_row_a_setting() -> None:
    assert {row.name for row in SERVE} == {entry.name for entry in dataclasses.fields(ServeConfig)}
    assert len({row.flag for row in SERVE}) == len(SERVE)
    for row in SERVE:
        assert row.variable == "TINKEX_" + row.flag.removeprefix("--").replace("-", "_").upper()
        assert row.about.endswith(".") and row.metavar


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(toml: Any) -> None:
    environ = toml("port = 1111", 'dtype = "bfloat16"', "max_rows = 3")
    environ |= {"TINKEX_PORT": "2222", "TINKEX_DTYPE": "float16"}
    config = resolve_serve(environ, port=3333)
    assert (config.port, config.dtype, config.max_rows, config.gap_s) == (3333, "float16", 3, 10.0)


def test_names_are_one_several_or_the_plural_wherever_they_come_from(toml: Any) -> None:
    wanted = ("tinkex/tiny", "smollm2-135m")
    assert resolve_serve({"TINKEX_BASE_MODEL": "tinkex/tiny, smollm2-135m,"}).base_models == wanted
    assert resolve_serve(toml('base_model = ["tinkex/tiny", "smollm2-135m", "tinkex/tiny"]')).base_models == wanted
    assert resolve_serve(toml('base_models = "tinkex/tiny"')).base_models == ("tinkex/tiny",)
    assert resolve_serve({}, base_models=["a,b"]).base_models == ("a,b",), "a folder's name may have a comma"


def test_a_wrong_value_is_refused_with_the_place_it_came_from(toml: Any) -> None:
    with pytest.raises(ConfigError, match=r"^TINKEX_PORT must be a whole number from 0 to 65535, not 'http'\.$"):
        resolve_serve({"TINKEX_PORT": "http"})
    with pytest.raises(ConfigError, match=r"tinkex\.toml: gap_s in \[serve\] must be seconds from 0, not -1\.$"):
        resolve_serve(toml("gap_s = -1"))
    with pytest.raises(ConfigError, match=r"^max_rows must be a whole number from 1, not True\.$"):
        resolve_serve({}, max_rows=True)
    with pytest.raises(ConfigError, match=r"Unknown settings: ports"):
        resolve_serve({}, ports=1)
    with pytest.raises(ConfigError, match=r"unknown settings in \[serve\]: prot"):
        resolve_serve(toml("prot = 1"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_models", []),
        ("base_models", {"a": 1}),
        ("host", "http://here"),
        ("port", 65536),
        ("port", 80.5),
        ("public_url", "here"),
        ("public_url", "https://me:secret@here"),
        ("data_dir", ""),
        ("database_url", "tinkex.db"),
        ("device", "tpu"),
        ("device", "cpu:1"),
        ("dtype", "int8"),
        ("durability", "some"),
        ("threads", -1),
        ("max_body_bytes", 10),
        ("quota_gb", 0),
        ("poll_hold_s", 60),
        ("drain_s", float("nan")),
        ("result_ttl_s", float("inf")),
        ("log_level", "loud"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        ServeConfig(**{name: value})


def test_values_are_read_as_text_or_as_they_are() -> None:
    config = ServeConfig(port="0", device="CUDA:1", host="[::1]", quota_gb="1.5", max_body_bytes="1_000_000")  # type: ignore[arg-type]
    assert (config.port, config.device, config.host, config.quota_gb) == (0, "cuda:1", "::1", 1.5)
    assert config.max_body_bytes == 1_000_000
    assert ServeConfig(public_url="HTTPS://Example.org:443/tinkex/").public_url == "https://example.org/tinkex"


def test_the_users_folders_are_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    environ = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    config = resolve_serve(environ)
    assert config.data_dir == tmp_path / "data" / "tinkex"
    assert config.cache_dir == tmp_path / "cache" / "tinkex"
    assert config.database_url == f"sqlite:///{tmp_path}/data/tinkex/tinkex.db"
    assert str(config.cache_dir) == resolve({**environ, "TINKER_API_KEY": KEY}).cache_dir, "one folder for both"
    monkeypatch.setattr("sys.platform", "darwin")
    assert resolve_serve({}).data_dir == Path.home() / "Library" / "Application Support" / "tinkex"


def test_a_keys_file_adds_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(f"# the team\n{KEY}\n\n  {KEY}2  \n", encoding="utf-8")
    config = resolve_serve({"TINKEX_API_KEY": f"{KEY}1"}, keys_file=file)
    assert config.api_keys == (f"{KEY}1", KEY, f"{KEY}2")


@pytest.mark.parametrize("content", ["", "# nothing\n", f"{KEY}\nsk-another-service\n", "tml-\n", f"{KEY} alice\n"])
def test_a_keys_file_without_good_keys_is_refused_and_shows_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"keys\.txt") as refused:
        resolve_serve({}, keys_file=file)
    assert "another" not in str(refused.value) and KEY not in str(refused.value)


def test_a_keys_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        resolve_serve({}, keys_file=tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        resolve_serve({}, keys_file=tmp_path / "binary")


def test_keys_and_passwords_show_in_no_repr_and_no_error() -> None:
    config = ServeConfig(api_keys=(KEY,), database_url="postgresql://me:hush@db/tinkex")
    assert KEY not in repr(config) and "hush" not in repr(config)
    for name, value in (("api_keys", ["sk-secret-key-of-mine"]), ("database_url", "me:hush@db")):
        with pytest.raises(ConfigError) as refused:
            resolve_serve({}, **{name: value})
        assert "secret" not in str(refused.value) and "hush" not in str(refused.value)


def test_listening_beyond_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org"):
        with pytest.raises(ConfigError, match="tinkex key create"):
            check_keys(ServeConfig(host=host), has_stored_keys=False)
        check_keys(ServeConfig(host=host, api_keys=(KEY,)), has_stored_keys=False)
        check_keys(ServeConfig(host=host), has_stored_keys=True)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_keys(ServeConfig(host=host), has_stored_keys=False)
    assert not is_loopback_host("127.evil.example")


def test_a_private_file_holds_every_setting_and_only_its_owner_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig(
        base_models=('a "quoted" name', "ümlaut"), api_keys=(KEY,), data_dir=tmp_path / "d", quota_gb=2.5, port=0
    )
    file = tmp_path / "private.toml"
    write_private_file(file, config)
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("TINKEX_PORT", "99")
    monkeypatch.setenv("TINKEX_API_KEY", f"{KEY}-of-another-service")
    environ = private_environment(file)
    assert resolve_serve(environ) == config
    assert environ["PATH"], "the rest of the environment is passed on"


SHARED = {"database_url": "postgresql://db/tinkex", "node_url": "http://10.0.0.5:8642"}


def test_a_node_needs_postgresql_and_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--node-url needs a PostgreSQL .*TINKEX_DATABASE_URL"):
        check_cluster(resolve_serve({}, node_url="http://10.0.0.5:8642"))
    with pytest.raises(ConfigError, match=r"--no-engine needs a secret .*TINKEX_CLUSTER_SECRET.*--cluster-secret-file"):
        check_cluster(resolve_serve({}, no_engine=True, database_url="postgresql://db/tinkex"))
    file = tmp_path / "secret"
    file.write_text("s" * 32 + "\n")
    config = resolve_serve({}, **SHARED, cluster_secret_file=file)
    assert config.cluster_secret == "s" * 32 and config.is_clustered and "sss" not in repr(config)
    check_cluster(config)
    check_cluster(resolve_serve({"TINKEX_CLUSTER_SECRET": "t" * 32}, **SHARED))
    assert resolve_serve({"TINKEX_NO_ENGINE": "true"}).is_clustered and not resolve_serve({}).is_clustered


def test_the_databases_address_may_be_in_a_file(tmp_path: Path) -> None:
    """Of two addresses an argument wins, as everywhere; a server on another database would be worse than an error."""
    file = tmp_path / "url"
    file.write_text("postgresql://tinkex:hunter2@db/tinkex\n")
    named = {"TINKEX_DATABASE_URL_FILE": str(file)}
    assert resolve_serve(named).database_url == "postgresql://tinkex:hunter2@db/tinkex"
    assert "hunter2" not in repr(resolve_serve(named))
    other = {"TINKEX_DATABASE_URL": "postgresql://other/x"}
    assert resolve_serve({**named, **other}).database_url == "postgresql://other/x"
    assert "@db/" in resolve_serve(other, database_url_file=file).database_url
    assert resolve_serve(named, database_url="postgresql://other/x").database_url == "postgresql://other/x"
    file.write_text("hunter2")
    with pytest.raises(ConfigError, match=r"url must hold a database address") as refused:
        resolve_serve(named)
    assert "hunter2" not in str(refused.value)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"url must hold a database address"):
        resolve_serve(named)
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        resolve_serve({}, database_url_file=tmp_path / "missing")


def test_the_keys_of_a_bucket_may_be_in_amazons_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        "[default]\naws_access_key_id = one\naws_secret_access_key = a%b\n"
        "[other]\naws_access_key_id = two\naws_secret_access_key = hunter2\naws_session_token = three\n"
    )
    named = {"AWS_SHARED_CREDENTIALS_FILE": str(file)}
    region = {"region": "us-east-1"}
    assert bucket_access(named) == {**region, "access_key_id": "one", "secret_access_key": "a%b"}
    assert bucket_access({**named, "AWS_PROFILE": "other"})["session_token"] == "three"
    sent = bucket_variables({**named, "AWS_ENDPOINT_URL": "http://s3"})  # to a machine that has not the file
    assert sent == {"AWS_ENDPOINT_URL": "http://s3", "AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "a%b"}
    from_environment = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    assert bucket_access({**named, **from_environment})["access_key_id"] == "x"
    for content in ("", "[default]\naws_secret_access_key = hunter2\n", "hunter2", "[default\nhunter2"):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"needs a section \[default\]") as refused:
            bucket_access(named)
        assert "hunter2" not in str(refused.value)
    file.unlink()
    with pytest.raises(ConfigError, match=r"AWS_SHARED_CREDENTIALS_FILE is .* cannot be read: No such file"):
        bucket_access(named)


def test_a_cluster_secret_is_long_and_no_flag(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short")
    with pytest.raises(ConfigError, match=r"secret must hold a secret of 32 characters") as refused:
        resolve_serve({}, **SHARED, cluster_secret_file=file)
    assert "short" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve_serve({}, **SHARED, cluster_secret_file=tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"^TINKEX_CLUSTER_SECRET must be a secret of 32 characters") as refused:
        resolve_serve({"TINKEX_CLUSTER_SECRET": "hunter2"})
    assert "hunter2" not in str(refused.value)
    assert [row.name for row in SERVE if not row.has_flag] == ["cluster_secret"]


def test_a_bucket_is_named_without_its_keys() -> None:
    assert resolve_serve({}).blobs is None
    assert resolve_serve({"TINKEX_BLOBS": " s3://training/some/prefix/ "}).blobs == "s3://training/some/prefix"
    assert resolve_serve({}, blobs="s3://training").blobs == "s3://training"
    for wrong in ("training", "gs://training", "s3://", "s3://KEY:SECRET@training", "s3://training?region=x"):
        with pytest.raises(ConfigError, match="s3://BUCKET"):
            resolve_serve({}, blobs=wrong)


def test_access_to_the_bucket_comes_from_the_usual_variables_and_is_no_setting() -> None:
    environ = {
        "AWS_ENDPOINT_URL": "https://s3.example.org",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_SESSION_TOKEN": " ",
    }
    assert bucket_access(environ) == {
        "endpoint": "https://s3.example.org",
        "region": "eu-central-1",
        "access_key_id": "id",
        "secret_access_key": "very-secret",
    }
    more = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9000", "AWS_REGION": "here", **environ}
    assert (bucket_access(more)["endpoint"], bucket_access(more)["region"]) == ("http://127.0.0.1:9000", "here")
    assert "very-secret" not in repr(resolve_serve({**environ, "TINKEX_BLOBS": "s3://b"}))
