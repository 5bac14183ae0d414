"""Where the vocabulary of a store comes from: `[data]` to a tokenizer and its origin.

In:       the `[data]` table, perhaps a tokenizer that was read from the file it names.
Out:      a `Vocabulary`, or the function that makes one from the clients' training text.
Promise:  a store records the origin of its tokenizer.
Not here: reading a tokenizer file (`parts.py`).
"""

from __future__ import annotations

from pathlib import Path

from fedlm.corpus.tokenizer import TextTokenizer
from fedlm.corpus.vocabulary import Counting, Vocabulary, from_file
from fedlm.recipe.settings import Data


def vocabulary_of(data: Data, given: TextTokenizer | None) -> Vocabulary | Counting | None:
    """Return the vocabulary that `[data]` asks for; None: counted on the text without noise.

    `given` is the tokenizer of the file that `data.tokenizer` names, if it names one.
    """
    return None if given is None else from_file(given, Path(data.tokenizer))
