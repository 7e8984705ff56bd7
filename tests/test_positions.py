"""The positional layers: what they add, where they count from, where they end."""

import keras
import numpy as np
import oracle
import pytest
from cases import Ride, numpy, randomize
from keras import ops

from keras_attn import (
    LearnedPositionEmbedding,
    SinusoidalPositionEncoding,
    SinusoidalPositionEncoding2D,
)


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


ARGUMENTS = [{}, {"layout": "halves"}, {"max_wavelength": 100}]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_sinusoids_are_added(arguments):
    x = array(2, 11, 6)
    expected = x + oracle.sinusoids(range(11), 6, **arguments)
    close(SinusoidalPositionEncoding(**arguments)(x), expected)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_sinusoids_are_added_to_a_grid(arguments):
    x = array(2, 3, 5, 8)
    layer = SinusoidalPositionEncoding2D(**arguments)
    close(layer(x), x + oracle.sinusoids_2d(3, 5, 8, **arguments))
    x = array(2, 7, 2, 8)  # another grid, the same layer
    close(layer(x), x + oracle.sinusoids_2d(7, 2, 8, **arguments))


def test_a_table_is_added():
    x, layer = array(2, 5, 3), LearnedPositionEmbedding(7)
    layer(x)
    randomize(layer)
    table = oracle.weights_of(layer)["embeddings"]
    assert table.shape == (7, 3)
    close(layer(x), x + table[:5])
    close(layer(x[:, :1]), x[:, :1] + table[:1])
    close(layer(array(2, 7, 3)), array(2, 7, 3) + table)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("grid", [(3, 5), (6, 10), (2, 3), (7, 5), (1, 1)])
def test_a_grid_is_added_and_resized(grid, interpolation):
    layer = LearnedPositionEmbedding((3, 5), interpolation=interpolation)
    layer(array(2, 3, 5, 2))
    randomize(layer)
    table = oracle.weights_of(layer)["embeddings"]
    x = array(2, *grid, 2)
    close(layer(x), x + oracle.resize(table, *grid, interpolation))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("sides", [(3, 5), (None, 5), (None, None)])
def test_a_grid_of_the_same_size_is_bit_identical(sides, interpolation):
    """Also where the model does not know the size; then any other works as well."""
    layer = LearnedPositionEmbedding((3, 5), interpolation=interpolation)
    inputs = keras.Input((*sides, 7))
    model = keras.Model(inputs, layer(inputs))
    randomize(layer)
    x = array(2, 3, 5, 7)
    found = model.predict(x, verbose=0)
    assert np.array_equal(found, x + numpy(layer.embeddings))
    if sides == (None, None):
        x = array(2, 6, 4, 7)
        table = oracle.weights_of(layer)["embeddings"]
        expected = x + oracle.resize(table, 6, 4, interpolation)
        close(model.predict(x, verbose=0), expected)


def test_the_table_starts_small():
    layer = LearnedPositionEmbedding(97)
    layer(array(1, 2, 11))
    table = numpy(layer.embeddings)
    assert 0.01 < table.std() < 0.03 and np.abs(table).max() < 0.05


# --- Where positions are counted from ------------------------------------------------

LAYERS = {
    "sinusoids": lambda **k: SinusoidalPositionEncoding(**k),
    "halves": lambda **k: SinusoidalPositionEncoding(layout="halves", **k),
    "table": lambda **k: LearnedPositionEmbedding(11, initializer="normal", **k),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
@pytest.mark.parametrize("way", ["argument", "riding"])
def test_padding_on_either_side_changes_no_real_token(name, way):
    real, layer = array(2, 5, 6), LAYERS[name]()
    bare = numpy(layer(real))
    for left, right in [(0, 3), (3, 0), (2, 1)]:
        x = np.pad(real, ((0, 0), (left, right), (0, 0)))
        mask = np.pad(np.ones((2, 5), bool), ((0, 0), (left, right)))
        padded = layer(x, mask=mask) if way == "argument" else layer(Ride(mask)(x))
        close(padded[:, left : left + 5], bare)


@every_layer
def test_a_position_is_the_count_of_real_tokens_before(name):
    x, layer = array(3, 7, 6), LAYERS[name]()
    mask = np.array(
        [[1, 0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], bool
    )
    bare = numpy(layer(np.zeros_like(x)))[2]  # what is added at each position
    expected = (x + bare[oracle.token_positions(mask)])[mask]
    close(numpy(layer(x, mask=mask))[mask], expected)


@every_layer
def test_positions_may_be_given(name):
    x, layer = array(2, 5, 6), LAYERS[name]()
    bare = numpy(layer(np.zeros((1, 11, 6), "float32")))[0]
    one = np.array([3, 1, 4, 1, 10])
    close(layer(x, positions=one), x + bare[one])
    two = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 10, 3]])
    close(layer(x, positions=two), x + bare[two])
    mask = np.ones((2, 5), bool)
    close(layer(x, mask=mask, positions=two), x + bare[two])


# --- Precision -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
@pytest.mark.parametrize("masked", [False, True])
def test_positions_are_float32_whatever_the_policy(dtype, layout, masked):
    """4,096 positions: all that is lost is the rounding of the sum."""
    layer = SinusoidalPositionEncoding(layout=layout, dtype=dtype)
    call = {"mask": np.ones((1, 4096), bool)} if masked else {}
    output = layer(np.zeros((1, 4096, 8), "float32"), **call)
    assert keras.backend.standardize_dtype(output.dtype) == layer.compute_dtype
    expected = oracle.sinusoids(range(4096), 8, layout=layout)
    digits = 11 if "float16" in dtype and "b" not in dtype else 8
    error = np.abs(numpy(ops.cast(output, "float32"))[0] - expected)
    assert (error <= 2.0**-digits * np.abs(expected) + 5e-4).all()


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16"])
def test_grid_positions_are_float32_whatever_the_policy(dtype):
    layer = SinusoidalPositionEncoding2D(dtype=dtype)
    output = layer(np.zeros((1, 1031, 2, 8), "float32"))
    expected = oracle.sinusoids_2d(1031, 2, 8)
    error = np.abs(numpy(ops.cast(output, "float32"))[0] - expected)
    assert (error <= 2.0**-8 * np.abs(expected) + 5e-4).all()


def test_tables_are_looked_up_exactly_under_bfloat16():
    """Positions past 256 are no bfloat16 numbers: they must not be rounded."""
    layer = LearnedPositionEmbedding(1031, initializer="normal", dtype="mixed_bfloat16")
    x = np.zeros((1, 1031, 3), "float32")
    layer(x)
    table = ops.cast(ops.convert_to_tensor(layer.embeddings), "bfloat16")
    expected = numpy(ops.cast(table, "float32"))[None]
    masked = layer(x, mask=np.ones((1, 1031), bool))
    np.testing.assert_array_equal(numpy(ops.cast(masked, "float32")), expected)
    given = layer(x, positions=np.arange(1031))
    np.testing.assert_array_equal(numpy(ops.cast(given, "float32")), expected)


# --- Where they end ------------------------------------------------------------------


def test_a_longer_sequence_than_the_table_is_refused():
    layer = LearnedPositionEmbedding(7)
    with pytest.raises(ValueError, match=r"(?s)longer.*7.*\(2, 11, 3\)"):
        layer(array(2, 11, 3))
    with pytest.raises(ValueError, match=r"(?s)longer.*7.*\(None, 11, 3\)"):
        LearnedPositionEmbedding(7)(keras.KerasTensor((None, 11, 3)))
    layer = LearnedPositionEmbedding(7)
    layer(array(2, 7, 3))
    with pytest.raises(ValueError, match=r"(?s)longer.*7.*\(2, 8, 3\)"):
        layer(array(2, 8, 3))
    mask = np.ones((2, 8), bool)
    with pytest.raises(ValueError, match=r"(?s)longer.*7.*\(2, 8, 3\)"):
        layer(array(2, 8, 3), mask=mask)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_longer_sequence_is_refused_by_an_open_model_too(jit_compile):
    if jit_compile and keras.backend.backend() == "torch":
        pytest.skip("needs a C++ compiler")
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, LearnedPositionEmbedding(7)(inputs))
    assert model(array(2, 7, 3)).shape == (2, 7, 3)
    with pytest.raises(ValueError, match="(?s)longer.*7"):
        model(array(2, 11, 3))
    model.compile(jit_compile=jit_compile)
    assert model.predict(array(2, 7, 3), verbose=0).shape == (2, 7, 3)
    said = r"(?s)longer|ncompatible shapes|must be equal|broadcast"
    with pytest.raises(Exception, match=said):
        model.predict(array(2, 11, 3), verbose=0)


@pytest.mark.parametrize("positions", [[0, 1, 7], [-1, 0, 1]])
def test_a_position_outside_the_table_raises(positions):
    layer = LearnedPositionEmbedding(7)
    with pytest.raises(ValueError, match=r"(?s)\[0, 7\).*Received: positions"):
        layer(array(2, 3, 5), positions=np.array(positions))


BAD_ARGUMENTS = [
    (SinusoidalPositionEncoding, {"layout": "both"}, "interleaved.*layout='both'"),
    (SinusoidalPositionEncoding2D, {"layout": "both"}, "interleaved.*layout='both'"),
    (SinusoidalPositionEncoding, {"max_wavelength": 0}, "max_wavelength=0"),
    (LearnedPositionEmbedding, {"size": 0}, "positive.*size=0"),
    (LearnedPositionEmbedding, {"size": (3, -1)}, "positive.*size=-1"),
    (LearnedPositionEmbedding, {"size": (3, 5, 7)}, r"pair.*\(3, 5, 7\)"),
    (LearnedPositionEmbedding, {"size": 2.5}, "positive.*size=2.5"),
    (
        LearnedPositionEmbedding,
        {"size": 3, "interpolation": "nearest"},
        "bicubic.*interpolation='nearest'",
    ),
]


@pytest.mark.parametrize("layer, arguments, said", BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_is_refused_at_once(layer, arguments, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        layer(**arguments)


BAD_SHAPES = [
    (SinusoidalPositionEncoding, {}, (2, 3, 4, 8), r"length, dim.*\(2, 3, 4, 8\)"),
    (SinusoidalPositionEncoding2D, {}, (2, 3, 8), r"rows, cols, dim.*\(2, 3, 8\)"),
    (SinusoidalPositionEncoding2D, {}, (2, 3, 5, 6), r"multiple of 4.*\(2, 3, 5, 6\)"),
    (LearnedPositionEmbedding, {"size": 7}, (2, 3, 4, 8), r"length, dim.*3, 4, 8\)"),
    (LearnedPositionEmbedding, {"size": (3, 5)}, (2, 3, 8), r"rows, cols.*\(2, 3, 8\)"),
]


@pytest.mark.parametrize("layer, arguments, shape, said", BAD_SHAPES, ids=str)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_bad_shape_is_refused(layer, arguments, shape, said, symbolic):
    x = keras.KerasTensor(shape) if symbolic else array(*shape)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        layer(**arguments)(x)
