"""Classify digits with a `.tflite` file, numpy and `ai-edge-litert` alone.

`vit_digits.py` puts this file, `runtime.py` of `keras_attn.export`, the model and the
held-out digits into one folder, and runs it there. Copied to a small device, that
folder works the same.
"""

import json
import pathlib
import sys
import time

# From here on, an import of any of these raises: the file needs none of them.
sys.modules.update(dict.fromkeys(["keras", "keras_attn", "tensorflow", "jax", "torch"]))

import numpy as np  # noqa: E402
from runtime import LiteRTModel  # noqa: E402

folder = pathlib.Path(__file__).parent
digits = np.load(folder / "held_out.npz")
model = LiteRTModel(folder / "digits.tflite", num_threads=1)

started = time.perf_counter()
predicted = [model(image[np.newaxis]).argmax() for image in digits["images"]]
seconds = time.perf_counter() - started
print(
    json.dumps(
        {
            "accuracy": np.mean(predicted == digits["labels"]),
            "milliseconds": 1000 * seconds / len(predicted),
        }
    )
)
