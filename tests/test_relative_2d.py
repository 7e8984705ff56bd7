"""The bias of a grid, entry by entry, at its own size and at others."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, randomize

from keras_attn import EncoderBlock, RelativePositionBias2D


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


def built(grid, **arguments):
    layer = RelativePositionBias2D(2, grid, **arguments)
    layer(array(1, *grid, 4))
    randomize(layer)
    return layer, oracle.weights_of(layer)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("grid", [(3, 5), (4, 4), (1, 3), (1, 1)])
def test_every_offset_has_its_entry(grid, prefix):
    layer, weights = built(grid, num_prefix_tokens=prefix)
    assert weights["table"].shape == (2 * grid[0] - 1, 2 * grid[1] - 1, 2)
    expected = oracle.grid_bias(
        weights["table"], *grid, prefix, weights.get("prefix_table")
    )
    assert np.array_equal(numpy(layer(array(3, *grid, 4)))[0], expected)
    sequence = array(3, prefix + grid[0] * grid[1], 4)
    assert np.array_equal(numpy(layer(sequence))[0], expected)


def test_swins_own_index():
    """The index of the paper's released code, written out for a window of 2."""
    layer, weights = built((2, 2))
    index = np.array([[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]])
    expected = weights["table"].reshape(9, 2)[index]
    close(layer(array(1, 2, 2, 4)), expected.transpose(2, 0, 1)[None], 0)


def test_beits_own_index():
    """The same with the three entries of the class token, for a window of 1 x 2."""
    layer, weights = built((1, 2), num_prefix_tokens=1)
    index = np.array([[5, 3, 3], [4, 1, 0], [4, 2, 1]])
    entries = [weights["table"].reshape(3, 2), weights["prefix_table"]]
    expected = np.concatenate(entries)[index]
    close(layer(array(1, 1, 2, 4)), expected.transpose(2, 0, 1)[None], 0)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("grid", [(5, 3), (2, 7), (6, 10)])
def test_another_grid_resizes_the_table(grid, interpolation):
    layer, weights = built((3, 5), num_prefix_tokens=1, interpolation=interpolation)
    table = oracle.resize(
        weights["table"], 2 * grid[0] - 1, 2 * grid[1] - 1, interpolation
    )
    expected = oracle.grid_bias(table, *grid, 1, weights["prefix_table"])
    close(layer(array(3, *grid, 4)), expected[None])


def test_the_same_grid_is_bit_identical_where_its_size_is_unknown():
    layer, weights = built((3, 5), num_prefix_tokens=1)
    inputs = keras.Input((None, None, 4))
    model = keras.Model(inputs, layer(inputs))
    expected = oracle.grid_bias(weights["table"], 3, 5, 1, weights["prefix_table"])
    found = model.predict(array(2, 3, 5, 4), verbose=0)
    assert np.array_equal(found[0], expected)
    larger = model.predict(array(2, 4, 7, 4), verbose=0)
    close(larger, numpy(layer(array(1, 4, 7, 4))))


def test_one_bias_is_shared_by_two_blocks_and_learns():
    inputs = keras.Input((3, 5, 8))
    x = keras.layers.Reshape((15, 8))(inputs)
    layer = RelativePositionBias2D(2, (3, 5))
    bias = layer(inputs)
    for _ in range(2):
        x = EncoderBlock(2, 11)(x, bias=bias)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = numpy(layer.table)
    model.fit(array(4, 3, 5, 8), array(4, 15, 8, seed=1), verbose=0)
    assert np.abs(numpy(layer.table) - before).min() > 0
    assert layer.count_params() == 5 * 9 * 2


BAD = [
    (lambda: RelativePositionBias2D(0, 3), "positive.*num_heads=0"),
    (lambda: RelativePositionBias2D(2, (3, 0)), "positive.*grid=0"),
    (lambda: RelativePositionBias2D(2, (3, 3, 3)), r"pair.*\(3, 3, 3\)"),
    (lambda: RelativePositionBias2D(2, 3, num_prefix_tokens=-1), "tokens=-1"),
    (lambda: RelativePositionBias2D(2, 3, interpolation="nearest"), "'nearest'"),
    (
        lambda: RelativePositionBias2D(2, (2, 3), 1)(array(2, 6, 4)),
        r"1 prefix.*\(2, 3\), 7 tokens.*\(2, 6, 4\)",
    ),
    (lambda: RelativePositionBias2D(2, 3)(array(2, 3)), r"rows, cols.*\(2, 3\)"),
]


@pytest.mark.parametrize("make, said", BAD, ids=lambda x: x if x is str else "")
def test_a_bad_argument_is_refused(make, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        make()
