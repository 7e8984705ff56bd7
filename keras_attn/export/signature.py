"""The names, shapes and dtypes that a model shows in an exported file."""

import dataclasses
import re

import keras

DEFAULT_SIGNATURE = "serving_default"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A named input or output. `None` in `shape` is a size left open."""

    name: str
    shape: tuple
    dtype: str

    def __str__(self):
        shape = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name} ({shape}) {self.dtype}"


def input_tensors(model, batch=None, length=None):
    """The inputs of `model` in the order of `keras.tree.flatten(model.input)`.

    Args:
        model: a functional or `Sequential` model.
        batch: the batch size to fix, or `None` for any.
        length: the sizes to fix where the model leaves them open: an integer for all,
            a tuple with one integer for each open axis, `{input name: either}`, or
            `None` for any.
    """
    names = leaf_names(input_structure(model), [x.name for x in model.inputs])
    if isinstance(length, dict) and set(length) - set(names):
        raise ValueError(
            f"`length` must name inputs of the model, {names}. "
            f"Received: length={length}"
        )
    return [
        Tensor(name, _shape(name, tensor.shape, batch, length), tensor.dtype)
        for name, tensor in zip(names, model.inputs, strict=True)
    ]


def output_names(model):
    """The names of the outputs in the order of `keras.tree.flatten(model.output)`.

    The keys of a dictionary, or the names of the layers that make the outputs.
    """
    is_sequence = isinstance(model, keras.Sequential)
    outputs = model.outputs[0] if is_sequence else model.output
    return leaf_names(outputs, model.output_names)


def input_structure(model):
    """What `model` takes: a tensor, or a list or dictionary of them."""
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def check_model(model):
    """Raises when `model` has no graph from named inputs to outputs."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {type(model).__name__}"
        )
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            f"The model {model.name!r} is not built: its input shape is unknown. "
            "Start it with `keras.Input(shape)`, or call it once."
        )
    if not getattr(model, "inputs", None):
        raise ValueError(
            "The model must be functional or Sequential, so that its inputs have "
            "names and shapes. Wrap yours: "
            "`x = keras.Input(shape); keras.Model(x, model(x))`. "
            f"Received: {type(model).__name__}"
        )


def _shape(name, shape, batch, length):
    if shape[0] is not None and batch is not None and shape[0] != batch:
        raise ValueError(
            f"The input `{name}` of the model has the fixed batch size {shape[0]}. "
            f"Received: batch={batch}"
        )
    if isinstance(length, dict):
        length = length.get(name)
    open_axes = [axis for axis in range(1, len(shape)) if shape[axis] is None]
    sizes = length if isinstance(length, (tuple, list)) else [length] * len(open_axes)
    if len(sizes) != len(open_axes):
        raise ValueError(
            f"The input `{name}` of shape {tuple(shape)} has {len(open_axes)} open "
            f"axes after the batch. Received: length={length}"
        )
    fixed = dict(zip(open_axes, sizes, strict=True))
    if shape[0] is None:
        fixed[0] = batch
    for axis, size in fixed.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(
                "`batch` and `length` must be positive integers or None. "
                f"Received {size!r} for axis {axis} of the input `{name}`"
            )
    return tuple(fixed.get(axis, size) for axis, size in enumerate(shape))


def leaf_names(structure, fallbacks):
    """One name a leaf, in the order of `keras.tree.flatten`, unique and plain.

    A leaf's name is its dictionary key where it has one. The order of a dictionary's
    keys differs by backend, and `flatten_with_path` has an order of its own.
    """
    paths = {}
    for path, leaf in keras.tree.flatten_with_path(structure):
        paths.setdefault(id(leaf), []).append(path)
    names = []
    for leaf, fallback in zip(keras.tree.flatten(structure), fallbacks, strict=True):
        path = paths[id(leaf)].pop(0)
        keyed = any(isinstance(key, str) for key in path)
        name = "_".join(str(key) for key in path) if keyed else fallback
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names
