"""Run every fuzz target for a while, guided by coverage, and count.

    python -m fuzz.run                      all targets, a minute each
    python -m fuzz.run --seconds 300 recipe journal
    python -m fuzz.run --runs 50000         so many inputs per target

In:       targets by name; seconds or inputs for each.
Out:      a table of inputs, and exit code 1 if a target met an exception that is none for users, a
          signal, a hang or too much memory; the input is kept in `fuzz/found/NAME/`.
Promise:  mutations are guided by coverage of fedlm's code where atheris is installed (pip install
          'fedlm[fuzz]'); without it they are random, and that is said.
Not here: the parsers and their seeds (`fuzz/targets.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
FOUND = HERE / "found"
INPUT_SECONDS, MEMORY_MB = 120, 4096
GUIDED = importlib.util.find_spec("atheris") is not None
# Names in the documents that targets read; the fuzzer puts them where they may hurt.
WORDS = ["null", "true", "1e400", "9" * 400, "9" * 5000, "[" * 3000, '{"a":' * 300, "\ud83d", "NaN"]


def main() -> int:
    """Run the targets that were named, or all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--runs", type=int, default=-1, help="inputs for each target; -1: no end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        fuzz_one(asked.targets[0], asked.seconds, asked.runs, asked.seed)
        return 0
    from fuzz.targets import TARGETS

    names = asked.targets or list(TARGETS)
    kind = "guided by coverage" if GUIDED else "random: install 'fedlm[fuzz]' for guided ones"
    print(f"{len(names)} targets, mutations {kind}")
    total, failed = 0, []
    for name in names:
        count, ended = run_child(name, asked)
        total += count
        if ended:
            failed.append(name)
        print(f"{name:18} {count:>12,}  {ended or 'nothing unhandled'}", flush=True)
    print(f"{'all':18} {total:>12,}  {len(failed)} with findings")
    return 1 if failed else 0


def run_child(name: str, asked: argparse.Namespace) -> tuple[int, str]:
    """Fuzz a target in a process of its own; return how many inputs there were, and what it met."""
    command = [sys.executable, "-m", "fuzz.run", "--child", name, "--seconds", str(asked.seconds)]
    command += ["--runs", str(asked.runs), "--seed", str(asked.seed)]
    # In memory where the system has such a folder: a disk would take most of the time.
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="fedlm-fuzz-", dir=root) as folder,
        tempfile.TemporaryFile() as log,
    ):
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "FEDLM_FUZZ_ROOT": folder}
        code = subprocess.run(command, stdout=log, stderr=log, env=env).returncode
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
    done = re.findall(r"^Done (\d+) (?:runs|inputs)", text, re.M) or re.findall(
        r"^#(\d+)", text, re.M
    )
    count = int(done[-1]) if done else 0
    if code == 0 and count:
        return count, ""
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    (FOUND / name / "log.txt").write_text(text, encoding="utf-8")
    last = [line for line in text.splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
    said = (last or text.splitlines() or ["nothing"])[-1].strip()[:120]
    return count, f"exit {code}: {said} (fuzz/found/{name}/log.txt)"


def fuzz_one(name: str, seconds: int, runs: int, seed: int) -> None:
    """Fuzz a target in this process until the time or the inputs are used up."""
    if GUIDED:
        _guided(name, seconds, runs, seed)
    else:
        _random(name, seconds, runs, seed)


def _guided(name: str, seconds: int, runs: int, seed: int) -> None:
    import atheris  # an extra

    with atheris.instrument_imports(include=["fedlm"]):
        from fuzz.targets import TARGETS
    target = TARGETS[name]()
    folder = Path(tempfile.mkdtemp(prefix="seeds-", dir=os.environ.get("FEDLM_FUZZ_ROOT")))
    for number, raw in enumerate(target.seeds):
        (folder / f"seed-{number}").write_bytes(raw)
    words = folder.with_suffix(".words")
    words.write_text("".join(f"{_quoted(word)}\n" for word in WORDS), encoding="ascii")
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-runs={runs}",
        f"-seed={seed + 1}",  # 0 would be drawn
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-dict={words}",
        f"-artifact_prefix={FOUND / name}/",
        "-max_len=20000",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder)], lambda data: target.try_one(data) and None)
    atheris.Fuzz()  # ends the process


def _quoted(word: str) -> str:
    """Return a word of libFuzzer's dictionary, of at most 128 bytes."""
    raw = word.encode("utf-8", "replace")[:128]
    return '"' + "".join(f"\\x{byte:02x}" for byte in raw) + '"'


def _random(name: str, seconds: int, runs: int, seed: int) -> None:
    from fuzz.targets import TARGETS

    target, rng = TARGETS[name](), random.Random(f"{seed} {name}")
    until, count = time.monotonic() + seconds, 0
    while count != runs and time.monotonic() < until:
        data = mutated(rng, target.seeds)
        try:
            target.try_one(data)
        except BaseException:
            (FOUND / name).mkdir(parents=True, exist_ok=True)
            (FOUND / name / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
            print(f"#{count + 1}", flush=True)
            raise
        count += 1
    print(f"Done {count} inputs", flush=True)


def mutated(rng: random.Random, seeds: list[bytes] | tuple[bytes, ...]) -> bytes:
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
