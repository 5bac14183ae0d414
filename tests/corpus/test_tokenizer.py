import json
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fedlm.core.errors import CorpusError
from fedlm.corpus import tokenizer as tok
from fedlm.corpus.tokenizer import (
    OWN,
    SPECIALS,
    TextTokenizer,
    decode,
    encode,
    encode_prompt,
    fit,
    from_counts,
    word_finder,
)

EOS, OOV = OWN.eos, OWN.oov
KINDS = ("words", "bpe", "bytes")
TEXTS = [
    "The cat sat on the mat.\nThe dog didn't, it seems.",
    "the cat-flap is ours; the mat is not\n\nthe end",
]
FITTED = {kind: fit(TEXTS, kind, 300, lowercase=False) for kind in KINDS}

# Letters that Python's table of Unicode knows: the library's own table may be newer.
known = st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="\r\n")
lines = st.text(known, max_size=40).filter(str.strip)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [True, False])
def test_the_first_four_entries_are_the_specials(kind, lowercase):
    tokenizer = fit(TEXTS, kind, 300, lowercase)
    assert [tokenizer.library.id_to_token(i) for i in range(4)] == list(SPECIALS)
    assert [tokenizer.library.token_to_id(s) for s in SPECIALS] == [0, 1, 2, 3]
    assert tokenizer.special == OWN


@pytest.mark.parametrize("kind", KINDS)
def test_fitting_the_same_text_gives_the_same_file(kind):
    texts = [f"w{i % 97} w{i % 89} und {i}" for i in range(2000)]
    first, second = (fit(texts, kind, 500, lowercase=True) for _ in range(2))
    assert first.library.to_str(pretty=True) == second.library.to_str(pretty=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_encodes_alike(kind):
    again = TextTokenizer(Tokenizer.from_str(FITTED[kind].library.to_str()), OWN)
    text = "The cat wrote <eos>\non a mat"
    expected = encode(FITTED[kind], text, np.int32)
    np.testing.assert_array_equal(encode(again, text, np.int32), expected)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@given(lines=st.lists(lines, max_size=4))
@example(lines=["<pad> and <eos>", "<oov>"])
@example(lines=["e\u0301", "\u2028 two", " lead", "tail "])
def test_bytes_and_bpe_give_any_text_back(kind, lines):
    """Up to NFC, and for `bpe` up to the space that begins every line."""
    tokenizer = FITTED[kind]
    back = decode(tokenizer, encode(tokenizer, "\n".join(lines), np.int32).tolist())
    expected = "".join(unicodedata.normalize("NFC", line) + "\n" for line in lines)
    if kind == "bpe":
        lines = expected.split("\n")[:-1]
        expected = "".join(" " + line.removeprefix(" ") + "\n" for line in lines)
    assert back == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("ab .\n\r\t<>pados\u2028"), max_size=30))
def test_every_line_that_is_not_blank_ends_in_eos_and_nothing_else_does(kind, text):
    tokens = encode(FITTED[kind], text, np.uint16)
    kept = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    alone = [encode(FITTED[kind], line, np.uint16) for line in kept]
    assert all(a[-1] == EOS and EOS not in a[:-1] and len(a) > 1 for a in alone)
    assert not np.isin(tokens, [0, OWN.bos]).any()
    np.testing.assert_array_equal(tokens, np.concatenate([np.zeros(0, np.uint16), *alone]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_tokens_have_the_asked_type_even_without_text(kind, dtype):
    assert encode(FITTED[kind], "a cat", dtype).dtype == dtype
    empty = encode(FITTED[kind], " \n\t\r\n", dtype)
    assert empty.dtype == dtype and empty.shape == (0,)


def test_unknown_words_are_out_of_vocabulary_and_known_ones_are_not():
    tokens = encode(FITTED["words"], "The zebra sat", np.int32).tolist()
    assert [t == OOV for t in tokens] == [False, True, False, False]
    assert decode(FITTED["words"], tokens) == "The <oov> sat \n"


def test_a_written_special_is_plain_text():
    """Otherwise a client could end lines, or make targets that do not count, by typing."""
    for kind in KINDS:
        tokens = encode(FITTED[kind], "the <pad> the <bos> <eos> the", np.int32)
        assert not np.isin(tokens[:-1], [0, 1, 2]).any()
    fitted = fit(["<pad> is a word <oov>"], "words", 50, lowercase=True)
    assert OOV not in encode(fitted, "<pad> <oov>", np.int32)


@pytest.mark.parametrize("size", [5, 10, 17, 1000])
def test_a_vocabulary_of_words_holds_the_most_frequent_within_the_asked_size(size):
    texts = [" ".join(f"w{i}" for i in range(n)) for n in range(1, 51)]
    tokenizer = fit(texts, "words", size, lowercase=True)
    assert tokenizer.vocabulary == min(size, 50 + len(SPECIALS))
    words = {f"w{i}" for i in range(min(size - len(SPECIALS), 50))}
    assert set(tokenizer.library.get_vocab()) == words | set(SPECIALS)


def test_bpe_keeps_to_the_asked_size_once_the_bytes_fit():
    assert FITTED["bpe"].vocabulary == 300
    assert FITTED["bytes"].vocabulary == 256 + len(SPECIALS)


@pytest.mark.parametrize("kind", KINDS)
def test_lowercase_folds_case_and_its_absence_does_not(kind):
    folding = fit(TEXTS, kind, 300, lowercase=True)
    upper, lower = (encode(folding, text, np.int32) for text in ("THE CAT", "the cat"))
    np.testing.assert_array_equal(upper, lower)
    kept = FITTED[kind]
    assert encode(kept, "The", np.int32).tolist() != encode(kept, "the", np.int32).tolist()


def test_words_keep_inner_apostrophes_and_hyphens_and_part_from_marks():
    tokenizer = fit(["Didn't the cat-flap, it's «naïve» 3rd?"], "words", 100, lowercase=True)
    found = set(tokenizer.library.get_vocab()) - set(SPECIALS)
    assert found == {*["didn't", "the", "cat-flap", "it's", "naïve", "3rd"], *",«»?"}


def test_composed_and_decomposed_letters_are_the_same_word():
    tokenizer = fit(["caf\u00e9"], "words", 100, lowercase=True)
    assert OOV not in encode(tokenizer, "cafe\u0301", np.int32)


@pytest.mark.parametrize("texts", [[], [""], [" \n\t", ""]])
def test_a_vocabulary_of_no_words_is_refused(texts):
    with pytest.raises(CorpusError, match="vocabulary is empty"):
        fit(texts, "words", 100, lowercase=True)


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_a_tokenizer_of_all_counted_words_is_the_one_fitted_to_the_text(kind):
    """Words of distinct frequencies: their order, and so all merges, are the same."""
    text = "\n".join(["the cat sat, Ünder"] * 8 + ["the cat sat"] * 4 + ["the cat"] * 2 + ["the"])
    size = 300 if kind == "bpe" else 50
    fitted = fit([text], kind, size, lowercase=True)
    assert word_finder(kind, True)(text) == word_finder(kind, True)("the cat sat, ünder\nthe")
    lead = "Ġ" if kind == "bpe" else ""
    under = "Ã¼nder" if kind == "bpe" else "ünder"
    counts = [(lead + "the", 15), (lead + "cat", 14), (lead + "sat", 12)]
    counts += [(",", 8), (lead + under, 8)]
    made = from_counts(counts, kind, size, lowercase=True)
    for line in ("The cat sat, ünder", "a mat"):
        assert encode(made, line, np.int64).tolist() == encode(fitted, line, np.int64).tolist()
        if kind == "bpe":
            assert decode(made, encode_prompt(made, line)).strip() == line.lower()


# ---- words by pieces between blanks: what the library gives, in a third of its time --------------

ODD = " \t\r\n\u00a0\u0301\u0308\u200d\u212b\u1e9e\u0130\u03a3\u03c3\u2028<>'\u2019-_.aAzZ09e\u00e9"
ANY_TEXT = st.one_of(
    st.text(st.sampled_from(ODD)), st.text(st.characters(exclude_categories=("Cs",)))
)


def by_library(texts, lowercase):
    tokenizer, trainer = tok._words(30)
    tokenizer.normalizer = tok._normalizer(lowercase)
    tokenizer.train_from_iterator(([*text.split("\n")] for text in texts), trainer)
    return tokenizer


@given(st.lists(ANY_TEXT, min_size=1, max_size=5), st.booleans())
def test_a_vocabulary_is_the_one_that_the_library_trains(texts, lowercase):
    texts = [*texts, "the cat <pad> sat"]
    fitted = fit(texts, "words", 30, lowercase)
    assert fitted.library.to_str() == by_library(texts, lowercase).to_str()


@pytest.mark.parametrize(("kind", "vocabulary"), [("words", 12), ("bpe", 280)])
@given(ANY_TEXT, st.booleans())
@example("two  blanks\tand a tab \n  the cat ", True)
def test_lines_have_the_tokens_that_the_library_gives(kind, vocabulary, text, lowercase):
    made = fit(["the cat <pad> sat", text], kind, vocabulary, lowercase)
    assert made.pieces is not None
    plain = TextTokenizer(made.library, OWN)
    plain.__dict__["pieces"] = None  # as for a tokenizer whose tokens may reach over a blank
    wanted = encode(plain, text, np.int64)
    assert encode(made, text, np.int64).tolist() == wanted.tolist()
    assert encode(made, text, np.int64).tolist() == wanted.tolist()  # of pieces that are known


def test_pieces_that_are_forgotten_are_met_again(monkeypatch):
    monkeypatch.setattr(tok, "MOST_PIECES", 3)
    made = fit(["a b c d e f g"], "words", 12, True)
    first = [encode(made, text, np.int64).tolist() for text in ("a b c d", "e f\ng a", "b")]
    assert len(made.pieces) <= 3
    assert first == [encode(made, text, np.int64).tolist() for text in ("a b c d", "e f\ng a", "b")]


def test_other_tokenizers_are_asked_for_whole_lines():
    assert FITTED["bytes"].pieces is None
    spaced = fit(["the cat sat"], "words", 12, True)
    changed = json.loads(spaced.library.to_str())
    changed["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always",
                                "split": False}  # fmt: skip
    assert TextTokenizer(Tokenizer.from_str(json.dumps(changed)), OWN).pieces is None
