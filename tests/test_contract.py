"""The contracts that every layer keeps, over the table in `cases.py`.

The numbers themselves are tested against a float64 reference in the layers' own files:
as every backend is held to it within 1e-5, they agree with each other.
"""

import inspect
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from cases import (
    BATCH,
    CASES,
    DIM,
    PUBLIC_LAYERS,
    Probe,
    Ride,
    numpy,
    padding,
    randomize,
    riding_mask,
    run_whole,
)
from keras import ops

from keras_attn import EncoderBlock, MultiHeadAttention

every_layer = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def only(condition):
    rows = [case for case in CASES if condition(case)]
    return pytest.mark.parametrize("case", rows, ids=lambda case: case.name)


def same(left, right, tolerance=1e-6):
    """Outputs, or whole structures of them, that are equal."""
    pairs = zip(keras.tree.flatten(left), keras.tree.flatten(right), strict=True)
    for one, two in pairs:
        np.testing.assert_allclose(
            numpy(one), numpy(two), rtol=tolerance, atol=tolerance
        )


def differ(left, right):
    return left.shape != right.shape or np.abs(left - right).max() > 1e-2


def test_every_public_layer_is_in_the_table():
    assert {case.layer for case in CASES} == PUBLIC_LAYERS


# --- 1. Masks ------------------------------------------------------------------------


def masks_of(case, side="right"):
    return [
        np.stack([padding(shape[-2], side=side)] * shape[0], 1)
        if len(shape) == 3
        else padding(shape[0], side=side)
        for shape in case.inputs[: len(case.mask_names)]
    ]


def hand_over(case, layer, arrays, masks, way, **call):
    """The layer's output, with the masks given as arguments or riding on the inputs."""
    call = {**case.call, **call}
    if way == "argument":
        return layer(*arrays, **case.mask_arguments(masks), **call)
    ridden = [Ride(mask)(array) for array, mask in zip(arrays, masks, strict=False)]
    return layer(*ridden, *arrays[len(ridden) :], **call)


@pytest.mark.parametrize("way", ["argument", "riding"])
@pytest.mark.parametrize("side", ["right", "left"])
@only(lambda case: case.mask_names)
def test_content_under_the_mask_changes_no_real_token(case, side, way):
    layer, arrays, masks = case.build(), case.arrays(), masks_of(case, side)
    other = [
        np.where(mask[..., None], array, 50.0 * noise)
        for array, noise, mask in zip(arrays, case.arrays(seed=9), masks, strict=False)
    ] + arrays[len(masks) :]
    one = numpy(hand_over(case, layer, arrays, masks, way))
    two = numpy(hand_over(case, layer, other, masks, way))
    assert not np.array_equal(arrays[0], other[0])
    real = masks[0]
    if case.pools:
        same(one, two)
    else:
        same(one[:, case.front :][real], two[:, case.front :][real])


@only(lambda case: len(case.mask_names) > 1)
def test_a_mask_on_one_input_alone_is_obeyed(case):
    layer, arrays, masks = case.build(), case.arrays(), masks_of(case)
    hidden = [
        arrays[0],
        np.where(masks[1][..., None], arrays[1], 50.0).astype("float32"),
        *arrays[2:],
    ]
    ridden = [[x[0], Ride(masks[1])(x[1]), *x[2:]] for x in (arrays, hidden)]
    name = case.mask_names[1]
    for inputs, call in ((ridden, {}), ((arrays, hidden), {name: masks[1]})):
        one, two = (layer(*x, **case.call, **call) for x in inputs)
        same(one, two)
    assert np.abs(numpy(layer(*arrays)) - numpy(layer(*hidden))).max() > 1e-2


@pytest.mark.parametrize("way", ["argument", "riding"])
@only(lambda case: case.keeps_mask and len(case.inputs[0]) == 2)
def test_the_mask_leaves_with_the_output(case, way):
    if way == "argument" and not case.mask_names:
        pytest.skip("takes no mask by argument")
    layer, arrays = case.build(), case.arrays()
    masks = masks_of(case) or [padding(case.inputs[0][0])]
    left = riding_mask(hand_over(case, layer, arrays, masks, way))
    np.testing.assert_array_equal(left[:, case.front :], masks[0])
    assert left[:, : case.front].all()


@only(lambda case: case.keeps_mask and len(case.inputs[0]) == 2)
def test_the_mask_travels_through_a_functional_model(case):
    masks = masks_of(case) or [padding(case.inputs[0][0])]
    inputs = case.symbols()
    first = keras.layers.Masking()(inputs[0])
    output = case.make()(first, *inputs[1:], **case.call)
    model = keras.Model(inputs, Probe()(output))
    arrays = case.arrays()
    arrays[0] *= masks[0][..., None]
    found = numpy(model(arrays)).astype(bool)
    np.testing.assert_array_equal(found[:, case.front :], masks[0])


def test_ids_make_the_mask_and_it_reaches_the_end_of_a_stack():
    ids = np.array([[3, 5, 2, 0, 0], [4, 0, 0, 0, 0]])
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(7, DIM, mask_zero=True)(inputs)
    for case in CASES:
        plain = len(case.inputs) == 1 and case.inputs[0] == (5, DIM)
        if plain and case.keeps_mask and not case.front and "7" not in case.name:
            y = case.make()(x, **case.call)
            x = y if y.shape[-1] == DIM else x
    model = keras.Model(inputs, [x, Probe()(x)])
    output, mask = run_whole(model, ids)
    np.testing.assert_array_equal(numpy(mask), ids != 0)
    longer = run_whole(model, np.pad(ids, ((0, 0), (0, 2))))[0]
    same(numpy(output)[ids != 0], numpy(longer)[:, :5][ids != 0], 1e-5)


@only(lambda case: case.mask_names)
def test_the_callers_own_tensors_keep_their_masks(case):
    layer, masks = case.build(), masks_of(case)
    arrays = [ops.convert_to_tensor(array) for array in case.arrays()]
    layer(*arrays, **case.mask_arguments(masks), **case.call)
    assert all(getattr(array, "_keras_mask", None) is None for array in arrays)
    ridden = [Ride(mask)(array) for array, mask in zip(arrays, masks, strict=False)]
    before = [array._keras_mask for array in ridden]
    layer(*ridden, *arrays[len(ridden) :], **case.call)
    assert all(x._keras_mask is mask for x, mask in zip(ridden, before, strict=True))


@only(lambda case: case.mask_names)
def test_a_float_mask_is_refused(case):
    layer, masks = case.build(), masks_of(case)
    for name, mask in case.mask_arguments(masks).items():
        with pytest.raises(TypeError, match=r"(?s)boolean.*float32.*bias="):
            layer(*case.arrays(), **{name: mask.astype("float32")}, **case.call)


@only(lambda case: case.is_causal and not case.vocabulary)
@pytest.mark.parametrize("training", [False, True])
def test_the_future_does_not_change_the_past(case, training):
    arrays, seen = case.arrays(), 3
    other = case.arrays(seed=9)
    other = [np.concatenate([arrays[0][:, :seen], other[0][:, seen:]], 1), *arrays[1:]]
    call = {**case.call, "training": training} if case.has_dropout else case.call
    # A new layer for each: its dropout draws the same numbers in the same call.
    one, two = (numpy(case.build()(*x, **call)) for x in (arrays, other))
    same(one[:, : seen + case.front], two[:, : seen + case.front])
    assert np.abs(one - two).max() > 1e-2


@only(lambda case: case.mask_names)
def test_a_row_of_padding_alone_stays_finite(case, gradients):
    layer, arrays, masks = case.build(), case.arrays(), masks_of(case)
    masks = [np.where(np.arange(BATCH) == 1, False, mask.T).T for mask in masks]
    names = case.mask_arguments(masks)
    output = numpy(layer(*arrays, **names, **case.call))
    assert np.isfinite(output).all()

    def loss(*inputs):
        return ops.square(layer(*inputs, **names, **case.call))

    for gradient in gradients(loss, *arrays):
        assert np.isfinite(gradient).all()


# --- 3. Half precision ---------------------------------------------------------------

POLICIES = ["float32", "mixed_float16", "mixed_bfloat16", "bfloat16"]


@pytest.mark.parametrize("dtype", POLICIES[1:])
@every_layer
def test_half_precision_stays_finite(case, dtype):
    layer = case.make(dtype=dtype)
    outputs = layer(*case.arrays(deviation=100.0), **case.call)
    output, *others = keras.tree.flatten(outputs)
    expected = case.dtype or keras.dtype_policies.get(dtype).compute_dtype
    assert keras.backend.standardize_dtype(output.dtype) == expected
    for x in (output, *others):
        assert np.isfinite(numpy(ops.cast(x, "float32"))).all()


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_every_layer_trains(dtype, policy):
    """One step of `fit`. TensorFlow takes minutes to trace the table: there eagerly."""
    policy(dtype)
    model = zoo(is_open=False)
    inputs = zoo_inputs()
    before = [numpy(weight) for weight in model.trainable_weights]
    random = np.random.default_rng(0)  # not ones: a last norm's mean is blind to them
    targets = {
        name: random.normal(size=(BATCH, *output.shape[1:])).astype("float32")
        for name, output in model.output.items()
    }
    eagerly = keras.backend.backend() == "tensorflow"
    optimizer = keras.optimizers.SGD(0.1)
    if dtype == "mixed_float16":  # from Keras' 2**15 the scale would come down by steps
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2**10)
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    model.fit(inputs, targets, epochs=1, batch_size=BATCH, verbose=0)
    stuck = []
    for weight, old in zip(model.trainable_weights, before, strict=True):
        new = numpy(weight)
        if not np.isfinite(new).all() or np.array_equal(new, old):
            stuck.append(weight.path)
    assert [path for path in stuck if not is_free(path)] == []


def is_free(path):
    """Weights whose gradient is 0 by the mathematics: softmax ignores a key's bias."""
    return path.endswith("key/bias")


# --- 4. Every path is the same function ----------------------------------------------


def test_eager_and_compiled_agree():
    model, inputs = zoo(is_open=False), zoo_inputs()
    eager = {name: numpy(output) for name, output in model(inputs).items()}
    # torch would need a C++ compiler, and minutes.
    model.compile(jit_compile=keras.backend.backend() != "torch")
    compiled = model.predict(inputs, verbose=0)
    assert differing(eager, compiled, 1e-5) == []


def differing(left, right, tolerance):
    assert set(left) == set(right)
    return [
        name
        for name in left
        if left[name].shape != right[name].shape
        or not np.allclose(left[name], right[name], rtol=tolerance, atol=tolerance)
    ]


# --- 5. Symbolic = eager -------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
@pytest.mark.parametrize("size", ["known", "unknown"])
@every_layer
def test_symbolic_is_eager(case, size, dtype):
    calls = [case.call]
    if case.layer is MultiHeadAttention and "implementation" not in case.arguments:
        calls.append({**case.call, "return_attention_scores": True})
    for call in calls:
        is_open = size == "unknown"
        symbols = case.symbols(is_open, batch=None if is_open else BATCH)
        symbolic = keras.tree.flatten(case.make(dtype=dtype)(*symbols, **call))
        eager = keras.tree.flatten(case.make(dtype=dtype)(*case.arrays(), **call))
        for expected, output in zip(symbolic, eager, strict=True):
            dtypes = [
                keras.backend.standardize_dtype(x.dtype) for x in (expected, output)
            ]
            assert dtypes[0] == dtypes[1]
            shape, real = tuple(expected.shape), tuple(output.shape)
            if not is_open and not case.has_open_length:
                assert shape == real
            assert len(shape) == len(real)
            assert all(a in (None, b) for a, b in zip(shape, real, strict=True))
            assert shape[0] is None or not is_open or case.is_shared


@every_layer
def test_compute_output_shape_needs_no_tensors(case):
    shapes = [(BATCH, *shape) for shape in case.inputs]
    output = case.build()(*case.arrays(), **case.call)
    found = case.make().compute_output_shape(*shapes)
    found = found if isinstance(output, tuple) else (found,)
    for shape, x in zip(found, keras.tree.flatten(output), strict=True):
        real = list(x.shape)
        real[1] = None if case.has_open_length else real[1]
        assert list(shape) == real


@every_layer
def test_one_open_model_takes_any_size(case):
    """Built once with unknown sizes, the model gives what the eager layer gives."""
    inputs = case.symbols()
    layer = case.make()
    model = keras.Model(inputs, layer(*inputs, **case.call))
    randomize(layer)
    arrays = case.arrays(batch=2)
    same(model(arrays), layer(*arrays, **case.call))


# --- 6. Saved is loaded --------------------------------------------------------------


@every_layer
def test_the_config_holds_every_argument(case):
    layer = case.make()
    config = layer.get_config()
    names = set()
    for cls in case.layer.__mro__:
        if cls.__module__.startswith("keras_attn") and "__init__" in vars(cls):
            names |= set(inspect.signature(cls.__init__).parameters)
    assert names - {"self", "kwargs"} <= set(config)
    for name, value in case.arguments.items():
        if isinstance(value, (int, str, float)):
            assert config[name] in (value, (value, value))  # one for both sides
        if isinstance(value, tuple):
            assert tuple(config[name]) == value
    assert json.loads(json.dumps(config)) is not None


@every_layer
def test_the_config_does_not_change_on_build(case):
    layer = case.make()
    before = json.dumps(layer.get_config(), sort_keys=True)
    layer(*case.arrays(), **case.call)
    assert json.dumps(layer.get_config(), sort_keys=True) == before


@every_layer
def test_a_layer_from_its_config_is_the_same_layer(case):
    layer = case.build()
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == layer.get_config()
    assert keras.saving.get_registered_name(case.layer) == (
        f"keras_attn>{case.layer.__name__}"
    )
    again(*case.arrays(), **case.call)
    paths = [[w.path for w in part.weights] for part in (layer, again)]
    assert paths[0] == paths[1]
    again.set_weights(layer.get_weights())
    same(again(*case.arrays(), **case.call), layer(*case.arrays(), **case.call))


@every_layer
def test_weight_paths_are_attribute_names(case):
    """So that saved keys, layout maps and the reader of the code agree."""
    layer = case.build()
    for weight in layer.trainable_weights:
        owner, (*inner, _) = (
            layer,
            weight.path.removeprefix(f"{layer.path}/").split("/"),
        )
        for name in inner:
            owner = getattr(owner, name)
        assert any(weight is own for own in owner.weights)


@every_layer
def test_no_two_kernels_start_alike(case):
    layer = case.make()
    layer(*case.arrays(), **case.call)
    kernels = [w for w in layer.trainable_weights if w.path.endswith("/kernel")]
    firsts = [tuple(numpy(kernel).ravel()[:3]) for kernel in kernels]
    assert len(set(firsts)) == len(firsts)


@only(lambda case: case.has_dropout)
def test_stateless_training_drops(case):
    layer = case.build()
    arrays = [ops.convert_to_tensor(array) for array in case.arrays()]
    trainable = [variable.value for variable in layer.trainable_variables]
    fixed = [variable.value for variable in layer.non_trainable_variables]

    def call(training):
        outputs, _ = layer.stateless_call(
            trainable, fixed, *arrays, training=training, **case.call
        )
        return numpy(outputs)

    same(call(False), layer(*arrays, training=False, **case.call))
    assert differ(call(True), call(False))


@only(lambda case: not case.has_dropout)
def test_without_dropout_training_changes_nothing(case):
    layer = case.build()
    takes = "training" in inspect.signature(layer.call).parameters
    if takes:
        one = layer(*case.arrays(), training=True, **case.call)
        same(one, layer(*case.arrays(), training=False, **case.call))


def zoo(is_open=True, rows=None):
    """One functional model with every row of the table in it, or with those named."""
    inputs, outputs = {}, {}
    for case in CASES:
        if rows is not None and case.name not in rows:
            continue
        symbols = case.symbols(is_open)
        inputs |= {symbol.name: symbol for symbol in symbols}
        output = case.make()(*symbols, **case.call)
        outputs[case.name] = case.readout(output, symbols[0])
    return keras.Model(inputs, outputs, name="zoo")


def zoo_inputs(rows=None):
    return {
        symbol.name: array
        for case in CASES
        if rows is None or case.name in rows
        for symbol, array in zip(case.symbols(), case.arrays(), strict=True)
    }


def outputs_of(model, inputs):
    return {name: numpy(output) for name, output in run_whole(model, inputs).items()}


def test_a_clone_is_the_same_model():
    model, inputs = zoo(), zoo_inputs()
    randomize(model)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert differing(outputs_of(model, inputs), outputs_of(clone, inputs), 1e-6) == []


LOADER = """
import sys
import numpy as np
import keras_attn
import keras

model = keras.saving.load_model(sys.argv[1])
inputs = dict(np.load(sys.argv[2]))
np.savez(sys.argv[3], **model.predict(inputs, verbose=0))
"""


NEXT = {"tensorflow": "jax", "jax": "torch", "torch": "tensorflow"}


def test_saved_here_is_loaded_there(tmp_path):
    """On the next backend round, in a fresh process that only imports keras_attn."""
    backend = NEXT[keras.backend.backend()]
    pytest.importorskip(backend)
    model, inputs = zoo(), zoo_inputs()
    randomize(model)
    model.save(tmp_path / "zoo.keras")
    np.savez(tmp_path / "inputs.npz", **inputs)
    names = ["zoo.keras", "inputs.npz", "outputs.npz"]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *(str(tmp_path / name) for name in names)],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loaded = dict(np.load(tmp_path / "outputs.npz"))
    assert differing(outputs_of(model, inputs), loaded, 1e-5) == []


def test_weights_alone_are_loaded(tmp_path):
    model, inputs = zoo(), zoo_inputs()
    randomize(model)
    path = str(pathlib.Path(tmp_path, "zoo.weights.h5"))
    model.save_weights(path)
    other = zoo(is_open=False)
    other.load_weights(path)
    assert differing(outputs_of(model, inputs), outputs_of(other, inputs), 1e-6) == []


# One row of each layer that holds dense layers: to quantize one takes Keras 0.3 s.
QUANTIZED = {
    "attention_cross",
    "attention_gate",
    "attention_grouped",
    "feed_forward",
    "geglu",
    "experts_gated",
    "residual_pre",
    "encoder_pre",
    "encoder_parts",
    "decoder",
    "token_embedding",
    "prefix_sequence",
    "pooling_feed_forward",
}


# Keras says so of every layer without weights to quantize.
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_quantized_is_saved_and_loaded(tmp_path):
    model, inputs = zoo(rows=QUANTIZED), zoo_inputs(QUANTIZED)
    randomize(model)
    exact = outputs_of(model, inputs)
    model.quantize("int8")
    quantized = outputs_of(model, inputs)
    kernels = [w for w in model.weights if w.path.endswith("kernel")]
    is_int8 = [w for w in kernels if keras.backend.standardize_dtype(w.dtype) == "int8"]
    assert len(is_int8) == len(kernels) == 53
    assert differing(exact, quantized, 1e-6) != []
    assert differing(exact, quantized, 1.0) == []  # still the same functions
    model.save(tmp_path / "zoo.keras")
    loaded = keras.saving.load_model(tmp_path / "zoo.keras")
    assert differing(quantized, outputs_of(loaded, inputs), 1e-6) == []


def test_lora_reaches_the_projections():
    layer = EncoderBlock(2, 11)
    x = np.random.default_rng(0).normal(size=(2, 5, DIM)).astype("float32")
    before = numpy(layer(x))
    projections = [
        layer.attention.query,
        layer.attention.key,
        layer.attention.value,
        layer.attention.attention_output,
        layer.feed_forward.intermediate_dense,
        layer.feed_forward.output_dense,
    ]
    for projection in projections:
        projection.enable_lora(2)
    assert sum("lora" in w.path for w in layer.trainable_weights) == 12
    assert not any(w.path.endswith("/kernel") for w in layer.trainable_weights)
    same(layer(x), before)
    for projection in projections:
        projection.lora_kernel_b.assign(np.ones(projection.lora_kernel_b.shape))
    assert np.abs(numpy(layer(x)) - before).max() > 1e-2
