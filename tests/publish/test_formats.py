"""A finished run as folders that Transformers and PEFT load."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedlm.core.errors import ConfigError, RecordError
from fedlm.models import catalog
from fedlm.models.adapters import linear_layers
from fedlm.models.interop import gguf, tensors
from fedlm.models.interop import huggingface as hf
from fedlm.models.interop import peft as ours
from fedlm.publish.card import _privacy, _privacy_of_part, card, licence_of, yaml_text
from fedlm.publish.finished_run import FinishedRun
from fedlm.publish.formats import write_export
from fedlm.recipe.build import build
from fedlm.recipe.settings import load
from fedlm.record.checkpoint import to_bytes
from fedlm.record.directory import RunDirectory, adapter_beside
from fedlm.training import train
from tests.conftest import write_tiny
from tests.models.interop.families import model
from tests.models.interop.test_huggingface import write as write_folder
from tests.recipe.test_init_from import words

TINY = (
    "server.rounds=1", "run.baselines=false", "run.prompts=[]", "wire.trainable=lora",
    "wire.rank=2", "client.learning_rate=2.0",
)  # fmt: skip


def adapted(folder, name, *changes):
    """A finished run of adapters on a tiny Hugging Face folder."""
    recipe = write_tiny(folder)
    text = recipe.read_text().replace("vocabulary = 60", "").split("[model]")
    recipe.write_text(text[0] + "[client]" + text[1].split("[client]")[1])
    base = folder / "base"
    write_folder(base, name)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    words().save(str(base / "tokenizer.json"))
    begun = (f"model.init_from={base}", f"data.tokenizer={base / 'tokenizer.json'}")
    run = build(load(recipe, (*begun, *TINY, *changes)), folder / "stores", out=folder / "run")
    train(run)
    return run.record


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A finished run on a tiny Llama. Not to be changed."""
    return adapted(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.slow
def test_a_folder_holds_the_merged_model_and_its_card(llama, tmp_path):
    file = write_export(llama, "huggingface", tmp_path)
    assert file == tmp_path / "model.safetensors"
    base = hf.read_base(tmp_path)
    params = hf.load(tmp_path, catalog.Dimensions(**base.sizes))
    kept = load_file(llama.weights)
    np.testing.assert_array_equal(params.blocks[1].attention.value.weight,
                                  kept["blocks.1.attention.value.weight"])  # fmt: skip
    card = (tmp_path / "README.md").read_text()
    for words_ in ("license: apache-2.0", "Rounds: 1", "no privacy plan", "20 clients", "before"):
        assert words_ in card, words_
    told = json.loads((tmp_path / "generation_config.json").read_text())
    assert told["eos_token_id"] == 2
    assert (tmp_path / "tokenizer.json").is_file() and (
        tmp_path / "tokenizer_config.json"
    ).is_file()


def test_a_card_says_what_the_run_claims(llama):
    """Perplexity before and after on the same rows, and privacy in the words of the claim."""
    lines = [json.loads(line) for line in llama.journal.read_text().splitlines()]
    before, after = lines[0]["start"]["perplexity"], lines[1]["perplexity"]
    assert f": {before:.2f} before, {after:.2f} after" in card(FinishedRun(llama), "peft")
    claim = {"sentence": "No more than so much.", "not_covered": ["a"], "assumptions": ["b"]}
    assert _privacy(claim) == [
        "- Privacy: No more than so much.", "  - Not covered: a", "  - Assumed: b"
    ]  # fmt: skip


def test_a_name_cannot_write_a_claim_into_a_card():
    name = "eve`\n\n# Privacy\n- Privacy: epsilon 0.1 covers this model. <img src=x>"
    (line,) = _privacy_of_part({"run": name, "private": True})
    assert "\n" not in line and "<" not in line and line.count("`") == 2


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"private": False}, "no privacy plan"),
        ({"private": False, "covered": None}, "no privacy plan"),
        ({"private": True, "node": "north"}, "the claim of the run `r`"),
        ({"private": False, "covered": True}, "the claim of the run `r`"),
        ({"private": False, "covered": False, "node": "north"}, "no promise covers this model"),
        ({"private": True, "client": "c1"}, "no promise covers this model"),
    ],
)
def test_a_card_says_whether_the_claim_of_a_run_covers_one_of_its_models(part, said):
    (line,) = _privacy_of_part({"run": "r", **part})
    assert said in line


def test_adapters_alone_name_their_base(llama, tmp_path):
    write_export(llama, "peft", tmp_path)
    told = json.loads((tmp_path / ours.CONFIG).read_text())
    assert told["base_model_name_or_path"] == str(llama.path.parent / "base")
    assert (told["r"], told["lora_alpha"], told["fan_in_fan_out"]) == (2, 16.0, False)
    assert "model.layers.0.self_attn.q_proj" in told["target_modules"]
    arrays = load_file(tmp_path / ours.WEIGHTS)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    assert arrays[name].shape == (8, 2) and np.any(arrays[name])
    assert not (tmp_path / "base").exists()


def changed_copy(llama, tmp_path, edit):
    """The run with other adapters."""
    there = shutil.copytree(llama.path, tmp_path / "copy")
    record = RunDirectory(there)
    file = adapter_beside(record.weights)
    arrays, base = load_file(file), ["0"]
    edit(arrays, base)
    file.write_bytes(to_bytes(arrays, base=base[0]))
    return record


def test_adapters_that_learned_nothing_are_refused(llama, tmp_path):
    def forget(arrays, base):
        arrays.update({n: 0 * x for n, x in arrays.items() if n.endswith("lora_b")})

    record = changed_copy(llama, tmp_path, forget)
    for kind in ("huggingface", "peft"):
        with pytest.raises(RecordError, match="its adapters equal their start"):
            write_export(record, kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(llama, tmp_path):
    record = changed_copy(llama, tmp_path, lambda arrays, base: None)
    with pytest.raises(RecordError, match="not the model that the adapters"):
        write_export(record, "peft", tmp_path / "out")


def test_runs_without_adapters_or_without_a_class_are_refused(trained, tmp_path):
    record = RunDirectory(trained / "runs" / "tiny")
    with pytest.raises(RecordError, match="trained the model itself, not adapters"):
        write_export(record, "peft", tmp_path / "out")
    with pytest.raises(ConfigError, match="Transformers has no class that computes the same"):
        write_export(record, "huggingface", tmp_path / "out")
    with pytest.raises(ConfigError, match="format = 'tar'"):
        write_export(record, "tar", tmp_path / "out")


def test_a_base_states_its_licence_or_not(tmp_path):
    (tmp_path / "README.md").write_text("# A model\n")
    assert licence_of(str(tmp_path)) is None is licence_of(None)
    (tmp_path / "README.md").write_text("---\nlicense: 'mit'\n---\n")
    assert licence_of(str(tmp_path)) == "mit"
    (tmp_path / "README.md").write_text("# A model\nlicense: of a sentence below the head\n")
    assert licence_of(str(tmp_path)) is None


def test_a_licence_of_a_stranger_is_one_entry_of_a_card(llama, tmp_path, monkeypatch):
    """Whatever a base states: it cannot add lines to the card, nor break its head."""
    base = Path(load(llama.recipe).model.init_from)
    kept = (base / "README.md").read_text()
    try:
        (base / "README.md").write_text("---\nlicense: [a: 'b\n---\n")
        head = card(FinishedRun(llama), "peft").split("---")[1].splitlines()
    finally:
        (base / "README.md").write_text(kept)
    assert 'license: "[a: \'b"' in head
    monkeypatch.setattr(gguf, "stated_licence", lambda path: "mit\n---\n# Buy this")
    (tmp_path / "base.gguf").write_bytes(b"")
    assert licence_of(str(tmp_path / "base.gguf")) == "mit --- # Buy this"
    assert yaml_text("mit --- # Buy this") == '"mit --- # Buy this"'


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of other libraries
@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", ()),
        ("llama-tied", ("wire.targets=['*.feedforward.*']", "wire.last_blocks=1")),
        ("qwen2", ()),
        ("gpt2", ("wire.targets=['*.attention.*', '*.feedforward.up']",)),
        ("gpt_neox", ()),
        ("mpt", ("wire.targets=['*.value', '*.out']",)),
        ("gpt2", ("model.base_dtype=bfloat16",)),
    ],
)
def test_transformers_and_peft_give_the_same_logits(tmp_path, name, changes):
    torch = pytest.importorskip("torch", reason="needs pip install 'fedlm[oracle]'")
    transformers = pytest.importorskip("transformers", reason="needs pip install 'fedlm[oracle]'")
    peft = pytest.importorskip("peft", reason="needs pip install 'fedlm[oracle]'")
    record = adapted(tmp_path, name, *changes)
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    write_export(record, "huggingface", whole)
    write_export(record, "peft", alone)
    rows = np.random.default_rng(0).integers(3, 16, (3, 8))

    def logits(loaded):
        with torch.no_grad():
            return loaded.eval()(torch.tensor(rows)).logits.numpy()

    params = hf.load(whole, catalog.Dimensions(**hf.read_base(whole).sizes))
    wanted = np.asarray(catalog.logits(params, rows))
    merged = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    np.testing.assert_allclose(logits(merged), wanted, atol=1e-4)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = logits(base)
    room = 0.05 if "bfloat16" in str(changes) else 1e-4  # the folder holds the base in float32
    np.testing.assert_allclose(
        logits(peft.PeftModel.from_pretrained(base, alone)), wanted, atol=room
    )
    assert np.abs(before - wanted).max() > 1e-2
    # AutoTokenizer takes Qwen2's own class whatever the folder says, and that one splits otherwise.
    door = transformers.PreTrainedTokenizerFast if name == "qwen2" else transformers.AutoTokenizer
    words_ = door.from_pretrained(whole)
    assert words_.decode(words_("the cat sat")["input_ids"]) == "the cat sat"
    file = alone / ours.WEIGHTS
    kept = load_file(file)
    turned = {n: x[::-1].copy() if n.endswith("lora_B.weight") else x for n, x in kept.items()}
    save_file(turned, file, {"format": "pt"})
    fresh = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    wrong = logits(peft.PeftModel.from_pretrained(fresh, alone))
    assert np.abs(wrong - wanted).max() > 1e-3


def test_every_family_has_a_place_for_adapters_of_each_layer():
    for name in ("llama", "gpt2", "gpt_neox", "mpt"):
        architecture, size, params = model(name)
        kind = hf.family_of(architecture, size)
        assert set(tensors.modules(hf.FAMILIES[kind].table, params)) == set(linear_layers(params))
