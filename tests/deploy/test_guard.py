"""The guard before the server: who may come in."""

import asyncio

import pytest

from fedlm.deploy.link import CONTROL_HEADER, LARGEST_REQUEST, Guard

KEY = {CONTROL_HEADER: "secret"}


def status(path, headers=None):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    raw = [(k.encode(), str(v).encode()) for k, v in (headers or {}).items()]
    scope = {"type": "http", "path": path, "headers": raw}
    asyncio.run(Guard(app, "secret")(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    "path, headers, wanted",
    [
        ("/v1/fleet/pull-messages", {}, 200),
        ("/v1/fleet/push-object", {"content-length": LARGEST_REQUEST}, 200),
        ("/v1/fleet/push-object", {"content-length": LARGEST_REQUEST + 1}, 413),
        ("/v1/fleet/push-object", {"content-length": "many"}, 411),
        ("/v1/fleet/push-object", {"transfer-encoding": "chunked"}, 411),
        ("/v1/control/register-node", {}, 403),
        ("/v1/control/start-run", {CONTROL_HEADER: "guess"}, 403),
        ("/v1/control/start-run", KEY, 200),
        ("/v1/runtime/acquire-task", {}, 403),
        ("/v1/runtime/pull-messages", KEY, 200),
        ("/v1/fleet/../control/start-run", {}, 200),  # no such route behind the guard
        ("/docs", {}, 403),
    ],
)
def test_only_the_fleet_is_open_and_only_so_wide(path, headers, wanted):
    assert status(path, headers) == wanted
