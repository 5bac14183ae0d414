"""What is sent arrives, and what the SuperLink has is not sent again."""

import numpy as np
from flwr.proto.message_pb2 import PushObjectResponse

from fedlm.deploy.flower.pull import assemble
from fedlm.deploy.flower.records import from_records
from fedlm.engine.messages import Payload
from tests.deploy.flower.fake import FakeSuperLink

FRAME = np.random.default_rng(0).bytes(12_000_000)


def payload(node):
    return Payload("train_request", {"node": node}, (FRAME,))


def test_what_is_sent_arrives():
    superlink = FakeSuperLink()
    message_id = superlink.transport.send(77, payload(77), 5)
    head, tree = superlink.requests[message_id]
    assert tree.object_id == message_id
    assert (head.metadata.dst_node_id, head.metadata.src_node_id) == (77, 1)
    assert (head.metadata.group_id, head.metadata.message_type) == ("5", "train.fedlm")
    found = assemble(tree, superlink.objects.__getitem__, 2 * len(FRAME))
    assert from_records(found.content) == payload(77)
    assert max(superlink.sizes) < len(FRAME) / 2  # in chunks


def test_a_frame_for_many_is_sent_once():
    superlink = FakeSuperLink()
    for node in (77, 78, 79):
        superlink.transport.send(node, payload(node), 1)
    assert len(FRAME) < sum(superlink.sizes) < 1.1 * len(FRAME)
    assert len(superlink.requests) == 3


def test_a_message_that_the_server_gave_up_was_not_sent():
    superlink = FakeSuperLink()
    superlink.PushObject = lambda request: PushObjectResponse(stored=False)
    assert superlink.transport.send(77, payload(77), 1) == ""
