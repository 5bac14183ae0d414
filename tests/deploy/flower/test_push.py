"""What is sent arrives, and what the meeting point has is not sent again."""

from types import SimpleNamespace

import numpy as np
from flwr.app import Message
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree

from fedlm.deploy.flower.pull import assemble
from fedlm.deploy.flower.push import send
from fedlm.engine.messages import TrainRequest, ask, read_request
from tests.deploy.local import TaskIdentity

FRAME = np.random.default_rng(0).bytes(12_000_000)


class Grid:
    """A meeting point that takes messages; keeps their objects, and how large each push was."""

    node = Node(node_id=1)
    run = SimpleNamespace(run_id=1)

    def __init__(self):
        TaskIdentity.node_id = 1
        self._runtime_client = self
        self.objects, self.trees, self.sizes = {}, [], []

    def PushMessages(self, request):
        (shape,) = request.message_object_trees
        self.trees.append(shape)
        wanted = {part.object_id for part in iterate_object_tree(shape)} - set(self.objects)
        return PushAppMessagesResponse(
            message_ids=[shape.object_id], objects_to_push=sorted(wanted), session_id="s"
        )

    def PushObject(self, request):
        assert get_object_id(request.object_content) == request.object_id
        self.objects[request.object_id] = request.object_content
        self.sizes.append(len(request.object_content))
        return PushObjectResponse(stored=True)


def message(node):
    question = TrainRequest(
        recipe="",
        round=1,
        first=node,
        population=100,
        text="",
        members=(node,),
        clip_norm=1.0,
        each=False,
        longest=len(FRAME),
        frames=(FRAME,),
    )
    return Message(ask(question), node, "train.fedlm", group_id="1")


def test_what_is_sent_arrives():
    grid = Grid()
    assert send(grid, message(77)) == grid.trees[0].object_id
    found = assemble(grid.trees[0], grid.objects.__getitem__, 2 * len(FRAME)).content
    assert read_request(found) == read_request(message(77).content)
    assert max(grid.sizes) < len(FRAME) / 2  # in chunks


def test_a_frame_for_many_is_sent_once():
    grid = Grid()
    for node in (77, 78, 79):
        send(grid, message(node))
    assert len(FRAME) < sum(grid.sizes) < 1.1 * len(FRAME)
    assert len({shape.object_id for shape in grid.trees}) == 3
