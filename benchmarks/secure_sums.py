"""Secure sums: CPU, seconds and bytes by nodes, megabytes and absences, with and without masks.

    python -m benchmarks.secure_sums                     # 4, 16, 64 nodes x 1, 10, 100 MB: long
    python -m benchmarks.secure_sums --nodes 4,16 --megabytes 1

All nodes and the server run one after the other in this process, so that seconds are CPU seconds of
one core. A row holds what one node needs on average (all its five answers), what the server needs,
and what one node sends over the same vector, packed, without masks. Absent nodes leave after they
shared and before they send their vector: the dearest moment for the server, which then makes the
masks of each absent node with every survivor.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections import defaultdict

import numpy as np

from fedlm.secure import keys, local, messages, node, server
from fedlm.secure.terms import Session
from fedlm.wire.frame import Reader
from fedlm.wire.pack import pack, packed_bytes, unpack


def measured(nodes: int, megabytes: float, bits: int, absent: float, neighbors: int) -> dict:
    """Run one sum and return its costs."""
    size = int(megabytes * 8e6 / bits)
    members, identities = local.made_up_members(nodes)
    terms = local.terms_for(members, size, bits, neighbors=neighbors)
    gone = min(int(absent * nodes), nodes - terms.threshold)
    session = Session(terms, secrets.token_hex(16), 0, 0)
    rng = np.random.default_rng(0)
    vector = rng.integers(0, 2**bits // nodes, size).astype(np.uint32)
    spent: dict[str, float] = defaultdict(float)
    sent: dict[str, int] = defaultdict(int)

    def timed(who, call, *arguments):
        began = time.process_time()
        found = call(*arguments)
        spent[who] += time.process_time() - began
        return found

    states = {i: node.begin(session, identities[i]) for i in range(nodes)}

    def answers(step, questions):
        """Yield the answers of a step; the server's time goes on between them."""
        for place, question in sorted(questions.items()):
            keys.verified.cache_clear()  # a real node has not seen what its peers checked
            began = time.process_time()
            state, identity = states[place], identities[place]
            if step == "keys":
                answer = node.keys(identity, state)
            elif step == "share":
                states[place], answer = node.share(state, question)
            elif step == "mask":
                states[place], answer = node.mask(state, question, vector)
            elif step == "sign":
                states[place], answer = node.sign(identity, state, question)
            else:
                states[place], answer = node.reveal(state, question)
            took = time.process_time() - began
            spent["nodes"] += took
            spent["server"] -= took
            sent[step] += len(answer)
            yield place, answer

    everybody = dict.fromkeys(range(nodes), b"")
    state, question = timed("server", server.take_keys, session, answers("keys", everybody))
    asked = dict.fromkeys(everybody, question)
    state, each = timed("server", server.take_shares, state, answers("share", asked))
    there = {place: each[place] for place in range(nodes - gone)}
    state, question = timed("server", server.take_masked, state, answers("mask", there))
    asked = dict.fromkeys(there, question)
    state, question = timed("server", server.take_signatures, state, answers("sign", asked))
    asked = dict.fromkeys(there, question)
    state, total = timed("server", server.take_revealed, state, answers("reveal", asked))
    assert (total == (vector.astype(np.uint64) * len(there)) % 2**bits).all()
    plain = _plain(vector, bits, len(there))
    per_node = sum(sent.values()) / nodes
    payload = packed_bytes(size, bits)
    return {
        "nodes": nodes,
        "megabytes": megabytes,
        "bits": bits,
        "neighbors": neighbors or nodes - 1,
        "threshold": terms.threshold,
        "absent": gone,
        "node_cpu": round(spent["nodes"] / nodes, 3),
        "server_cpu": round(spent["server"], 3),
        "plain_node_cpu": round(plain[0], 3),
        "plain_server_cpu": round(plain[1], 3),
        "vector_bytes_over_plain": round(messages.masked_bytes(terms) / payload, 4),
        "sent_bytes_over_plain": round(per_node * nodes / max(1, len(there)) / payload, 4),
        "other_bytes": int(per_node - sent["mask"] / nodes),
    }


def _plain(vector: np.ndarray, bits: int, count: int) -> tuple[float, float]:
    """Return the CPU of one node and of the server without masks: pack; unpack and add."""
    began = time.process_time()
    body = pack(vector, bits)
    packed = time.process_time() - began
    began = time.process_time()
    total = np.zeros(len(vector), np.uint32)
    total += unpack(Reader(memoryview(body), len(body)), len(vector), bits)
    return packed, (time.process_time() - began) * count


def main() -> None:
    """Print a line per case, as a table and as JSON."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--nodes", default="4,16,64")
    words.add_argument("--megabytes", default="1,10,100")
    words.add_argument("--absent", default="0,0.1,0.3")
    words.add_argument("--bits", type=int, default=20)
    words.add_argument("--neighbors", type=int, default=0)
    given = words.parse_args()
    print("nodes    MB absent  node CPU s (plain)  server CPU s (plain)  payload  all bytes")
    for nodes in map(int, given.nodes.split(",")):
        for megabytes in map(float, given.megabytes.split(",")):
            for absent in map(float, given.absent.split(",")):
                neighbors = given.neighbors if given.neighbors < nodes else 0
                row = measured(nodes, megabytes, given.bits, absent, neighbors)
                print(
                    f"{nodes:5d} {megabytes:5g} {row['absent']:6d}  "
                    f"{row['node_cpu']:10.3f} ({row['plain_node_cpu']:.3f})  "
                    f"{row['server_cpu']:12.3f} ({row['plain_server_cpu']:.3f})  "
                    f"{row['vector_bytes_over_plain']:7.4f}  {row['sent_bytes_over_plain']:9.4f}",
                    flush=True,
                )
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
