"""Flower's middlewares run where they do something, and nowhere else."""

import asyncio
import types

import pytest
from flwr.superlink.main import _get_middleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from fedlm.deploy.flower.middlewares import PATHS, ForPaths, only_where_needed

PLACES = ["/v1/control/start-run", "/v1/fleet/pull-messages", "/v1/runtime/push-object"]
FLOWERS = {each.cls.__name__: each for each in _get_middleware()}


async def answer(app, path):
    """Return all that an application sends to a request."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"asked", "more_body": False}

    async def send(part):
        sent.append(part)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await app({**scope, "scheme": "http", "http_version": "1.1", "server": ("h", 1)}, receive, send)
    body = b"".join(part.get("body", b"") for part in sent)
    return sent[0]["status"], sorted(sent[0]["headers"]), body


async def echo(request):
    return PlainTextResponse(await request.body() + request.url.path.encode())


def app_with(*middlewares):
    routes = [Route(path, echo, methods=["POST"]) for path in PLACES]
    return Starlette(routes=routes, middleware=list(middlewares))


def test_the_table_names_middlewares_of_flower():
    assert PATHS.keys() <= FLOWERS.keys()


@pytest.mark.parametrize("name", PATHS)
def test_where_it_is_left_out_a_middleware_does_nothing(name, monkeypatch):
    monkeypatch.delenv("FLWR_TRACING_ENABLED", raising=False)
    left_out = [path for path in PLACES if not (PATHS[name] and path.startswith(PATHS[name]))]
    assert left_out
    for path in left_out:
        plain = asyncio.run(answer(app_with(), path))
        assert asyncio.run(answer(app_with(FLOWERS[name]), path)) == plain
        assert plain[2] == b"asked" + path.encode()


def test_each_runs_for_its_paths_and_an_unknown_one_for_all():
    def noting(name):
        class Noting:
            def __init__(self, app):
                self.app = app

            async def __call__(self, scope, receive, send):
                seen.append(name)
                await self.app(scope, receive, send)

        return Middleware(type(name, (Noting,), {}))

    names = [*FLOWERS, "OfTheNextVersion"]
    made = only_where_needed(types.SimpleNamespace(user_middleware=[noting(n) for n in names]))
    app, ran = app_with(*made.user_middleware), {}
    for path in PLACES:
        seen = []
        assert asyncio.run(answer(app, path))[0] == 200
        ran[path] = seen
    always = ["BaseHTTPMiddleware", "ProtobufTranslationMiddleware", "OfTheNextVersion"]
    control = [name for name in names if PATHS.get(name, "") in ("", "/v1/control/")]
    assert ran[PLACES[0]] == control  # in Flower's order
    assert ran[PLACES[1]] == [*always[:2], "NodeAuthMiddleware", always[2]]
    assert ran[PLACES[2]] == always
    assert any(each.cls is ForPaths for each in made.user_middleware)
