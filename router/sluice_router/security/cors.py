"""Which web pages may call the router from a browser: cross-origin resource sharing (the Fetch standard, section 3.3).

Browsers send API keys in a header and no cookies, so that credentials need not be allowed.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

ANY = "*"
METHODS = "GET, HEAD, POST"
# Headers of answers that pages may read, besides those that every page may.
EXPOSED = "x-request-id, x-sluice-reason, x-sluice-ignored, x-sluice-resume, Retry-After"
# How long a browser need not ask again, in seconds; the most that one of them honours.
MAX_AGE_S = 7200


class CorsPolicy:
    """Answers what browsers ask.

    Args:
        origins: Origins of pages, as browsers send them; ``*`` for all; empty: none.
    """

    def __init__(self, origins: frozenset[str] = frozenset()) -> None:
        self._origins = origins

    def find_headers(self, origin: str | None) -> dict[str, str]:
        """Finds the headers of an answer to a page.

        Args:
            origin: The request's header of that name; None: it is no browser's.
        """
        if not self._origins:
            return {}
        if ANY in self._origins:
            return {"Access-Control-Allow-Origin": ANY, "Access-Control-Expose-Headers": EXPOSED}
        if origin is None or origin not in self._origins:
            # A cache must not show one page's answer to another.
            return {"Vary": "Origin"}
        allowed = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
        return {**allowed, "Vary": "Origin"}

    def answer_preflight(self, method: str, headers: Mapping[str, str]) -> web.Response | None:
        """Answers a browser that asks before it sends a request; None: it is another request.

        Args:
            method: The request's.
            headers: The request's.
        """
        origin = headers.get("Origin")
        if not self._origins or method != "OPTIONS" or origin is None or "Access-Control-Request-Method" not in headers:
            return None
        if "Access-Control-Allow-Origin" not in self.find_headers(origin):
            return web.Response(status=204)
        allowed = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        # What a header may say is checked when it comes; clients add headers of their own.
        if asked := headers.get("Access-Control-Request-Headers"):
            allowed["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=allowed)
