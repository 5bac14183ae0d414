"""Secure sums: CPU, seconds and bytes by nodes, megabytes and absences, with and without masks.

    python -m benchmarks.secure_sums --out secure_sums.jsonl   # 4, 16, 64 nodes x 1, 10, 100 MB
    python -m benchmarks.secure_sums --out secure_sums.jsonl --table
    python -m benchmarks.secure_sums --nodes 4,16 --megabytes 1

All nodes and the server run one after the other in this process; times are CPU seconds of one core.
A row holds what one node needs on average (all its five answers), what the server needs, and both
together: the seconds of a round in which every node has a core and the network costs nothing.
Absent nodes leave after they shared and before they send their vector: the dearest moment for the
server, which then makes the masks of each absent node with every survivor.

Memory: vectors are made, masked and added one at a time, so that 64 nodes of 100 MB need what one
node and the server need. Time: above `SAMPLED` megabytes over all nodes only the first `SAMPLE`
nodes mask their vector, and the server adds the last of those again in place of the others'. What
nodes and server do is the same; the sum is then not compared with the right one, as it is in all
other rows.

With `--out` a row goes to the file as soon as it is measured, and rows that are there are not
measured again.
"""

from __future__ import annotations

import argparse
import json
import resource
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedlm.secure import keys, local, messages, node, server
from fedlm.secure.terms import Session, Terms
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, packed_bytes, unpack

SAMPLED = 2000.0  # megabytes over all nodes
SAMPLE = 8
CASE = ("nodes", "megabytes", "bits", "neighbors", "absent")
HEAD = (
    "| nodes | MB per node | absent | one node | without masks | server | without masks "
    "| seconds of a round | MB sent per node | over plain |\n|" + "---|" * 10
)


class Sum:
    """One sum, and what it cost."""

    def __init__(self, nodes: int, megabytes: float, bits: int, absent: float, neighbors: int):
        self.size = int(megabytes * 8e6 / bits)
        members, self.identities = local.made_up_members(nodes)
        terms = Terms(
            members=members,
            threshold=max(nodes // 2 + 1, -(-2 * nodes // 3)),
            bits=bits,
            size=self.size,
            neighbors=neighbors,
        )
        self.gone = min(int(absent * nodes), nodes - terms.threshold)
        self.session = Session(terms, secrets.token_hex(16), 0, 0)
        rng = np.random.default_rng(0)
        self.vector = rng.integers(0, 2**bits // nodes, self.size, np.uint32)
        self.sample = SAMPLE if nodes * megabytes > SAMPLED else nodes
        self.states = [node.begin(self.session, identity) for identity in self.identities]
        self.spent: dict[str, float] = defaultdict(float)
        self.sent: dict[str, int] = defaultdict(int)
        self.last = b""  # the masked vector that stands for those of nodes that are not sampled

    def run(self) -> np.ndarray:
        """Run all five steps; return the opened sum."""
        everybody = range(len(self.identities))
        began = time.process_time()
        state, question = server.take_keys(
            self.session, self.answers("keys", dict.fromkeys(everybody, b""))
        )
        asked = dict.fromkeys(everybody, question)
        state, each = server.take_shares(state, self.answers("share", asked))
        there = {place: each[place] for place in everybody[: len(everybody) - self.gone]}
        state, question = server.take_masked(state, self.answers("mask", there))
        asked = dict.fromkeys(there, question)
        state, question = server.take_signatures(state, self.answers("sign", asked))
        asked = dict.fromkeys(there, question)
        state, total = server.take_revealed(state, self.answers("reveal", asked))
        self.spent["server"] = time.process_time() - began - sum(self.spent.values())
        return total

    def answers(self, step: str, questions: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield the answers of a step; what passes between them is the server's time."""
        for place, question in sorted(questions.items()):
            keys.verified.cache_clear()  # a real node has not seen what its peers checked
            began = time.process_time()
            sampled = step != "mask" or place < self.sample
            answer = (self.answer if sampled else self.repeated)(step, place, question)
            self.spent[step if sampled else "nobody"] += time.process_time() - began
            self.sent[step] += len(answer)
            yield place, answer

    def answer(self, step: str, place: int, question: bytes) -> bytes:
        """Return a node's answer."""
        state, identity = self.states[place], self.identities[place]
        if step == "keys":
            return node.keys(identity, state)
        if step == "share":
            self.states[place], found = node.share(state, question)
        elif step == "mask":
            self.states[place], found = node.mask(state, question, self.vector)
            self.last = found
        elif step == "sign":
            self.states[place], found = node.sign(identity, state, question)
        else:
            self.states[place], found = node.reveal(state, question)
        return found

    def repeated(self, step: str, place: int, question: bytes) -> bytes:
        """Return the masked vector of a sampled node in the name of another."""
        self.states[place] = replace(self.states[place], shares=question, vector=b"not sampled")
        at = messages.HEAD
        return self.last[:at] + place.to_bytes(2, "big") + self.last[at + 2 :]


def measured(nodes: int, megabytes: float, bits: int, absent: float, neighbors: int) -> dict:
    """Run one sum and return its costs."""
    made = Sum(nodes, megabytes, bits, absent, neighbors)
    began = time.monotonic()
    total = made.run()
    wall, there = time.monotonic() - began, nodes - made.gone
    if made.sample == nodes:
        assert (total == (made.vector.astype(np.uint64) * there) % 2**bits).all()
    plain = _plain(made.vector, bits, there)
    payload, masked = packed_bytes(made.size, bits), made.sent.pop("mask") / there
    other = sum(made.sent.values()) / nodes
    asked = {"keys": nodes, "share": nodes, "mask": min(there, made.sample)}
    of_node = sum(made.spent[step] / asked.get(step, there) for step in local.STEPS)
    return {
        "nodes": nodes,
        "megabytes": megabytes,
        "bits": bits,
        "neighbors": neighbors,
        "absent": absent,
        "left": made.gone,
        "threshold": made.session.terms.threshold,
        "sampled": min(nodes, made.sample),
        "node_cpu": round(of_node, 4),
        "server_cpu": round(made.spent["server"], 4),
        "plain_node_cpu": round(plain[0], 4),
        "plain_server_cpu": round(plain[1], 4),
        "sent_bytes": int(masked + other),
        "plain_bytes": payload,
        "bytes_over_plain": round((masked + other) / payload, 4),
        "wall_seconds": round(wall, 1),
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }


def _plain(vector: np.ndarray, bits: int, count: int) -> tuple[float, float]:
    """Return the CPU of one node and of the server without masks: pack; unpack and add.

    The best of three, because one message stands for all, and the first one finds no memory ready.
    """
    total, packed, added = np.ones(len(vector), np.uint32), [], []
    for _ in range(3):
        began = time.process_time()
        body = pack(vector, bits)
        packed.append(time.process_time() - began)
        began = time.process_time()
        total += unpack(Reader(memoryview(body), len(body)), len(vector), bits)
        added.append(time.process_time() - began)
    return min(packed), min(added) * count


def line(row: dict) -> str:
    """Return a row of the table in the docs."""
    cells = [
        f"{row['nodes']}",
        f"{row['megabytes']:g}",
        f"{row['left']}",
        f"{row['node_cpu']:.3g} s" + " (8 nodes)" * (row["sampled"] < row["nodes"]),
        f"{row['plain_node_cpu']:.3g} s",
        f"{row['server_cpu']:.3g} s",
        f"{row['plain_server_cpu']:.3g} s",
        f"{row['node_cpu'] + row['server_cpu']:.3g} "
        f"({row['plain_node_cpu'] + row['plain_server_cpu']:.3g})",
        f"{row['sent_bytes'] / 1e6:.3f}",
        f"{row['bytes_over_plain']:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure every case that is not in the file yet, and print its row."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--nodes", default="4,16,64")
    words.add_argument("--megabytes", default="1,10,100")
    words.add_argument("--absent", default="0,0.1,0.3")
    words.add_argument("--bits", type=int, default=20)
    words.add_argument("--neighbors", type=int, default=0)
    words.add_argument("--out", type=Path)
    words.add_argument("--table", action="store_true", help="print the rows of --out alone")
    given = words.parse_args()
    known = {}
    if given.out is not None and given.out.exists():
        rows = [json.loads(text) for text in given.out.read_text().splitlines()]
        known = {tuple(row[name] for name in CASE): row for row in rows}
    print(HEAD)
    if given.table:
        for case in sorted(known):
            print(line(known[case]))
        return
    for nodes in map(int, given.nodes.split(",")):
        for megabytes in map(float, given.megabytes.split(",")):
            for absent in map(float, given.absent.split(",")):
                neighbors = given.neighbors if given.neighbors < nodes else 0
                case = (nodes, megabytes, given.bits, neighbors, absent)
                if case not in known:
                    known[case] = measured(nodes, megabytes, given.bits, absent, neighbors)
                    if given.out is not None:
                        with open(given.out, "a", encoding="utf-8") as file:
                            file.write(json.dumps(known[case]) + "\n")
                print(line(known[case]), flush=True)


if __name__ == "__main__":
    main()
