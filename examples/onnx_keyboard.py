"""Suggest next words with an exported model: onnxruntime and tokenizers, nothing of fedlm.

fedlm export runs/sotu --format onnx --out sotu-onnx
python examples/onnx_keyboard.py sotu-onnx/model.onnx "we must protect the"
"""

import json
import sys

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

session = onnxruntime.InferenceSession(sys.argv[1])
about = session.get_modelmeta().custom_metadata_map
tokenizer, special = Tokenizer.from_str(about["tokenizer"]), json.loads(about["special_tokens"])
kinds = {"tensor(float)": np.float32, "tensor(int32)": np.int32}
state = {
    one.name: np.zeros([1 if isinstance(d, str) else d for d in one.shape], kinds[one.type])
    for one in session.get_inputs()[1:]
}
for token in [special["bos"], *tokenizer.encode(sys.argv[2], add_special_tokens=False).ids]:
    logits, *after = session.run(None, {"token": np.array([token], np.int32), **state})
    state = dict(zip(state, after, strict=True))
logits[0, special["reserved"]] = -np.inf
for best in np.argsort(-logits[0])[:5]:
    print(tokenizer.decode([int(best)]).strip())
