"""The text of many clients, split at once: the lines and cuts of each client alone."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedlm.corpus.line_split import split_lines
from fedlm.corpus.pieces import cut_text
from fedlm.corpus.split import lines_of

ODD = " \t\r\n\n\n\x00\x1c\x85\u00a0\u0301\u200d\u2028\u3000\u3042\U0001f600ab.\u00e9"
CLIENT = st.tuples(st.text(st.sampled_from(ODD), max_size=60), st.booleans())


def one_by_one(clients, share):
    """The same, by the law of the split: lines, where parts end, held-out bytes, uneven texts."""
    lines, ends, held_bytes, uneven = [], [], [], []
    for number, (text, test) in enumerate(clients):
        train, held = cut_text(text, test, share)
        for part in (train, held):
            lines += lines_of(part)
            ends.append(len(lines))
        held_bytes.append(len(held.encode()))
        if share <= 0 and train and "\n".join(lines_of(train)) != train:
            uneven.append((number, train))
    return "".join(f"{line}\n" for line in lines).encode(), ends, held_bytes, uneven


@given(st.lists(CLIENT, min_size=1, max_size=6), st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]))
@example([("a b\n\nc d", False), ("", False), (" a\r\nb", True), ("a  b\u00a0c", False)], 0.7)
@example([("abc\nabcdefg\n" * 5, False)], 0.7)  # 1 - 0.7 is a little more than 0.3
@settings(max_examples=400)
def test_many_clients_are_split_as_each_of_them_alone(clients, share):
    texts = [text.encode() + b"\n" for text, _ in clients]
    ends, test = np.cumsum(list(map(len, texts))), np.array([test for _, test in clients])
    found = split_lines(b"".join(texts), ends, test, share)
    told = found.text, found.ends.tolist(), found.held_bytes.tolist(), found.uneven
    assert told == one_by_one(clients, share)
