"""Small tokenizers as others make them, and files that are none."""

import json

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "the big cat sat on the red mat and the dog ran",
    "a dog saw the moon and the sun on a big red cat",
    "größe, naïve café: 日本語も少し 🙂",
]


def like_gpt2():
    """Byte-level BPE with one special token, which both begins and ends a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens(["<|endoftext|>"])
    return made


def like_llama():
    """SentencePiece-like BPE with byte fallback; <unk>, <s> and </s> come first."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    fitted = Tokenizer(models.BPE(unk_token="<unk>"))
    fitted.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    fitted.train_from_iterator(TEXTS[:2], trainer)
    learned = json.loads(fitted.to_str())["model"]
    pieces += [p for p in sorted(learned["vocab"], key=learned["vocab"].get) if p not in pieces]
    merges = [tuple(pair) for pair in learned["merges"]]
    made = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(specials)
    return made


def like_bert():
    """WordPiece with [CLS] and [SEP], which no rule knows as bos and eos."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=specials, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    return made


def like_t5():
    """A unigram model, in whose vocabulary </s> is a likely word."""
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz</>"]
    made = Tokenizer(models.Unigram(words, unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return made


def saved(tokenizer, folder, **beside):
    """The path of a tokenizer's file; `beside` are objects for JSON files next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _bpe(**changes):
    vocab = {letter: number for number, letter in enumerate("abcdefg")}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"added_tokens": [], "model": model, **changes}


def _model(**changes):
    made = _bpe()
    return {**made, "model": {**made["model"], **changes}}


# What is in the file, and what the sentence about it says.
BROKEN = {
    "nothing": (b"", "can use"),
    "not UTF-8": (b"\xff\xfe", "not valid UTF-8"),
    "not JSON": (b"{", "can use"),
    "no object": (b"[]", "can use"),
    "no model": (b"{}", "can use"),
    "another JSON": (b'{"bos_token": "<s>"}', "can use"),
    "an empty vocabulary": (json.dumps(_model(vocab={})).encode(), "vocabulary of 0 entries"),
    "a number beyond any": (
        json.dumps(_model(vocab={"a": 0, "b": 4_294_967_295})).encode(),
        "vocabulary of 4294967296 entries",
    ),
    "a merge of nothing": (json.dumps(_model(merges=["a z"])).encode(), "can use"),
    "words without an unknown one": (
        json.dumps(_model(type="WordLevel", unk_token="<unk>")).encode(),
        "can use",
    ),
    "a panic when read": (
        json.dumps(
            _bpe(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
        ).encode(),
        "Cannot parse precompiled_charsmap",
    ),
    "a panic in a merge": (
        json.dumps(_model(merges=["a b"], continuing_subword_prefix="###")).encode(),
        "out of range",
    ),
    "no special token": (json.dumps(_bpe()).encode(), "--eos TOKEN"),
}
