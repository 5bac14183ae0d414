"""A tokenizer made elsewhere is used as it is, or refused in one sentence."""

import hashlib
import json
import os

import numpy as np
import pytest

from fedlm.core.errors import CorpusError
from fedlm.core.types import SpecialTokens
from fedlm.corpus.concat import JoinedStore
from fedlm.corpus.store import StoreSettings, write
from fedlm.corpus.tokenizer import OWN, decode, encode, encode_prompt, fit
from fedlm.corpus.tokenizer_file import load_tokenizer, special_tokens_map
from fedlm.corpus.vocabulary import from_file
from tests.corpus import made_elsewhere as others
from tests.corpus.test_store import LETTERS

LINES = [
    "the cat sat",
    "größe, naïve café: 日本語 🙂",
    "</s> and <|endoftext|> <s>",
    " lead, tail ",
]


def llama(folder, **beside):
    return others.saved(others.like_llama(), folder, **beside)


def gpt2(folder, **beside):
    return others.saved(others.like_gpt2(), folder, **beside)


def test_special_tokens_are_found_by_their_usual_names(tmp_path):
    two = load_tokenizer(llama(tmp_path / "llama"))
    assert two.special == SpecialTokens(bos=1, eos=2, oov=0, reserved=(0, 1, 2))
    one = load_tokenizer(gpt2(tmp_path / "gpt2"))
    end = one.library.token_to_id("<|endoftext|>")
    assert one.special == SpecialTokens(bos=end, eos=end, oov=None, reserved=(end,))
    unigram = load_tokenizer(others.saved(others.like_t5(), tmp_path / "t5"))
    assert unigram.special == SpecialTokens(bos=1, eos=1, oov=2, reserved=(0, 1, 2))


@pytest.mark.parametrize("kind", ["words", "bpe", "bytes"])
def test_own_tokenizers_are_read_like_others(kind, tmp_path):
    fitted = fit(others.TEXTS, kind, 300, lowercase=True)
    path = others.saved(fitted.library, tmp_path)
    found = load_tokenizer(path).special  # as of a run that was made before the file beside it was
    assert (found.bos, found.eos, found.reserved) == (OWN.bos, OWN.eos, OWN.reserved)
    (tmp_path / "special_tokens_map.json").write_bytes(special_tokens_map(fitted))
    assert load_tokenizer(path).special == OWN
    assert load_tokenizer(path).vocabulary == fitted.vocabulary


def test_what_lies_beside_the_file_decides(tmp_path):
    named = {"bos_token": {"content": "<unk>", "special": True}, "eos_token": "<s>"}
    found = load_tokenizer(llama(tmp_path / "map", special_tokens_map=named)).special
    assert (found.bos, found.eos) == (0, 1)
    config = {"bos_token": None, "eos_token": "</s>"}
    both = llama(tmp_path / "both", tokenizer_config=config, special_tokens_map=named)
    assert (load_tokenizer(both).special.bos, load_tokenizer(both).special.eos) == (
        2,
        2,
    )  # no bos: eos
    missing = llama(tmp_path / "missing", tokenizer_config={"eos_token": "<end>"})
    with pytest.raises(CorpusError, match=r"has no token '<end>'.* --eos TOKEN"):
        load_tokenizer(missing)
    (missing.parent / "tokenizer_config.json").write_text("{")
    with pytest.raises(CorpusError, match=r"tokenizer_config\.json, beside .*, is not JSON"):
        load_tokenizer(missing)


def test_what_is_given_decides_before_all(tmp_path):
    path = llama(tmp_path, tokenizer_config={"eos_token": "<end>"})
    found = load_tokenizer(path, bos="</s>", eos="▁the").special
    assert found.bos == 2 and found.eos not in (0, 1, 2)
    assert found.reserved == (0, 1, 2, found.eos)
    with pytest.raises(CorpusError, match=r"has no token 'zzz'.* --bos TOKEN"):
        load_tokenizer(path, bos="zzz", eos="</s>")


def test_without_an_end_of_line_the_way_out_is_named(tmp_path):
    path = others.saved(others.like_bert(), tmp_path)
    with pytest.raises(CorpusError, match=r"special tokens: .*\[SEP\].* --eos TOKEN, and --bos"):
        load_tokenizer(path)
    found = load_tokenizer(path, bos="[CLS]", eos="[SEP]").special
    assert found == SpecialTokens(bos=2, eos=3, oov=1, reserved=(0, 1, 2, 3, 4))


@pytest.mark.parametrize("case", others.BROKEN)
def test_what_is_no_tokenizer_is_refused_in_one_sentence(case, tmp_path, capfd):
    content, said = others.BROKEN[case]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        load_tokenizer(path)
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # a panic would print its stack


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"none\.json is not readable: No such file"):
        load_tokenizer(tmp_path / "none.json")


@pytest.mark.parametrize("make", [others.like_gpt2, others.like_llama], ids=["gpt2", "llama"])
def test_any_text_comes_back(make, tmp_path):
    """Up to the space at either end of a line, which decoders treat as they do."""
    tokenizer = load_tokenizer(others.saved(make(), tmp_path))
    tokens = encode(tokenizer, "\n".join(LINES), np.uint32)
    back = decode(tokenizer, tokens.tolist())
    assert [line.strip() for line in back.split("\n")] == [*(line.strip() for line in LINES), ""]
    assert (tokens == tokenizer.special.eos).sum() == len(LINES)
    assert encode_prompt(tokenizer, LINES[0]) == encode(tokenizer, LINES[0], np.int64)[:-1].tolist()


@pytest.mark.parametrize(
    "make", [others.like_gpt2, others.like_llama, others.like_t5], ids=["gpt2", "llama", "t5"]
)
def test_a_typed_special_token_is_text_or_nothing(make, tmp_path):
    tokenizer = load_tokenizer(others.saved(make(), tmp_path))
    tokens = encode(tokenizer, "a </s> b <s> c <|endoftext|> <pad>", np.int64)
    allowed = {tokenizer.special.oov, None}
    assert not (set(tokens[:-1].tolist()) & set(tokenizer.special.reserved)) - allowed
    assert tokens[-1] == tokenizer.special.eos


def test_padding_truncation_and_dropout_of_a_file_are_switched_off(tmp_path):
    made = others.like_gpt2()
    made.enable_padding(length=40)
    made.enable_truncation(4)
    path = others.saved(made, tmp_path)
    told = json.loads(path.read_text())
    told["model"]["dropout"] = 0.5
    path.write_text(json.dumps(told))
    plain = load_tokenizer(gpt2(tmp_path / "plain"))
    wanted = encode(plain, LINES[0], np.int64).tolist()
    assert all(
        encode(load_tokenizer(path), LINES[0], np.int64).tolist() == wanted for _ in range(5)
    )


def test_gaps_in_a_vocabulary_are_no_words(tmp_path):
    told = json.loads(others.like_llama().to_str())
    told["model"]["vocab"]["▁far"] = 500
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    made = load_tokenizer(tmp_path / "tokenizer.json")
    assert made.vocabulary == 501
    gaps = set(range(501)) - set(made.library.get_vocab().values())
    assert gaps and set(made.special.reserved) == {0, 1, 2} | gaps


def settings(tokenizer):
    return StoreSettings(tokenizer="file", vocabulary=tokenizer.vocabulary, lowercase=False)


@pytest.mark.parametrize("make", [others.like_gpt2, others.like_llama], ids=["gpt2", "llama"])
def test_a_store_keeps_the_tokenizer_and_its_special_tokens(make, tmp_path):
    tokenizer = load_tokenizer(path := others.saved(make(), tmp_path / "file"))
    made = from_file(tokenizer, path)
    store = write(LETTERS, tmp_path / "s", settings(tokenizer), vocabulary=made)
    assert store.special == store.tokenizer.special == tokenizer.special
    assert store.vocabulary == tokenizer.vocabulary
    assert store.train(0).dtype == np.uint16
    first = decode(store.tokenizer, store.train(0).tolist()).split("\n")[0].strip()
    assert first == "first0 and so on"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert store.manifest["tokenizer_from"] == {"kind": "file", "name": path.name, "sha256": digest}


def test_a_large_vocabulary_takes_wider_tokens(tmp_path):
    told = json.loads(others.like_llama().to_str())
    told["model"]["vocab"]["▁and▁far"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    tokenizer = load_tokenizer(path := tmp_path / "tokenizer.json")
    made = from_file(tokenizer, path)
    store = write(LETTERS, tmp_path / "s", settings(tokenizer), vocabulary=made)
    assert store.train(0).dtype == np.uint32 and store.vocabulary == 70_001


def test_stores_with_other_special_tokens_are_not_joined(tmp_path):
    path = llama(tmp_path / "file")
    for name, eos in (("one", "</s>"), ("two", "<s>")):
        tokenizer = load_tokenizer(path, eos=eos)
        made = from_file(tokenizer, path)
        write(LETTERS, tmp_path / name, settings(tokenizer), vocabulary=made)
    with pytest.raises(CorpusError, match="has another tokenizer"):
        JoinedStore([tmp_path / "one", tmp_path / "two"])


def test_a_pipe_is_not_waited_for_and_a_huge_file_is_not_read(tmp_path):
    pipe, huge = tmp_path / "pipe.json", tmp_path / "huge.json"
    os.mkfifo(pipe)
    with pytest.raises(CorpusError, match=r"pipe\.json is no regular file"):
        load_tokenizer(pipe)
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with pytest.raises(CorpusError, match=r"zero\.json is no regular file"):
        load_tokenizer(tmp_path / "zero.json")
    with open(huge, "wb") as file:
        file.truncate(1 << 40)  # takes no place on the disk
    with pytest.raises(CorpusError, match=r"huge\.json is larger than 512 MiB"):
        load_tokenizer(huge)
