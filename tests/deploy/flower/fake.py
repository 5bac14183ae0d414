"""A SuperLink in memory: takes messages apart into objects, hands them out, and counts."""

from flwr.app import Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree

from fedlm.deploy.flower.push import push
from fedlm.deploy.flower.records import Sender, to_records, with_message_id
from fedlm.deploy.flower.transport import RunTransport


class FakeSuperLink:
    """The verbs of a Runtime client that a run's transport needs."""

    def __init__(self):
        self.objects, self.sizes = {}, []
        self.requests, self.replies = {}, {}  # heads and trees, by the id of the request
        self.pulled, self.confirmed = 0, []

    @property
    def transport(self):
        return RunTransport(self, Sender(run_id=1, node_id=1, task_id=1))

    # ---- what the server calls ---------------------------------------------------------

    def PushMessages(self, request):
        (head,), (tree,) = request.messages_list, request.message_object_trees
        message_id = head.metadata.message_id
        self.requests[message_id] = head, tree
        wanted = {part.object_id for part in iterate_object_tree(tree)} - set(self.objects)
        return PushAppMessagesResponse(
            message_ids=[message_id], objects_to_push=sorted(wanted), session_id="s"
        )

    def PushObject(self, request):
        assert get_object_id(request.object_content) == request.object_id
        self.objects[request.object_id] = request.object_content
        self.sizes.append(len(request.object_content))
        return PushObjectResponse(stored=True)

    def PullMessages(self, request):
        found = [self.replies[i] for i in request.message_ids if i in self.replies]
        return PullAppMessagesResponse(
            messages_list=[head for head, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request):
        content = self.objects.get(request.object_id)
        self.pulled += len(content or b"")
        return PullObjectResponse(
            object_found=content is not None, object_available=True, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)

    # ---- what a node does --------------------------------------------------------------

    def reply(self, message_id, content, *, sender=None, says=None, to=None):
        """Leaves a payload, records or an error; `sender` is inside, `says` outside."""
        asked = metadata_from_proto(self.requests[message_id][0].metadata)
        asked.dst_node_id = sender or asked.dst_node_id
        asked = with_message_id(asked, to or message_id)
        content = to_records(content) if hasattr(content, "kind") else content
        made = Message(content, reply_to=make_message(asked, RecordDict()))

        def announce(head, tree):
            head.metadata.src_node_id = says or head.metadata.src_node_id
            head.metadata.reply_to_message_id = message_id
            self.replies[message_id] = head, tree
            ids = [part.object_id for part in iterate_object_tree(tree)]
            return ids, self.objects.__setitem__

        push(made, announce)
