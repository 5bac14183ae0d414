"""Who may talk to the page.

In:       the headers of a request.
Out:      None, or the reason why it is refused; the headers of every response.
Promise:  a page of another site reaches nothing, also on loopback: the host must be ours, the
          origin must be ours, and a secret of this server must be in the address or the cookie.
          A browser that shows our page asks nobody else for anything.
Not here: what a request does (`server.py`).
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

# Nothing but our own files; no inline code, no frame, no form.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class PageGuard:
    """The address and the secret of one server."""

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The Host headers that are ours."""
        names = [f"[{self.host}]" if ":" in self.host else self.host]
        if is_loopback(self.host):
            names += ["127.0.0.1", "localhost", "[::1]"]
        return tuple(f"{name}:{self.port}" for name in names)

    @property
    def cookie(self) -> str:
        """The cookie's name; ports share cookies, so each has its own."""
        return f"fedlm_watch_{self.port}"

    @property
    def address(self) -> str:
        """The address to open."""
        return f"http://{self.hosts[0]}/?token={self.token}"

    def refuses(
        self,
        method: str,
        headers: Mapping[str, str],
        cookies: Mapping[str, str],
        token: str | None = None,
    ) -> str | None:
        """Return why a request is refused; None if it is let in."""
        if headers.get("host", "") not in self.hosts:
            return "This server has another name."
        origin = headers.get("origin")
        ours = {f"http://{host}" for host in self.hosts}
        if origin is not None and origin not in ours:
            return "This server answers no other site."
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "This server answers no other site."
        if method not in ("GET", "HEAD") and origin is None:
            return "A change needs the header Origin."
        given = cookies.get(self.cookie, "") if token is None else token
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return "Open the address that fedlm watch printed, with its token."
        return None
