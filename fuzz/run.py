"""Give damaged input to every parser, guided by coverage, and count what nobody handles.

    python -m fuzz.run                           a million inputs over all targets
    python -m fuzz.run --inputs 50000 recipe     so many for one target
    python -m fuzz.run --again                   forget the results of earlier runs

In:       targets by name; how many inputs there are for all together; seconds for each.
Out:      a table, and exit code 1 if a target met an exception that is none for users, a signal, a
          hang or too much memory. In `.fuzz/`: `results/NAME.json`, `found/NAME/` with the input
          and the log, `corpus/NAME/` with what the fuzzer has learned.
Promise:  every target runs in a process of its own under a memory limit and gets an equal share of
          the inputs, within its time; what slow ones leave goes to the fast ones. A run that was
          stopped goes on with the targets that it has not finished; a result counts only for the
          code that its target runs (`fuzz/code.py`). Mutations are guided by coverage of fedlm's
          code where atheris is installed (pip install 'fedlm[fuzz]'); without it they are random,
          and that is said.
Not here: the parsers and their seeds (`fuzz/targets.py`), what their code is (`fuzz/code.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fuzz.code import fingerprint

with contextlib.suppress(ImportError):
    import atheris  # an extra

HERE = Path(__file__).parent
INPUT_SECONDS = 20  # that one input may take
MEMORY_MB = 4096  # that a process may have
START_SECONDS = 300  # until the first input, on a busy machine
LEFT_OUT = 3  # the exit code of a target whose package is not installed
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
GUIDED = importlib.util.find_spec("atheris") is not None
# Names in the documents that targets read; the fuzzer puts them where they may hurt.
WORDS = ["null", "true", "1e400", "9" * 400, "9" * 5000, "[" * 3000, '{"a":' * 300, "\ud83d", "NaN"]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one target has gone through."""

    code: str  # the hash of the code that the target runs
    inputs: int = 0
    seconds: float = 0.0
    edges: int = 0  # places in the code that were reached; 0 without atheris
    unhandled: str = ""
    left_out: str = ""  # why the target could not be run

    def plus(self, other: Result) -> Result:
        """Return both runs of a target as one result."""
        return dataclasses.replace(
            other,
            inputs=self.inputs + other.inputs,
            seconds=self.seconds + other.seconds,
            edges=max(self.edges, other.edges),
        )


def main() -> int:
    """Run the targets that were named, or all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for all targets together")
    parser.add_argument("--seconds", type=int, default=240, help="the most for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE.parent / ".fuzz")
    parser.add_argument("--again", action="store_true", help="forget results of earlier runs")
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    # Before the targets are imported. Forks of a process with threads of its own could hang.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", **ONE_THREAD}
    with atheris.instrument_imports(include=["fedlm"]) if GUIDED else contextlib.nullcontext():
        from fuzz.targets import TARGETS
    unknown = sorted(set(asked.targets) - set(TARGETS))
    if unknown:
        parser.error(f"no target {unknown[0]!r}: there are {', '.join(TARGETS)}")
    results = run_all({n: TARGETS[n] for n in asked.targets or TARGETS}, asked)
    print(table(results), flush=True)
    return 1 if any(result.unhandled for result in results.values()) else 0


def run_all(
    targets: Mapping[str, Callable[[], Any]], asked: argparse.Namespace
) -> dict[str, Result]:
    """Give every target its share, then what slow ones left to those that were fast."""
    kind = "guided by coverage" if GUIDED else "random: install 'fedlm[fuzz]' for guided ones"
    names = list(targets)
    print(f"{len(names)} targets, {asked.inputs:,} inputs, mutations {kind}", flush=True)
    codes = {name: fingerprint(name) for name in names}
    results = {
        name: Result(code) if asked.again else known(asked.out, name, code)
        for name, code in codes.items()
    }
    missing, open_to_more, turn = asked.inputs, list(names), 0
    while missing > 0 and open_to_more:
        share = -(-missing // len(open_to_more))
        for name in open_to_more:
            wanted = share if turn == 0 else results[name].inputs + share
            left = asked.seconds * (turn + 1) - results[name].seconds
            if results[name].inputs < wanted and left >= 1 and not results[name].unhandled:
                bounds = (wanted - results[name].inputs, int(left), asked.seed + turn)
                found = run_child(name, targets[name], codes[name], asked.out, *bounds)
                results[name] = results[name].plus(found)
                keep(asked.out, name, results[name])
            said = results[name].unhandled or results[name].left_out or "nothing unhandled"
            print(f"{name:20} {results[name].inputs:>10,}  {said}", flush=True)
        missing = asked.inputs - sum(result.inputs for result in results.values())
        open_to_more = [
            name
            for name in open_to_more
            if results[name].seconds < 0.8 * asked.seconds * (turn + 1)
            and not (results[name].unhandled or results[name].left_out)
        ]
        turn += 1
    return results


def table(results: dict[str, Result]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| target | inputs | seconds | edges | unhandled |", "|---|---|---|---|---|"]
    for name, found in results.items():
        said = found.unhandled or found.left_out or "none"
        edges = f"{found.edges:,}" if found.edges else "-"
        lines.append(f"| {name} | {found.inputs:,} | {found.seconds:.0f} | {edges} | {said} |")
    total, spent = (
        sum(found.inputs for found in results.values()),
        sum(found.seconds for found in results.values()),
    )
    failed = sum(bool(found.unhandled) for found in results.values())
    left = sum(bool(found.left_out) for found in results.values())
    said = f"{failed or 'none'}{f'; {left} left out' if left else ''}"
    lines.append(f"| {len(results)} targets | {total:,} | {spent:.0f} | | {said} |")
    return "\n".join(lines)


# ---- results on disk -------------------------------------------------------------------------


def known(out: Path, name: str, code: str) -> Result:
    """Return the result of an earlier run with the same code, or an empty one."""
    try:
        found = Result(**json.loads((out / "results" / f"{name}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return Result(code)
    return found if found.code == code else Result(code)


def keep(out: Path, name: str, result: Result) -> None:
    """Write down the result of a target."""
    folder = out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(result)) + "\n"
    (folder / f"{name}.part").write_text(text, encoding="utf-8")
    os.replace(folder / f"{name}.part", folder / f"{name}.json")


# ---- a process per target --------------------------------------------------------------------


def run_child(
    name: str, make: Callable[[], Any], code: str, out: Path, inputs: int, seconds: int, seed: int
) -> Result:
    """Fuzz a target in a process of its own, a fork: the imports take longer than many targets."""
    began = time.monotonic()
    # In memory where the system has such a folder: a disk would take most of the time.
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="fedlm-fuzz-", dir=root) as folder,
        tempfile.TemporaryFile() as log,
    ):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.environ["FEDLM_FUZZ_ROOT"] = folder
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            fuzz_one(name, make, seconds, inputs, seed, out)
        ended = _wait(child, seconds + INPUT_SECONDS + START_SECONDS)
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
    done = re.findall(r"^Done (\d+) (?:runs|inputs)", text, re.M) or re.findall(
        r"^#(\d+)", text, re.M
    )
    edges = re.findall(r"\bcov: (\d+)", text)
    result = Result(
        code,
        inputs=int(done[-1]) if done else 0,
        seconds=round(time.monotonic() - began, 1),
        edges=int(edges[-1]) if edges else 0,
    )
    if ended == LEFT_OUT:
        return dataclasses.replace(result, inputs=0, left_out=text.strip().splitlines()[-1][:120])
    if ended == 0 and result.inputs:
        return result
    found = out / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    (found / "log.txt").write_text(text, encoding="utf-8")
    last = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    said = (last or text.splitlines() or ["nothing"])[-1].strip()[:120]
    said = "hang" if ended is None else f"exit {ended}: {said}"
    return dataclasses.replace(result, unhandled=f"{said} ({found}/log.txt)")


def _wait(child: int, seconds: float) -> int | None:
    """Return how a process ended; kill it after so many seconds, and return None."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def fuzz_one(
    name: str, make: Callable[[], Any], seconds: int, inputs: int, seed: int, out: Path
) -> NoReturn:
    """Fuzz a target until the time or the inputs are used up, and end this process."""
    try:
        most = MEMORY_MB << 20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        # Targets import what belongs to an extra themselves; it is to be seen by the fuzzer too.
        with atheris.instrument_imports(include=["fedlm"]) if GUIDED else contextlib.nullcontext():
            target = make()
        found = out / "found" / name
        found.mkdir(parents=True, exist_ok=True)
        if GUIDED:
            _guided(target, seconds, inputs, seed, found, out / "corpus" / name)
        else:
            _random(target, seconds, inputs, f"{seed} {name}", found)
    except ModuleNotFoundError as error:
        if not (error.name or "fedlm").startswith(("fedlm", "fuzz")):
            print(f"left out: {error.name} is not installed", flush=True)
            os._exit(LEFT_OUT)
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    else:
        os._exit(0)
    os._exit(1)


def _guided(
    target: Any, seconds: int, inputs: int, seed: int, found: Path, learned: Path
) -> NoReturn:
    folder = Path(tempfile.mkdtemp(prefix="seeds-", dir=os.environ["FEDLM_FUZZ_ROOT"]))
    for number, raw in enumerate(target.seeds):
        (folder / f"seed-{number}").write_bytes(raw)
    words = folder.with_suffix(".words")
    words.write_text("".join(f"{_quoted(word)}\n" for word in WORDS), encoding="ascii")
    learned.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-runs={inputs}",
        f"-seed={seed + 1}",  # 0 would be drawn
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-dict={words}",
        f"-artifact_prefix={found}/",
        "-max_len=20000",
        "-print_final_stats=1",
    ]
    folders = [str(learned), str(folder)]
    atheris.Setup([sys.argv[0], *options, *folders], lambda data: target.try_one(data) and None)
    atheris.Fuzz()  # ends the process
    raise AssertionError


def _quoted(word: str) -> str:
    """Return a word of libFuzzer's dictionary, of at most 128 bytes."""
    raw = word.encode("utf-8", "replace")[:128]
    return '"' + "".join(f"\\x{byte:02x}" for byte in raw) + '"'


def _random(target: Any, seconds: int, inputs: int, seed: str, found: Path) -> None:
    rng, until, count = random.Random(seed), time.monotonic() + seconds, 0
    while count != inputs and time.monotonic() < until:
        data = mutated(rng, target.seeds)
        try:
            target.try_one(data)
        except BaseException:
            (found / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
            print(f"#{count + 1}", flush=True)
            raise
        count += 1
    print(f"Done {count} inputs", flush=True)


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a seed with a few random changes: bits, cuts, copies, numbers and words."""
    data = bytearray(rng.choice(list(seeds)))
    for _ in range(rng.choice((1, 1, 2, 4, 16, 64))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 2, 8, 64)))
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:to]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
        elif kind == 3:
            start = rng.randrange(len(data) + 1)
            data[at:to] = data[start : start + (to - at)]
        elif kind == 4:
            data[at:to] = rng.choice(WORDS).encode("utf-8", "replace")
        else:
            data[at:at] = str(rng.choice((-1, 0, 1 << 31, 1 << 63, 1e308))).encode()
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
