"""Several processes, on one machine or many, that run one experiment.

In:       where process 0 listens, how many processes there are, which one this is.
Out:      JAX over the devices of all of them; a broadcast from process 0; an agreement of all.
Promise:  whoever fails ends all, with the sentence of the one that failed; one that dies or
          stops answering ends the others within `patience` seconds; alone, nothing changes.
Not here: lanes (`mesh.py`), who writes what (`cli/train.py`).

JAX's coordination service watches over the processes, but its way to report a loss is to abort
the process; `_last_words` turns that abort into a sentence and exit code 2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedlm.core.errors import ConfigError, EngineError, FedlmError, require

# What JAX reads when it finds itself under SLURM.
SLURM = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")
FAILED, HEARD = "fedlm/failed", "fedlm/heard"
LOST = (
    "another process of this run is gone or no longer answers. The last checkpoint is whole: "
    "start all processes again with --resume."
)
# Parts of JAX's error messages when a connection breaks; these errors have no own class.
BROKEN = ("Gloo", "NCCL", "oordination service", "Barrier failed", "UNAVAILABLE")
# A process that waits for a long evaluation of process 0 waits this long; losses show earlier.
LONGEST_WAIT = 24 * 3600
PIECE = 1 << 26  # bytes of a broadcast at a time


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """One process among others; without a coordinator, SLURM says the rest."""

    coordinator: str | None = None
    processes: int = 1
    process: int = 0
    patience: int = 60


def place_of(
    coordinator: str | None, processes: int | None, process: int | None, patience: int
) -> ProcessPlace | None:
    """Check the place that the command line asks for; return None if this process is alone."""
    if coordinator is None:
        for name, value in (("--processes", processes), ("--process", process)):
            require(value is None, name, value, "--coordinator beside it")
        return None
    require(patience >= 1, "--patience", patience, "at least one second")
    if coordinator == "auto":
        for name, value in (("--processes", processes), ("--process", process)):
            require(value is None, name, value, "none beside --coordinator auto: SLURM tells it")
        missing = [f"SLURM_{name}" for name in SLURM if f"SLURM_{name}" not in os.environ]
        if missing:
            raise ConfigError(
                f"--coordinator = 'auto': {missing[0]} is not set. Start with srun, or give "
                "--coordinator HOST:PORT --processes N --process I."
            )
        return ProcessPlace(patience=patience)
    host, colon, port = coordinator.rpartition(":")
    fine = bool(host and colon) and port.isdecimal() and 0 < int(port) < 1 << 16
    require(fine, "--coordinator", coordinator, "HOST:PORT, or auto under SLURM")
    count = processes or 0
    require(count >= 1, "--processes", processes, "how many there are, at least 1")
    number = -1 if process is None else process
    wanted = f"a number from 0 to {count - 1}, another one for each process"
    require(0 <= number < count, "--process", process, wanted)
    return ProcessPlace(coordinator=coordinator, processes=count, process=number, patience=patience)


def alone() -> bool:
    return jax.process_count() == 1


def first_process() -> bool:
    """Return whether this is the process that writes and decides."""
    return jax.process_index() == 0


@contextlib.contextmanager
def joined_processes(place: ProcessPlace | None, say: Callable[[str], None]) -> Iterator[None]:
    """Join the other processes for a block of code; an error inside ends all processes."""
    if place is None:
        yield
        return
    _stdout_is_ours()
    words = _last_words(_absent(place))
    try:
        _connect(place)
    except FedlmError as error:
        say(f"fedlm: {error}")
        _exit(error.exit_code)
    words.value = f"fedlm: {LOST}\n".encode()
    watch = _Watch(say)
    try:
        yield
        meet()
    except BaseException as error:
        watch.fail(error)
    watch.stop()
    jax.distributed.shutdown()


# ---- together ------------------------------------------------------------------------------


def broadcast(data: bytes = b"") -> bytes:
    """Return process 0's bytes at every process."""
    if alone():
        return data
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)] if first_process() else []
    count, last = _sum(np.array([len(pieces), len(pieces[-1]) if pieces else 0], np.int32))
    sizes = [*[PIECE] * (int(count) - 1), int(last)][: int(count)]
    rows = pieces if first_process() else [bytes(size) for size in sizes]
    return b"".join(_sum(np.frombuffer(row, np.uint8)).tobytes() for row in rows)


def agree(wish: bool) -> bool:
    """Return whether any process says yes, the same answer at every process."""
    return wish if alone() else int(_sum(np.int32(wish))) > 0


def meet() -> None:
    """Wait until every process is here, without collectives, which would time out."""
    if alone():
        return
    _Watch.meetings += 1
    name = f"fedlm/meet/{_Watch.meetings}"
    _interruptible(lambda: _client().wait_at_barrier(name, LONGEST_WAIT * 1000))


def _sum(value: Any) -> np.ndarray:
    """Sum an array of equal shape and type over processes."""
    meet()
    firsts = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[i] for i in sorted(firsts)]), ("processes",))
    per_process = NamedSharding(mesh, P("processes"))
    row = np.asarray(value)[None]
    rows = jax.make_array_from_process_local_data(per_process, row, (len(firsts), *row.shape[1:]))
    total = jax.jit(_add, out_shardings=NamedSharding(mesh, P()))(rows)
    return np.asarray(total.addressable_data(0))


def _add(rows: Any) -> Any:
    return jnp.sum(rows, axis=0, dtype=rows.dtype)


def _client() -> Any:
    """Return the client of the coordination service; JAX has no public name for it."""
    # Here, so that fedlm can be imported where a later JAX has no such module.
    from jax._src import distributed

    return distributed.global_state.client


def _interruptible(work: Callable[[], None]) -> None:
    """Wait on a thread, so that Ctrl-C still interrupts."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if errors:
        raise errors[0]


# ---- coming together -----------------------------------------------------------------------


def _absent(place: ProcessPlace) -> str:
    return (
        f"not all processes came within {place.patience} seconds. Start all of them, each with "
        "the same --coordinator and --processes, or raise --patience."
    )


def _connect(place: ProcessPlace) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself, which here asks for a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    asked: dict[str, Any] = {"cluster_detection_method": "slurm"}
    if place.coordinator is not None:
        _reach(place, place.coordinator)
        asked = {
            "coordinator_address": place.coordinator,
            "num_processes": place.processes,
            "process_id": place.process,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **asked,
            initialization_timeout=place.patience,
            heartbeat_timeout_seconds=place.patience,
            shutdown_timeout_seconds=place.patience,
        )
        _ = jax.devices()
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"the processes could not be joined_processes: {error}.") from None


def _reach(place: ProcessPlace, coordinator: str) -> None:
    """Check the coordinator's address before JAX does, which would abort the process."""
    host, _, port = coordinator.rpartition(":")
    if place.process == 0:
        try:
            with socket.create_server(("", int(port))):
                return
        except OSError as error:
            raise ConfigError(
                f"--coordinator = {coordinator!r}: port {port} is not free here ({error.strerror})."
                " Give another one to all processes."
            ) from None
    deadline = time.monotonic() + place.patience
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=place.patience):
                return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--coordinator = {coordinator!r}: not reached within {place.patience} seconds "
                f"({reason}). Is process 0 running there?"
            ) from None
        time.sleep(0.2)


def _stdout_is_ours() -> None:
    """Send the output of C libraries (Gloo) to stderr, because stdout holds results alone."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)


# ---- falling apart -------------------------------------------------------------------------


class _Watch:
    """A watch that learns of failed processes, and reports the failure of this one."""

    meetings = 0

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._over, self._leaving = say, threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="fedlm-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._over.wait(0.5):
            told = _told()
            if told:
                self._leave(told, FedlmError.exit_code)

    def fail(self, error: BaseException) -> None:
        """End this process, and the others by telling them why."""
        code = error.exit_code if isinstance(error, FedlmError) else 1
        sentence = str(error)
        if isinstance(error, KeyboardInterrupt):
            code, sentence = 130, "stopped at once"
        elif any(word in str(error) for word in BROKEN):
            time.sleep(1.0)  # the one that failed may be about to say why
            code, sentence = EngineError.exit_code, LOST
        elif not isinstance(error, FedlmError):
            traceback.print_exception(error)
        self._leave(_told() or _tell(sentence) or sentence, code)

    def _leave(self, sentence: str, code: int) -> None:
        self._leaving.acquire()  # never released: who comes second waits for the end
        self._say(f"fedlm: {sentence}")
        client, me = _client(), jax.process_index()
        with contextlib.suppress(Exception):
            client.key_value_set(f"{HEARD}/{me}", "")
        others = [i for i in range(jax.process_count()) if i != me] if first_process() else []
        # The service ends with process 0, so that one leaves last.
        deadline = time.monotonic() + 5.0
        for other in others:
            left = max(1, int(1000 * (deadline - time.monotonic())))
            with contextlib.suppress(Exception):
                client.blocking_key_value_get(f"{HEARD}/{other}", left)
        _exit(code)


def _told() -> str:
    """Return the message of a failed process, or an empty string."""
    try:
        return str(_client().key_value_try_get(FAILED))
    except Exception:
        return ""  # nothing was said, or the service is gone: `_last_words` speaks then


def _tell(sentence: str) -> str:
    """Publish why this process fails, unless another one was faster."""
    whole = f"process {jax.process_index()}: {sentence}" if sentence != LOST else LOST
    try:
        _client().key_value_set(FAILED, whole)
        return whole
    except Exception:
        return ""


def _last_words(sentence: str) -> Any:
    """Return a buffer whose text goes last to stderr, with exit code 2, if JAX aborts."""
    words = ctypes.create_string_buffer(f"fedlm: {sentence}\n".encode(), 4096)

    def speak(number: int) -> None:
        os.write(2, words.value)
        os._exit(FedlmError.exit_code)

    # Python's own handlers run between bytecodes, which an abort never reaches.
    global _HANDLER
    _HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(speak)
    ctypes.CDLL(None).signal(signal.SIGABRT, _HANDLER)
    return words


_HANDLER: Any = None  # kept: the system calls it by address


def _exit(code: int) -> None:
    """Exit without JAX's shutdown, which would wait for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
