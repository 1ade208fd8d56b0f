"""Signs the requests that one server of a cluster hands to another: the tenant, so that its key is checked once.

Who has the secret may act for every tenant. A signature holds for one method and path, and for 30 seconds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from tinkex.server.http.errors import RequestRejected

HEADER = b"x-tinkex-hop"
VALID_S = 30.0
"""How long a signature holds, and how far the clocks of two machines may be apart."""


class Signer:
    def __init__(self, secret: str) -> None:
        # Not the secret itself: another use of it could then not be confused with this one.
        self._key = hashlib.sha256(b"tinkex hop\0" + secret.encode()).digest()

    def sign(self, tenant: str | None, method: str, target: bytes, now: float) -> bytes:
        """Return the value of the header. A link to files has no tenant."""
        named = "-" if tenant is None else base64.urlsafe_b64encode(tenant.encode()).decode()
        text = f"{now:.0f}.{named}"
        return f"{text}.{self._digest(text, method, target)}".encode()

    def verify(self, header: bytes | None, method: str, target: bytes, now: float) -> str | None:
        """Return the tenant. Raises 403 for what no server of this cluster has signed, or not lately."""
        try:
            text, _, digest = (header or b"").decode("ascii").rpartition(".")
            at, _, named = text.partition(".")
            is_ours = hmac.compare_digest(digest, self._digest(text, method, target))
            if is_ours and abs(now - int(at)) <= VALID_S:
                return None if named == "-" else base64.urlsafe_b64decode(named).decode()
        except (ValueError, binascii.Error):
            is_ours = False
        reason = "Its signature is too old: set the clocks of the servers. " if is_ours else ""
        raise RequestRejected(
            403, f"Only the servers of this cluster may send this. {reason}Send requests to /api/v1.", "not_signed"
        )

    def _digest(self, text: str, method: str, target: bytes) -> str:
        content = b"\n".join((text.encode(), method.encode(), target))
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()
