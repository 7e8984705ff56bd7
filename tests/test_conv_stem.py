"""The convolutional stem against loops, and against the same stack in torch."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, randomize

from keras_attn import ConvStem


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


def built(images, **arguments):
    layer = ConvStem(7, data_format="channels_last", **arguments)
    layer(images)
    randomize(layer)
    for weight in layer.non_trainable_variables:
        if "moving" in weight.path:
            weight.assign(1.0 + array(*weight.shape) ** 2)
    return layer


@pytest.mark.parametrize("normalization", ["batch", "layer"])
@pytest.mark.parametrize(
    "filters, strides, image, grid",
    [
        ((3,), 2, (6, 9), (3, 5)),
        ((3, 5), 2, (7, 8), (2, 2)),
        ((3, 5, 2), (2, 1, 3), (11, 5), (2, 1)),
    ],
)
def test_the_stem_is_the_papers(filters, strides, image, grid, normalization):
    images = array(2, *image, 3)
    layer = built(images, filters=filters, strides=strides, normalization=normalization)
    output = layer(images)
    assert tuple(output.shape) == (2, *grid, 7)
    steps = (strides,) * len(filters) if isinstance(strides, int) else strides
    weights = oracle.weights_of(layer)
    expected = oracle.conv_stem(weights, images, steps, normalization)
    close(output, expected, 2e-5)
    first = ConvStem(7, filters, strides, normalization, data_format="channels_first")
    images = np.moveaxis(images, -1, 1)
    first(images)
    first.set_weights(layer.get_weights())
    close(first(images), expected, 2e-5)


def test_the_same_stack_in_torch():
    torch = pytest.importorskip("torch")
    images = array(2, 12, 9, 3)
    layer = built(images, filters=(4, 6))
    weights = oracle.weights_of(layer)
    x = torch.tensor(np.moveaxis(images, -1, 1), dtype=torch.float64)
    for index in range(2):
        kernel = weights[f"conv_{index}/kernel"].transpose(3, 2, 0, 1)
        norm = oracle.inside(weights, f"norm_{index}")
        x = torch.nn.functional.conv2d(x, torch.tensor(kernel), stride=2, padding=1)
        x = torch.nn.functional.batch_norm(
            x,
            *(
                torch.tensor(norm[name])
                for name in ("moving_mean", "moving_variance", "gamma", "beta")
            ),
            eps=1e-5,
        ).relu()
    kernel = weights["projection/kernel"].transpose(3, 2, 0, 1)
    bias = torch.tensor(weights["projection/bias"])
    x = torch.nn.functional.conv2d(x, torch.tensor(kernel), bias)
    close(layer(images), x.numpy().transpose(0, 2, 3, 1), 2e-5)


def test_statistics_are_learned_in_training_alone():
    images = array(5, 8, 8, 3)
    layer = ConvStem(7, (4,), data_format="channels_last")
    layer(images)
    before = numpy(layer.norm_0.moving_mean)
    layer(images, training=False)
    np.testing.assert_array_equal(numpy(layer.norm_0.moving_mean), before)
    layer(images, training=True)
    assert np.abs(numpy(layer.norm_0.moving_mean) - before).max() > 1e-4


BAD_ARGUMENTS = [
    ({"filters": ()}, r"at least one.*filters=\(\)"),
    ({"filters": (3, 5), "strides": (2,)}, r"one 3x3.*strides=\(2,\)"),
    ({"filters": (3, 0)}, "positive.*filters=0"),
    ({"filters": 3, "strides": 0}, "positive.*strides=0"),
    ({"filters": 3, "normalization": "group"}, "batch.*layer.*'group'"),
    ({"filters": 3, "data_format": "last"}, "data_format='last'"),
]


@pytest.mark.parametrize("arguments, said", BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_is_refused_at_once(arguments, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        ConvStem(7, **arguments)


def test_what_is_no_image_is_refused():
    layer = ConvStem(7, 3, data_format="channels_last")
    with pytest.raises(ValueError, match=r"(?s)rank 4.*\(2, 3, 4\)"):
        layer(array(2, 3, 4))
    with pytest.raises(ValueError, match="(?s)channels must be known"):
        ConvStem(7, 3, data_format="channels_last")(keras.Input((8, 8, None)))
