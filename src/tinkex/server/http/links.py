"""Signed links to files. They need no key, name one checkpoint, and expire; the secret never leaves the data folder."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from tinkex.server.http.errors import RequestRejected

LINK_LIFE_S = 15 * 60
SECRET_FILE = "link-secret"


def sign(data_dir: Path, path: str, expires_at: int) -> str:
    """The token for a checkpoint's path."""
    text = f"{expires_at} {path}".encode()
    return f"{_encode(text)}.{_encode(_signature(data_dir, text))}"


def verify(data_dir: Path, token: str, now: float) -> str:
    """The path that a token was made for. Raises 403 if it is not ours or is too old."""
    try:
        text, signature = (_decode(part) for part in token.split("."))
        is_ours = hmac.compare_digest(signature, _signature(data_dir, text))
        expires_at, _, path = text.decode().partition(" ") if is_ours else ("0", "", "")
    except (ValueError, binascii.Error):
        is_ours = False
    if not is_ours:
        raise RequestRejected(403, "This link is not valid. Ask for the checkpoint's address again.", "bad_link")
    if int(expires_at) <= now:
        raise RequestRejected(403, "This link has expired. Ask for the checkpoint's address again.", "expired_link")
    return path


def _signature(data_dir: Path, text: bytes) -> bytes:
    return hmac.new(_secret(data_dir), text, hashlib.sha256).digest()


@functools.lru_cache(maxsize=64)
def _secret(data_dir: Path) -> bytes:
    """Made once per data folder and readable by its owner only. A restart keeps links alive."""
    file = data_dir / SECRET_FILE
    part = file.with_name(f".{SECRET_FILE}.{secrets.token_hex(4)}")
    if not file.exists():
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as fresh:
            fresh.write(secrets.token_hex(32))
        try:
            os.link(part, file)  # fails if another process was first: then theirs counts
        except FileExistsError:
            pass
        except OSError:
            part.replace(file)
        part.unlink(missing_ok=True)
    return bytes.fromhex(file.read_text(encoding="ascii"))


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
