"""Safetensors against Orbax for the state of a run: `python -m benchmarks.checkpoints`.

Writes and reads a state of 20 million parameters with Adam's two moments, in turns, and measures
what importing each library costs. Orbax is not a dependency; it comes with the onnx extra.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fedlm.record import checkpoint


def import_seconds(module: str) -> float:
    """What a process pays to load a library after jax."""
    clock = "time.perf_counter()"
    code = f"import jax, time; t = {clock}; import {module}; print({clock} - t)"
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))


def timed(run: object) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    rng = np.random.default_rng(0)
    state = {n: jnp.asarray(rng.normal(size=(20, 1_000_000)), jnp.float32) for n in "pmv"}
    times: dict[str, list[float]] = {n: [] for n in ("st save", "st load", "ox save", "ox load")}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        orbax = ocp.StandardCheckpointer()
        for turn in range(3):
            times["st save"].append(timed(lambda t=turn: checkpoint.save(place / "st", t, state)))
            times["st load"].append(
                timed(lambda: checkpoint.load_newest(place / "st", state, print))
            )

            def save(t: int = turn) -> None:
                orbax.save(place / f"ox{t}", state)
                orbax.wait_until_finished()

            times["ox save"].append(timed(save))
            times["ox load"].append(timed(lambda t=turn: orbax.restore(place / f"ox{t}", state)))
    print("| library | import s | save s | load s |\n|---|---|---|---|")
    for name, short, module in (
        ("safetensors, with digest and fsync", "st", "safetensors.numpy"),
        ("orbax-checkpoint", "ox", "orbax.checkpoint"),
    ):
        save, load = (statistics.median(times[f"{short} {verb}"]) for verb in ("save", "load"))
        print(f"| {name} | {import_seconds(module):.2f} | {save:.2f} | {load:.2f} |")


if __name__ == "__main__":
    main()
