"""Run an exported `.tflite` file by its names, with `numpy` and `ai-edge-litert` alone.

This file imports nothing of Keras or of `keras_attn`: copy it next to the `.tflite`
file on the device.

    pip install numpy ai-edge-litert

    from runtime import LiteRTModel

    model = LiteRTModel("model.tflite")
    logits = model(images)                          # one input
    logits = model(source=tokens, target=started)   # several inputs, by name
"""

import os

import numpy as np

DEFAULT_SIGNATURE = "serving_default"


class LiteRTModel:
    """A `.tflite` file as a function of named arrays.

    Inputs with unknown sizes take any size; every call resizes them.

    Args:
        path: the `.tflite` file.
        num_threads: threads of the interpreter; `None` leaves the choice to it.
        signature: which signature of the file to call. `None` takes
            `"serving_default"`, or the only one there is.

    Attributes:
        inputs: `{name: (shape, dtype)}`, with `None` for an unknown size.
        outputs: the same for the outputs.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no LiteRT model, or has no such signature; on a call,
            when names, shapes or dtypes are not those of the file.
    """

    def __init__(self, path, num_threads=None, signature=None):
        self.path = os.fspath(path)
        self._interpreter = _open(self.path, num_threads)
        self.signatures = tuple(self._interpreter.get_signature_list())
        self.signature = _choose(self.signatures, signature, self.path)
        self._runner = self._interpreter.get_signature_runner(self.signature)
        self.inputs = _describe(self._runner.get_input_details())
        self.outputs = _describe(self._runner.get_output_details())

    def __call__(self, *args, **kwargs):
        """Returns the output array, or `{name: array}` when there are several."""
        outputs = self._runner(**self._prepare(args, kwargs))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def __repr__(self):
        names = ", ".join(f"{name}={shape}" for name, (shape, _) in self.inputs.items())
        return f"LiteRTModel({self.path!r}, {names})"

    def _prepare(self, args, kwargs):
        if len(args) == 1 and isinstance(args[0], dict) and not kwargs:
            args, kwargs = (), args[0]
        if args and (len(args) > 1 or kwargs or len(self.inputs) > 1):
            raise ValueError(
                f"A file with the inputs {sorted(self.inputs)} is called by name, "
                f"`model({sorted(self.inputs)[0]}=...)`. "
                f"Received: {len(args)} positional and {sorted(kwargs)}"
            )
        if args:
            kwargs = dict(zip(self.inputs, args, strict=True))
        if set(kwargs) != set(self.inputs):
            raise ValueError(
                f"{self.path} takes the inputs {sorted(self.inputs)}. "
                f"Received: {sorted(kwargs)}"
            )
        return {
            name: _convert(name, kwargs[name], *self.inputs[name])
            for name in self.inputs
        }


def _open(path, num_threads):
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise ImportError(
            "Running a `.tflite` file needs LiteRT: `pip install ai-edge-litert`"
        ) from error
    if not os.path.isfile(path):
        raise FileNotFoundError(f"There is no file {path!r}")
    try:
        return Interpreter(model_path=path, num_threads=num_threads)
    except ValueError as error:
        raise ValueError(f"{path!r} is not a LiteRT model: {error}") from error


def _choose(signatures, wanted, path):
    if wanted is None and len(signatures) == 1:
        return signatures[0]
    wanted = DEFAULT_SIGNATURE if wanted is None else wanted
    if wanted not in signatures:
        raise ValueError(
            f"{path!r} has the signatures {sorted(signatures)}. "
            f"Received: signature={wanted!r}"
        )
    return wanted


def _describe(details):
    return {
        name: (
            tuple(None if size == -1 else int(size) for size in d["shape_signature"]),
            np.dtype(d["dtype"]),
        )
        for name, d in details.items()
    }


def _convert(name, value, shape, dtype):
    """One input in the dtype of the file; refuses what would change its values."""
    array = np.asarray(value)
    fits = len(array.shape) == len(shape) and all(
        expected in (None, size)
        for expected, size in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"The input `{name}` of this file has the shape {shape} (`None` is any "
            f"size). Received: {array.shape}"
        )
    if 0 in array.shape:
        raise ValueError(f"The input `{name}` is empty. Received: {array.shape}")
    if array.dtype != dtype and array.dtype.kind not in _TAKES.get(dtype.kind, ""):
        raise ValueError(
            f"The input `{name}` of this file holds {dtype}. Received: {array.dtype}"
        )
    converted = array.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(converted, array):
        raise ValueError(
            f"The input `{name}` of this file holds {dtype}. "
            f"Received values up to {array.max()}, which it cannot hold"
        )
    return np.ascontiguousarray(converted)


# Kinds of arrays (`numpy.dtype.kind`) that an input of a kind accepts.
_TAKES = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}
