"""Runs that begin from a model made elsewhere."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fedlm.core import tree
from fedlm.core.errors import ConfigError
from fedlm.models import catalog
from fedlm.models.interop import huggingface as hf
from fedlm.recipe.build import build
from fedlm.recipe.parts import tokenizer_store
from fedlm.recipe.settings import load
from fedlm.recipe.tables import Data
from tests.conftest import WORDS
from tests.models.interop.test_huggingface import write


def words(*more):
    """A tokenizer of whole words, with special tokens."""
    vocabulary = {word: n for n, word in enumerate(["<unk>", "<s>", "</s>", *WORDS, *more])}
    made = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


@pytest.fixture
def base(tmp_path):
    """A Hugging Face folder: a tiny Llama and its tokenizer."""
    folder = tmp_path / "base"
    write(folder)
    words().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def made(tiny_recipe, tmp_path, base):
    """`made("table.key=value", ...)`: a run of the tiny recipe that begins from the folder."""
    text = tiny_recipe.read_text().replace("vocabulary = 60", "").split("[model]")
    tiny_recipe.write_text(text[0] + "[client]" + text[1].split("[client]")[1])
    begun = (f"model.init_from={base}", f"data.tokenizer={base / 'tokenizer.json'}")

    def of(*changes):
        return build(
            load(tiny_recipe, (*begun, *changes)), tmp_path / "stores", out=tmp_path / "run"
        )

    return of


def test_a_run_begins_from_the_folder_and_takes_its_sizes(made, base):
    run = made()
    model = run.recipe.model
    assert (model.name, model.layers, model.key_heads, model.tied) == ("llama", 2, 2, False)
    assert model.vocab == 40 > run.store.vocabulary
    sizes = catalog.Dimensions(**hf.read_base(base).sizes)
    assert tree.sha256(run.start()) == tree.sha256(hf.load(base, sizes))


@pytest.mark.parametrize(
    "change, words",
    [
        ("model.name=gpt2", r"model\.name = 'gpt2': expected 'llama', as the model in"),
        ("model.layers=3", r"model\.layers = 3: expected 2, as the model in"),
    ],
)
def test_a_setting_that_contradicts_the_folder_is_refused(made, change, words):
    with pytest.raises(ConfigError, match=words):
        made(change)


def test_another_tokenizer_is_refused(made, base, tmp_path):
    words("more").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="its tokenizer is not that of the store"):
        made(f"data.tokenizer={tmp_path / 'tokenizer.json'}").start()


def test_a_tokenizer_larger_than_the_embedding_is_refused(made, base):
    words(*(f"w{n}" for n in range(40))).save(str(base / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"model\.vocab = 40: expected at least 56"):
        made()


def test_a_folder_that_says_too_much_is_refused(made, base):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "attn_logit_cap": 3}))
    with pytest.raises(ConfigError, match="attn_logit_cap"):
        made()


def test_a_server_without_text_looks_at_no_files_of_its_folder(base, tmp_path, monkeypatch):
    """The empty path is the current folder: all that lay there was part of the store's name."""
    monkeypatch.chdir(tmp_path)
    data = Data(tokenizer=str(base / "tokenizer.json"))
    first = tokenizer_store(data, tmp_path / "cache")
    (tmp_path / "another").write_text("file")
    assert tokenizer_store(data, tmp_path / "cache").path == first.path
