"""TLS between the servers of a cluster: a node's own certificate, and which certificates of other nodes it accepts.

With `--cluster-ca` only that authority counts, not those that the machine trusts: the name of a node is no public
name, and whoever controls one public authority should not be able to read the requests of all tenants.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

from tinkex.errors import ConfigError
from tinkex.settings import ServeConfig

HANDSHAKE_S = 10.0
"""How long a node lets a handshake take. A connection counts against `--max-connections` after it only."""
_MOST_ROUNDS = 10
_REASONS = {
    9: "its certificate is not valid yet: compare the clocks",
    10: "its certificate has expired",
    62: "its certificate is for another name",
    64: "its certificate is for another address",
}
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, …_HAS_EXPIRED, …_HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH."""


def client_context(config: ServeConfig) -> ssl.SSLContext:
    """Return what the hop verifies nodes with: the cluster's CA if one is set, else what the machine trusts."""
    if config.cluster_ca is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # host names are checked, and no other authority is loaded
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cafile=config.cluster_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The CA of the cluster cannot be read: {_file_reason(config.cluster_ca, error)}.") from None
    return context


def server_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Return what a node serves with, or None if it has no certificate of its own.

    Raises ConfigError for a certificate that the other nodes would refuse: without that, this node would join and get
    runs, and nobody could reach them.
    """
    if config.node_cert is None or config.node_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.node_cert, config.node_key, password="")  # an encrypted key must not ask
    except (OSError, ssl.SSLError) as error:
        files = f"{config.node_cert} with the key {config.node_key}"
        raise ConfigError(f"The node's certificate {files} cannot be used: {_pair_reason(error)}.") from None
    host = urlsplit(config.node_url or "").hostname or ""
    if (reason := _own_reason(context, client_context(config), host)) is not None:
        raise ConfigError(
            f"The other nodes would refuse this node's certificate {config.node_cert}: {reason}. Make one with "
            f"`tinkex cluster cert FOLDER --name {host}`, from the CA that all servers name with --cluster-ca."
        )
    return context


def refusal_reason(error: ssl.SSLError) -> str:
    """Return why a handshake with another node failed, for a sentence that begins with that node."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return "it does not speak TLS on that port"
        return f"the TLS handshake failed ({error.reason or type(error).__name__})"
    other = f"its certificate is not from the cluster's CA ({error.verify_message})"
    return _REASONS.get(error.verify_code, other)


def _own_reason(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str | None:
    """Return why another node would refuse this certificate, or None: a handshake with itself, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_MOST_ROUNDS):
        for side in sides.copy():
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return refusal_reason(error)
        if not sides:
            return None
    return "the handshake does not end"


def _file_reason(file: Path, error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{file} holds no certificate in PEM"
    return f"{file}: {error.strerror}"


def _pair_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is of another certificate"
        return "both must be PEM files, and the key without a password"
    return error.strerror or type(error).__name__
