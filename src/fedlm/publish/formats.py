"""A finished run as files that other programs load.

In:       a run directory, a format.
Out:      a folder.
Promise:  the model there gives the logits of the run's model; one line in `FORMATS` adds a format.
Not here: names and layouts (`models/interop`), ONNX itself (`record/export.py`), the model card
          (`card.py`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

from fedlm.core.documents import JsonObject
from fedlm.core.durable import write_atomically
from fedlm.core.errors import require
from fedlm.core.types import Params
from fedlm.corpus import tokenizer_file
from fedlm.corpus.tokenizer import WORD
from fedlm.models import catalog
from fedlm.models.interop import gguf, huggingface, peft, web
from fedlm.publish.card import CARD, CONVERTED, FENCE, card, is_ours, licence_of, yaml_text
from fedlm.publish.finished_run import FinishedRun
from fedlm.record.directory import RunDirectory, adapter_beside
from fedlm.record.export import states_of, step_to_onnx
from fedlm.record.facts import facts_of

Files = dict[str, bytes]
LEAST_CAPACITY = 64  # tokens


def _safetensors(run: FinishedRun) -> Files:
    return {"model.safetensors": run.weights.read_bytes()}


def _onnx(run: FinishedRun, *, int8: bool) -> Files:
    """Return one step of the model, with all that is needed to use it in the file's metadata."""
    params, special = run.params, run.tokenizer.special
    capacity = _capacity(run)
    claim = facts_of(run.directory.path).final.get("privacy") or {}
    tokens = {"bos": special.bos, "eos": special.eos, "oov": special.oov}
    metadata = {
        "tokenizer": run.directory.tokenizer.read_text(encoding="utf-8"),
        "special_tokens": json.dumps({**tokens, "reserved": list(special.reserved)}),
        "capacity": str(capacity),  # tokens that a key-value cache holds
        "epsilon": json.dumps(claim.get("epsilon")),
        "delta": json.dumps(claim.get("delta")),
        "card": card(run, "onnx"),
    }
    data = step_to_onnx(
        lambda state, token: catalog.advance(params, state, token),
        lambda batch: params.start(batch, capacity),
        metadata,
        int8=int8,
    )
    return {"model.onnx": data}


def _capacity(run: FinishedRun) -> int:
    """Return how many tokens a key-value cache holds."""
    return min(max(run.recipe.data.sequence_length, LEAST_CAPACITY), run.spec.size.length)


def _huggingface(run: FinishedRun) -> Files:
    if adapter_beside(run.directory.weights).is_file():
        run.check_learned()
    return _folder(run, run.params)


def _peft(run: FinishedRun) -> Files:
    factors, adapters = run.factors, run.spec.adapters
    run.check_learned()
    assert adapters is not None  # or there were no factors
    base, origin = run.base, run.recipe.model.init_from
    ready = origin is not None and (Path(origin) / huggingface.CONFIG).is_file()
    where = str(origin) if ready else "base"
    files = peft.files_of(run.kind, run.spec.size, adapters, factors, where)
    beside = {} if ready else {f"base/{k}": v for k, v in _folder(run, base).items()}
    return {**files, **beside}


def _folder(run: FinishedRun, params: Params) -> Files:
    """Return the files of a Hugging Face folder."""
    special = run.tokenizer.special
    tokens = {"bos_token_id": special.bos, "eos_token_id": special.eos}
    config = huggingface.config_of(run.kind, run.spec.size, tokens)
    return {
        huggingface.WEIGHTS: huggingface.weights_of(run.kind, run.spec.size, params),
        huggingface.CONFIG: _json(config),
        "generation_config.json": _json({"_from_model_config": True, **tokens}),
        **_tokenizer(run),
    }


def _tokenizer(run: FinishedRun) -> Files:
    """Return the tokenizer's files: those of the base where it has them, with its chat template."""
    special = tokenizer_file.special_tokens_map(run.tokenizer)
    made = {"tokenizer_class": "PreTrainedTokenizerFast", **json.loads(special)}
    theirs = Path(run.recipe.model.init_from or "") / "tokenizer_config.json"
    kept = run.recipe.model.init_from and theirs.is_file()
    return {
        "tokenizer.json": run.directory.tokenizer.read_bytes(),
        "tokenizer_config.json": theirs.read_bytes() if kept else _json(made),
        run.directory.special_tokens.name: special,
    }


def _json(value: JsonObject) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _plain(make: Callable[[FinishedRun], Files]) -> Callable[[FinishedRun], Files]:
    """Return a format of one file, with the tokenizer beside it."""
    return lambda run: {
        **make(run),
        "tokenizer.json": run.directory.tokenizer.read_bytes(),
        run.directory.special_tokens.name: tokenizer_file.special_tokens_map(run.tokenizer),
    }


def _web(run: FinishedRun, *, int8: bool) -> Files:
    """Return a page with a keyboard that needs no server; `model.bin` holds the weights."""
    library = json.loads(run.tokenizer.library.to_str())
    _check_tokenizer(library)
    plain = web.is_plain(run.params) or run.onnxruntime is None
    pack = partial(web.pack, run.params) if plain else partial(_onnx_page, run)
    config, data = pack(int8=int8)
    special = run.tokenizer.special
    config |= {
        "about": f"{run.directory.path.resolve().name}: {run.spec.architecture}, "
        f"{run.spec.parameters:,} parameters{', int8 weights' if int8 else ''}. Nothing that is "
        "typed leaves this page.",
        "special": {"bos": special.bos, "eos": special.eos, "oov": special.oov}
        | {"reserved": list(special.reserved)},
        "tokenizer": {name: library[name] for name in WEB_TOKENIZER},
    }
    page = resources.files("fedlm") / "web"
    return {
        "index.html": (page / "index.html").read_bytes(),
        "model.bin" if plain else "model.onnx": data,
        **({} if plain or run.onnxruntime is None else _runtime(run.onnxruntime)),
        # A page opened from disk may not read a binary file: the same bytes as a script.
        "weights.js": b'window.FEDLM_WEIGHTS = "' + base64.b64encode(data) + b'";\n',
        "config.js": b"window.FEDLM = " + json.dumps(config).encode() + b";\n",
        **{name: (page / name).read_bytes() for name in ("style.css", "model.js", "page.js")},
    }


def _onnx_page(run: FinishedRun, *, int8: bool) -> tuple[JsonObject, bytes]:
    """Return what a page must know of a model that onnxruntime-web computes, and the ONNX file."""
    data = _onnx(run, int8=int8)["model.onnx"]
    return {"onnx": True, "capacity": _capacity(run), "states": states_of(data)}, data


def _runtime(folder: Path) -> Files:
    """Return onnxruntime-web as one script, which a page that was opened from disk may load too."""
    files = {"program": RUNTIME_PROGRAM, "wasm": RUNTIME_WASM}
    for name in files.values():
        require(
            (folder / name).is_file(),
            "--onnxruntime",
            str(folder),
            f"a folder with {' and '.join(files.values())}",
            "npm install onnxruntime-web puts it into node_modules/onnxruntime-web/dist.",
        )
    told = {
        name: base64.b64encode((folder / file).read_bytes()).decode()
        for name, file in files.items()
    }
    return {"runtime.js": b"window.FEDLM_RUNTIME = " + json.dumps(told).encode() + b";\n"}


RUNTIME_PROGRAM, RUNTIME_WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
WEB_TOKENIZER = ("normalizer", "pre_tokenizer", "model", "added_tokens")


def _check_tokenizer(library: JsonObject) -> None:
    """Raise `ConfigError` for a tokenizer that the page does not know."""
    cut, model = library["pre_tokenizer"] or {}, library["model"]
    words = model["type"] == "WordLevel" and cut.get("pattern") == {"Regex": WORD}
    pieces = (
        model["type"] == "BPE" and cut.get("type") == "ByteLevel" and cut.get("use_regex", True)
    )
    first = library["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps = {step["type"] for step in first.get("normalizers", [first])}
    require(
        bool(words or pieces) and steps <= {"NFC", "Lowercase"},
        "format",
        "web",
        "a tokenizer that fedlm fitted (words, bpe or bytes), or another of byte-level BPE",
        "Export others with --format onnx.",
    )


FORMATS: dict[str, Callable[[FinishedRun], Files]] = {
    "safetensors": _plain(_safetensors),
    "onnx": _plain(partial(_onnx, int8=False)),
    "onnx-int8": _plain(partial(_onnx, int8=True)),
    "huggingface": _huggingface,
    "peft": _peft,
    "web": partial(_web, int8=False),
    "web-int8": partial(_web, int8=True),
}


def check_folder(folder: Path) -> None:
    """Refuse a folder with files that no earlier export has made: they could be overwritten."""
    there = folder.is_dir() and next(folder.iterdir(), None) is not None
    require(
        not there or is_ours(folder),
        "--out",
        str(folder),
        "a new folder, or one that an earlier fedlm export or convert has made",
    )


def write_export(
    directory: RunDirectory,
    kind: str,
    folder: Path,
    *,
    best: bool = False,
    onnxruntime: Path | None = None,
) -> Path:
    """Write a run's model in a format with its card, and return the path of its main file.

    `onnxruntime`: a folder with onnxruntime-web, for a page with a model that is not recurrent.
    """
    require(kind in FORMATS, "format", kind, ", ".join(FORMATS))
    check_folder(folder)
    run = FinishedRun(directory, best=best, onnxruntime=onnxruntime)
    files = {**FORMATS[kind](run), CARD: card(run, kind).encode()}
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, data)
    return folder / next(iter(files))


# ---- a GGUF file as a folder -------------------------------------------------------------------


def convert_gguf(path: Path, folder: Path) -> Path:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face folder.

    Quantised weights become the float32 numbers that they stand for.
    """
    check_folder(folder)
    base = gguf.read_base(path)
    size = catalog.Dimensions(**base.sizes)
    kind = huggingface.family_of(base.architecture, size)
    library, names = gguf.tokenizer_of(path)
    tokens = {
        f"{name}_id": None if token is None else library.token_to_id(token)
        for name, token in names.items()
        if name != "unk_token"
    }
    template = gguf.chat_template_of(path)
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    licence = licence_of(str(path))
    entries = [f"license: {yaml_text(licence)}"] if licence else []
    made = f"{CONVERTED}: {yaml_text(path.name)}"
    head = "\n".join([FENCE, *entries, made, FENCE, "", ""])
    files = {
        huggingface.WEIGHTS: huggingface.weights_of(kind, size, gguf.load(path, size)),
        huggingface.CONFIG: _json(huggingface.config_of(kind, size, tokens)),
        "generation_config.json": _json({"_from_model_config": True, **tokens}),
        "tokenizer.json": library.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(told | ({"chat_template": template} if template else {})),
        CARD: f"{head}# {path.stem}\n\nMade by fedlm from `{path.name}`; quantised weights are "
        "the float32 numbers that they stand for.\n".encode(),
    }
    for name, data in files.items():
        write_atomically(folder / name, data)
    return folder / huggingface.WEIGHTS
