"""How many lanes this machine gives.

In:       the recipe's `run.devices`.
Out:      JAX, told to show that many CPU devices.
Promise:  called before JAX is first used, or it says why it cannot.
Not here: what lanes do (`engine/mesh.py`).
"""

from __future__ import annotations

import os

import jax

from fedlm.core.errors import ConfigError


def use_devices(count: int) -> None:
    """Shows `count` CPU devices, or one a core for zero; accelerators are used as they are."""
    wanted = count or len(os.sched_getaffinity(0))
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        if jax.device_count() != wanted:
            raise ConfigError(
                f"run.devices = {count}: JAX already runs with {jax.device_count()} devices "
                "in this process. Set it before the first use of JAX."
            ) from None
