"""Makes the settings of a node and of a front from those of the whole service."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path

from tinkex.errors import ConfigError
from tinkex.settings import ServeConfig

SECRET_FILE = "cluster-secret"


def node_settings(config: ServeConfig, host: str, data_dir: Path, **given: object) -> ServeConfig:
    """Return the settings of a node that the other servers reach at `host`, on a port that is free now."""
    port = free_port(host)
    address = f"[{host}]" if ":" in host else host
    return replace(
        _of_one_server(config),
        host=host,
        port=port,
        node_url=f"{'https' if config.node_cert else 'http'}://{address}:{port}",
        data_dir=data_dir,
        **given,  # type: ignore[arg-type]
    )


def front_settings(config: ServeConfig, host: str, port: int) -> ServeConfig:
    # Its clients reach a front at another address than the one that a node's certificate is for.
    return replace(_of_one_server(config), host=host, port=port, no_engine=True, node_cert=None, node_key=None)


def _of_one_server(config: ServeConfig) -> ServeConfig:
    # The keys and the secret were read from their files already, which may be on another machine.
    return replace(config, engines=1, keys_file=None, cluster_secret_file=None)


def free_port(host: str, preferred: int = 0) -> int:
    """Return a port of this machine that nothing listens on now: the preferred one if it is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (preferred, 0):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise ConfigError(f"Cannot listen on {host}: it is not an address of this machine, or no port is free.")


def own_secret(data_dir: Path) -> str:
    """Return the secret of the cluster in this data folder, made on first use. Only the owner may read its file."""
    file = data_dir / SECRET_FILE
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Complete before it has its name: another server may start at the same moment, and would read half of it.
        draft = file.with_name(f"{SECRET_FILE}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(32) + "\n")
        try:
            os.link(draft, file)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"The secret of the cluster cannot be kept in {data_dir} ({error.strerror}). Set TINKEX_CLUSTER_SECRET."
        ) from None
