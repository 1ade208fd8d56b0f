"""Resolves the settings of a service (`ServeConfig`) from arguments, environment, file and defaults, in that order.

Flag `--x-y`, variable `TINKEX_X_Y` and `x_y` in the table `[serve]` of `tinkex.toml` are one setting. All of them are
in `SERVE`, from which the command's flags and `docs/settings.md` are made. A wrong value is rejected with its source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tinkex.errors import ConfigError
from tinkex.settings.client import is_loopback_host, normalise_url
from tinkex.settings.folders import cache_dir, data_dir
from tinkex.settings.limits import LIMITS
from tinkex.settings.setting import (
    Setting,
    check_names,
    count,
    gather,
    names,
    number,
    one_of,
    optional,
    text,
    yes_or_no,
)

KEY_PREFIX = "tml-"
"""How a key begins: official clients from 0.36 reject any other."""
MIB = 1024 * 1024
SECRET_CHARACTERS = 32
"""The least length of the secret of a cluster: who has it may act for every tenant."""
BUCKET_VARIABLES = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN",),
}
"""What obstore calls a setting of the bucket → its variables, the first that is set."""
CREDENTIALS_FILE = "AWS_SHARED_CREDENTIALS_FILE"
"""The variable that names a file with the keys, for example a secret that is mounted. obstore does not read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Everything a service needs to know, settled once and passed down. What each is for: `SERVE`."""

    base_models: tuple[str, ...] = ("smollm2-135m",)
    load_models: Literal["start", "first-use"] = "start"
    host: str = "127.0.0.1"
    port: int = 8642
    public_url: str | None = None
    data_dir: Path = field(default_factory=lambda: data_dir(os.environ))
    cache_dir: Path = field(default_factory=lambda: cache_dir(os.environ))
    database_url: str = field(default="", repr=False)  # may hold a password
    database_url_file: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    keys_file: Path | None = None
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    decode_weights: Literal["float32", "bfloat16", "int8"] = "float32"
    threads: int = 0
    sampler: Literal["own", "vllm"] = "own"
    vllm_python: Path | None = None
    vllm_max_rank: int = 64
    vllm_slots: int = 8
    vllm_cache_gb: float = 2.0
    proofs: bool = False
    devices_per_engine: int = 1
    engines: int = 1
    blobs: str | None = None
    blobs_cache_gb: float = 20.0
    durability: Literal["normal", "full"] = "normal"
    snapshot_every_s: float = 10.0
    max_batch_tokens: int = 2048
    max_rows: int = 64
    max_cache_tokens: int = 131_072
    poll_hold_s: float = 25.0
    gap_s: float = 10.0
    idle_session_s: float = 600.0
    result_ttl_s: float = 86_400.0
    drain_s: float = 30.0
    node_url: str | None = None
    no_engine: bool = False
    samples_only: bool = False
    cluster_secret: str | None = field(default=None, repr=False)
    cluster_secret_file: Path | None = None
    node_lease_s: float = 15.0
    node_cert: Path | None = None
    node_key: Path | None = None
    cluster_ca: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Limits: `settings/limits.py` says what each bounds.
    max_connections: int = 8192
    max_connections_per_address: int = 4096
    head_timeout_s: float = 10.0
    max_requests_per_s: float = 2000.0
    max_body_bytes: int = 256 * MIB
    max_tenant_body_bytes: int = 512 * MIB
    max_all_body_bytes: int = 1024 * MIB
    max_decompressed_per_s: int = 32 * MIB
    min_body_rate: int = 16_384
    max_targets: int = 2**24
    max_sample_values: int = 2**23
    max_stops: int = 256
    max_text_characters: int = 4096
    max_queued_samples: int = 4096
    max_tenant_response_bytes: int = 512 * MIB
    max_all_response_bytes: int = 2048 * MIB
    max_tenant_sample_bytes: int = 256 * MIB
    max_all_sample_bytes: int = 1024 * MIB
    max_queued_operations: int = 10_000
    max_tenant_queued_bytes: int = 1024 * MIB
    max_all_queued_bytes: int = 4096 * MIB
    max_tenant_result_bytes: int = 8192 * MIB
    max_unread_bytes: int = 8 * MIB
    max_sessions: int = 4096
    max_models: int = 4096
    max_run_metric_bytes: int = 256 * MIB
    max_run_sample_bytes: int = 64 * MIB
    max_samplers: int = 10_000
    max_uploads: int = 4
    adapter_memory_mb: int | None = None
    base_model_memory_mb: int | None = None
    quota_gb: float | None = None
    tenant_quota_gb: float | None = None

    @property
    def is_clustered(self) -> bool:
        """Whether the server shares its store with others."""
        return self.node_url is not None or self.no_engine

    def __post_init__(self) -> None:
        for setting in SERVE:
            # A default is right as it is; what a caller passed is brought into shape once, here.
            object.__setattr__(self, setting.name, setting.value(getattr(self, setting.name), setting.name))
        if not self.database_url:
            object.__setattr__(self, "database_url", f"sqlite:///{self.data_dir / 'tinkex.db'}")


def resolve_serve(environ: Mapping[str, str] | None = None, **arguments: Any) -> ServeConfig:
    """Settle a service's configuration. Arguments that are None count as not given; keys of a file are read."""
    environ = os.environ if environ is None else environ
    check_names(arguments, [setting.name for setting in SERVE])
    merged: dict[str, Any] = {"data_dir": data_dir(environ), "cache_dir": cache_dir(environ)}
    found = gather(SERVE, "serve", environ, arguments)
    merged |= {name: sourced.value for name, sourced in found.items()}
    if merged.get("keys_file"):
        merged["api_keys"] = (*merged.get("api_keys", ()), *_keys_in(merged["keys_file"]))
    if merged.get("cluster_secret_file") and not merged.get("cluster_secret"):
        merged["cluster_secret"] = _secret_in(merged["cluster_secret_file"])
    if (file := found.get("database_url_file")) is not None:
        address = found.get("database_url")
        if address is None or (file.source == "argument" and address.source != "argument"):
            merged["database_url"] = _database_in(file.value)
    return ServeConfig(**merged)


def bucket_access(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return how to reach the bucket, in the words of obstore: the variables that every client of S3 reads.

    Not in `ServeConfig`, so that no secret is written or shown with the settings. What is absent, obstore looks for
    itself: the role of a machine, or of a pod.
    """
    environ = os.environ if environ is None else environ
    access = {}
    for option, variables in BUCKET_VARIABLES.items():
        value = next((environ[name].strip() for name in variables if environ.get(name, "").strip()), None)
        if value is not None:
            access[option] = value
    if "access_key_id" not in access and (file := environ.get(CREDENTIALS_FILE, "").strip()):
        access |= _credentials_in(Path(file).expanduser(), environ.get("AWS_PROFILE", "").strip() or "default")
    # S3-compatible services ignore the region, and obstore requires one.
    return {"region": "us-east-1", **access}


def bucket_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that `bucket_access` reads, for a server that is started on another machine."""
    environ = os.environ if environ is None else environ
    known = (name for names in BUCKET_VARIABLES.values() for name in names)
    found = {name: environ[name] for name in known if environ.get(name, "").strip()}
    if environ.get(CREDENTIALS_FILE, "").strip():  # a file of this machine
        keys = ("access_key_id", "secret_access_key", "session_token")
        found |= {BUCKET_VARIABLES[key][0]: value for key, value in bucket_access(environ).items() if key in keys}
    return found


def check_cluster(config: ServeConfig) -> None:
    """Raise unless a server that shares its store with others has what that needs, or is alone and set up so."""
    if config.samples_only and config.node_url is None:
        raise ConfigError("--samples-only is for a node beside others that train: set --node-url too, or leave it out.")
    if not config.is_clustered:
        if config.node_cert or config.node_key or config.cluster_ca:
            raise ConfigError(
                "--node-cert, --node-key and --cluster-ca are for servers that share a database (--node-url, "
                "--no-engine). This one would serve without TLS: put a proxy in front of it and set --public-url."
            )
        return
    flag = "--no-engine" if config.no_engine else "--node-url"
    check_postgres(config, flag)
    if config.cluster_secret is None:
        raise ConfigError(
            f"{flag} needs a secret that all servers of the cluster share: set TINKEX_CLUSTER_SECRET, or name a file "
            f"with --cluster-secret-file. {SECRET_CHARACTERS} characters or more; `openssl rand -hex 32` makes one."
        )
    if (config.node_cert is None) != (config.node_key is None):
        given, missing = ("--node-cert", "--node-key") if config.node_cert else ("--node-key", "--node-cert")
        raise ConfigError(f"{given} needs {missing} too: `tinkex cluster cert` writes both files.")
    if config.node_cert is not None and config.node_url is None:
        raise ConfigError(
            "--node-cert is for nodes, which other servers reach at --node-url. A front is reached by clients: put a "
            "proxy before it, with a certificate that they trust."
        )
    needs_tls = "--node-cert" if config.node_cert else "--cluster-ca" if config.cluster_ca else ""
    if needs_tls and (config.node_url or "").startswith("http://"):
        raise ConfigError(f"With {needs_tls} the --node-url must begin with https://, not {config.node_url!r}.")


def check_postgres(config: ServeConfig, flag: str) -> None:
    """Raise unless the database is one that several servers can share. `flag` is what asks for several."""
    if not config.database_url.startswith(("postgres:", "postgresql:", "postgresql+")):
        raise ConfigError(
            f"{flag} needs a PostgreSQL that all servers of the cluster share. Set TINKEX_DATABASE_URL to "
            f"postgresql://USER:PASSWORD@HOST/NAME, or leave out {flag} to serve alone."
        )


def check_keys(config: ServeConfig, *, has_stored_keys: bool) -> None:
    """Raise if the service would listen beyond this machine without a key: anyone who reaches the port could use it."""
    if config.api_keys or has_stored_keys or is_loopback_host(config.host):
        return
    raise ConfigError(
        f"Host {config.host} can be reached from other machines, and no key is set. Make one with "
        "`tinkex key create NAME`, or pass --api-key or --keys-file; without keys, listen on 127.0.0.1 only."
    )


def write_private_file(file: Path, config: ServeConfig) -> None:
    """Write all settings as a `tinkex.toml` for a process that we start. Only its owner may read it: it holds keys."""
    import json

    rows = ["[serve]"]
    for setting in SERVE:
        value = getattr(config, setting.name)
        if value is not None and value != ():
            plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
            rows.append(f"{setting.key} = {json.dumps(plain, ensure_ascii=False)}")  # such JSON is TOML too
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write("\n".join(rows) + "\n")


def private_environment(file: Path) -> dict[str, str]:
    """This process's environment for a service that takes its settings from `file` and from nowhere else."""
    variables = {setting.variable for setting in SERVE}
    inherited = {name: value for name, value in os.environ.items() if name not in variables}
    return {**inherited, "TINKEX_CONFIG": str(file)}


def _keys_in(path: Path) -> tuple[str, ...]:
    """One key per line; empty lines and lines that begin with # do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"The keys file {path} cannot be read: {reason}.") from None
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(f"The keys file {path} holds no key. Write one per line; `tinkex key create` makes some.")
    for line_number, key in keys.items():
        try:
            _keys(key)
        except ValueError as error:
            raise ConfigError(f"The keys file {path}, line {line_number}: must be {error}.") from None
    return tuple(keys.values())


# -- how values are read: text from a flag or a variable, or a plain value from the file or a caller -----------------


def _keys(given: Any) -> tuple[str, ...]:
    keys = names(given) if given else ()
    for key in keys:
        is_whole = key.isascii() and key.isprintable() and " " not in key and len(key) >= 8
        if not (key.startswith(KEY_PREFIX) and is_whole):
            raise ValueError(
                f"keys that start with {KEY_PREFIX} (official clients send no others), 8 characters or more, "
                "without spaces; `tinkex key create` makes one"
            )
    return keys


def _secret_in(path: Path) -> str:
    try:
        return _secret(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"The cluster's secret file {path} cannot be read: {reason}.") from None
    except ValueError as error:
        raise ConfigError(f"The cluster's secret file {path} must hold {error}.") from None


def _database_in(path: Path) -> str:
    try:
        return _database(path.read_text(encoding="utf-8").strip() or "-")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"The file with the database's address, {path}, cannot be read: {reason}.") from None
    except ValueError as error:
        raise ConfigError(f"The file {path} must hold {error}.") from None


def _credentials_in(path: Path, profile: str) -> dict[str, str]:
    """Read the keys of a bucket from a file as Amazon's tools write it."""
    from configparser import ConfigParser, Error

    names = {"access_key_id": "aws_access_key_id", "secret_access_key": "aws_secret_access_key"}
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
        keys = {option: parser[profile][name] for option, name in names.items()}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{CREDENTIALS_FILE} is {path}, which cannot be read: {reason}.") from None
    except (Error, KeyError):  # a parser's message shows the line
        raise ConfigError(
            f"{CREDENTIALS_FILE} is {path}, which needs a section [{profile}] with aws_access_key_id and "
            "aws_secret_access_key."
        ) from None
    token = parser[profile].get("aws_session_token")
    return keys if token is None else {**keys, "session_token": token}


def _secret(given: Any) -> str:
    secret = given.strip() if isinstance(given, str) else ""
    if len(secret) < SECRET_CHARACTERS:
        raise ValueError(f"a secret of {SECRET_CHARACTERS} characters or more, for example of `openssl rand -hex 32`")
    return secret


def _host(given: Any) -> str:
    host = text(given)
    if "/" in host or " " in host:
        raise ValueError("a host name or an address, for example 127.0.0.1")
    return host.strip("[]")


def _url(given: Any) -> str:
    try:
        return normalise_url(text(given))
    except ConfigError:
        raise ValueError("an http(s) address, for example https://tinkex.example.org/api") from None


def _database(given: Any) -> str:
    if given and not (isinstance(given, str) and "://" in given):
        raise ValueError("a database address: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME")
    return str(given).strip() if given else ""


def _path(given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)) or not str(given).strip():
        raise ValueError("a path")
    return Path(given).expanduser().absolute()


def _device(given: Any) -> str:
    device = text(given).lower()
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (number and not (kind == "cuda" and number.isdigit())):
        raise ValueError("auto, cpu, cuda, cuda:N or mps")
    return device


def _bucket(given: Any) -> str:
    parts = urlsplit(text(given))
    if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("s3://BUCKET or s3://BUCKET/PREFIX, without keys: those come from AWS_ACCESS_KEY_ID and so on")
    return f"s3://{parts.netloc}/{parts.path.strip('/')}".rstrip("/")


_seconds = number("seconds")

SERVE = (
    Setting("base_models", names, "A model to serve: a hub name, a folder, or a built-in (`smollm2-135m`, "
            "`tinkex/tiny`). Clients can use what is offered, and nothing else.", "NAME", "base_model"),
    Setting("load_models", one_of("start", "first-use"), "When the engine loads the models that are named: at its "
            "`start`, as far as there is memory, or at the `first-use` of each.", "WHEN"),
    Setting("host", _host, "The address to listen on. Beyond this machine (0.0.0.0) keys are required.", "HOST"),
    Setting("port", count(0, 65535), "The port to listen on; 0 takes any that is free.", "PORT"),
    Setting("public_url", optional(_url), "How clients reach the service if a proxy stands in front, path included.",
            "URL"),
    Setting("data_dir", _path, "Where runs, checkpoints and the journal are kept. One service per folder.", "FOLDER"),
    Setting("cache_dir", _path, "Where models are kept once fetched.", "FOLDER"),
    Setting(
        "database_url", _database,
        "`sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`. Set it in the environment: others can read "
        "command lines.", "URL", is_secret=True,
    ),
    Setting("database_url_file", optional(_path), "A file with the database's address, for example a mounted secret.",
            "FILE"),
    Setting(
        "api_keys", _keys,
        "A key that clients must send, each a tenant of its own. Discouraged as a flag (others read command lines): "
        "use `tinkex key create` or a keys file.", "KEY", "api_key", True,
    ),
    Setting("keys_file", optional(_path), "A file with one key per line; lines that begin with # do not count.",
            "FILE"),
    Setting("device", _device, "Where to compute: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.", "DEVICE"),
    Setting(
        "dtype", one_of("float32", "bfloat16", "float16"),
        "The base model's numbers: `float32`, `bfloat16` or `float16`. Adapters are always float32.", "DTYPE",
    ),
    Setting(
        "decode_weights", one_of("float32", "bfloat16", "int8"),
        "The numbers that samples are drawn with on a CPU: fewer bits are faster and not exact; at the start the "
        "service says by how much. Training and prompts keep the model's own.", "KIND",
    ),
    Setting(
        "threads", count(0, 1024),
        "Threads for the maths; 0: one per core. With several devices per engine: of each process.", "N",
    ),
    Setting(
        "devices_per_engine", count(1, 64),
        "Devices over which the engine divides the weights of each base model (FSDP2), with a process for each: GPUs, "
        "or on a CPU processes. For models that one device has no room for; with one it is faster.", "N",
    ),
    Setting("sampler", one_of("own", "vllm"), "What samples: `own`, the engine that trains, or `vllm` beside it, a "
            "process for each base model. Needs `tinkex[vllm]`.", "KIND"),
    Setting("vllm_python", optional(_path), "The Python that has vLLM, if that is not the one that runs the service.",
            "FILE"),
    Setting("vllm_max_rank", count(1, 512), "The largest rank of an adapter that vLLM samples. Its memory grows with "
            "it.", "N"),
    Setting("vllm_slots", count(1, 1024), "Adapters that vLLM samples at the same time; requests of others wait.",
            "N"),
    Setting("vllm_cache_gb", number("gigabytes", 0.1), "Gigabytes for the keys and values of the sequences that vLLM "
            "samples.", "GB"),
    Setting("proofs", yes_or_no, "Save with all weights what a vLLM sampler compares before it serves them. On with "
            "`--sampler vllm`; for nodes that train while others sample.", "BOOL", is_switch=True),
    Setting("engines", count(1, 64), "Engines on this machine, each with a GPU of its own or an equal share of the "
            "cores, behind one address. More than one needs PostgreSQL.", "N"),
    Setting(
        "blobs", optional(_bucket),
        "`s3://BUCKET/PREFIX`: where checkpoints, snapshots and large payloads are kept, if not in the data folder. "
        "Endpoint and credentials come from the usual variables (`AWS_ENDPOINT_URL`, `AWS_REGION`, "
        "`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`; or `AWS_SHARED_CREDENTIALS_FILE` for the keys).", "URL",
    ),
    Setting("blobs_cache_gb", number("gigabytes", 0.0), "Gigabytes of the bucket's files that are kept in the data "
            "folder too, beyond those in use. Only with `--blobs`.", "GB"),
    Setting(
        "durability", one_of("normal", "full"),
        "`normal`: what was accepted survives the death of any process. `full`: also a power cut, at some speed.",
        "HOW",
    ),
    Setting(
        "snapshot_every_s", _seconds,
        "Seconds of work on a run after which its state is saved, so that a restart repeats no more than that.", "S",
    ),
    Setting("max_batch_tokens", count(16), "Tokens in one pass; more work is cut up. Bounds memory.", "N"),
    Setting("max_rows", count(1), "Sequences that are sampled at the same time.", "N"),
    Setting("max_cache_tokens", count(16), "Tokens that the sampler keeps at hand for all sequences together.", "N"),
    Setting("poll_hold_s", number("seconds", 0, 25), "Seconds that a poll is held open. Clients give up after 45.",
            "S"),
    Setting("gap_s", _seconds, "Seconds that a run waits for a missing number before it goes on without.", "S"),
    Setting("idle_session_s", _seconds, "Seconds without a heartbeat after which a run leaves memory (not the disk).",
            "S"),
    Setting("result_ttl_s", _seconds, "Seconds that results of training operations are kept.", "S"),
    Setting("drain_s", _seconds, "Seconds that running work gets to finish when the service is stopped.", "S"),
    Setting("node_url", optional(_url), "Share the store with other servers, and be reached by them at this address. "
            "Needs PostgreSQL and a cluster secret.", "URL"),
    Setting("no_engine", yes_or_no, "Compute nothing: check keys and limits, and hand requests to the nodes of the "
            "cluster.", "BOOL", is_switch=True),
    Setting("samples_only", yes_or_no, "Take no training runs: samples go to such nodes while there are some. For a "
            "node of a cluster; others that train need `--proofs` if it has `--sampler vllm`.", "BOOL", is_switch=True),
    Setting(
        "cluster_secret", optional(_secret),
        "The secret that the servers of a cluster share, 32 characters or more. It has no flag: use the environment, "
        "or a file.", "SECRET", is_secret=True, has_flag=False,
    ),
    Setting("cluster_secret_file", optional(_path), "A file with the secret that the servers of a cluster share.",
            "FILE"),
    Setting("node_lease_s", number("seconds", 1), "Seconds without a sign of life after which other nodes take over "
            "a node's runs. The same for all nodes.", "S"),
    Setting("node_cert", optional(_path), "Serve with TLS, with this certificate (PEM). `--node-url` begins with "
            "https:// then. `tinkex cluster cert` makes one.", "FILE"),
    Setting("node_key", optional(_path), "The private key of `--node-cert`.", "FILE"),
    Setting("cluster_ca", optional(_path), "Hand requests only to nodes whose certificate is from this authority "
            "(PEM), and to none without TLS. For nodes and fronts.", "FILE"),
    Setting("log_level", one_of("debug", "info", "warning", "error"), "`debug`, `info`, `warning` or `error`.",
            "LEVEL"),
    *(limit.setting for limit in LIMITS),
)  # fmt: skip
"""Every setting of a service, in the order of `ServeConfig`."""
