"""Merges of byte-pair encoding, learned from counted words.

In:       words in the byte alphabet with their counts, special tokens, a number of entries.
Out:      the vocabulary and the merges, in order.
Promise:  what the `tokenizers` library learns from a text in which each word stands so often.
Not here: words of a text and the finished tokenizer (`tokenizer.py`).

The library counts words itself, one by one, at 4 to 9 MB of text per second; it takes no counts.
Learning from counts costs the same whatever the length of the text: it grows with distinct words.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

SHIFT = 32  # a pair of numbers is one number, ordered like the pair
Queue = list[tuple[int, int, list[int]]]  # minus a count, a pair, and the words to look at


def learn_merges(
    words: Mapping[str, int], specials: Sequence[str], alphabet: Iterable[str], vocabulary: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the entries of a vocabulary with their numbers, and the merges in their order.

    The pair that is most frequent is merged first, and among equals the one of the lowest numbers.

    >>> learn_merges({"abab": 3, "ab": 1}, ["<pad>"], "ab", 5)
    ({'<pad>': 0, 'a': 1, 'b': 2, 'ab': 3, 'abab': 4}, [('a', 'b'), ('ab', 'ab')])
    """
    symbols = sorted({*alphabet, *(letter for word in words for letter in word)})
    number = {entry: n for n, entry in enumerate(dict.fromkeys([*specials, *symbols]))}
    entries = list(number)
    spelled = [[number[letter] for letter in word] for word in words]
    times = list(words.values())
    counts, queue = _count_pairs(spelled, times)
    merged: dict[int, int] = {}  # a pair that is merged again has the rank of its last time
    while len(number) < vocabulary and queue:
        count, pair, places = heapq.heappop(queue)
        if -count != counts[pair]:
            heapq.heappush(queue, (-counts[pair], pair, places))
            continue
        if -count < 1:
            break
        left, right = _parts(pair)
        made = entries[left] + entries[right]
        if made not in number:
            number[made] = len(entries)
            entries.append(made)
        merged.pop(pair, None)
        merged[pair] = number[made]
        arisen = _merge(left, right, number[made], places, spelled, times, counts)
        for new, found in arisen.items():
            if counts[new] > 0:
                heapq.heappush(queue, (-counts[new], new, found))
    return number, [(entries[left], entries[right]) for left, right in map(_parts, merged)]


def _parts(pair: int) -> tuple[int, int]:
    return pair >> SHIFT, pair & ((1 << SHIFT) - 1)


def _count_pairs(spelled: list[list[int]], times: list[int]) -> tuple[dict[int, int], Queue]:
    """Count the pairs of neighbours; return counts, and a queue of pairs with their words."""
    counts: dict[int, int] = defaultdict(int)
    where: dict[int, list[int]] = defaultdict(list)
    for place, word in enumerate(spelled):
        pairs = [left << SHIFT | right for left, right in pairwise(word)]
        for pair in pairs:
            counts[pair] += times[place]
        for pair in set(pairs):
            where[pair].append(place)
    queue = [(-counts[pair], pair, places) for pair, places in where.items()]
    heapq.heapify(queue)
    return counts, queue


def _merge(
    left: int,
    right: int,
    made: int,
    places: Iterable[int],
    spelled: list[list[int]],
    times: list[int],
    counts: dict[int, int],
) -> dict[int, list[int]]:
    """Replace a pair by its new symbol in some words; return the pairs that arise, and where."""
    arisen: dict[int, list[int]] = defaultdict(list)
    for place in places:
        word, weight, at = spelled[place], times[place], 0
        merged: list[int] = []
        found: dict[int, None] = {}  # pairs that arise here, each once, in order
        ahead = word.count(left)  # how often it stands from `at` on
        while ahead:
            here = word.index(left, at)
            merged += word[at:here]
            at, ahead = here, ahead - 1
            if at + 1 == len(word) or word[at + 1] != right:
                merged.append(left)
                at += 1
                continue
            ahead -= left == right
            if merged:
                before = merged[-1] << SHIFT
                counts[before | left] -= weight
                counts[before | made] += weight
                found[before | made] = None
            merged.append(made)
            at += 2
            if at < len(word):
                after = word[at]
                counts[right << SHIFT | after] -= weight
                counts[made << SHIFT | after] += weight
                found[made << SHIFT | after] = None
        spelled[place] = merged + word[at:]
        for pair in found:
            arisen[pair].append(place)
    return arisen
