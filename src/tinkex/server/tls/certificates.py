"""Makes the certificates of a cluster: an authority of its own, and one certificate with its key for each node.

Nothing here is used by a server: it reads PEM files, whoever made them.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tinkex.clock import REAL
from tinkex.errors import ConfigError, ValidationError

CA_CERT, CA_KEY = "ca.crt", "ca.key"
CA_DAYS = 3650
BEFORE = dt.timedelta(hours=1)
"""How far back a certificate is valid from: the clocks of the machines are not equal."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The CA of a cluster, with its key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """Where the certificate of a node is, and how long it is valid."""

    names: tuple[str, ...]
    cert: Path
    key: Path
    until: dt.datetime


def open_authority(folder: Path) -> Authority:
    """Read the CA in a folder, or make it there. Raises ConfigError if half of it is missing or cannot be read."""
    cert_file, key_file = folder / CA_CERT, folder / CA_KEY
    if not cert_file.exists() and not key_file.exists():
        return _new_authority(folder)
    try:
        cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} has one of {CA_CERT} and {CA_KEY}, and not the other. Both are needed to make certificates; for "
            "another CA name an empty folder."
        ) from error
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "they must be PEM files, and the key without a password"
        raise ConfigError(f"{cert_file} and {key_file} cannot be read: {reason}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise ConfigError(f"{key_file} is not the key of {cert_file}.")
    if cert.not_valid_after_utc <= _now():
        raise ConfigError(f"The CA {cert_file} has expired. Make another one in an empty folder.")
    return Authority(cert=cert, key=key, is_new=False)


def issue(folder: Path, authority: Authority, names: tuple[str, ...], days: int) -> NodeFiles:
    """Write the certificate of a node that is reached by these names, and a new key. Replaces those that are there."""
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(_now() + dt.timedelta(days=days), authority.cert.not_valid_after_utc)
    built = (
        _builder(f"tinkex node {names[0]}"[:64], authority.cert.subject, key.public_key(), until)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_issued_by(authority.cert), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    stem = stem_of(names)
    files = NodeFiles(names=names, cert=folder / f"{stem}.crt", key=folder / f"{stem}.key", until=until)
    _write(files.key, _pem(key), 0o600)
    _write(files.cert, built.public_bytes(serialization.Encoding.PEM), 0o644)
    return files


def stem_of(names: tuple[str, ...]) -> str:
    """Return the name of a node's files, without the ending."""
    return names[0].replace("*", "any").replace(":", "-")


def checked_names(text: str) -> tuple[str, ...]:
    """Return the names of one node, which are separated by commas. Raises ValidationError for what is no host name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if not _HOST.fullmatch(name) or len(name) > 253 or name.rstrip(".") in ("ca", "CA"):
                raise ValidationError(
                    f"{name!r} is no host name or address. Name the host of a --node-url, without https:// and port."
                ) from None
    if not names:
        raise ValidationError("--name is empty. Name the host of a --node-url, for example node1.internal.")
    return names


def is_from(cert_file: Path, authority: Authority) -> bool:
    """Whether a certificate is from this CA, so that it may be replaced."""
    try:
        x509.load_pem_x509_certificate(cert_file.read_bytes()).verify_directly_issued_by(authority.cert)
    except (OSError, ValueError, TypeError, InvalidSignature):
        return False
    return True


def _new_authority(folder: Path) -> Authority:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    # The name is unique: OpenSSL finds an issuer by it, and another cluster's CA is not to be taken for this one.
    name = f"tinkex cluster {uuid4().hex[:8]}"
    cert = (
        _builder(name, None, key.public_key(), _now() + dt.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / CA_KEY, _pem(key), 0o600)
    _write(folder / CA_CERT, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return Authority(cert=cert, key=key, is_new=True)


def _builder(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePublicKey, until: dt.datetime
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - BEFORE)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, is_authority: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issued_by(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    known = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.rstrip("."))


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(file: Path, content: bytes, mode: int) -> None:
    """Write a file at once and with its mode from the first byte on."""
    draft = file.with_name(f".{file.name}.{uuid4().hex[:8]}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
    os.replace(draft, file)


def _now() -> dt.datetime:
    return dt.datetime.fromtimestamp(REAL.wall(), dt.UTC)
