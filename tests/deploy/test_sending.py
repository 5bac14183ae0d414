"""What is sent arrives, and what the meeting point has is not sent again."""

from types import SimpleNamespace

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree

from fedlm.engine.fetching import assemble
from fedlm.engine.sending import send
from tests.deploy.local import TaskIdentity

FRAME = bytes(range(256)) * 50_000  # three chunks, of which no two are alike at its end


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
    frames = ArrayRecord({"0": Array("uint8", (len(FRAME),), "fedlm.frame", FRAME)})
    content = RecordDict({"question": ConfigRecord({"node": node}), "frames": frames})
    return Message(content, node, "train.fedlm", group_id="1")


def test_what_is_sent_arrives():
    grid = Grid()
    assert send(grid, message(77)) == grid.trees[0].object_id
    found = assemble(grid.trees[0], grid.objects.__getitem__, 2 * len(FRAME)).content
    assert found["question"]["node"] == 77
    assert found["frames"]["0"].data == FRAME
    assert max(grid.sizes) < len(FRAME) / 2  # in chunks


def test_a_frame_for_many_is_sent_once():
    grid = Grid()
    for node in (77, 78, 79):
        send(grid, message(node))
    assert sum(grid.sizes) < 1.1 * len(FRAME)
    assert len({shape.object_id for shape in grid.trees}) == 3
