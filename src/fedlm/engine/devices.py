"""How many lanes this machine gives.

In:       the recipe's `run.devices`.
Out:      JAX, told to show that many CPU devices and to keep what it compiles.
Promise:  called before JAX is first used, or it says why it cannot.
Not here: what lanes do (`engine/mesh.py`), where programs are kept (`engine/programs.py`).
"""

from __future__ import annotations

import os

import jax

from fedlm.core.errors import ConfigError
from fedlm.engine.programs import programs_folder

# Programs that took so many seconds to compile are kept. A fresh model is made by dozens of small
# ones: each takes a tenth of a second to compile, and some milliseconds to load.
KEPT_FROM = 0.02


def use_devices(count: int = 0) -> None:
    """Show JAX `count` CPU devices, or one per core for zero; leave accelerators as they are.

    Call it before anything else uses JAX; in a notebook, in the first cell.

    Args:
      count: the number of lanes that train members side by side.

    Raises:
      ConfigError: JAX already runs with another number of devices.

    >>> import jax
    >>> use_devices(jax.device_count())  # as many as there are: nothing changes
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = programs_folder()
        jax.config.update("jax_compilation_cache_dir", str(folder) if folder else None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_FROM)
    wanted = count or len(os.sched_getaffinity(0))
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        if jax.device_count() != wanted:
            raise ConfigError(
                f"run.devices = {count}: JAX already runs with {jax.device_count()} devices "
                "in this process. Set it before the first use of JAX."
            ) from None
