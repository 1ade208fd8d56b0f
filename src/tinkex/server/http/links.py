"""Signs links to files. A link needs no API key, covers one checkpoint and expires; the secret stays on the server."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from tinkex.server.http.errors import RequestRejected
from tinkex.store.disk import sync
from tinkex.store.store import Store

logger = logging.getLogger("tinkex.server")

LINK_LIFE_S = 15 * 60
SECRET_FILE = "link-secret"
SECRET_BYTES = 32
SECRET_NAME = "links"


class SignedLink(NamedTuple):
    """What a token was made for: a checkpoint's path, and the tenant that may read it (as a hash)."""

    reader: str
    path: str


def sign(data_dir: Path, reader: str, path: str, expires_at: int) -> str:
    """Return the token of a link for a checkpoint's path, given to the tenant `reader`."""
    text = f"{expires_at} {hash_reader(reader)} {path}".encode()
    return f"{_encode(text)}.{_encode(_signature(data_dir, text))}"


def verify(data_dir: Path, token: str, now: float) -> SignedLink:
    """Return what a token was made for. Raises 403 if it was not signed here or has expired."""
    try:
        text, signature = (_decode(part) for part in token.split("."))
        is_ours = hmac.compare_digest(signature, _signature(data_dir, text))
        expires_at, reader, path = text.decode().split(" ", 2) if is_ours else ("0", "", "")
    except (ValueError, binascii.Error):
        is_ours = False
    if not is_ours:
        raise RequestRejected(403, "This link is not valid. Request the checkpoint's URL again.", "bad_link")
    if int(expires_at) <= now:
        raise RequestRejected(403, "This link has expired. Request the checkpoint's URL again.", "expired_link")
    return SignedLink(reader, path)


def hash_reader(tenant: str) -> str:
    """Return the form in which a link names a tenant: a link may be passed on, and the name is nobody's business."""
    return hashlib.sha256(tenant.encode("utf-8", "replace")).hexdigest()[:16]


def prepare_secret(data_dir: Path) -> None:
    """Make the secret of a data folder unless there is one: at the start, when the disk has room, not at first use."""
    _secret(data_dir)


def share_secret(data_dir: Path, store: Store) -> None:
    """Use the secret that the database has, so that every server on it accepts the links of the others.

    The first server puts its own there: links that it sent before stay valid. The file is this machine's copy.
    """
    own = _secret(data_dir).hex()
    shared = store.shared_secret(SECRET_NAME, own)
    if shared != own:
        _write_secret(data_dir / SECRET_FILE, is_replaced=True, secret=shared)
        _secret.cache_clear()


def _signature(data_dir: Path, text: bytes) -> bytes:
    return hmac.new(_secret(data_dir), text, hashlib.sha256).digest()


@functools.lru_cache(maxsize=64)
def _secret(data_dir: Path) -> bytes:
    """Return the secret of a data folder. It is created once, readable by its owner only; links survive a restart.

    A secret that is not whole is replaced: anybody could sign with an empty one. That only ends links, which live for
    minutes.
    """
    file = data_dir / SECRET_FILE
    if (secret := _read_secret(file)) is not None:
        return secret
    is_replaced = file.exists()
    if is_replaced:
        logger.warning("%s is damaged; a new secret is made, and links that were sent before are not valid", file)
    _write_secret(file, is_replaced=is_replaced)
    secret = _read_secret(file)
    if secret is None:
        raise OSError(f"{file} cannot be written: it is damaged again.")
    return secret


def _read_secret(file: Path) -> bytes | None:
    """Return the secret, or None if the file is missing or does not hold exactly 32 bytes."""
    try:
        secret = bytes.fromhex(file.read_bytes()[: 4 * SECRET_BYTES].decode("ascii"))
    except (FileNotFoundError, ValueError):
        return None
    return secret if len(secret) == SECRET_BYTES else None


def _write_secret(file: Path, *, is_replaced: bool, secret: str = "") -> None:
    """Write a secret, a new one by default, on the disk before its name is there.

    Without `is_replaced`, one that is there stays.
    """
    part = file.with_name(f".{SECRET_FILE}.{secrets.token_hex(4)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
            out.write(secret or secrets.token_hex(SECRET_BYTES))
            out.flush()
            os.fsync(out.fileno())
        if is_replaced:
            part.replace(file)
        else:
            try:
                os.link(part, file)  # fails if another process was first: then its secret counts
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                part.replace(file)
        sync(file.parent)
    finally:
        part.unlink(missing_ok=True)


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
