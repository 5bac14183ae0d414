"""The guard before the server: who may come in."""

import asyncio
import base64
import json
import time

import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, Metadata
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from fedlm.deploy import certificates, signing
from fedlm.deploy.flower import bodies, superlink
from fedlm.deploy.flower.bodies import LARGEST_REQUEST
from fedlm.deploy.flower.client import CONTROL_HEADER
from fedlm.deploy.flower.superlink import FrontDoor
from fedlm.deploy.signing import WHO_AM_I, Identity, Verifier, key_id

KEY = {CONTROL_HEADER: "secret"}
PRIVATE, PUBLIC = certificates.node_key()
OTHER_PRIVATE, OTHER_PUBLIC = certificates.node_key()
PULL, PUSH, OBJECT = (f"/v1/fleet/{p}" for p in ("pull-messages", "push-messages", "push-object"))
KNOWN = {key_id(PUBLIC): Identity("north", PUBLIC, time.time() + 1e6)}


def guard_of(app=None, **more):
    async def nothing(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return FrontDoor(app or nothing, "secret", Verifier(lambda: KNOWN), **more)


def signed(path, body=b"", private=PRIVATE, public=PUBLIC, process="0" * 32, method="POST"):
    headers = signing.sign(certificates.load_private(private), public, method, path, body, process)
    shown = base64.b64encode(public).decode()
    return {**headers, FLEET_HTTP_PUBLIC_KEY_HEADER: shown, "content-length": len(body)}


def ask(guard, path, headers=None, body=b"", method="POST", receive=None):
    """Return the status, the answer's body, and how many parts of the request were read."""
    sent, read = [], []

    async def whole():
        read.append(body)
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    raw = [(k.lower().encode(), str(v).encode()) for k, v in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b""}
    asyncio.run(guard(scope, receive or whole, send))
    return sent[0]["status"], sent[-1].get("body", b""), len(read)


@pytest.mark.parametrize(
    "path, headers, wanted",
    [
        (PULL, {}, 401),
        (PULL, {"content-length": 0}, 401),
        (OBJECT, {"content-length": LARGEST_REQUEST}, 401),
        (OBJECT, {"content-length": LARGEST_REQUEST + 1}, 413),
        (OBJECT, {"content-length": "9" * 5000}, 411),
        (OBJECT, {"content-length": "many"}, 411),
        (OBJECT, {"transfer-encoding": "chunked"}, 411),
        ("/v1/control/register-node", {}, 403),
        ("/v1/control/start-run", {CONTROL_HEADER: "guess"}, 403),
        ("/v1/control/start-run", KEY, 200),
        ("/v1/runtime/acquire-task", {}, 403),
        ("/v1/runtime/pull-messages", KEY, 200),
        ("/v1/fleet/../control/start-run", {}, 401),
        ("/docs", {}, 403),
    ],
)
def test_nobody_comes_in_unknown_and_nothing_of_theirs_is_read(path, headers, wanted):
    status, _, read = ask(guard_of(), path, headers)
    assert status == wanted
    assert read == (wanted == 200)


def test_a_registered_node_comes_in_and_its_body_arrives():
    arrived = []

    async def app(scope, receive, send):
        arrived.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert ask(guard_of(app), PULL, signed(PULL, b"abc"), b"abc")[0] == 200
    assert arrived == [b"abc"]


@pytest.mark.parametrize(
    "path, headers, body, words",
    [
        (PULL, lambda: signed(PUSH, b"abc"), b"abc", "not of this request"),
        (PULL, lambda: signed(PULL, b"abc", method="GET"), b"abc", "not of this request"),
        (PULL, lambda: signed(PULL, b"abc"), b"xyz", "not the one that was signed"),
        (
            PULL,
            lambda: {**signed(PULL, b"abc"), "content-length": 4},
            b"abcd",
            "not of this request",
        ),
        (PULL, lambda: {**signed(PULL), "fedlm-nonce": "0" * 32}, b"", "not of this request"),
        (
            PULL,
            lambda: {**signed(PULL), "fedlm-time": f"{time.time() + 2:.3f}"},
            b"",
            "not of this",
        ),
        (PULL, lambda: {**signed(PULL), "fedlm-time": f"{time.time() - 400:.3f}"}, b"", "clock"),
        (PULL, lambda: {**signed(PULL), "fedlm-time": "1e999"}, b"", "fedlm-time"),
        (PULL, lambda: {**signed(PULL), "fedlm-signature": "AAAAAAAA"}, b"", "not of this request"),
        (PULL, lambda: {**signed(PULL), "fedlm-scheme": "fedlm-0"}, b"", "install the same fedlm"),
        (
            PULL,
            lambda: signed(PULL, private=OTHER_PRIVATE, public=OTHER_PUBLIC),
            b"",
            "not registered",
        ),
        (PULL, lambda: signed(PULL, private=OTHER_PRIVATE), b"", "not of this request"),
        (PULL, lambda: {**signed(PULL), FLEET_HTTP_PUBLIC_KEY_HEADER: "eA=="}, b"", "another key"),
    ],
)
def test_a_signature_covers_all_of_a_request(path, headers, body, words):
    status, answer, _ = ask(guard_of(), path, headers(), body)  # signed now, not when collected
    assert status == 401 and words in json.loads(answer)["reason"]


def test_a_node_of_version_four_is_told_what_to_install_and_so_is_the_operator():
    """Such a node shows its key as Flower has it, and signs nothing but the time."""
    said = []
    headers = {k: v for k, v in signed(PULL, b"abc").items() if not k.startswith("fedlm-")}
    assert FLEET_HTTP_PUBLIC_KEY_HEADER in headers
    guard = guard_of()
    guard.say = said.append
    status, answer, read = ask(guard, PULL, headers, b"abc")
    assert status == 401 and read == 0
    told = json.loads(answer)["reason"]
    assert "version 4 or before" in told and "install the same fedlm" in told and len(told) <= 200
    assert said == [f"turned away somebody: {told}"]


def test_a_signature_counts_once():
    guard, headers = guard_of(), signed(PULL)
    assert ask(guard, PULL, headers)[0] == 200
    status, answer, _ = ask(guard, PULL, headers)
    assert status == 401 and "used before" in json.loads(answer)["reason"]
    assert ask(guard, PULL, signed(PULL))[0] == 200


def test_nonces_are_forgotten_with_their_time():
    now = [time.time()]
    verifier = Verifier(lambda: KNOWN, lambda: now[0])
    headers = {k.lower().encode(): str(v).encode() for k, v in signed(PULL).items()}
    verifier.check("POST", PULL, headers, 0)
    now[0] += 1000
    with pytest.raises(signing.Unsigned, match="clock"):
        verifier.check("POST", PULL, headers, 0)
    verifier._count(key_id(PUBLIC), "1" * 32, now[0], now[0])
    assert list(verifier._seen[key_id(PUBLIC)]) == ["1" * 32]


def raw(headers):
    return {k.lower().encode(): str(v).encode() for k, v in headers.items()}


def test_a_signature_does_not_count_again_after_a_restart(tmp_path, monkeypatch):
    file, before = tmp_path / "signed.json", raw(signed(PULL))
    Verifier(lambda: KNOWN, marks=file).check("POST", PULL, before, 0)
    assert file.stat().st_mode & 0o777 == 0o600
    restarted = Verifier(lambda: KNOWN, marks=file)
    with pytest.raises(signing.Unsigned, match="started again"):
        restarted.check("POST", PULL, before, 0)
    later = time.time() + signing.MARK_SECONDS + 0.01
    monkeypatch.setattr(signing.time, "time", lambda: later)
    Verifier(lambda: KNOWN, lambda: later, file).check("POST", PULL, raw(signed(PULL)), 0)


def test_many_nodes_that_come_seldom_cost_few_writes(tmp_path, monkeypatch):
    writes, write, now = [], signing.write_atomically, [0.0]

    def counted(*words, **more):
        writes.append(now[0])
        write(*words, **more)

    monkeypatch.setattr(signing, "write_atomically", counted)
    file = tmp_path / "signed.json"
    marks, skews = signing.Marks(file, lambda: now[0]), {f"key-{n}": 0.5 * n for n in range(20)}
    for second in range(100):
        for place, (key, skew) in enumerate(skews.items()):
            if (second + place) % 10 == 0:  # each comes every ten seconds
                now[0] = second + place / 100
                marks.check(key, now[0] - skew)
    first = 10  # while keys come for the first time, each is written once
    later = [at for at in writes if at >= first]
    assert len(later) <= (100 - first) / signing.MARK_SECONDS + 1
    again = signing.Marks(file, lambda: now[0])
    for key, skew in skews.items():
        with pytest.raises(signing.Unsigned, match="started again"):
            again.check(key, now[0] - skew)
        again.check(key, now[0] - skew + signing.MARK_SECONDS + 1)


@pytest.mark.parametrize("damaged", [b"", b"[]", b"{", b'{"x": "y"}', b'{"x": [1]}'])
def test_a_damaged_file_of_times_lets_nothing_old_in(damaged, tmp_path):
    file, before = tmp_path / "signed.json", raw(signed(PULL))
    file.write_bytes(damaged)
    restarted = Verifier(lambda: KNOWN, lambda: time.time() + 1, file)
    with pytest.raises(signing.Unsigned, match="started again"):
        restarted.check("POST", PULL, before, 0)


def test_addresses_of_those_who_showed_a_key_are_known():
    known = []
    guard = guard_of(known=known.append)
    assert ask(guard, PULL, signed(PULL, private=OTHER_PRIVATE, public=OTHER_PUBLIC))[0] == 401
    assert ask(guard, "/v1/control/list-runs")[0] == 403 and known == []
    assert ask(guard, PULL, signed(PULL))[0] == 200 and known == ["somebody"]


def test_an_expired_certificate_is_turned_away():
    verifier = Verifier(lambda: {key_id(PUBLIC): Identity("north", PUBLIC, time.time() - 1)})
    headers = {k.lower().encode(): str(v).encode() for k, v in signed(PULL).items()}
    with pytest.raises(signing.Unsigned, match="expired"):
        verifier.check("POST", PULL, headers, 0)


def test_a_body_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(bodies, "PART_SECONDS", 0.05)

    async def silent():
        await asyncio.sleep(30)

    status, answer, _ = ask(guard_of(), PULL, signed(PULL, b"abc"), receive=silent)
    assert status == 408 and b"slowly" in answer


def test_a_node_makes_few_requests_at_once():
    guard = guard_of()
    guard._at_once["north"] = superlink.MOST_AT_ONCE
    assert ask(guard, PULL, signed(PULL))[0] == 429
    guard._at_once["north"] = 0
    assert ask(guard, PULL, signed(PULL))[0] == 200 and guard._at_once["north"] == 0


def pushed(node, *heads):
    request = PushMessagesRequest(node=Node(node_id=node))
    for sender, answers in heads:
        head = Metadata(src_node_id=sender, reply_to_message_id=answers, message_id="reply")
        request.messages_list.append(ProtoMessage(metadata=head))
    return request.SerializeToString()


@pytest.mark.parametrize(
    "body, wanted",
    [
        (pushed(7, (7, "question")), 200),
        (pushed(7, (8, "question")), 403),  # for another node
        (pushed(7, (7, "question"), (8, "question")), 403),
        (pushed(7, (1, "")), 403),  # as if it were the server that asks
        (pushed(7, (7, "")), 403),
        (pushed(7), 403),
        (b"\xff\xff", 403),
    ],
    ids=["own", "other", "both", "server", "question", "nothing", "garbage"],
)
def test_a_node_answers_for_itself_alone(body, wanted):
    assert ask(guard_of(), PUSH, signed(PUSH, body), body)[0] == wanted


def test_a_node_leaves_no_more_than_its_quota():
    guard, answer, chunk = guard_of(quota=1190), pushed(7, (7, "question")), b"x" * 400
    assert ask(guard, PUSH, signed(PUSH, answer), answer)[0] == 200
    push = lambda: ask(guard, OBJECT, signed(OBJECT, chunk), chunk)[0]  # noqa: E731
    assert [push() for _ in range(3)] == [200, 200, 507]
    confirm = ConfirmMessageReceivedRequest(message_object_id="reply").SerializeToString()
    headers = {**KEY, "content-length": len(confirm)}
    assert ask(guard, superlink.CONFIRMED, headers, confirm)[0] == 200
    assert [push() for _ in range(3)] == [200, 200, 507]
    assert ask(guard, "/v1/control/start-run", KEY)[0] == 200
    assert push() == 200


def test_a_full_disk_stays_usable(tmp_path, monkeypatch):
    monkeypatch.setattr(superlink, "LEAST_FREE", 1 << 60)
    guard = guard_of(folder=tmp_path)
    assert ask(guard, OBJECT, signed(OBJECT, b"x"), b"x")[0] == 507
    assert ask(guard, PULL, signed(PULL))[0] == 200


def test_a_kit_that_two_processes_use_is_noticed(tmp_path):
    said, file = [], tmp_path / "sightings.json"
    guard = guard_of(say=said.append, sightings=file)
    for process in "0001111":  # it was started again
        assert ask(guard, PULL, signed(PULL, process=process * 32))[0] == 200
    assert not said and not file.exists()
    for process in "01":
        ask(guard, PULL, signed(PULL, process=process * 32))
    assert len(said) == 1 and "kit of north" in said[0]
    assert list(json.loads(file.read_text())) == ["north"]


def test_a_node_may_ask_who_it_is():
    status, answer, _ = ask(guard_of(), WHO_AM_I, signed(WHO_AM_I, method="GET"), method="GET")
    assert status == 200 and json.loads(answer)["name"] == "north"


def test_who_is_turned_away_is_told_now_and_then():
    said = []
    guard = guard_of(say=said.append)
    for _ in range(5):
        ask(guard, PULL)
    assert len(said) == 1 and "turned away" in said[0]
