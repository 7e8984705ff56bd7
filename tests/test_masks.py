"""The masks, written out by hand."""

import keras
import numpy as np
import pytest
from cases import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_attn import masks


def test_causal_mask_of_a_sentence():
    """ "<Begin> I have a cat": row i attends to 0..i."""
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    mask = masks.causal_mask(5)
    assert keras.backend.standardize_dtype(mask.dtype) == "bool"
    np.testing.assert_array_equal(numpy(mask), np.array(expected, bool))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 11), st.integers(0, 5))
def test_causal_mask_by_its_definition(queries, keys, offset):
    mask = numpy(masks.causal_mask(queries, keys, offset=offset))
    assert mask.shape == (queries, keys)
    for i, j in np.ndindex(queries, keys):
        assert mask[i, j] == (j <= i + offset)


@pytest.mark.parametrize("window", [1, 2, 3, (0, 0), (2, 0), (0, 1), (1, 2)])
@pytest.mark.parametrize("offset", [0, 2])
def test_sliding_window_by_its_definition(window, offset):
    mask = numpy(masks.sliding_window_mask(5, 7, window=window, offset=offset))
    assert mask.shape == (5, 7)
    for i, j in np.ndindex(5, 7):
        distance = i + offset - j
        if isinstance(window, int):
            assert mask[i, j] == (abs(distance) < window)
        else:
            assert mask[i, j] == (-window[1] <= distance <= window[0])


def test_sliding_window_defaults_to_a_square():
    assert numpy(masks.sliding_window_mask(5, window=2)).sum() == 5 + 4 + 4


def test_padding_mask():
    ids = np.array([[3, 0, 2], [0, 0, 1]])
    np.testing.assert_array_equal(numpy(masks.padding_mask(ids)), ids != 0)
    np.testing.assert_array_equal(numpy(masks.padding_mask(ids, 2)), ids != 2)


def test_segment_mask():
    ids = np.array([[1, 1, 2, 2, 2], [1, 2, 3, 3, 0]])
    mask = numpy(masks.segment_mask(ids))
    for b, i, j in np.ndindex(2, 5, 5):
        assert mask[b, i, j] == (ids[b, i] == ids[b, j])
    keys = np.array([[1, 2, 7], [0, 0, 3]])
    mask = numpy(masks.segment_mask(ids, keys))
    for b, i, j in np.ndindex(2, 5, 3):
        assert mask[b, i, j] == (ids[b, i] == keys[b, j])


def test_prefix_mask():
    mask = numpy(masks.prefix_mask(2, 5, 7))
    assert mask.shape == (5, 7)
    for i, j in np.ndindex(5, 7):
        assert mask[i, j] == (j < 2 or j <= i)
    prefixes = np.array([0, 3, 5])
    mask = numpy(masks.prefix_mask(prefixes, 5))
    assert mask.shape == (3, 5, 5)
    for b, i, j in np.ndindex(3, 5, 5):
        assert mask[b, i, j] == (j < prefixes[b] or j <= i)


def test_combine_masks_of_every_rank():
    random = np.random.default_rng(0)
    two = random.random((5, 7)) < 0.6
    three = random.random((2, 5, 7)) < 0.6
    four = random.random((2, 3, 5, 7)) < 0.6
    one_key = random.random((2, 1, 7)) < 0.6
    np.testing.assert_array_equal(
        numpy(masks.combine_masks(two, None, three, one_key, four)),
        two & three[:, None] & one_key[:, None] & four,
    )
    np.testing.assert_array_equal(numpy(masks.combine_masks(two, three)), two & three)
    np.testing.assert_array_equal(numpy(masks.combine_masks(None, two)), two)
    assert masks.combine_masks(None, None) is None
    assert masks.combine_masks() is None


def test_integers_count_as_booleans():
    mask = masks.combine_masks(np.array([[1, 0], [2, 1]]))
    np.testing.assert_array_equal(numpy(mask), [[True, False], [True, True]])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_float_mask_is_refused(dtype):
    mask = keras.ops.zeros((3, 3), dtype=dtype)
    with pytest.raises(TypeError, match=rf"boolean.*{dtype}.*bias="):
        masks.combine_masks(masks.causal_mask(3), mask)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 3, 3)])
def test_a_mask_of_another_rank_is_refused(shape):
    with pytest.raises(ValueError, match="rank 2 .*Received: shape="):
        masks.combine_masks(np.ones(shape, bool))


@pytest.mark.parametrize("window", [0, -1, (1, -1), (1, 2, 3), "wide", None])
def test_a_window_that_is_none(window):
    with pytest.raises(ValueError, match="positive integer.*Received"):
        masks.sliding_window_mask(3, window=window)
