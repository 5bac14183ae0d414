"""The live page over HTTP.

In:       a folder with runs, an address to listen at.
Out:      the page, a stream of server-sent events, three requests that do something.
Promise:  every request passes the guard; a damaged file or a wrong request gives a sentence, never
          a traceback; the stream sends rows that changed and the runs that are looked at, at most
          twice per second; bodies are small and their fields checked.
Not here: reading runs (`board.py`), buttons (`control.py`), suggestions (`keyboard.py`).
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import anyio
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from fedlm.core.errors import ConfigError, FedlmError
from fedlm.record.journal import dumps
from fedlm.watch.board import Board
from fedlm.watch.control import Control
from fedlm.watch.guard import HEADERS, PageGuard, is_loopback
from fedlm.watch.keyboard import Keyboard

POLL_SECONDS, SILENT_POLLS = 0.5, 30  # a comment after so many polls without news
FIRST_SECONDS = 0.2  # of reading before what is known is shown
MOST_BODY = 64 << 10
MOST_LOOKED_AT = 12  # runs in one stream
KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}

RunId = Annotated[str, Field(min_length=1, max_length=4096)]


class AskedRun(BaseModel):
    """The body of stop and resume."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: RunId


class AskedWords(AskedRun):
    """The body of a question for suggestions."""

    node: Annotated[str, Field(max_length=1000)] = ""
    kind: Annotated[str, Field(pattern="^(last|best|personal|pretrained)$")] = "last"
    text: Annotated[str, Field(max_length=10_000)]


class WatchServer:
    """The application and everything it holds."""

    def __init__(self, folder: Path, guard: PageGuard) -> None:
        self.guard = guard
        # Names that a privacy plan hides are for the owner on this machine.
        self.board = Board(folder, private=is_loopback(guard.host))
        self.control, self.keyboard = Control(self.board), Keyboard(self.board)
        self.ends = False

    @cached_property
    def app(self) -> Any:
        """The application, guarded."""
        routes = [
            Route("/", self._page),
            Route("/pages/{name}", self._file),
            Route("/events", self._events),
            Route("/stop", self._stop, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/suggest", self._suggest, methods=["POST"]),
        ]
        return Guarded(Starlette(routes=routes), self.guard)

    # ---- files ---------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        response = _static("index.html")
        response.set_cookie(
            self.guard.cookie, self.guard.token, httponly=True, samesite="strict", path="/"
        )
        return response

    async def _file(self, request: Request) -> Response:
        return _static(request.path_params["name"])

    # ---- the stream ----------------------------------------------------------------------

    async def _events(self, request: Request) -> Response:
        looked_at = request.query_params.getlist("run")[:MOST_LOOKED_AT]
        return StreamingResponse(self._stream(looked_at), media_type="text/event-stream")

    async def _stream(self, looked_at: list[str]) -> AsyncIterator[str]:
        sent: dict[str, Any] = {}
        versions: dict[str, Any] = {}
        silent = 0
        while not self.ends:
            news = await anyio.to_thread.run_sync(self._changes, sent)
            if news is not None:
                yield f"event: board\ndata: {dumps(news)}\n\n"
            for id in looked_at:
                details = await anyio.to_thread.run_sync(self._details, id)
                if details["version"] != versions.get(id):
                    versions[id] = details["version"]
                    yield f"event: run\ndata: {dumps(details)}\n\n"
                    silent = 0
            silent = 0 if news is not None else silent + 1
            if silent >= SILENT_POLLS:
                yield ": still here\n\n"
                silent = 0
            await anyio.sleep(0 if self.board.unread else POLL_SECONDS)

    def _changes(self, sent: dict[str, Any]) -> dict[str, Any] | None:
        """Return rows that changed since they were sent, names that are gone, and sweeps."""
        failures = self.control.failures()
        rows = [
            {**row, "problem": row.get("problem") or failures.get(row["id"])}
            for row in self.board.rows(FIRST_SECONDS)
        ]
        now = {row["id"]: row for row in rows}
        changed = [row for row in rows if sent.get(row["id"]) != row]
        gone = [id for id in sent if id not in now and id != ""]
        first = "" not in sent
        if not (changed or gone or first):
            return None
        for id in gone:
            del sent[id]
        sent.update({row["id"]: row for row in changed})
        news: dict[str, Any] = {"rows": changed, "gone": gone}
        sweeps = self.board.sweeps()
        if first or sweeps != sent[""]:
            sent[""] = sweeps
            news["sweeps"] = sweeps
        if first:
            news["folder"] = str(self.board.folder.resolve())
        return news

    def _details(self, id: str) -> dict[str, Any]:
        try:
            return self.board.details(id)
        except FedlmError as error:
            return {"id": id, "version": str(error), "problem": str(error)}

    # ---- what does something -------------------------------------------------------------

    async def _stop(self, request: Request) -> Response:
        return await self._do(request, AskedRun, lambda asked: self.control.stop(asked.id))

    async def _resume(self, request: Request) -> Response:
        return await self._do(request, AskedRun, lambda asked: self.control.resume(asked.id))

    async def _suggest(self, request: Request) -> Response:
        def suggest(asked: AskedWords) -> Any:
            return self.keyboard.suggest(asked.id, asked.node, asked.kind, asked.text)

        return await self._do(request, AskedWords, suggest)

    async def _do(self, request: Request, form: type, act: Callable[[Any], Any]) -> Response:
        try:
            asked = form.model_validate_json(await _body(request))  # type: ignore[attr-defined]
            done = await anyio.to_thread.run_sync(act, asked)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            return JSONResponse({"error": f"{where}: {problem['msg']}."}, 400)
        except FedlmError as error:
            return JSONResponse({"error": str(error)}, 400)
        return Response(dumps({"done": done}), media_type="application/json")


async def _body(request: Request) -> bytes:
    data = b""
    try:
        async for part in request.stream():
            data += part
            if len(data) > MOST_BODY:
                raise ConfigError(f"the request has more than {MOST_BODY >> 10} KiB.")
    except ClientDisconnect:
        raise ConfigError("the request ended early.") from None
    return data


def _static(name: str) -> Response:
    """Return a file of the page; no other file has a name here."""
    file = resources.files("fedlm.watch") / "pages" / name
    kind = KINDS.get(Path(name).suffix)
    if kind is None or "/" in name or "\\" in name or not file.is_file():
        return PlainTextResponse("There is no such page.", 404)
    return Response(file.read_bytes(), media_type=kind)


class Guarded:
    """The application behind the guard, with the headers that every response has."""

    def __init__(self, app: Any, guard: PageGuard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse or pass on one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)
        token = request.query_params.get("token") if scope["path"] == "/" else None
        why = self.guard.refuses(request.method, request.headers, request.cookies, token)
        app = self.app if why is None else PlainTextResponse(f"{why}\n", 403)

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        await app(scope, receive, with_headers)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; 0 takes any free port."""
    # With the protocol named, asyncio sends small answers at once; else each waits for 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(64)
    except (OSError, OverflowError) as error:
        made.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--host {host} --port {port}: expected an address that is free ({reason}). "
            "--port 0 takes any free port."
        ) from None
    return made


def serve(folder: Path, host: str, port: int, said: Callable[[str], None]) -> None:
    """Serve the page until interrupted; `said` is told the address."""
    with listen(host, port) as made:
        guard = PageGuard(host, made.getsockname()[1])
        watch = WatchServer(folder, guard)
        said(guard.address)
        HttpServer(watch).run(sockets=[made])


class HttpServer(uvicorn.Server):
    """A server that ends its streams when it is asked to stop."""

    def __init__(self, watch: WatchServer) -> None:
        super().__init__(
            uvicorn.Config(
                watch.app,
                # What the package always has; no websockets, no log of requests.
                loop="asyncio",
                http="h11",
                ws="none",
                log_level="error",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=5,  # streams look up twice per second
                limit_concurrency=100,
            )
        )
        self.watch = watch

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop, and let open streams end."""
        self.watch.ends = True
        super().handle_exit(sig, frame)
