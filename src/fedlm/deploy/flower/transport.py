"""The remote engine's `Transport` over a Flower SuperLink.

In:       a client of the SuperLink's Runtime interface, the numbers of a run.
Out:      messages to nodes, and their replies as payloads.
Promise:  a reply is read only if its sender, outside and inside, is the node that was asked, and it
          is not larger than allowed; a reply is fetched once; a run that the SuperLink ended is
          begun anew, and then every node counts as having joined again.
Not here: starting a run (`client.py`), objects and chunks (`push.py`, `pull.py`).

Flower's `HttpGrid` connects by itself, without a control key and with its own retries, so the
requests of a grid are made here, with the client that it is made of. Written for flwr 1.41; can go
once a grid takes interceptors and a limit of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import httpx
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    GetNodesRequest,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.runtime import RuntimeHttpClient

from fedlm.core.errors import WireError
from fedlm.deploy.flower.parcels import HOLD, in_order
from fedlm.deploy.flower.pull import Missing, PullObject, assemble, object_puller
from fedlm.deploy.flower.push import NotTaken, PushObject, object_pusher, push
from fedlm.deploy.flower.records import Sender, from_records, request_message
from fedlm.deploy.flower.whole import Post, Puller, Pushed, given, push_whole
from fedlm.engine.dispatch import Presence, Undelivered
from fedlm.engine.messages import Payload

# The SuperLink's own replies, for nodes that went away and messages that it no longer has.
UNAVAILABLE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
T = TypeVar("T")


class RunTransport:
    """Sends and fetches the messages of one run on the SuperLink."""

    def __init__(self, client: RuntimeHttpClient, sender: Sender, post: Post | None = None) -> None:
        """Take a client for single requests, and `post` if the server knows those of many parts."""
        self.client, self.sender, self.post = client, sender, post
        self._pushed, self._awaited = Pushed(), ""
        self.node = Node(node_id=sender.node_id)
        self._asked: dict[str, int] = {}  # message id to the id of the node that may reply

    def send(self, node_id: int, payload: Payload, round: int) -> str:
        message = request_message(payload, node_id, round, self.sender)
        try:
            message_id = self._send_whole(message) if self.post else self._send_objects(message)
        except NotTaken:
            return ""
        if message_id:
            self._asked[message_id] = node_id
        return message_id

    def _send_whole(self, message: Message) -> str:
        assert self.post is not None

        def announce(head: Any, tree: Any) -> bytes:
            request = PushAppMessagesRequest(messages_list=[head], message_object_trees=[tree])
            return request.SerializeToString()

        def of_session(session: str) -> PushObjectRequest:
            run_id = self.sender.run_id
            return PushObjectRequest(node=self.node, run_id=run_id, session_id=session)

        read = PushAppMessagesResponse.FromString
        try:
            said = push_whole(message, self.post, announce, read, of_session, self._pushed)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            self.post = None  # the server is older
            return self._send_objects(message)
        return said.message_ids[0] if said.message_ids else ""

    def _send_objects(self, message: Message) -> str:
        message_id = ""

        def announce(head: Any, tree: Any) -> tuple[list[str], PushObject]:
            nonlocal message_id
            request = PushAppMessagesRequest(messages_list=[head], message_object_trees=[tree])
            said = self.client.PushMessages(request)
            message_id = said.message_ids[0] if said.message_ids else ""
            run_id, session = self.sender.run_id, said.session_id
            pusher = object_pusher(self.client.PushObject, self.node, run_id, session)
            return said.objects_to_push, pusher

        push(message, announce)
        return message_id

    def fetch(self, message_id: str, max_bytes: int) -> Payload | None:
        request, with_it = PullAppMessagesRequest(message_ids=[message_id]), dict[str, bytes]()
        if self.post:
            # Who asks twice for the same has nothing else to do: the server may hold the request.
            hold = HOLD if message_id == self._awaited else b""
            answer = self.post("poll", [request.SerializeToString(), hold], ())
            found = PullAppMessagesResponse.FromString(answer.part())
            with_it = given(answer)
            self._awaited = message_id
        else:
            found = self.client.PullMessages(request)
        for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            if head.metadata.reply_to_message_id == message_id:
                return self._read(head.metadata, tree, max_bytes, with_it)
        return None

    def _read(self, head: Any, tree: Any, max_bytes: int, with_it: dict[str, bytes]) -> Payload:
        """Pull, check and confirm a reply; the SuperLink then deletes it."""
        asked, run_id = self._asked[head.reply_to_message_id], self.sender.run_id
        pull: PullObject
        if self.post:
            pull = Puller(self.post, self.node, run_id, tree, with_it)
        else:
            pull = object_puller(self.client.PullObject, self.node, run_id)
        whole = set(in_order([tree])) <= with_it.keys()  # then the server has confirmed it
        try:
            if head.src_node_id not in (asked, SUPERLINK_NODE_ID):
                raise WireError("the reply is from a node that was not asked.")
            message = assemble(tree, pull, max_bytes)
            _check_sender(message, head)
            payload = from_records(message.content)
        except Missing as error:
            raise Undelivered(str(error)) from None  # the sender may still be asked again
        except (WireError, Undelivered):
            self._confirm(head, whole)
            raise
        self._confirm(head, whole)
        return payload

    def _confirm(self, head: Any, whole: bool) -> None:
        """Tell the SuperLink that a reply is no longer needed, unless it came whole."""
        del self._asked[head.reply_to_message_id]
        if whole:
            return
        self.client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.sender.run_id, message_object_id=head.message_id
            )
        )

    def presence(self) -> dict[str, Presence]:
        return {n.name: presence_of(n) for n in self.client.GetNodes(GetNodesRequest()).nodes}


def _check_sender(message: Message, head: Any) -> None:
    """Raise unless a message's own head agrees with its envelope and it is no failure.

    Updates are accepted from nodes only, and failures from the SuperLink only.
    """
    inside, from_superlink = message.metadata, head.src_node_id == SUPERLINK_NODE_ID
    if inside.src_node_id != head.src_node_id or (from_superlink and not message.has_error()):
        raise WireError("the reply is from a node that was not asked.")
    if inside.reply_to_message_id != head.reply_to_message_id:
        raise WireError("the reply is to another message.")
    if message.has_error():
        if from_superlink and message.error.code in UNAVAILABLE:
            raise Undelivered(head.reply_to_message_id)
        raise WireError(f"the node failed: {str(message.error.reason)[:200]}")


def presence_of(node: Any) -> Presence:
    """Convert Flower's information on a node to its presence."""
    return Presence(
        node_id=node.node_id,
        online=node.status == "online",
        since=node.last_activated_at,
        until=node.online_until,
    )


class LastingTransport:
    """A transport that outlives its run on the SuperLink.

    A SuperLink that was away for a minute ends the run. The transport then begins another run:
    messages sent before are lost, and every node counts as newly joined, so it is asked again.
    """

    def __init__(self, open_run: Callable[[], AbstractContextManager[RunTransport]]) -> None:
        self._open_run, self.runs = open_run, 0
        self._sent: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> LastingTransport:
        self._run = self._stack.enter_context(self._open_run())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def send(self, node_id: int, payload: Payload, round: int) -> str:
        message_id = self._try(lambda: self._run.send(node_id, payload, round), "")
        self._sent.add(message_id)
        return message_id

    def fetch(self, message_id: str, max_bytes: int) -> Payload | None:
        if message_id not in self._sent:
            raise Undelivered(message_id)
        return self._try(lambda: self._run.fetch(message_id, max_bytes), None)

    def presence(self) -> dict[str, Presence]:
        nobody: dict[str, Presence] = {}
        found = self._try(self._run.presence, nobody)
        return {n: p._replace(since=f"{self.runs} {p.since}") for n, p in found.items()}

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        """Return a call's result, or `otherwise` after beginning another run if this one ended."""
        try:
            return call()
        except httpx.HTTPStatusError:
            self._stack.close()
            self._sent.clear()
            self.runs += 1
            self.__enter__()  # if this fails too, the server raises its real reason
            return otherwise
