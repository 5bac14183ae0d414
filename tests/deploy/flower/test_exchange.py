"""Whole messages in one request: they arrive, and hostile requests get nowhere."""

import asyncio
import base64
import hashlib
import io

import httpx
import numpy as np
import pytest
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import (
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PullTaskInputResponse,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, TASK_TOKEN_HEADER, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedlm.core.errors import WireError
from fedlm.deploy import certificates, signing, workspace
from fedlm.deploy.flower import exchange, superlink
from fedlm.deploy.flower.client import CONTROL_HEADER, _bundle
from fedlm.deploy.flower.database import make_ready
from fedlm.deploy.flower.line import Answer
from fedlm.deploy.flower.parcels import (
    GONE,
    HOLD,
    INLINE,
    LARGEST_PART,
    MOST_PARTS,
    OF_NODES,
    OF_RUNS,
    Entry,
    entry_of,
    in_order,
    pieces_of,
    write_table,
)
from fedlm.deploy.flower.pull import assemble
from fedlm.deploy.flower.push import NotTaken, object_pusher, push
from fedlm.deploy.flower.records import Sender, from_records, reply_message, with_message_id
from fedlm.deploy.flower.transport import RunTransport
from fedlm.deploy.flower.whole import Puller, Pushed, given, push_whole
from fedlm.engine.dispatch import Undelivered
from fedlm.engine.messages import Payload
from tests.deploy.flower.fake import FakeSuperLink

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # flwr's
PROTOBUF = {"content-type": PROTOBUF_MEDIA_TYPE}
SMALL, LARGE = np.random.default_rng(0).bytes(40_000), np.random.default_rng(1).bytes(12_000_000)
MOST = 100_000_000


def body_of(parts, names=()):
    names = [*names, *([""] * (len(parts) - len(names)))]
    table = write_table([entry_of(p, n) for p, n in zip(parts, names, strict=True)])
    return table, table + b"".join(piece for part in parts for piece in pieces_of(part))


class Said(io.BytesIO):
    """The body of a response."""

    headers = ()


class Server:
    """A guarded SuperLink without a network, with two nodes and a run."""

    def __init__(self, folder):
        self.made = workspace.init(folder / "fed", "fed", ["127.0.0.1"], 9443, ["north", "south"])
        make_ready(self.made.database, print)
        self.guard = superlink.application(self.made, lambda text: None)
        self.secret = self.made.control_key.read_text()
        self.loop = asyncio.new_event_loop()
        self.ids = {}
        for name, key in self.made.nodes().items():
            self.flower("control/register-node", RegisterNodeRequest(public_key=key, name=name))
        for name in self.made.nodes():
            request = ActivateNodeRequest(public_key=self.key(name)[1], heartbeat_interval=1800)
            said = self.flower("fleet/activate-node", request, name)
            self.ids[name] = ActivateNodeResponse.FromString(said).node_id
        fab = fab_to_proto(Fab(hashlib.sha256(_bundle()).hexdigest(), _bundle(), {}))
        self.flower("control/start-run", StartRunRequest(fab=fab))
        asked = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        said = self.flower("runtime/acquire-task", asked)
        self.token = AcquireTaskResponse.FromString(said).token
        said = self.flower("runtime/pull-task-input", PullTaskInputRequest())
        told = PullTaskInputResponse.FromString(said)
        self.sender = Sender(told.run.run_id, told.context.node_id, told.task_id)
        self.store = self.guard.exchange.store

    token = ""

    def key(self, name):
        private = certificates.load_private(self.made.kit(name).key)
        return private, certificates.public_pem(private)

    def ask(self, path, headers, body, receive=None):
        """Return status, headers and body of an answer, and how much of the request was read."""
        sent, read = [], []

        async def whole():
            if read:
                await asyncio.Event().wait()
            read.append(len(body))
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            sent.append(message)

        headers = {"content-length": len(body), **headers}
        raw = [(k.lower().encode(), str(v).encode()) for k, v in headers.items()]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path}
        more = {"headers": raw, "query_string": b"", "scheme": "https", "root_path": ""}
        self.loop.run_until_complete(self.guard({**scope, **more}, receive or whole, send))
        told = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], dict(sent[0]["headers"]), told, sum(read)

    def flower(self, verb, request, name="", path=""):
        path, body = f"/v1/{verb}", request.SerializeToString()
        headers = self.of_node(name, path, body) if name else self.of_run()
        status, _, said, _ = self.ask(path, {**headers, **PROTOBUF}, body)
        assert status == 200, said
        return said

    def of_run(self):
        return {CONTROL_HEADER: self.secret, TASK_TOKEN_HEADER: self.token}

    def of_node(self, name, path, table, length=None, method="POST"):
        private, public = self.key(name)
        signed = signing.sign(private, public, method, path, table, "0" * 32, length)
        request = httpx.Request("POST", "https://x")
        auth = NodeAuthHttpInterceptor(private, private.public_key())
        context = type("Context", (), {"request": request, "message": None, "rpc_method": ""})()
        auth.intercept(context, lambda context: None)
        shown = base64.b64encode(public).decode()
        request.headers.pop("content-length", None)
        return {**dict(request.headers), **signed, FLEET_HTTP_PUBLIC_KEY_HEADER: shown}

    def parcel(self, path, parts, names=(), *, name="", **more):
        table, body = body_of(parts, names)
        headers = self.of_node(name, path, table, len(body)) if name else self.of_run()
        return self.ask(path, {**headers, **more}, body)

    def post(self, name=""):
        def made(verb, parts, names):
            path = (OF_NODES if name else OF_RUNS) + verb
            status, _, said, _ = self.parcel(path, parts, names, name=name)
            if status != 200:
                request = httpx.Request("POST", "https://x" + path)
                response = httpx.Response(status, content=said, request=request)
                raise httpx.HTTPStatusError("refused", request=request, response=response)
            return Answer(Said(said), lambda: None)

        return made

    @property
    def transport(self):
        return RunTransport(Client(self), self.sender, self.post())

    def node(self, name):
        return Node(node_id=self.ids[name])

    # ---- what a node does --------------------------------------------------------------

    def receive(self, name):
        """Return the payload of the next message and its head; how many objects came with it."""
        asked = PullMessagesRequest(node=self.node(name)).SerializeToString()
        answer = self.post(name)("poll", [asked], ())
        found = PullMessagesResponse.FromString(answer.part())
        with_it = given(answer)
        (head,), (tree,) = found.messages_list, found.message_object_trees
        run_id = head.metadata.run_id
        pull = Puller(self.post(name), self.node(name), run_id, tree, with_it)
        message = assemble(tree, pull, MOST)
        return from_records(message.content), with_message_id(message.metadata, tree.object_id)

    def announced(self, name, head, tree):
        return PushMessagesRequest(
            node=self.node(name), messages_list=[head], message_object_trees=[tree]
        )

    def reply(self, name, head, payload):
        def announce(head, tree):
            return self.announced(name, head, tree).SerializeToString()

        def of_session(session):
            node, run_id = self.node(name), self.sender.run_id
            return PushObjectRequest(node=node, run_id=run_id, session_id=session)

        message, read = reply_message(payload, head), PushMessagesResponse.FromString
        return push_whole(message, self.post(name), announce, read, of_session, Pushed())

    def files(self):
        return list(self.store.folder.iterdir())


class Client:
    """Flower's requests of a run, for single objects."""

    def __init__(self, server):
        self.server, self.confirmed = server, []

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)
        self.server.flower("runtime/confirm-message-received", request)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("exchange"))
    yield made
    made.loop.close()


def request(frame):
    return Payload("train_request", {"round": 1}, (frame,))


def answer_to(frame):
    return Payload("train_reply", {"round": 1}, (frame[::-1],))


def asked(server, frame=SMALL, name="north"):
    """Ask a node, and return the message's id and the head that it received."""
    message_id = server.transport.send(server.ids[name], request(frame), 1)
    payload, head = server.receive(name)
    assert payload == request(frame)
    return message_id, head


@pytest.mark.parametrize("frame", [SMALL, LARGE], ids=["small", "large"])
def test_a_message_arrives_and_so_does_its_answer_and_nothing_stays(server, frame):
    transport = server.transport
    message_id = transport.send(server.ids["north"], request(frame), 1)
    assert transport.fetch(message_id, MOST) is None
    payload, head = server.receive("north")
    assert payload == request(frame)
    said = server.reply("north", head, answer_to(frame))
    assert bool(said.objects_to_push) == (frame is LARGE)
    assert server.files()
    assert transport.fetch(message_id, MOST) == answer_to(frame)
    whole = transport.client.confirmed == []
    assert whole == (frame is SMALL), "a large one is confirmed when it was read"
    if frame is LARGE:  # the node has confirmed nothing in this test
        server.store.delete(message_id)
    assert server.files() == [] and len(server.store) == 0


def test_a_small_message_takes_four_requests(server, monkeypatch):
    made, post = [], Server.post

    def counted(self, name=""):
        inner = post(self, name)
        return lambda verb, *words: made.append((name, verb)) or inner(verb, *words)

    monkeypatch.setattr(Server, "post", counted)
    transport = server.transport
    message_id = transport.send(server.ids["north"], request(SMALL), 1)
    _, head = server.receive("north")
    server.reply("north", head, answer_to(SMALL))
    transport.fetch(message_id, MOST)
    assert made == [("", "push"), ("north", "poll"), ("north", "push"), ("", "poll")]


def test_a_large_frame_for_many_is_stored_once_and_sent_once(server, monkeypatch):
    sizes, parcel = [], Server.parcel

    def counted(self, path, parts, *words, **more):
        sizes.append(sum(entry_of(part, "00").length for part in parts))
        return parcel(self, path, parts, *words, **more)

    transport = server.transport
    with monkeypatch.context() as patch:
        patch.setattr(Server, "parcel", counted)
        ids = [transport.send(server.ids[n], request(LARGE), 1) for n in ("north", "south")]
    assert len(LARGE) < sum(sizes) < 1.1 * len(LARGE)
    assert sum(path.stat().st_size for path in server.files()) < 1.1 * len(LARGE)
    for name in ("north", "south"):
        assert server.receive(name)[0] == request(LARGE)
    for message_id in ids:
        server.store.delete(message_id)
    assert server.files() == []


def test_a_request_that_is_repeated_does_no_harm(server, monkeypatch):
    """A node repeats what it sent when the connection broke before the answer."""
    parcel = Server.parcel

    def twice(self, *words, **more):
        parcel(self, *words, **more)
        return parcel(self, *words, **more)

    message_id, head = asked(server, LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(Server, "parcel", twice)
        server.reply("north", head, answer_to(LARGE))
    transport = server.transport
    transport._asked[message_id] = server.ids["north"]
    assert transport.fetch(message_id, MOST) == answer_to(LARGE)
    server.store.delete(message_id)
    assert server.files() == []


def test_a_reply_that_comes_is_handed_to_who_waits(server, monkeypatch):
    monkeypatch.setattr(exchange, "HOLD_SECONDS", 3600.0)  # nothing else ends the wait
    message_id, head = asked(server)
    request, sent = PullAppMessagesRequest(message_ids=[message_id]).SerializeToString(), []
    _, body = body_of([request, HOLD])

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message.get("body", b""))

    headers = {**server.of_run(), "content-length": len(body)}
    raw = [(k.lower().encode(), str(v).encode()) for k, v in headers.items()]
    scope = {"type": "http", "method": "POST", "path": OF_RUNS + "poll", "headers": raw}
    held = server.loop.create_task(server.guard(scope, receive, send))
    server.loop.run_until_complete(asyncio.sleep(0.3))
    server.guard.exchange.wake([message_id])  # for nothing: it goes on waiting
    server.loop.run_until_complete(asyncio.sleep(0.1))
    assert not sent
    server.reply("north", head, answer_to(SMALL))
    server.loop.run_until_complete(asyncio.wait_for(held, 60))
    answer = Answer(Said(b"".join(sent)), lambda: None)
    assert len(answer.entries) == 6 + 1 and server.files() == []


def test_a_reply_that_is_too_large_is_not_read(server):
    message_id, head = asked(server)
    server.reply("north", head, answer_to(LARGE))
    transport = server.transport
    transport._asked[message_id] = server.ids["north"]
    with pytest.raises(WireError, match="most"):
        transport.fetch(message_id, 1_000_000)
    assert server.files() == []


def test_an_older_node_pushes_object_by_object_and_pulls_so(server):
    message_id = server.transport.send(server.ids["south"], request(LARGE), 1)
    asking = PullMessagesRequest(node=server.node("south"))
    said = server.flower("fleet/pull-messages", asking, "south")
    (tree,) = PullMessagesResponse.FromString(said).message_object_trees

    def pull(object_id):
        wanted = PullObjectRequest(
            node=server.node("south"), run_id=server.sender.run_id, object_id=object_id
        )
        raw = server.flower("fleet/pull-object", wanted, "south")
        return PullObjectResponse.FromString(raw).object_content

    message = assemble(tree, pull, MOST)
    assert from_records(message.content) == request(LARGE)
    head = with_message_id(message.metadata, tree.object_id)

    def announce(head, tree):
        raw = server.flower("fleet/push-messages", server.announced("south", head, tree), "south")
        told = PushMessagesResponse.FromString(raw)

        def verb(request):
            return PushObjectResponse.FromString(
                server.flower("fleet/push-object", request, "south")
            )

        node, run_id = server.node("south"), server.sender.run_id
        return told.objects_to_push, object_pusher(verb, node, run_id, told.session_id)

    push(reply_message(answer_to(LARGE), head), announce)
    transport = server.transport
    transport._asked[message_id] = server.ids["south"]
    assert transport.fetch(message_id, MOST) == answer_to(LARGE)
    server.store.delete(message_id)
    assert server.files() == []


def test_an_older_server_is_sent_objects(server):
    """It has no such request: the run goes on with those that it has."""
    older = FakeSuperLink()

    def post(verb, parts, names):
        request = httpx.Request("POST", "https://x")
        told = httpx.Response(404, request=request)
        raise httpx.HTTPStatusError("404", request=request, response=told)

    transport = RunTransport(older, Sender(1, 1, 1), post)
    message_id = transport.send(77, request(SMALL), 1)
    older.reply(message_id, answer_to(SMALL))
    assert transport.fetch(message_id, MOST) == answer_to(SMALL)


# ---- hostile requests ------------------------------------------------------------------------


PUSH, OBJECTS, POLL, PULL = (OF_NODES + verb for verb in ("push", "objects", "poll", "pull"))


@pytest.mark.parametrize("path", [PUSH, OBJECTS, POLL, PULL])
def test_nothing_is_read_of_who_is_not_known(server, path):
    _, body = body_of([b"x"])
    assert server.ask(path, {}, body)[::3] == (401, 0)
    headers = server.of_node("north", path, b"another table", len(body))
    assert server.ask(path, headers, body)[0] == 401
    table, _ = body_of([b"x"])
    shown = server.of_node("north", path, table, len(body))
    shown[FLEET_HTTP_PUBLIC_KEY_HEADER] = base64.b64encode(server.key("south")[1]).decode()
    assert server.ask(path, shown, body)[0] == 401
    run = path.replace(OF_NODES, OF_RUNS)
    assert server.ask(run, {}, body)[::3] == (403, 0)
    assert server.ask(run, {CONTROL_HEADER: "guess"}, body)[::3] == (403, 0)
    only_key = {CONTROL_HEADER: server.secret}
    head = PullObjectRequest(node=Node(node_id=1)).SerializeToString()
    _, body = body_of([head, b"hold"])
    if not path.endswith("/push"):
        assert server.ask(run, only_key, body)[0] == 401, "a run shows its token"


def test_parts_are_those_that_were_signed(server):
    head = PushObjectRequest(node=server.node("north"), run_id=server.sender.run_id)
    table, body = body_of([head.SerializeToString(), b"one"])
    headers = server.of_node("north", OBJECTS, table, len(body))
    status, _, said, _ = server.ask(OBJECTS, headers, body[:-1] + b"x")
    assert status == 401 and b"part" in said


@pytest.mark.parametrize(
    "table",
    [
        write_table([Entry(1, b"\0" * 32)] * 3),
        write_table([Entry(LARGEST_PART + 1, b"\0" * 32)]),
        write_table([Entry((1 << 64) - 1, b"\0" * 32)]),
        (MOST_PARTS + 1).to_bytes(4, "big"),
        b"\xff" * 4,
        b"\0" * 4,
        b"\0\0",
        b"",
    ],
    ids=["lengths", "large", "huge", "many", "most", "none", "short", "empty"],
)
def test_a_table_that_tells_nonsense_is_refused_before_anything_is_read(server, table):
    for name in ("north", ""):
        path = (OF_NODES if name else OF_RUNS) + "poll"
        headers = server.of_node(name, path, table, len(table)) if name else server.of_run()
        assert server.ask(path, headers, table)[0] in (400, 401)


def test_a_body_that_ends_early_is_refused(server):
    table, body = body_of([b"x" * 100])
    headers = server.of_node("north", POLL, table, len(body))
    assert server.ask(POLL, {**headers, "content-length": len(body)}, body[:-50])[0] == 400


@pytest.mark.parametrize("path", [PUSH, OBJECTS, POLL, PULL])
def test_a_node_speaks_for_itself_alone(server, path):
    """South's number in a request that north has signed."""
    south = server.node("south")
    run_id = server.sender.run_id
    head = {
        PUSH: None,
        OBJECTS: PushObjectRequest(node=south, run_id=run_id),
        POLL: PullMessagesRequest(node=south),
        PULL: PullObjectRequest(node=south, run_id=run_id),
    }[path]
    if head is None:
        _, received = asked(server, name="south")
        with pytest.raises(httpx.HTTPStatusError) as refused:
            server.reply("north", received, answer_to(SMALL))
        assert refused.value.response.status_code == 403
        return
    status, _, said, _ = server.parcel(path, [head.SerializeToString(), b"x"], name="north")
    assert status == 401 and b"another node" in said


def test_what_was_not_announced_is_not_stored(server):
    _, head = asked(server)
    told = server.reply("north", head, answer_to(LARGE))
    before = set(server.files())
    for run_id, session in (
        (server.sender.run_id, told.session_id),
        (server.sender.run_id, "another session"),
        (server.sender.run_id, ""),
    ):
        request = PushObjectRequest(node=server.node("north"), run_id=run_id, session_id=session)
        parts = [request.SerializeToString(), b"ArrayChunk  3\0abc"]
        status, _, said, _ = server.parcel(OBJECTS, parts, name="north")
        stored = PushObjectResponse.FromString(Answer(Said(said), lambda: None).part()).stored
        assert status == 200 and not stored
    assert set(server.files()) == before
    server.store.clear()


@pytest.mark.parametrize("path", [OBJECTS, PULL])
def test_objects_of_another_run_are_out_of_reach(server, path):
    kind = PushObjectRequest if path == OBJECTS else PullObjectRequest
    request = kind(node=server.node("north"), run_id=123456).SerializeToString()
    assert server.parcel(path, [request, b"0" * 64], name="north")[0] in (403, 404)


def test_unknown_names_are_gone_and_lists_are_bounded(server):
    request = PullObjectRequest(node=server.node("north"), run_id=server.sender.run_id)
    head = request.SerializeToString()
    said = server.parcel(PULL, [head, b"0" * 64], name="north")[2]
    answer = Answer(Said(said), lambda: None)
    assert answer.part() == GONE and not answer.left
    for names in (b"", b"\xff\xfe", b"../../x", b" ".join([b"0" * 64] * MOST_PARTS)):
        assert server.parcel(PULL, [head, names], name="north")[0] in (200, 400)
    assert server.parcel(PULL, [head], name="north")[0] == 400


def test_what_comes_with_a_message_is_small(server):
    _, head = asked(server)
    message = reply_message(answer_to(SMALL), head)

    def announce(head, tree):
        raw = server.announced("north", head, tree).SerializeToString()
        many = [raw, *([b"x" * INLINE] * 3)]
        assert server.parcel(PUSH, many, name="north")[0] == 413
        return [], None

    push(message, announce)


def test_bytes_that_are_no_object_change_nothing(server):
    _, head = asked(server)
    before, raw = set(server.files()), b"no object"
    message = reply_message(answer_to(SMALL), head)

    def announce(head, tree):
        tree.children.append(ObjectTree(object_id=hashlib.sha256(raw).hexdigest()))
        first = server.announced("north", head, tree).SerializeToString()
        assert server.parcel(PUSH, [first, raw], name="north")[0] == 400
        return [], None

    push(message, announce)
    assert set(server.files()) == before
    server.reply("north", head, answer_to(SMALL))  # it may still answer
    server.store.clear()


@pytest.mark.parametrize("head", [b"\xff\xff", b"", b"\x0a\x00"])
@pytest.mark.parametrize("verb", ["push", "objects", "poll", "pull", "other", "push/more"])
def test_garbage_is_refused(server, head, verb):
    for name in ("north", ""):
        path = (OF_NODES if name else OF_RUNS) + verb
        status = server.parcel(path, [head, b"x", b"y"], name=name)[0]
        nothing_asked = not name and verb == "poll" and head != b"\xff\xff"
        assert status in (400, 401, 403, 404) or (nothing_asked and status == 200)


def test_a_quota_counts_each_object_before_it_is_read(server):
    _, head = asked(server)
    stored, quota = server.guard.stored, server.guard.stored.quota
    stored.quota = 6_000_000
    try:
        with pytest.raises(httpx.HTTPStatusError) as refused:
            server.reply("north", head, answer_to(LARGE))
        assert refused.value.response.status_code == 507
    finally:
        stored.quota = quota
        stored.clear()
        server.store.clear()


def test_heads_come_before_what_they_name(server):
    leaf = ObjectTree(object_id="c")
    tree = ObjectTree(object_id="a", children=[ObjectTree(object_id="b", children=[leaf]), leaf])
    assert in_order([tree]) == ["a", "b", "c"]


def test_a_run_that_is_over_takes_nothing(server):
    """The last of these tests, since it ends the run."""
    _, head = asked(server)
    message_id, _ = asked(server, LARGE, "south")
    server.flower("control/stop-run", StopRunRequest(run_id=server.sender.run_id))
    with pytest.raises((httpx.HTTPStatusError, NotTaken)):
        server.reply("north", head, answer_to(SMALL))
    with pytest.raises((httpx.HTTPStatusError, Undelivered)):
        server.transport.fetch(message_id, MOST)
