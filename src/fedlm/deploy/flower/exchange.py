"""Whole messages in one request, where Flower has a request for each of their objects.

In:       a parcel (`parcels.py`) from a node, or from the run that the operator has started.
Out:      a parcel: Flower's answer, and objects.
Promise:  nothing that Flower's own requests would refuse: the same handlers decide, a node speaks
          for the number that its key is registered with, and a run for itself; an object is stored
          only if it was announced and has the hash that was signed; memory holds one object of a
          request, or `INLINE` bytes of small ones; a reply, or an object, that somebody waits for
          is handed out when it comes.
Not here: signatures, the control key and quotas (`superlink.py`).

    push      a message's head and tree, and objects if they are small -> which are wanted still
    objects   objects of a message that was announced -> whether all were stored
    poll      -> a message, if there is one, and its objects up to `INLINE` bytes; if these are
              all of them, the message is confirmed, and Flower forgets it
    pull      names of objects -> those that are there, in order, up to `LARGEST_ANSWER` bytes

An empty round of two nodes took 58 requests, each 7 to 14 ms of the server's process; it takes a
dozen. Written for flwr 1.41 (`fleet_handlers`, `runtime_handlers`, the sessions of its state); can
go once Flower carries many objects in a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from flwr.common.constant import SUPERLINK_NODE_ID, Status
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest, PushObjectResponse
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
)
from flwr.server.superlink.utils import check_abort
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from google.protobuf.message import DecodeError, Message
from sqlalchemy import text

from fedlm.deploy.flower.bodies import Parcel, Turned
from fedlm.deploy.flower.parcels import (
    GONE,
    HOLD,
    INLINE,
    MOST_PARTS,
    Entry,
    entry_of,
    in_order,
    write_table,
)
from fedlm.deploy.flower.polls import HELD_HEADER, Polls, addressees
from fedlm.deploy.flower.store import FileStore

LARGEST_ANSWER = 16 << 20  # bytes, unless one object alone has more
HOLD_SECONDS = 2.0  # for which a poll or a pull is held open
OVER = [Status.PENDING, Status.STARTING, Status.FINISHED]  # runs that take nothing
T = TypeVar("T")


class Caller(NamedTuple):
    """Who sent a request, and what the guard wants to know of it."""

    key: bytes = b""  # of a node: its public key
    token: str = ""  # of a run
    announce: Callable[[bytes], None] = lambda head: None
    admit: Callable[[int], None] = lambda size: None
    fetched: Callable[[str], None] = lambda message: None

    @property
    def is_node(self) -> bool:
        return bool(self.key)


class Exchange:
    """Answers parcels with the state of a SuperLink in this process."""

    def __init__(self, state: Any, store: FileStore, polls: Polls) -> None:
        self.state, self.store, self.polls = state, store, polls
        # One thread: transactions that write would wait for each other in any case.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._waiting: dict[str, set[asyncio.Event]] = {}  # by object, or by message asked

    async def answer(
        self, path: str, caller: Caller, parcel: Parcel, receive: Any, send: Any
    ) -> None:
        """Answer a request whose table has been read."""
        head = bytes(await parcel.part())
        verb = {
            "push": self._push,
            "objects": self._objects,
            "poll": self._poll_node if caller.is_node else self._poll_run,
            "pull": self._pull,
        }.get(path.rpartition("/")[2])
        if verb is None:
            raise Turned(404, "there is no such request")
        await verb(caller, head, parcel, receive, send)

    def wake(self, names: Iterable[str]) -> None:
        """Wake requests that wait for these objects, or for replies to these messages."""
        for name in names:
            for event in self._waiting.get(name, ()):
                event.set()

    def wake_all(self) -> None:
        """Wake all waiting requests: objects have come by Flower's own requests."""
        self.wake(list(self._waiting))

    # ---- push --------------------------------------------------------------------------

    async def _push(self, caller: Caller, head: bytes, parcel: Parcel, _: Any, send: Any) -> None:
        caller.announce(head)
        if sum(entry.length for entry in parcel.left) > 2 * INLINE:
            raise Turned(413, "the objects that come with a message are too large")
        objects = {name: content async for name, content in _admitted(caller, parcel)}
        answer, asked = await self._do(self._take_message, caller, head, objects)
        if not caller.is_node:
            self.polls.wake(addressees(head))
        self.wake([*asked, *objects])
        await _send_parcel(send, [answer.SerializeToString()])

    def _take_message(
        self, caller: Caller, head: bytes, objects: Mapping[str, bytes | bytearray]
    ) -> tuple[Any, list[str]]:
        """Announce a message to Flower, which finds its objects already there."""
        with self._writing(), self.store.offering(objects):
            if caller.is_node:
                request = _parsed(PushMessagesRequest, head)
                self._check_node(caller, request.node.node_id)
                answer = fleet_handlers.push_messages(request, self.state)
            else:
                request = _parsed(PushAppMessagesRequest, head)
                task = self._task(caller)
                answer = runtime_handlers.push_messages(request, self.state, task)
        return answer, [m.metadata.reply_to_message_id for m in request.messages_list]

    async def _objects(
        self, caller: Caller, head: bytes, parcel: Parcel, _: Any, send: Any
    ) -> None:
        request = _parsed(PushObjectRequest, head)
        run_id = await self._do(self._run_of, caller, request)
        whole, some, size = True, dict[str, bytearray](), 0

        async def flush() -> bool:
            stored = await self._do(self._store, run_id, request.session_id, some)
            self.wake(stored)
            return len(stored) == len(some)

        async for name, content in _admitted(caller, parcel):
            some[name] = content
            size += len(content)
            if size >= INLINE:
                whole = await flush() and whole
                some, size = {}, 0
        if some:
            whole = await flush() and whole
        answer = PushObjectResponse(stored=whole)
        await _send_parcel(send, [answer.SerializeToString()])

    def _store(
        self, run_id: int, session: str, objects: Mapping[str, bytes | bytearray]
    ) -> list[str]:
        """Store objects, whose hashes have been checked; return the names of those it took."""
        with self._writing(), self.store.offering(objects):
            return [
                name
                for name, content in objects.items()
                if self.state.store_object(run_id, session, name, content)
                or self.store.sizes([name]).get(name)  # the request was repeated
            ]

    # ---- poll --------------------------------------------------------------------------

    async def _poll_node(
        self, caller: Caller, head: bytes, _: Parcel, receive: Any, send: Any
    ) -> None:
        found: list[Any] = []

        async def flower(scope: Any, receive: Any, send: Any) -> None:
            answer = await self._do(self._ask_for_node, caller, head)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": answer.SerializeToString()})

        async def keep(message: Any) -> None:
            found.append(message)

        await self.polls.answer(flower, {}, head, receive, keep)
        if found:  # the node has not hung up
            start, body = found
            held = [h for h in start["headers"] if h[0] == HELD_HEADER.encode()]
            answer = PullMessagesResponse.FromString(body["body"])
            await self._hand_out(caller, answer, send, held)

    def _ask_for_node(self, caller: Caller, head: bytes) -> Any:
        request = _parsed(PullMessagesRequest, head)
        self._check_node(caller, request.node.node_id)
        return fleet_handlers.pull_messages(request, self.state, self.store)

    async def _poll_run(
        self, caller: Caller, head: bytes, parcel: Parcel, receive: Any, send: Any
    ) -> None:
        request = _parsed(PullAppMessagesRequest, head)
        seconds = HOLD_SECONDS if bytes(await parcel.part()) == HOLD else 0.0

        async def ask() -> Any:
            answer = await self._do(self._ask_for_run, caller, request)
            return answer if answer.messages_list else None

        answer = await self._held(list(request.message_ids), ask, seconds)
        await self._hand_out(caller, answer or PullAppMessagesResponse(), send, [])

    def _ask_for_run(self, caller: Caller, request: Any) -> Any:
        return runtime_handlers.pull_messages(request, self.state, self._task(caller))

    async def _hand_out(self, caller: Caller, answer: Any, send: Any, headers: list[Any]) -> None:
        """Send a message with its small objects; confirm it if these are all of them."""
        objects, whole = dict[str, bytes](), False
        if answer.messages_list:
            objects, whole = await self._do(self._small_objects, answer)
        if whole:
            for tree in answer.message_object_trees:
                caller.fetched(tree.object_id)
        parts = [answer.SerializeToString(), *objects.values()]
        await _send_parcel(send, parts, ["", *objects], headers)

    def _small_objects(self, answer: Any) -> tuple[dict[str, bytes], bool]:
        """Return the small objects of a message, and whether these are all; then delete it."""
        found, names = dict[str, bytes](), in_order(answer.message_object_trees)
        sizes, left = self.store.sizes(names), INLINE
        for name in names:
            size = sizes.get(name, 0)
            if not 0 < size <= left or len(found) + 1 >= MOST_PARTS:
                return found, False
            content = self.store.get(name)
            if not content:
                return found, False
            found[name], left = content, left - size
        for tree in answer.message_object_trees:
            self.store.delete(tree.object_id)
        return found, True

    # ---- pull --------------------------------------------------------------------------

    async def _pull(
        self, caller: Caller, head: bytes, parcel: Parcel, receive: Any, send: Any
    ) -> None:
        request = _parsed(PullObjectRequest, head)
        names = bytes(await parcel.part()).decode("ascii", "replace").split()
        if not 0 < len(names) < MOST_PARTS:
            raise Turned(400, "a request names too few objects, or too many")
        run_id = await self._do(self._run_of, caller, request)

        async def ask() -> Any:
            sizes = await self._do(self._sizes, run_id, names)
            return sizes if sizes.get(names[0]) != 0 else None  # it is there, or never will be

        sizes = await self._held(names[:1], ask, HOLD_SECONDS)
        there, left = list[tuple[str, int]](), LARGEST_ANSWER
        for name in names:
            size = (sizes or {}).get(name, 0)
            if not size or (there and size > left):
                break
            there.append((name, size))
            left -= size
        first = GONE if sizes is not None and names[0] not in sizes else b""
        entries = [entry_of(first), *(Entry(size, bytes.fromhex(name)) for name, size in there)]
        await _send_start(send, entries, [])
        await send({"type": "http.response.body", "body": first, "more_body": bool(there)})
        for name, size in there:
            content = await asyncio.to_thread(self.store.get, name)
            if content is None or len(content) != size:
                return  # it was deleted meanwhile; the connection ends here
            await _send_body(send, content, more=name != there[-1][0])

    def _sizes(self, run_id: int, names: Sequence[str]) -> dict[str, int]:
        sizes = self.store.sizes(names)
        if sizes.get(names[0]) == 0:
            self.state.get_object(run_id, names[0])  # Flower gives up a push that takes too long
            sizes = self.store.sizes(names)
        return sizes

    # ---- who, and when -----------------------------------------------------------------

    def _check_node(self, caller: Caller, node_id: int) -> None:
        if self.state.get_node_id_by_public_key(caller.key) != node_id:
            raise Turned(401, "the request names another node than the one that signed it")

    def _task(self, caller: Caller) -> Any:
        task = self.state.get_task_by_token(caller.token) if caller.token else None
        if task is None:
            raise Turned(401, "the run is not known, or over")
        return task

    def _run_of(self, caller: Caller, request: Any) -> int:
        """Return the run whose objects a request is about, or raise `Turned`."""
        if not caller.is_node:
            if request.node.node_id != SUPERLINK_NODE_ID:
                raise Turned(400, "a run asks for itself alone")
            return int(self._task(caller).run_id)
        self._check_node(caller, request.node.node_id)
        try:
            over = check_abort(request.run_id, OVER, self.state)
        except KeyError:
            over = "there is no such run"
        if over:
            raise Turned(403, over)
        return int(request.run_id)

    async def _held(self, names: Sequence[str], ask: Callable[[], Any], seconds: float) -> Any:
        """Call `ask` again whenever one of these names is woken, until it answers or time is up."""
        came, ends = asyncio.Event(), asyncio.get_running_loop().time() + seconds
        for name in names:
            self._waiting.setdefault(name, set()).add(came)  # before asking: no gap
        try:
            while (found := await ask()) is None:
                left = ends - asyncio.get_running_loop().time()
                if left <= 0:
                    return None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await came.wait()
                came.clear()
            return found
        finally:
            for name in names:
                self._waiting[name].discard(came)
                if not self._waiting[name]:
                    del self._waiting[name]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Take the database's write lock first, so that reads in the block are current."""
        with self.state.session() as session:
            session.execute(text("UPDATE objectstore_locks SET lock_value = lock_value"))
            yield

    async def _do(self, call: Callable[..., T], *words: Any) -> T:
        """Call a function of the state in its thread, and translate its refusals."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *words)
        except FlowerError as error:
            known = API_ERROR_MAP.get(error.code)
            raise Turned(known.http_status_code if known else 500, "") from None
        except DecodeError:
            raise Turned(400, "the head is no request of Flower's") from None
        except ValueError as error:
            raise Turned(400, str(error)[:200]) from None
        except Turned:
            raise
        except Exception as error:  # Flower declares none, and answers 500 itself
            raise Turned(500, f"the server failed: {type(error).__name__}") from error


def _parsed(kind: type[Message], raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise Turned(400, "the head is no request of Flower's") from None


async def _admitted(caller: Caller, parcel: Parcel) -> AsyncIterator[tuple[str, bytearray]]:
    """Yield the objects of a parcel, each counted before it is read."""
    while parcel.left:
        entry = parcel.left[0]
        caller.admit(entry.length)
        yield entry.sha256.hex(), await parcel.part()


async def _send_parcel(
    send: Any, parts: Sequence[bytes], names: Sequence[str] = (), headers: Sequence[Any] = ()
) -> None:
    names = names or [""] * len(parts)
    entries = [entry_of(part, name) for part, name in zip(parts, names, strict=True)]
    await _send_start(send, entries, headers)
    await _send_body(send, b"".join(parts), more=False)


async def _send_start(send: Any, entries: Sequence[Entry], headers: Sequence[Any]) -> None:
    table = write_table(entries)
    length = len(table) + sum(entry.length for entry in entries)
    told = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % length)]
    start = {"status": 200, "headers": [*told, *headers]}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": table, "more_body": True})


async def _send_body(send: Any, content: bytes, *, more: bool) -> None:
    """Send bytes in pieces, so that no more than one waits in a buffer."""
    pieces = range(0, max(1, len(content)), PIECE)
    for first in pieces:
        last = first + PIECE >= len(content)
        piece = content[first : first + PIECE]
        await send({"type": "http.response.body", "body": piece, "more_body": more or not last})


PIECE = 1 << 18  # bytes
