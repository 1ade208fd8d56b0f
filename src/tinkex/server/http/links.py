"""Signs links to files. A link needs no API key, covers one checkpoint and expires; the secret stays on the server."""

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
    """Return the token of a link for a checkpoint's path."""
    text = f"{expires_at} {path}".encode()
    return f"{_encode(text)}.{_encode(_signature(data_dir, text))}"


def verify(data_dir: Path, token: str, now: float) -> str:
    """Return the path that a token was made for. Raises 403 if it was not signed here or has expired."""
    try:
        text, signature = (_decode(part) for part in token.split("."))
        is_ours = hmac.compare_digest(signature, _signature(data_dir, text))
        expires_at, _, path = text.decode().partition(" ") if is_ours else ("0", "", "")
    except (ValueError, binascii.Error):
        is_ours = False
    if not is_ours:
        raise RequestRejected(403, "This link is not valid. Request the checkpoint's URL again.", "bad_link")
    if int(expires_at) <= now:
        raise RequestRejected(403, "This link has expired. Request the checkpoint's URL again.", "expired_link")
    return path


def _signature(data_dir: Path, text: bytes) -> bytes:
    return hmac.new(_secret(data_dir), text, hashlib.sha256).digest()


@functools.lru_cache(maxsize=64)
def _secret(data_dir: Path) -> bytes:
    """Return the secret of a data folder. It is created once, readable by its owner only; links survive a restart."""
    file = data_dir / SECRET_FILE
    part = file.with_name(f".{SECRET_FILE}.{secrets.token_hex(4)}")
    if not file.exists():
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
            out.write(secrets.token_hex(32))
        try:
            os.link(part, file)  # fails if another process was first: then its secret counts
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
