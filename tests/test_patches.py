"""Patches cut by loops, and the tokens put in front of them."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, randomize

from keras_attn import PatchEmbedding, PrefixTokens, TubeletEmbedding


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


VALID = [
    # patch, strides, image, grid
    (2, None, (6, 10), (3, 5)),
    ((2, 3), None, (6, 15), (3, 5)),
    (3, 2, (7, 11), (3, 5)),
    ((3, 2), (1, 3), (5, 11), (3, 4)),
    (5, None, (5, 5), (1, 1)),
]


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("patch, strides, image, grid", VALID)
def test_patches(patch, strides, image, grid, use_bias):
    images = array(2, *image, 3)
    layer = PatchEmbedding(
        7, patch, strides, use_bias=use_bias, data_format="channels_last"
    )
    layer(images)
    randomize(layer)
    sizes = [
        (size, size) if isinstance(size, int) else size
        for size in (patch, strides or patch)
    ]
    expected = oracle.patch_embedding(oracle.weights_of(layer), images, *sizes, grid)
    output = layer(images)
    assert tuple(output.shape) == (2, *grid, 7)
    close(output, expected)
    first = PatchEmbedding(
        7, patch, strides, use_bias=use_bias, data_format="channels_first"
    )
    images = np.transpose(images, (0, 3, 1, 2))
    first(images)
    first.set_weights(layer.get_weights())
    close(first(images), expected)


@pytest.mark.parametrize(
    "patch, strides, image, grid",
    [
        (4, None, (6, 9), (2, 3)),
        (3, None, (7, 2), (3, 1)),
        (3, 2, (6, 11), (3, 6)),
        (2, None, (4, 6), (2, 3)),
    ],
)
def test_same_pads_on_all_sides(patch, strides, image, grid):
    """Conv2D's rule: what is missing comes half before, half (or one more) after."""
    images = array(2, *image, 3)
    layer = PatchEmbedding(
        7, patch, strides, padding="same", data_format="channels_last"
    )
    layer(images)
    randomize(layer)
    stride = strides or patch
    before = [
        max((count - 1) * stride + patch - side, 0) // 2
        for count, side in zip(grid, image, strict=True)
    ]
    expected = oracle.patch_embedding(
        oracle.weights_of(layer), images, (patch,) * 2, (stride,) * 2, grid, before
    )
    close(layer(images), expected)


TUBELETS = [
    # patch, strides, padding, video, grid, zeros before
    ((2, 3, 1), None, "valid", (4, 6, 5), (2, 2, 5), None),
    ((2, 3, 2), (1, 2, 3), "valid", (3, 7, 5), (2, 3, 2), None),
    (2, None, "same", (3, 4, 5), (2, 2, 3), (0, 0, 0)),
    ((3, 2, 5), (1, 2, 2), "same", (4, 3, 5), (4, 2, 3), (1, 0, 2)),
]


@pytest.mark.parametrize("patch, strides, padding, video, grid, before", TUBELETS)
def test_tubelets(patch, strides, padding, video, grid, before):
    videos = array(2, *video, 3)
    layer = TubeletEmbedding(
        7, patch, strides, padding=padding, data_format="channels_last"
    )
    layer(videos)
    randomize(layer)
    sizes = [
        (size,) * 3 if isinstance(size, int) else size
        for size in (patch, strides or patch)
    ]
    weights = oracle.weights_of(layer)
    expected = oracle.patch_embedding(weights, videos, *sizes, grid, before)
    close(layer(videos), expected)
    first = TubeletEmbedding(
        7, patch, strides, padding=padding, data_format="channels_first"
    )
    videos = np.moveaxis(videos, -1, 1)
    first(videos)
    first.set_weights(layer.get_weights())
    close(first(videos), expected)


def test_a_tubelet_of_one_frame_is_a_patch_of_every_frame():
    videos = array(2, 3, 4, 6, 3)
    tubelets = TubeletEmbedding(7, (1, 2, 3), data_format="channels_last")
    patches = PatchEmbedding(7, (2, 3), data_format="channels_last")
    output = numpy(tubelets(videos))
    patches(videos[:, 0])
    kernel, bias = tubelets.get_weights()
    patches.set_weights([kernel[0], bias])
    for frame in range(3):
        close(output[:, frame], numpy(patches(videos[:, frame])))


def test_the_format_follows_keras(monkeypatch):
    before = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_first")
    try:
        layer = PatchEmbedding(7, 2)
        assert layer.get_config()["data_format"] == "channels_first"
        assert layer.compute_output_shape((None, 3, 4, 6)) == (None, 2, 3, 7)
    finally:
        keras.config.set_image_data_format(before)


def test_tokens_go_in_front():
    x = array(2, 5, 3)
    layer = PrefixTokens(2, initializer="normal")
    output = numpy(layer(x))
    tokens = oracle.weights_of(layer)["tokens"]
    assert tokens.shape == (2, 3)
    assert np.abs(tokens).max() > 0
    for row in range(2):
        close(output[row, :2], tokens)
    close(output[:, 2:], x, 0)


def test_a_grid_is_flattened_row_by_row():
    x = array(2, 3, 5, 7)
    output = numpy(PrefixTokens()(x))
    assert output.shape == (2, 16, 7)
    for r, c in np.ndindex(3, 5):
        close(output[:, 1 + 5 * r + c], x[:, r, c], 0)


def test_a_video_is_flattened_frame_by_frame():
    x = array(2, 3, 5, 2, 7)
    output = numpy(PrefixTokens()(x))
    assert output.shape == (2, 31, 7)
    for t, r, c in np.ndindex(3, 5, 2):
        close(output[:, 1 + 10 * t + 2 * r + c], x[:, t, r, c], 0)


def test_tokens_learn(gradients):
    x, layer = array(2, 5, 3), PrefixTokens(2)
    inputs = keras.Input((5, 3))
    model = keras.Model(inputs, layer(inputs))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = numpy(layer.tokens)
    model.fit(x, np.ones((2, 7, 3), "float32"), verbose=0)
    assert (numpy(layer.tokens) > before).all()


BAD_ARGUMENTS = [
    (PatchEmbedding, {"dim": 0, "patch_size": 2}, "positive.*dim=0"),
    (PatchEmbedding, {"dim": 7, "patch_size": 0}, "positive.*patch_size=0"),
    (PatchEmbedding, {"dim": 7, "patch_size": (2, -3)}, "positive.*patch_size=-3"),
    (PatchEmbedding, {"dim": 7, "patch_size": (2, 2, 2)}, r"pair.*\(2, 2, 2\)"),
    (PatchEmbedding, {"dim": 7, "patch_size": 2, "strides": 0}, "strides=0"),
    (
        PatchEmbedding,
        {"dim": 7, "patch_size": 2, "padding": "full"},
        "valid.*same.*padding='full'",
    ),
    (
        PatchEmbedding,
        {"dim": 7, "patch_size": 2, "data_format": "last"},
        "channels_last.*data_format='last'",
    ),
    (
        TubeletEmbedding,
        {"dim": 7, "patch_size": (2, 2)},
        r"patch_size.*triple.*\(2, 2\)",
    ),
    (TubeletEmbedding, {"dim": 7, "patch_size": 2, "strides": 0}, "strides=0"),
    (PrefixTokens, {"num_tokens": 0}, "positive.*num_tokens=0"),
    (PrefixTokens, {"num_tokens": -1}, "positive.*num_tokens=-1"),
]


@pytest.mark.parametrize("layer, arguments, said", BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_is_refused_at_once(layer, arguments, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        layer(**arguments)


BAD_IMAGES = [
    # The error says which side, and what padding="same" would do.
    ((2, 3, 15, 3), r'height, 3, is smaller.*5.*padding="same".*1 patches.*\(2, 3, 15'),
    ((2, 15, 4, 3), r'width, 4, is smaller.*5.*padding="same".*1 patches'),
    ((2, 12, 15, 3), r'height, 12, is not covered.*5.*"same".*3 patches.*\(2, 12, 15'),
    ((2, 15, 16, 3), r'width, 16, is not covered.*5.*"same".*4 patches'),
    ((2, 15, 15), r"rank 4.*\(2, 15, 15\)"),
]


@pytest.mark.parametrize("shape, said", BAD_IMAGES)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_bad_image_is_refused(shape, said, symbolic):
    layer = PatchEmbedding(7, 5, data_format="channels_last")
    x = keras.KerasTensor(shape) if symbolic else array(*shape)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        layer(x)


BAD_VIDEOS = [
    ((2, 3, 4, 4, 3), r'video\'s frames, 3, is not covered.*of 2.*"same".*2 patches'),
    ((2, 4, 1, 4, 3), r"video\'s height, 1, is smaller.*of 2"),
    ((2, 4, 4, 5, 3), r"video's width, 5, is not covered.*\(2, 4, 4, 5, 3\)"),
    ((2, 4, 4, 3), r"TubeletEmbedding.*videos of rank 5.*\(2, 4, 4, 3\)"),
]


@pytest.mark.parametrize("shape, said", BAD_VIDEOS)
def test_a_bad_video_is_refused(shape, said):
    layer = TubeletEmbedding(7, 2, data_format="channels_last")
    with pytest.raises(ValueError, match=f"(?s){said}"):
        layer(array(*shape))


def test_a_bad_image_is_refused_after_the_build():
    layer = PatchEmbedding(7, 5, data_format="channels_last")
    layer(array(1, 5, 10, 3))
    with pytest.raises(ValueError, match="(?s)width, 11"):
        layer(array(1, 5, 11, 3))


def test_tokens_before_what_is_no_sequence_are_refused():
    with pytest.raises(ValueError, match=r"(?s)length, .*\(2, 3\)"):
        PrefixTokens()(array(2, 3))
