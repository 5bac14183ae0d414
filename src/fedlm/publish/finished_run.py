"""What an export reads of a finished run.

In:       a run directory.
Out:      its recipe, tokenizer, model and adapters, each read when it is asked for.
Promise:  an adapter that never left its start, or whose base has changed, is refused.
Not here: formats (`formats.py`), the model card (`card.py`).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedlm.core import tree
from fedlm.core.errors import RecordError
from fedlm.core.types import Params
from fedlm.corpus import tokenizer_file
from fedlm.corpus.tokenizer import TextTokenizer
from fedlm.inference import load_params
from fedlm.models import catalog
from fedlm.models.interop import huggingface
from fedlm.recipe import parts
from fedlm.recipe.settings import Recipe, load
from fedlm.record import checkpoint
from fedlm.record.directory import RunDirectory, adapter_beside


class FinishedRun:
    """What an export reads of a finished run."""

    def __init__(
        self, directory: RunDirectory, *, best: bool = False, onnxruntime: Path | None = None
    ) -> None:
        """Take the last model of a run, or the best one on the way.

        `onnxruntime`: a folder with the files of onnxruntime-web, for a page that needs it.
        """
        self.directory, self.onnxruntime = directory, onnxruntime
        self.weights = directory.weights_to_use(best=best)

    @cached_property
    def recipe(self) -> Recipe:
        return load(self.directory.recipe)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return tokenizer_file.load_tokenizer(self.directory.tokenizer)

    @cached_property
    def spec(self) -> catalog.ModelSpec:
        return parts.model_spec(self.recipe, self.tokenizer.vocabulary)

    @cached_property
    def params(self) -> Params:
        """The model after training, adapters merged."""
        model = self.recipe.model
        return load_params(model, self.tokenizer.vocabulary, self.weights)

    @cached_property
    def kind(self) -> str:
        """The `model_type` that Transformers knows the model by."""
        return huggingface.family_of(self.spec.architecture, self.spec.size)

    @cached_property
    def factors(self) -> dict[str, np.ndarray]:
        """The A and B of the run's adapters."""
        file = adapter_beside(self.weights)
        if not file.is_file():
            raise RecordError(
                f"{self.directory.path} trained the model itself, not adapters: expected a run "
                "with wire.trainable = 'lora'. Export it with --format huggingface."
            )
        return dict(checkpoint.arrays_in(file.read_bytes(), str(file)).state)

    def check_learned(self) -> None:
        """Raise `RecordError` if the adapters are as they began: then nothing was learned."""
        if not any(np.any(x) for name, x in self.factors.items() if name.endswith(".lora_b")):
            raise RecordError(
                f"{self.directory.path}: its adapters equal their start, so there is nothing to "
                "export: train more rounds, or with a higher learning rate."
            )

    @cached_property
    def base(self) -> Params:
        """The frozen model under the run's adapters, which must be the one they were trained on."""
        file = adapter_beside(self.weights)
        digest = checkpoint.arrays_in(file.read_bytes(), str(file)).facts["base"]
        plain = parts.plain_start(self.recipe, self.spec)
        dtype = jnp.dtype(self.recipe.model.base_dtype)
        if tree.sha256(jax.tree.map(lambda x: x.astype(dtype), plain)) != digest:
            raise RecordError(
                f"model.init_from = {self.recipe.model.init_from!r}: this is not the model that "
                f"the adapters of {self.directory.path} were trained on: bring back that one."
            )
        return plain
