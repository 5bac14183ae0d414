"""Compares the mesh engine on eight simulated devices with the loop engine; a line per model.

`python tests/engine/eight_devices.py SHARD OPTIMIZER NAME...`: a process of its own, because the
number of devices is chosen once per process. Plain SGD is compared in float32. Adam would enlarge
the rounding of gradients that are zero by nature, so it is compared in float64, with clipped
gradients (`test_sharding.py` says more).
"""

import json
import sys

import jax
import numpy as np

from fedlm.core.types import Start
from fedlm.engine.loop import LoopEngine
from fedlm.engine.mesh import MeshEngine
from tests.engine.test_laws import MEMBERS, SHAPE, algorithm, model, rows_of

RTOL = 2e-5  # as in `test_laws.assert_same`


def off(found, wanted):
    """How far two sums are apart, in units of the tolerance."""
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted.delta))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(
        float(np.max(np.abs(a - b) / (RTOL * max(1e-3, scale) + RTOL * np.abs(b))))
        for a, b in ((np.asarray(x), np.asarray(y)) for x, y in pairs)
    )


def main(shard, optimizer, *names):
    exact = optimizer != "sgd"
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", exact)
    chosen = algorithm(optimizer, clip=0.5 if exact else 0.0)
    loop = LoopEngine(chosen, rows_of, SHAPE, 7)
    mesh = MeshEngine(chosen, rows_of, SHAPE, 7, shard=int(shard))
    for name in names:
        kind = np.float64 if exact else np.float32
        start = Start(jax.tree.map(lambda x, kind=kind: np.asarray(x, kind), model(name)))
        slow, fast = (e.total(start, e.prepare(1, MEMBERS)) for e in (loop, mesh))
        assert slow[1:] == fast[1:]
        whole = [leaf for leaf in jax.tree.leaves(fast.total.delta) if leaf.ndim > 1]
        row = {
            "name": name,
            "lanes": mesh.lanes,
            "divided": sum(leaf.addressable_data(0).size < leaf.size for leaf in whole),
            "off": off(fast.total, slow.total),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
