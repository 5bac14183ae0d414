"""Text that is cut into pieces by many processes: the store that one process makes of lines."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fedlm.core.errors import CorpusError
from fedlm.corpus import piece_workers
from fedlm.corpus import pieces as cutting
from fedlm.corpus import store as stores
from fedlm.corpus import tokenizer as tok
from fedlm.corpus.byte_pairs import learn_merges
from fedlm.corpus.gather import gather_clients
from fedlm.corpus.piece_workers import PieceWorker, cut_blocks
from fedlm.corpus.sources import Document
from fedlm.corpus.split import cut_tail, held_out_clients
from fedlm.corpus.store import StoreSettings, write
from fedlm.corpus.tokenizer import encode

ODD = " \t\r\n\u00a0\u0301\u200d\u1e9e\u0130\x1c\u2028<>'-_.aAzZ09e\u00e9"
TEXT = st.text(st.sampled_from(ODD), max_size=60)
LETTERS = [
    Document(
        f"c{n}", ("land",), f"Dear  you,\tit is {n}\n\n" * (n % 4) + f" {'so ' * n}<pad> {n}\r"
    )
    for n in range(40)
]


def by_lines(texts, tokenizer, validation, test_clients):
    """The tokens of each client, as the tokenizer gives them for its text, cut in two."""
    test = held_out_clients((f"c{n}" for n in range(len(texts))), test_clients, 0)
    for number, text in enumerate(texts):
        parts = ("", text) if f"c{number}" in test else cut_tail(text, validation)
        yield [encode(tokenizer, part, np.int64).tolist() for part in parts]


@pytest.mark.parametrize("kind", ["words", "bpe"])
@given(texts=st.lists(TEXT, min_size=1, max_size=6), validation=st.sampled_from([0.0, 0.3]))
@example(texts=["a  b\nc d", "\ta b ", "a\r\n \nb"], validation=0.0)
@settings(max_examples=40)
def test_a_store_holds_the_tokens_of_every_line(tmp_path_factory, kind, texts, validation):
    texts = [f"{text} the cat" for text in texts]
    documents = [Document(f"c{n}", (), text) for n, text in enumerate(texts)]
    shares = {"test_clients": 0.0 if len(texts) == 1 else 0.3, "validation": validation}
    asked = StoreSettings(tokenizer=kind, vocabulary=280, **shares)
    made = write(documents, tmp_path_factory.mktemp("s") / "store", asked)
    wanted = by_lines(texts, made.tokenizer, validation, shares["test_clients"])
    for number, (train, held) in enumerate(wanted):
        assert made.train(number).tolist() == train
        assert made.held(number).tolist() == held
    trained = [
        cut_tail(text, validation)[0]
        for number, text in enumerate(texts)
        if number not in made.test_clients
    ]
    fitted = tok.fit(trained, kind, 280, True).library.to_str()
    assert made.tokenizer.library.to_str() == fitted


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_the_number_of_processes_and_of_clients_in_a_block_does_not_show(
    kind, tmp_path, monkeypatch
):
    asked = StoreSettings(tokenizer=kind, vocabulary=300)
    write(LETTERS, tmp_path / "one", asked)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 64)
    monkeypatch.setattr(cutting, "TEXT_AT_A_TIME", 50)
    for workers in (1, 3):
        write(LETTERS, tmp_path / f"{workers}", asked, workers=workers)
        for file in (tmp_path / "one").iterdir():
            assert file.read_bytes() == (tmp_path / f"{workers}" / file.name).read_bytes()


def test_pieces_that_are_forgotten_get_other_numbers_and_the_same_tokens(tmp_path, monkeypatch):
    asked = StoreSettings(vocabulary=300)
    first = write(LETTERS, tmp_path / "one", asked)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 64)
    monkeypatch.setattr(cutting, "MOST_PIECES", 4)
    second = write(LETTERS, tmp_path / "two", asked)
    assert first.manifest == second.manifest


def test_documents_of_a_client_are_joined_wherever_they_stand():
    several = [Document("b", (), "x"), Document("a", ("g",), ""), Document("b", (), "y"),
               Document("empty", (), " \n"), Document("a", ("h",), "z")]  # fmt: skip
    clients = gather_clients(several)
    assert list(clients) == [Document("b", (), "x\ny"), Document("a", ("g",), "\nz")]
    assert clients[-1] == clients[1] and clients[:1] == [clients[0]]


def test_an_error_of_the_source_is_not_one_of_the_disk(tmp_path):
    """A source that could not be opened was said to be text that could not be kept."""

    def documents():
        yield Document("a", (), "x")
        raise PermissionError(13, "Permission denied", "letters.jsonl")

    with pytest.raises(PermissionError, match=r"letters\.jsonl"):
        gather_clients(documents(), folder=tmp_path)
    with pytest.raises(CorpusError, match=r"text could not be kept in .*missing"):
        gather_clients(LETTERS, folder=tmp_path / "missing")


def test_half_of_a_surrogate_pair_in_python_text_is_refused():
    with pytest.raises(CorpusError, match=r"client 'a': half of a surrogate pair"):
        gather_clients([Document("a", (), "x\ud800")])


def test_a_process_that_dies_ends_in_a_sentence_and_leaves_no_other(monkeypatch):
    clients, begun = gather_clients(LETTERS), []

    class Dying(PieceWorker):
        def __init__(self, *asked):
            super().__init__(*asked)
            begun.append(self._process)
            if len(begun) == 2:
                self._process.kill()
                self._process.wait()

    monkeypatch.setattr(piece_workers, "PieceWorker", Dying)
    tasks = clients.tasks(np.zeros(len(clients), bool), 0.1, False, 64)
    with pytest.raises(CorpusError, match=r"a process that cuts text died .* --workers 1"):
        list(cut_blocks(tasks, clients.file, 2))
    assert len(begun) == 2 and all(process.returncode is not None for process in begun)


def test_a_loop_that_ends_early_leaves_no_process(monkeypatch):
    clients, begun = gather_clients(LETTERS), []

    class Seen(PieceWorker):
        def __init__(self, *asked):
            super().__init__(*asked)
            begun.append(self._process)

    monkeypatch.setattr(piece_workers, "PieceWorker", Seen)
    tasks = clients.tasks(np.zeros(len(clients), bool), 0.1, False, 64)
    blocks = cut_blocks(tasks, clients.file, 2)
    next(blocks)
    blocks.close()
    assert len(begun) == 2 and all(process.returncode is not None for process in begun)


# ---- merges from counts: what the library learns from the text ----------------------------------


def by_library(words, vocabulary):
    """Train the library on a text in which each word stands as often as its count says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>"], initial_alphabet=["a"], show_progress=False
    )
    text = [" ".join([word] * times) for word, times in words.items()]
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


WORDS = st.dictionaries(st.text(st.sampled_from("abc<pd>"), min_size=1, max_size=9),
                        st.integers(1, 9), min_size=1, max_size=12)  # fmt: skip


def test_one_long_run_of_a_letter_is_learned_in_its_length():
    """Quadratic, a line of a million dashes took more than an hour."""
    entries, merges = learn_merges({"=" * 100_000: 1}, [], "=", 18)
    assert len(entries) == 18 and [len(left) for left, _ in merges[:16]] == [
        2**n for n in range(16)
    ]


@given(WORDS, st.integers(2, 60))
@example({"abab": 3, "ababab": 2, "aab": 5, "bab": 1}, 12)
@example({"aaaa": 2, "aaa": 3, "aa": 1}, 9)
@example({"<pad>": 9}, 30)
@settings(max_examples=300)
def test_merges_of_counted_words_are_those_of_the_library(words, vocabulary):
    entries, merges = learn_merges(words, ["<pad>"], "a", vocabulary)
    trained = by_library(words, vocabulary)
    mine = Tokenizer(models.BPE(entries, merges))
    mine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    mine.add_special_tokens(["<pad>"])
    assert mine.to_str() == trained.to_str()
