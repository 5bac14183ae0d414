"""Run each of Flower's middlewares only for the paths that it is for.

In:       Flower's application, before its first request.
Out:      the same application, whose requests pass fewer middlewares.
Promise:  a middleware that is left out for a path does nothing there, by its own source; one that
          is not in the table runs for every path.
Not here: what the application answers (`flwr.superlink`), who may ask it (`superlink.py`).

Flower wraps its application in nine of Starlette's `BaseHTTPMiddleware`s, each of which starts a
task and a stream for every request; for most requests most of them do nothing. Written for flwr
1.41; can go once its middlewares are plain ASGI, or belong to their routers.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

CONTROL, FLEET, NOWHERE = "/v1/control/", "/v1/fleet/", None
# By name: the paths that begin so. Tracing needs FLWR_TRACING_ENABLED, event logs a plugin.
PATHS: dict[str, str | None] = {
    "ControlSensitiveResponseMiddleware": CONTROL,
    "ControlAuthenticationMiddleware": CONTROL,
    "ControlLicenseMiddleware": CONTROL,
    "ControlEventLogMiddleware": CONTROL,
    "NodeAuthMiddleware": FLEET,
    "FleetEventLogMiddleware": NOWHERE,
    "RuntimeTracingMiddleware": NOWHERE,
}


class ForPaths:
    """A middleware that runs only for paths with a prefix."""

    def __init__(self, app: Any, prefix: str, inner: Middleware) -> None:
        self.app, self.prefix = app, prefix
        self.inner: Any = inner.cls(app, *inner.args, **inner.kwargs)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request through the middleware, or around it."""
        needed = scope["type"] != "http" or scope["path"].startswith(self.prefix)
        await (self.inner if needed else self.app)(scope, receive, send)


def only_where_needed(app: Any) -> Any:
    """Return Flower's application with its middlewares only for the paths that they are for."""
    made = []
    for each in app.user_middleware:
        prefix = PATHS.get(each.cls.__name__, "")
        if prefix is not None:
            made.append(Middleware(ForPaths, prefix, each) if prefix else each)
    app.user_middleware = made
    return app
