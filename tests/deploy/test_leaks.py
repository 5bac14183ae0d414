"""The search for text in files finds what it says, and nothing where there is nothing."""

import base64
import json

import numpy as np
import pytest

from tests.deploy.leaks import Search, planted, varint

TEXT = "Den gamle snegl på fjellet spiste aldri kål"
TOKENS = np.array([300, 12, 77, 401, 5, 9, 260, 31, 8])
ROW = np.random.default_rng(0).normal(size=16).astype(np.float32)


@pytest.fixture(scope="module")
def search():
    made = Search()
    made.text(TEXT, "a line")
    made.word("kvantesnegl")
    made.numbers(TOKENS, "a row")
    made.row(ROW, "an embedding")
    return made


LEAKS = {
    "text": TEXT.encode(),
    "part of a text": TEXT[9:26].encode(),
    "small letters": TEXT.lower().encode(),
    "UTF-16": TEXT.encode("utf-16-le"),
    "JSON": json.dumps(TEXT).encode(),
    "hexadecimal": TEXT.encode().hex().encode(),
    "base64": base64.b64encode(b"x" + TEXT.encode()),
    "a word": "Kvantesnegl".lower().encode(),
    **{f"{kind} tokens": TOKENS.astype(kind).tobytes() for kind in ("<u2", ">i4", "<i8", "<f4")},
    "part of the tokens": TOKENS[2:].astype("<u4").tobytes(),
    "decimals": str(TOKENS.tolist()).encode(),
    "varints": b"".join(map(varint, TOKENS.tolist())),
    "float32 row": ROW.tobytes(),
    "part of a row": b"x" + ROW[5:12].tobytes(),
    "float64 row": ROW.astype(np.float64).tobytes(),
    "float16 row": ROW.astype(np.float16).tobytes(),
    "bfloat16 row": (ROW.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_planted_leak_is_found(search, tmp_path, name):
    planted(tmp_path, LEAKS[name], "plain")
    assert search.leaks(tmp_path)


@pytest.mark.parametrize("how", ["gzip", "sqlite"])
def test_a_leak_is_found_wherever_it_lies(search, tmp_path, how):
    planted(tmp_path, TOKENS.astype("<u2").tobytes(), how)
    assert any("as <u2" in leak for leak in search.leaks(tmp_path))


def test_nothing_is_found_where_there_is_nothing(search, tmp_path):
    rng = np.random.default_rng(1)
    (tmp_path / "noise").write_bytes(rng.bytes(200_000))
    (tmp_path / "zeros").write_bytes(bytes(10_000))
    (tmp_path / "words").write_text(json.dumps(TEXT.split()))  # single words, as a vocabulary has
    (tmp_path / "near").write_bytes((TOKENS + 1).astype("<u2").tobytes())
    assert search.leaks(tmp_path) == []
