"""A local step of adapters: speed, memory and compile time, beside Transformers with PEFT.

    python -m benchmarks.adapters --peer .bench/peft/bin/python

In:       a Hugging Face folder of Llama architecture (by default random numbers in the shape of
          SmolLM2-135M); a Python that has torch, transformers and peft, or none.
Out:      three tables: tokens per second, step by step in turns, and the share of what the machine
          does on nothing but a large product, measured in turns with them; peak memory at long
          rows; seconds until the first step, cold and at a second start.
Promise:  every contender is a process of its own and computes only in its turn; the same base,
          rows, targets, rank and optimiser; the frozen features that are kept come from the disk.
Not here: whole rounds (`benchmarks/peers`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

SMOLLM2 = {
    "vocab": 49_152, "embedding_size": 576, "hidden_size": 1536, "layers": 30, "heads": 9,
    "key_heads": 3, "head_size": 64, "length": 8192, "rope_theta": 100_000.0, "tied": True,
}  # fmt: skip
PEER = Path(__file__).parent / "peers" / "peft_step.py"


# ---- fedlm's contender -------------------------------------------------------------------------


def serve(folder: Path, first: int, keep: bool, remat: bool) -> None:
    """Answer `step ROWS WIDTH` with the seconds of one step, and `probe` with GFLOP/s."""
    import jax  # here: the process that only asks needs none of it
    import jax.numpy as jnp

    from benchmarks.probe import matmul_gflops
    from fedlm.core import tree
    from fedlm.core.types import OnBase, Precomputed
    from fedlm.engine.devices import use_devices
    from fedlm.engine.frozen_features import FrozenFeatures
    from fedlm.local.train import local_training
    from fedlm.methods.optimizers import client_optimizer
    from fedlm.models import catalog
    from fedlm.models.adapters import Adapters, adapt
    from fedlm.models.interop import huggingface
    from fedlm.models.partial import ON_BASE, leaves_by_name

    use_devices(1)
    sizes = catalog.Dimensions(**huggingface.read_base(folder).sizes, remat=remat)
    adapters = Adapters(last_blocks=sizes.layers - first if first else 0)
    model = adapt(huggingface.load(folder, sizes), adapters, jax.random.key(0))
    trained, base = tree.split(model, leaves_by_name(model, ["*.lora_b"]))
    adam = client_optimizer("adam", 1e-3, momentum=0.9, weight_decay=0.0, clip=0.0)
    local = local_training(catalog.loss, adam, part=ON_BASE)
    shared = OnBase(base, trained)
    step = jax.jit(lambda shared, carry, batch: local.step(shared, carry, batch))
    carry = local.init(shared, jax.random.key(0), None, jax.numpy.ones(()))
    drawn: dict[tuple[int, int], np.ndarray] = {}
    kept: dict[tuple[int, int], FrozenFeatures] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for line in sys.stdin:
            if line.split() == ["probe"]:
                print(json.dumps({"gflops": matmul_gflops()}), flush=True)
                continue
            rows, width = (int(part) for part in line.split()[1:])
            size = rows, width
            if size not in drawn:
                made = np.random.default_rng(0).integers(4, 40_000, (rows, width + 1))
                drawn[size] = made.astype(np.int32)
                place = Path(temporary) / f"{rows}-{width}"
                kept[size] = FrozenFeatures(
                    lambda: base.frozen, sizes.embedding_size, lambda m, s=size: drawn[s], place,
                    1 << 30,
                )  # fmt: skip
            begun = time.perf_counter()
            batch: Any = jnp.asarray(drawn[size])
            if keep:
                (features,) = kept[size].batches([(0, np.arange(rows))])
                batch = Precomputed(batch, jnp.asarray(features))
            before = carry.nats
            carry = jax.block_until_ready(step(shared, carry, batch))
            took = time.perf_counter() - begun
            loss = float(carry.nats - before) / rows / width
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({"seconds": took, "loss": loss, "peak_mb": round(peak)}), flush=True)


def write_random(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a model of random numbers as a Hugging Face folder."""
    import jax  # here, as above

    from fedlm.models import catalog
    from fedlm.models.interop import huggingface

    size = catalog.Dimensions(**sizes)
    model = catalog.make("llama", size, jax.random.key(0))
    (folder / huggingface.WEIGHTS).write_bytes(huggingface.weights_of("llama", size, model))
    config = huggingface.config_of("llama", size, {"bos_token_id": 1, "eos_token_id": 2})
    (folder / huggingface.CONFIG).write_text(json.dumps(config))


# ---- who asks ----------------------------------------------------------------------------------


class Contender:
    """A process that takes one step whenever it is asked."""

    def __init__(self, command: list[str], programs: str | None = None) -> None:
        place = {} if programs is None else {"JAX_COMPILATION_CACHE_DIR": programs}
        # Compiled programs of any length are kept, as in fedlm's commands those above 0.3 s.
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **place, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"},
        )  # fmt: skip

    def step(self, rows: int, width: int) -> dict[str, float]:
        return self.ask(f"step {rows} {width}")

    def ask(self, question: str) -> dict[str, float]:
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(f"{question}\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.child.args} ended with {self.child.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def end(self) -> None:
        assert self.child.stdin
        self.child.stdin.close()
        self.child.wait()


def ours(folder: Path, first: int, *, keep: bool = False, remat: bool = False) -> list[str]:
    flags = [*(["--keep"] if keep else []), *(["--remat"] if remat else [])]
    return [sys.executable, "-m", "benchmarks.adapters", "--serve", str(folder), str(first), *flags]


def token_flops(config: dict[str, Any], width: int, forward: int, backward: int) -> float:
    """Return the operations of a token in products, for blocks that run forward and backward.

    What is frozen has no gradient of its own: two a weight forward, two backward. Adapters
    themselves are left out: eight columns.
    """
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or embed // heads
    keys = config.get("num_key_value_heads", heads)
    block = embed * head * (2 * heads + 2 * keys) + 3 * embed * config["intermediate_size"]
    attention = 4.0 * width * heads * head
    passes = forward * (2 * block + attention) + backward * (2 * block + 2 * attention)
    return float(passes + 4 * config["vocab_size"] * embed)


def speed(folder: Path, layers: int, asked: Any, say: Console) -> list[dict[str, Any]]:
    """Take steps in turns; return the median tokens per second of each contender."""
    third = layers - layers // 3
    config = json.loads((folder / "config.json").read_text())
    blocks = {"all blocks": (layers, layers), "last third": (layers, layers - third)}
    blocks["last third, features kept"] = (layers - third, layers - third)
    commands = {
        "fedlm, all blocks": ours(folder, 0),
        "fedlm, last third": ours(folder, third),
        "fedlm, last third, features kept": ours(folder, third, keep=True),
    }
    if asked.peer:
        for name, first in (("all blocks", 0), ("last third", third)):
            commands[f"PEFT, {name}"] = [str(asked.peer), str(PEER), str(folder), str(first)]
    contenders = {name: Contender(command) for name, command in commands.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    first_loss = {}
    probes = []
    for turn in range(asked.steps + 1):
        probes.append(contenders["fedlm, all blocks"].ask("probe")["gflops"])
        for name, contender in contenders.items():
            found = contender.step(asked.rows, asked.width)
            first_loss.setdefault(name, found["loss"])
            if turn:  # the first one compiles, and fills what is kept
                times[name].append(found["seconds"])
        say.print(f"turn {turn} of {asked.steps}")
    for contender in contenders.values():
        contender.end()
    tokens = asked.rows * asked.width

    def rate(name: str) -> float:
        each = token_flops(config, asked.width, *blocks[name.split(", ", 1)[1]])
        return each * tokens / statistics.median(times[name]) / 1e9

    return [
        {
            "contender": name,
            "tokens_per_second": tokens / statistics.median(times[name]),
            "gflops": rate(name),
            "share_of_probe": rate(name) / statistics.median(probes),
            "fastest": tokens / min(times[name]),
            "first_loss": first_loss[name],
        }
        for name in contenders
    ]


def memory(folder: Path, asked: Any) -> list[dict[str, Any]]:
    """Return the peak memory of one step at long rows, each in a process of its own."""
    base = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / (1 << 20)
    found = []
    cases = [(asked.rows, 512, False), (asked.rows, 512, True), (asked.rows, 2048, True)]
    for rows, width, remat in cases[: 1 if asked.smoke else None]:
        width = 64 if asked.smoke else width
        contender = Contender(ours(folder, 0, remat=remat))
        peak = contender.step(rows, width)["peak_mb"]
        contender.end()
        found.append({"rows": rows, "width": width, "remat": remat, "peak_mb": peak})
        found[-1]["above_base_mb"] = round(peak - base)
    return found


def compiling(folder: Path, asked: Any) -> dict[str, float]:
    """Return the seconds of a first step, less a second one: cold, and at a second start."""
    found = {}
    with tempfile.TemporaryDirectory() as programs:
        for name in ("cold", "second start"):
            contender = Contender(ours(folder, 0), programs)
            first, second = (contender.step(asked.rows, asked.width)["seconds"] for _ in range(2))
            contender.end()
            found[name] = round(first - second, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="a Hugging Face folder; default: random numbers")
    parser.add_argument("--peer", type=Path, help="a Python with torch, transformers and peft")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "FIRST"), help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--remat", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve(Path(asked.serve[0]), int(asked.serve[1]), asked.keep, asked.remat)
    say = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder, sizes = asked.base, dict(SMOLLM2)
        if asked.smoke:
            sizes |= {"embedding_size": 24, "hidden_size": 32, "layers": 6, "heads": 3}
            sizes |= {"head_size": 8}
        if folder is None:
            folder = Path(temporary)
            write_random(folder, sizes)
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        found: dict[str, Any] = {"load": os.getloadavg()[0]}
        parts = {
            "speed": lambda: speed(folder, layers, asked, say),
            "compile_seconds": lambda: [compiling(folder, asked)],
            "memory": lambda: memory(folder, asked),
        }
        for name, measure in parts.items():  # each is shown when it is there
            found[name] = measure()
            show(name, found[name])
            if asked.out:
                asked.out.write_text(json.dumps(found, indent=2) + "\n")
    Console().print(f"load before: {found['load']:.1f}")


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print figures as a table."""
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
