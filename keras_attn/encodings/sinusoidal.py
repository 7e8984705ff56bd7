"""The sinusoids of "Attention Is All You Need", on sequences and grids."""

import math

from keras import ops

__all__ = ["LAYOUTS", "sinusoidal_encoding", "sinusoidal_encoding_2d"]

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
