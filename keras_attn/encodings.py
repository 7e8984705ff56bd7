"""Position encodings as pure functions, computed in float32 whatever the policy."""

import math

from keras import ops

__all__ = ["sinusoidal_encoding", "sinusoidal_encoding_2d"]

LAYOUTS = ("interleaved", "halves")


def sinusoidal_encoding(positions, dim, max_wavelength=10_000, layout="interleaved"):
    r"""Sines and cosines of the position at geometric frequencies.

    `layout="interleaved"` is "Attention Is All You Need", section 3.5:

    $$PE_{(pos, 2i)} = \sin(pos / 10000^{2i/d}), \quad
      PE_{(pos, 2i+1)} = \cos(pos / 10000^{2i/d})$$

    `layout="halves"` is `[all sines | all cosines]` with the frequencies
    $10000^{-i / (d/2 - 1)}$ of tensor2tensor, Whisper and big_vision.

    Args:
        positions: any shape `(...)`, integers or floats.
        dim: size of the encoding. An odd `dim` drops the last cosine.
        max_wavelength: the base of the frequencies, 10,000 in the paper.
        layout: `"interleaved"` or `"halves"`.

    Returns:
        `(..., dim)`, float32.
    """
    pairs = math.ceil(dim / 2)
    if layout == "interleaved":
        rate = math.log(max_wavelength) * 2 / dim
    else:
        rate = math.log(max_wavelength) / max(pairs - 1, 1)
    frequencies = ops.exp(ops.arange(0, pairs, dtype="float32") * -rate)
    angles = ops.expand_dims(ops.cast(positions, "float32"), -1) * frequencies
    sines, cosines = ops.sin(angles), ops.cos(angles)  # (..., dim / 2)
    if layout == "interleaved":
        encoding = ops.stack([sines, cosines], axis=-1)  # (..., dim / 2, 2)
        encoding = ops.reshape(encoding, (*ops.shape(angles)[:-1], 2 * pairs))
    else:
        encoding = ops.concatenate([sines, cosines], axis=-1)
    return encoding if dim % 2 == 0 else encoding[..., :dim]


def sinusoidal_encoding_2d(
    rows, cols, dim, max_wavelength=10_000, layout="interleaved"
):
    """The encoding of the row in the first half of `dim`, of the column in the second.

    Args:
        rows: number of rows of the grid.
        cols: number of columns of the grid.
        dim: size of the encoding, a multiple of 4.
        max_wavelength: the base of the frequencies.
        layout: of each half, see `sinusoidal_encoding`.

    Returns:
        `(rows, cols, dim)`, float32.
    """
    row, col = (
        sinusoidal_encoding(
            ops.arange(0, length, dtype="float32"), dim // 2, max_wavelength, layout
        )
        for length in (rows, cols)
    )
    shape = (rows, cols, dim // 2)
    return ops.concatenate(
        [
            ops.broadcast_to(ops.expand_dims(row, 1), shape),
            ops.broadcast_to(ops.expand_dims(col, 0), shape),
        ],
        axis=-1,
    )


def interpolation_matrix(source, target, method):
    """Weights that resize an axis of `source` points to `target` points.

    torch's rule for images without antialias: half-pixel centres, edges clamped,
    `method="bicubic"` with a = -0.75. The same size gives the identity exactly.

    Returns:
        `(target, source)`, float32; each row sums to 1.
    """
    last = float(source - 1)
    scale = source / ops.cast(ops.convert_to_tensor(target), "float32")
    centres = (ops.arange(0, target, dtype="float32") + 0.5) * scale - 0.5
    if method == "bilinear":
        centres = ops.clip(centres, 0.0, last)
        taps = (0, 1)
        kernel = _linear_kernel
    else:
        taps = (-1, 0, 1, 2)
        kernel = _cubic_kernel
    start = ops.floor(centres)
    points = ops.expand_dims(ops.arange(0, source, dtype="float32"), 0)
    matrix = 0.0
    for tap in taps:
        neighbour = start + tap
        weight = kernel(ops.abs(centres - neighbour))
        neighbour = ops.clip(neighbour, 0.0, last)
        hit = ops.cast(ops.equal(ops.expand_dims(neighbour, 1), points), "float32")
        matrix = matrix + hit * ops.expand_dims(weight, 1)
    return matrix


def _linear_kernel(distance):
    return ops.relu(1.0 - distance)


def _cubic_kernel(distance, a=-0.75):
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = ((a * distance - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a
    return ops.where(
        distance <= 1.0, near, ops.where(distance < 2.0, far, ops.zeros_like(far))
    )
