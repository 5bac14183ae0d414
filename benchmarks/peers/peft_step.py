"""One step of adapters on a frozen model, by Transformers and PEFT.

In:       a Hugging Face folder; lines on standard input: `step ROWS WIDTH`; their end is the end.
Out:      one JSON line per step: its seconds, its loss, and the most memory so far in megabytes.
Promise:  base, rows, targets, rank and optimiser of `benchmarks/adapters.py`; A stays as drawn, as
          in fedlm, so that both compute the same gradients.
Not here: fedlm (`benchmarks/adapters.py`).
"""

from __future__ import annotations

import json
import resource
import sys
import time

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, first = sys.argv[1], int(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    blocks = list(range(first, model.config.num_hidden_layers))
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, layers_to_transform=blocks)
    model = get_peft_model(model, config)
    trained = []
    for name, values in model.named_parameters():
        values.requires_grad_("lora_B" in name)
        trained += [values] if values.requires_grad else []
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    model.train()
    for line in sys.stdin:
        _, rows, width = line.split()
        drawn = np.random.default_rng(0).integers(4, 40_000, (int(rows), int(width) + 1))
        tokens = torch.from_numpy(drawn)
        begun = time.perf_counter()
        optimizer.zero_grad()
        # Labels are shifted by the model itself.
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        took = time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        said = {"seconds": took, "loss": loss.item(), "peak_mb": round(peak)}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
