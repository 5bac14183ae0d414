"""The client side of the Flower contender: imported by name in every Ray actor.

In:       a message with parameters; the workload folder from the environment.
Out:      a reply with parameters and the number of examples.
Promise:  an actor reads the workload and builds its model once, as a careful user would.
Not here: the server side (`flower_round.py`), the models (`torch_models.py`).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch_models import LanguageModel, make, train_member
from turns import Workload, load

FOLDER = "FEDLM_BENCH_WORKLOAD"
app = ClientApp()


@functools.cache
def ready() -> tuple[Workload, LanguageModel, list[torch.Tensor]]:
    torch.set_num_threads(1)  # an actor a core
    work = load(Path(os.environ[FOLDER]))
    rows = [torch.from_numpy(r).long() for r in work.rows]
    return work, make(work.settings, library=True), rows


@app.train()
def train(message: Message, context: Context) -> Message:
    work, model, rows = ready()
    mine = rows[int(context.node_config["partition-id"])]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_member(model, mine, work.settings)
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(mine)}),
        }
    )
    return Message(content=content, reply_to=message)
