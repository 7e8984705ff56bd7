"""FlexiViT's resampling: a resized patch embeds as before."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy

from keras_attn import PatchEmbedding, resample_patch_kernel


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def embedded(kernel, patch):
    """<w, x> for each feature."""
    return np.tensordot(kernel, patch, ((0, 1, 2), (0, 1, 2)))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("old, new", [((4, 6), (8, 9)), ((3, 5), (3, 11))])
def test_a_larger_patch_embeds_to_the_same_vector(old, new, interpolation):
    """<resample(w), B x> = <w, x>."""
    kernel, patch = array(*old, 3, 7), array(*old, 3, seed=1)
    resampled = resample_patch_kernel(kernel, new, interpolation)
    assert resampled.shape == (*new, 3, 7) and resampled.dtype == kernel.dtype
    larger = oracle.resize(patch, *new, interpolation)
    np.testing.assert_allclose(
        embedded(resampled, larger), embedded(kernel, patch), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("old, new", [((8, 6), (4, 3)), ((6, 4), (3, 8))])
def test_it_is_the_papers_pseudo_inverse(old, new, interpolation):
    """Of the matrix that resizes whole patches, made by torch pixel by pixel."""
    torch = pytest.importorskip("torch")
    pixels = torch.eye(old[0] * old[1], dtype=torch.float64).reshape(-1, 1, *old)
    resized = torch.nn.functional.interpolate(pixels, size=new, mode=interpolation)
    matrix = resized.reshape(len(pixels), -1).numpy().T  # (new pixels, old pixels)
    kernel = array(*old, 3, 7)
    flat = kernel.reshape(len(pixels), -1)
    expected = (np.linalg.pinv(matrix.T) @ flat).reshape(*new, 3, 7)
    np.testing.assert_allclose(
        resample_patch_kernel(kernel, new, interpolation), expected, atol=1e-5
    )


def test_the_same_size_is_the_same_kernel():
    kernel = array(4, 6, 3, 7).astype("float32")
    assert np.array_equal(resample_patch_kernel(kernel, (4, 6)), kernel)


def test_a_video_kernel_is_resampled_side_by_side():
    kernel = array(2, 4, 6, 3, 7)
    resampled = resample_patch_kernel(kernel, (2, 8, 9))
    for frame in range(2):
        expected = resample_patch_kernel(kernel[frame], (8, 9))
        np.testing.assert_allclose(resampled[frame], expected, atol=1e-12)


def test_a_layer_at_another_patch_size():
    """An image twice as large, with patches twice as large, embeds nearly as before."""
    image = array(1, 8, 12, 3).astype("float32")
    small = PatchEmbedding(7, 4, data_format="channels_last")
    large = PatchEmbedding(7, 8, data_format="channels_last")
    before = numpy(small(image))
    kernel, bias = small.get_weights()
    large.build((None, 16, 24, 3))
    large.set_weights([resample_patch_kernel(small.projection.kernel, 8), bias])
    patches = image.reshape(2, 4, 3, 4, 3).transpose(0, 2, 1, 3, 4).reshape(6, 4, 4, 3)
    larger = np.stack([oracle.resize(patch, 8, 8, "bilinear") for patch in patches])
    after = numpy(large(larger.astype("float32")))
    np.testing.assert_allclose(after.reshape(before.shape), before, atol=1e-4)


@pytest.mark.parametrize(
    "kernel, arguments, said",
    [
        (array(4, 4, 3), [8], r"rows, cols.*\(4, 4, 3\)"),
        (array(4, 4, 3, 7), [(8, 8, 8)], r"pair.*\(8, 8, 8\)"),
        (array(2, 4, 4, 3, 7), [(8, 8)], r"triple.*\(8, 8\)"),
        (array(4, 4, 3, 7), [0], "positive.*new_size=0"),
        (array(4, 4, 3, 7), [8, "area"], "bilinear.*'area'"),
    ],
    ids=lambda x: "",
)
def test_a_bad_argument_is_refused(kernel, arguments, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        resample_patch_kernel(keras.ops.convert_to_tensor(kernel), *arguments)
