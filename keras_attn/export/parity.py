"""Does the file compute what the model computes?"""

import warnings

import keras
import numpy as np

from keras_attn.export.errors import ExportError
from keras_attn.export.signature import input_structure, leaf_names

# Sizes tried for the open axes, in turn over the axes of all inputs: two different
# lengths first, then equal ones (some models need that), then what images need.
_LENGTHS = ((8, 5), (8,), (5,), (1,), (16,), (32,), (64,), (96,), (224,), (384,))
_ENOUGH = 3


def reference_cases(model, tensors, inputs=None, seed=0):
    """Pairs `(inputs by name, outputs by name)` of the live model.

    Args:
        model: the model, on whatever backend it lives.
        tensors: the `signature.Tensor` of each input.
        inputs: the user's own inputs, as the model takes them, or `None` to make some.
        seed: of the generated inputs.

    Raises:
        ValueError: the model fails on `inputs`, or on every generated input.
    """
    if inputs is not None:
        return _given_cases(model, tensors, inputs)
    cases, failure = [], None
    for lengths in _LENGTHS if any(None in t.shape[1:] for t in tensors) else (None,):
        feeds = _generate(model, tensors, lengths, np.random.default_rng(seed))
        try:
            with warnings.catch_warnings():  # sizes that the user did not choose
                warnings.simplefilter("ignore")
                cases.append((feeds, forward(model, tensors, feeds)))
        except Exception as error:
            failure = error
        if len(cases) == _ENOUGH:
            break
    if not cases:
        raise ValueError(
            f"The model {model.name!r} fails on every input generated for its check, "
            f"of shapes {_shapes(feeds)} in the end: {failure} "
            "Pass inputs that it takes: `inputs=...`."
        ) from failure
    return cases


def forward(model, tensors, feeds):
    """The outputs of the live model by name, as numpy arrays.

    By `predict_on_batch`, which on JAX compiles once a shape and not once an operation.
    """
    flat = [feeds[tensor.name] for tensor in tensors]
    packed = keras.tree.pack_sequence_as(input_structure(model), flat)
    outputs = model.predict_on_batch(packed)
    names = leaf_names(outputs, model.output_names)
    arrays = [_to_numpy(output) for output in keras.tree.flatten(outputs)]
    return dict(zip(names, arrays, strict=True))


def max_difference(cases, run, tolerance):
    """The largest difference between the model and the file over all cases.

    Args:
        cases: what `reference_cases` returned.
        run: a function from inputs by name to outputs by name: the file.
        tolerance: the bound, for outputs of size 1; it grows with larger outputs.

    Raises:
        ExportError: an output is missing, has another shape, is not finite where the
            model's is, or differs by more than the bound.
    """
    worst = 0.0
    for feeds, expected in cases:
        try:
            got = run(feeds)
        except Exception as error:
            raise ExportError(
                f"The file does not run on inputs of shape {_shapes(feeds)}: {error}"
            ) from error
        if set(got) != set(expected):
            raise ExportError(
                f"The model has the outputs {sorted(expected)}. The file: {sorted(got)}"
            )
        for name, value in expected.items():
            where = f"The output `{name}` for inputs of shape {_shapes(feeds)}"
            worst = max(worst, _difference(value, got[name], tolerance, where))
    return worst


def largest_output(cases):
    """The largest finite output of the model over all cases."""
    return max(_largest(value) for _, outputs in cases for value in outputs.values())


def _largest(array):
    finite = np.abs(array[np.isfinite(array)].astype("float64"))
    return float(finite.max(initial=0.0))


def _difference(expected, got, tolerance, where):
    if expected.shape != got.shape:
        raise ExportError(
            f"{where} has the shape {expected.shape} in the model. "
            f"The file: {got.shape}"
        )
    expected, got = expected.astype("float64"), got.astype("float64")
    if np.isnan(expected).any():
        raise ExportError(f"{where} holds NaN in the model itself")
    equal = expected == got  # holds for equal infinities
    difference = np.zeros_like(expected)
    np.subtract(expected, got, where=~equal, out=difference)
    largest = float(np.abs(difference).max(initial=0.0))
    bound = tolerance * max(1.0, _largest(expected))
    if not largest <= bound:
        raise ExportError(
            f"{where} differs by {largest:.3g} between the model and the file. "
            f"Expected at most {bound:.3g} (`tolerance={tolerance:g}`)"
        )
    return largest


def _given_cases(model, tensors, inputs):
    arrays = [np.asarray(_to_numpy(leaf)) for leaf in keras.tree.flatten(inputs)]
    if isinstance(inputs, dict) and set(inputs) == {tensor.name for tensor in tensors}:
        arrays = [np.asarray(_to_numpy(inputs[tensor.name])) for tensor in tensors]
    if len(arrays) != len(tensors) or len({len(array) for array in arrays}) != 1:
        raise ValueError(
            f"`inputs` must hold one array for each of {[t.name for t in tensors]}, "
            f"all of one batch size. Received shapes: {[a.shape for a in arrays]}"
        )
    for tensor, array in zip(tensors, arrays, strict=True):
        same = len(array.shape) == len(tensor.shape) and all(
            wanted in (None, size)
            for wanted, size in zip(tensor.shape[1:], array.shape[1:], strict=True)
        )
        if not same:
            raise ValueError(
                f"`inputs` must fit the exported input {tensor}. "
                f"Received: {array.shape}"
            )
    size = tensors[0].shape[0] or len(arrays[0])
    if len(arrays[0]) < size:
        raise ValueError(
            f"`inputs` must hold at least the exported batch of {size}. "
            f"Received: {len(arrays[0])}"
        )
    cases = []
    for start in range(0, len(arrays[0]) - size + 1, size):
        feeds = {
            tensor.name: array[start : start + size].astype(tensor.dtype)
            for tensor, array in zip(tensors, arrays, strict=True)
        }
        cases.append((feeds, forward(model, tensors, feeds)))
    return cases


def _generate(model, tensors, lengths, rng):
    feeds, axis = {}, 0
    for tensor, keras_tensor in zip(tensors, model.inputs, strict=True):
        shape = [3 if tensor.shape[0] is None else tensor.shape[0]]
        for size in tensor.shape[1:]:
            if size is None:
                size, axis = lengths[axis % len(lengths)], axis + 1
            shape.append(size)
        limit = _vocabulary_size(model, keras_tensor.name)
        feeds[tensor.name] = _values(shape, tensor.dtype, limit, rng)
    return feeds


def _values(shape, dtype, limit, rng):
    if dtype == "bool":
        values = rng.random(shape) < 0.7
        values[..., 0] = True
        return values
    if "int" not in dtype:
        return rng.standard_normal(shape).astype(dtype)
    if limit is None:
        return rng.integers(0, 256 if dtype == "uint8" else 2, shape).astype(dtype)
    values = rng.integers(min(1, limit - 1), limit, shape)
    if len(shape) == 2:  # token ids: rows padded at the end, each to another length
        for row, ids in enumerate(values):
            ids[len(ids) - len(ids) * ((row + 1) % 4) // 4 :] = 0
    return values.astype(dtype)


def _vocabulary_size(model, input_name):
    """How many ids the embeddings behind this input know; `None` without any."""
    layers = [layer["name"] for layer in _consumers(model, input_name)]
    behind = [layer for layer in model.layers if layer.name in layers]
    for group in (behind, [model]):
        sizes = [
            int(variable.shape[0])
            for layer in group
            for variable in layer.variables
            if variable.path.split("/")[-1] == "embeddings"
        ]
        if sizes:
            return min(sizes)
    return None


def _consumers(model, input_name):
    def reads(node):
        if isinstance(node, dict):
            if node.get("class_name") == "__keras_tensor__":
                return node["config"]["keras_history"][0] == input_name
            node = list(node.values())
        return isinstance(node, list | tuple) and any(reads(item) for item in node)

    if isinstance(model, keras.Sequential):
        return [{"name": model.layers[0].name}]
    return [
        layer
        for layer in model.get_config().get("layers", ())
        if reads(layer.get("inbound_nodes"))
    ]


def _to_numpy(value):
    return keras.ops.convert_to_numpy(value)


def _shapes(feeds):
    return {name: tuple(array.shape) for name, array in feeds.items()}
