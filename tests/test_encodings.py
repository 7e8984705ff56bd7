"""The position encodings against the papers' formulas, entry by entry."""

import math

import keras
import numpy as np
import oracle
import pytest
from cases import numpy

from keras_attn import encodings
from keras_attn.encodings import interpolation_matrix, resize_grid


def test_the_papers_first_position():
    """PE(1) for d = 512: sin(1), cos(1), sin(1 / 10000^(2/512)), ..."""
    first = numpy(encodings.sinusoidal_encoding(np.array([1]), 512))[0]
    expected = [
        math.sin(1),
        math.cos(1),
        math.sin(1 / 10000 ** (2 / 512)),
        math.cos(1 / 10000 ** (2 / 512)),
        math.sin(1 / 10000 ** (4 / 512)),
    ]
    np.testing.assert_allclose(first[:5], expected, atol=1e-6)
    expected = [0.84147, 0.54030, 0.82186, 0.56969]
    np.testing.assert_allclose(first[:4], expected, atol=1e-5)


def test_position_zero_is_zeros_and_ones():
    zero = numpy(encodings.sinusoidal_encoding(np.array([0]), 6))[0]
    np.testing.assert_array_equal(zero, [0, 1, 0, 1, 0, 1])
    zero = numpy(encodings.sinusoidal_encoding(np.array([0]), 6, layout="halves"))[0]
    np.testing.assert_array_equal(zero, [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("dim", [1, 2, 6, 7, 64])
@pytest.mark.parametrize("max_wavelength", [10_000, 100])
def test_by_the_formula(dim, layout, max_wavelength):
    positions = np.arange(23)
    encoding = encodings.sinusoidal_encoding(positions, dim, max_wavelength, layout)
    assert keras.backend.standardize_dtype(encoding.dtype) == "float32"
    expected = oracle.sinusoids(positions, dim, max_wavelength, layout)
    np.testing.assert_allclose(numpy(encoding), expected, atol=1e-5)


def test_positions_of_any_shape_and_fractions():
    positions = np.array([[0.5, 3.25], [2.0, 7.75], [1.0, 0.0]])
    encoding = numpy(encodings.sinusoidal_encoding(positions, 6))
    assert encoding.shape == (3, 2, 6)
    np.testing.assert_allclose(
        encoding.reshape(6, 6), oracle.sinusoids(positions.ravel(), 6), atol=1e-5
    )


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_far_positions_keep_their_place(layout):
    """float32 holds an angle of 4,096 to 2.4e-4; anything coarser is a fault."""
    positions = np.arange(4000, 4096)
    encoding = encodings.sinusoidal_encoding(positions, 64, layout=layout)
    expected = oracle.sinusoids(positions, 64, layout=layout)
    np.testing.assert_allclose(numpy(encoding), expected, atol=4e-4)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_two_dimensions(layout):
    encoding = encodings.sinusoidal_encoding_2d(3, 5, 8, layout=layout)
    assert keras.backend.standardize_dtype(encoding.dtype) == "float32"
    expected = oracle.sinusoids_2d(3, 5, 8, layout=layout)
    np.testing.assert_allclose(numpy(encoding), expected, atol=1e-5)


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("sizes", [(3, 7), (7, 3), (5, 5), (1, 3), (3, 1), (2, 11)])
def test_interpolation_by_torchs_rule(method, sizes):
    matrix = numpy(interpolation_matrix(*sizes, method))
    unit = np.eye(sizes[0])[:, None, :]  # each point of the source on its own
    expected = oracle.resize(unit, sizes[1], 1, method)[:, 0]
    np.testing.assert_allclose(matrix, expected, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="torch's own resize")
@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("grid", [(7, 2), (2, 11), (4, 4)])
def test_the_reference_is_torchs_own_resize(method, grid):
    import torch

    table = np.random.default_rng(0).normal(size=(3, 5, 2))
    image = torch.tensor(table).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(image, size=grid, mode=method)
    expected = resized[0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(oracle.resize(table, *grid, method), expected, atol=1e-9)


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(3, 5), (7, 2), (6, 10), (1, 1)])
def test_a_grid_is_resized_as_by_torch(size, method):
    torch = pytest.importorskip("torch")
    table = np.random.default_rng(0).normal(size=(3, 5, 2)).astype("float32")
    expected = torch.nn.functional.interpolate(
        torch.tensor(table.transpose(2, 0, 1)[None]).double(), size=size, mode=method
    )[0].numpy()
    found = numpy(resize_grid(keras.ops.convert_to_tensor(table), *size, method))
    np.testing.assert_allclose(found, expected.transpose(1, 2, 0), atol=2e-6)
    if size == (3, 5):
        assert np.array_equal(found, table)
