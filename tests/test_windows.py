"""Windows cut, put back and shifted, token by token."""

import keras
import numpy as np
import pytest
from cases import numpy

from keras_attn.windows import shifted_window_mask, window_partition, window_reverse


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.mark.parametrize(
    "grid, window, size",
    [((4, 6), 2, (2, 2)), ((4, 6), (4, 3), (4, 3)), ((3, 5), (1, 5), (1, 5))],
)
def test_windows_are_cut_and_put_back(grid, window, size):
    x = array(2, *grid, 3)
    windows = numpy(window_partition(x, window))
    across = grid[1] // size[1]
    assert windows.shape == (
        2,
        grid[0] // size[0] * across,
        size[0] * size[1],
        3,
    )
    for r, c in np.ndindex(*grid):
        where = r // size[0] * across + c // size[1]
        place = r % size[0] * size[1] + c % size[1]
        np.testing.assert_array_equal(windows[:, where, place], x[:, r, c])
    np.testing.assert_array_equal(numpy(window_reverse(windows, window, *grid)), x)


def test_a_padding_mask_is_cut_like_the_grid():
    real = np.ones((1, 2, 4, 1), bool)
    real[:, :, 3] = False
    cut = numpy(window_partition(real, 2))
    assert cut.dtype == bool
    assert cut[0, :, :, 0].tolist() == [[True] * 4, [True, False] * 2]


@pytest.mark.parametrize(
    "grid, window, shift",
    [
        ((4, 6), (2, 3), (1, 1)),
        ((8, 8), (4, 4), (2, 2)),
        ((6, 6), (3, 3), (2, 1)),
        ((4, 4), (4, 4), (0, 2)),
        ((4, 6), (2, 3), (0, 0)),
    ],
)
def test_the_mask_shows_only_who_were_neighbours(grid, window, shift):
    """Undo the roll: who may see each other share a window of the shifted plane."""
    mask = numpy(shifted_window_mask(*grid, window, shift))
    assert mask.dtype == bool
    place = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1)
    rolled = np.roll(place, [-s for s in shift], axis=(0, 1))[None].astype("int32")
    windows = numpy(window_partition(rolled, window))[0]
    assert mask.shape == (*windows.shape[:2], windows.shape[1])
    for w, q, k in np.ndindex(*mask.shape):
        cells = [(windows[w, i] - shift) // window for i in (q, k)]
        assert mask[w, q, k] == (cells[0] == cells[1]).all()


def test_windows_in_a_functional_model_with_an_open_batch():
    inputs = keras.Input((4, 6, 3))
    windows = window_partition(inputs, 2)
    assert windows.shape == (None, 6, 4, 3)
    outputs = window_reverse(windows, 2, 4, 6)
    assert outputs.shape == (None, 4, 6, 3)
    x = array(2, 4, 6, 3)
    np.testing.assert_array_equal(numpy(keras.Model(inputs, outputs)(x)), x)


class Windows(keras.layers.Layer):
    def call(self, inputs):
        _, rows, cols, _ = keras.ops.shape(inputs)
        windows = window_partition(inputs, 2)
        return window_reverse(2 * windows, 2, rows, cols)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


def test_windows_of_an_unknown_grid_inside_a_layer():
    inputs = keras.Input((None, None, 3))
    model = keras.Model(inputs, Windows()(inputs))
    for shape in [(2, 4, 6, 3), (3, 2, 2, 3)]:
        x = array(*shape)
        np.testing.assert_array_equal(model.predict(x, verbose=0), 2 * x)


BAD = [
    (lambda: window_partition(array(1, 4, 5, 3), 2), r"\(2, 2\).*pad.*\(4, 5\)"),
    (lambda: window_partition(array(4, 5, 3), 2), r"rows, cols.*\(4, 5, 3\)"),
    (lambda: window_partition(array(1, 4, 4, 3), 0), "positive.*window_size=0"),
    (lambda: window_partition(keras.Input((None, 4, 3)), 2), "must be known.*None, 4"),
    (
        lambda: window_reverse(array(1, 4, 4, 3), 2, 4, 6),
        r"\(4, 6\).*6.*4.*\(1, 4, 4, 3\)",
    ),
    (lambda: shifted_window_mask(4, 4, 2, 2), "below.*shift=2"),
    (lambda: shifted_window_mask(4, 4, 2, -1), "at least 0.*shift=-1"),
    (lambda: shifted_window_mask(4, 5, 2, 1), r"cover.*\(4, 5\)"),
]


@pytest.mark.parametrize("make, said", BAD, ids=lambda x: x if x is str else "")
def test_a_bad_argument_is_refused(make, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        make()
