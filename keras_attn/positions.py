"""Positional layers: each adds to its input what says where a token stands."""

import keras
from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import broadcasts, check_choice, check_greater, check_positive
from keras_attn.encodings import (
    LAYOUTS,
    interpolation_matrix,
    sinusoidal_encoding,
    sinusoidal_encoding_2d,
)
from keras_attn.masks import as_mask
from keras_attn.serialization import fresh

__all__ = [
    "LearnedPositionEmbedding",
    "SinusoidalPositionEncoding",
    "SinusoidalPositionEncoding2D",
]

INTERPOLATIONS = ("bicubic", "bilinear")


def token_positions(mask, inputs):
    """Where each token stands: how many real tokens come before it in its row.

    Args:
        mask: `(batch, length)`, `True` at real tokens.
        inputs: `(batch, length, dim)`, the tokens that the mask is of.

    Returns:
        `(batch, length)`, int32. Left-padded, right-padded and unpadded rows number
        their real tokens alike, from 0.
    """
    mask = as_mask(mask)
    if not broadcasts(mask.shape, inputs.shape[:-1]):
        raise ValueError(
            "`mask` must have the shape of its input without the features, "
            f"{tuple(inputs.shape[:-1])}. Received: mask of shape {tuple(mask.shape)}"
        )
    real = ops.cast(mask, "int32")
    return ops.maximum(ops.cumsum(real, axis=-1) - 1, 0)


@register_keras_serializable(package="keras_attn")
class SinusoidalPositionEncoding(layers.Layer):
    """Adds the fixed sinusoids of "Attention Is All You Need" to a sequence.

    The sinusoids are computed in float32 whatever the policy. With a mask a token's
    position is the count of real tokens before it, so padding on either side changes
    nothing. The mask leaves with the output.

    Args:
        max_wavelength: the base of the frequencies, 10,000 in the paper.
        layout: `"interleaved"` (sine, cosine, sine, ..., the paper) or `"halves"` (all
            sines, then all cosines: tensor2tensor, Whisper).

    Call arguments:
        inputs: `(batch, length, dim)`.
        mask: `(batch, length)`, `True` at real tokens.
        positions: `(batch, length)` or `(length,)`, when they are not counted from the
            mask.

    Returns:
        The shape of `inputs`.

    Example:
    >>> tuple(SinusoidalPositionEncoding()(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.5.
    """

    def __init__(self, max_wavelength=10_000, layout="interleaved", **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.max_wavelength = check_greater("max_wavelength", max_wavelength, 1)
        self.layout = check_choice("layout", layout, LAYOUTS)

    def build(self, inputs_shape):
        _check_rank(self, inputs_shape, 3, "(batch, length, dim)")

    def call(self, inputs, mask=None, positions=None):
        if positions is None and mask is not None:
            positions = token_positions(mask, inputs)
        if positions is None:
            positions = ops.arange(0, ops.shape(inputs)[1], dtype="float32")
        encoding = sinusoidal_encoding(
            positions, inputs.shape[-1], self.max_wavelength, self.layout
        )
        return inputs + ops.cast(encoding, inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "layout": self.layout,
        }


@register_keras_serializable(package="keras_attn")
class SinusoidalPositionEncoding2D(layers.Layer):
    """Adds fixed sinusoids to a grid, half the features for its rows, half for columns.

    Args:
        max_wavelength: the base of the frequencies.
        layout: of each half, as in `SinusoidalPositionEncoding`.

    Call arguments:
        inputs: `(batch, rows, cols, dim)`, `dim` a multiple of 4; any grid size.

    Returns:
        The shape of `inputs`.

    Example:
    >>> tuple(SinusoidalPositionEncoding2D()(keras.random.normal((2, 4, 6, 64))).shape)
    (2, 4, 6, 64)

    Reference: [Chen et al., 2021](https://arxiv.org/abs/2104.02057), MoCo v3.
    """

    def __init__(self, max_wavelength=10_000, layout="interleaved", **kwargs):
        super().__init__(**kwargs)
        self.max_wavelength = check_greater("max_wavelength", max_wavelength, 1)
        self.layout = check_choice("layout", layout, LAYOUTS)

    def build(self, inputs_shape):
        _check_rank(self, inputs_shape, 4, "(batch, rows, cols, dim)")
        if inputs_shape[-1] % 4:
            raise ValueError(
                "The width of a grid must be a multiple of 4: a sine and a cosine for "
                f"rows and for columns. Received: inputs_shape={tuple(inputs_shape)}"
            )

    def call(self, inputs):
        _, rows, cols, _ = ops.shape(inputs)
        encoding = sinusoidal_encoding_2d(
            rows, cols, inputs.shape[-1], self.max_wavelength, self.layout
        )
        return inputs + ops.cast(encoding, inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "layout": self.layout,
        }


@register_keras_serializable(package="keras_attn")
class LearnedPositionEmbedding(layers.Layer):
    """Adds a learned vector a position to a sequence or to a grid.

    On a sequence, with a mask, a token's position is the count of real tokens before
    it. On a grid of another size than the table's, the table is resized by torch's
    rule for images (half-pixel centres, no antialias, bicubic with a = -0.75): a model
    trained at one image size runs at any other. The mask leaves with the output.

    Args:
        size: an int, the longest sequence; or `(rows, cols)` of the grid the table is
            learned on.
        initializer: initializer of the table.
        interpolation: `"bicubic"` or `"bilinear"`, for grids of another size.

    Call arguments:
        inputs: `(batch, length, dim)`, or `(batch, rows, cols, dim)` for a grid.
        mask: `(batch, length)`, `True` at real tokens; sequences only.
        positions: `(batch, length)` or `(length,)`, when they are not counted from the
            mask; sequences only.

    Returns:
        The shape of `inputs`.

    Raises:
        ValueError: a sequence longer than the table, or a position outside it. In
            compiled code, where values cannot be looked at, a position outside gives
            NaN at its token and nowhere else.

    Example:
    >>> tuple(LearnedPositionEmbedding(50)(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)
    >>> grid = keras.random.normal((2, 14, 14, 64))
    >>> tuple(LearnedPositionEmbedding((7, 7))(grid).shape)
    (2, 14, 14, 64)

    Reference: [Gehring et al., 2017](https://arxiv.org/abs/1705.03122) for sequences,
    [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929) for grids.
    """

    def __init__(
        self,
        size,
        initializer=None,
        interpolation="bicubic",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.is_grid = isinstance(size, (tuple, list))
        sizes = tuple(size) if self.is_grid else (size,)
        if len(sizes) != 1 + self.is_grid:
            raise ValueError(
                "`size` must be an integer or a pair `(rows, cols)`. "
                f"Received: size={size}"
            )
        self.table_shape = tuple(check_positive("size", side) for side in sizes)
        if initializer is None:
            initializer = initializers.TruncatedNormal(stddev=0.02)
        self.initializer = initializers.get(initializer)
        self.interpolation = check_choice(
            "interpolation", interpolation, INTERPOLATIONS
        )

    def build(self, inputs_shape):
        shape = "(batch, rows, cols, dim)" if self.is_grid else "(batch, length, dim)"
        _check_rank(self, inputs_shape, len(self.table_shape) + 2, shape)
        self._check_length(inputs_shape)
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(*self.table_shape, inputs_shape[-1]),
            initializer=fresh(self.initializer),
        )

    def call(self, inputs, mask=None, positions=None):
        table = ops.convert_to_tensor(self.embeddings)
        if self.is_grid and positions is not None:
            raise ValueError(
                "The positions of a grid are its rows and columns. "
                f"Received: positions={positions}, size={self.table_shape}"
            )
        if self.is_grid:
            return inputs + self._resized(table, *ops.shape(inputs)[1:3])
        self._check_length(inputs.shape)
        if positions is not None:
            return inputs + self._looked_up(table, positions)
        if mask is not None:
            return inputs + ops.take(table, token_positions(mask, inputs), axis=0)
        return inputs + table[: ops.shape(inputs)[1]]

    def compute_output_shape(self, inputs_shape):
        self._check_length(inputs_shape)
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "size": self.table_shape if self.is_grid else self.table_shape[0],
            "initializer": initializers.serialize(self.initializer),
            "interpolation": self.interpolation,
        }

    def _resized(self, table, rows, cols):
        if isinstance(rows, int) and (rows, cols) == self.table_shape:
            return table
        resize_rows, resize_cols = (
            interpolation_matrix(source, target, self.interpolation)
            for source, target in zip(self.table_shape, (rows, cols), strict=True)
        )
        dtype, dim = table.dtype, table.shape[-1]
        table = ops.reshape(ops.cast(table, "float32"), (self.table_shape[0], -1))
        table = ops.matmul(resize_rows, table)  # (rows, table_cols * dim)
        table = ops.reshape(table, (rows, self.table_shape[1], dim))
        return ops.cast(ops.matmul(resize_cols, table), dtype)  # (rows, cols, dim)

    def _looked_up(self, table, positions):
        positions = ops.convert_to_tensor(positions, dtype="int32")
        length = self.table_shape[0]
        inside = ops.logical_and(positions >= 0, positions < length)
        if _is_known_false(ops.all(inside)):
            raise ValueError(
                f"Positions must be in [0, {length}), the length of the table of "
                f"{self.name!r}. Received: positions={positions}"
            )
        rows = ops.take(table, ops.clip(positions, 0, length - 1), axis=0)
        outside = ops.expand_dims(ops.logical_not(inside), -1)
        return ops.where(outside, ops.full_like(rows, float("nan")), rows)

    def _check_length(self, inputs_shape):
        length = None if self.is_grid else inputs_shape[1]
        if length is not None and length > self.table_shape[0]:
            raise ValueError(
                f"The sequence is longer than the table of {self.name!r}: its `size` "
                f"is {self.table_shape[0]}. Received: "
                f"inputs_shape={tuple(inputs_shape)}"
            )


def _is_known_false(value):
    """Whether a boolean scalar is `False` already now, before any compiled run."""
    try:
        return not bool(keras.ops.convert_to_numpy(value))
    except Exception:  # a traced value: each backend refuses with an error of its own
        return False


def _check_rank(layer, shape, rank, expected):
    if len(shape) != rank:
        raise ValueError(
            f"{type(layer).__name__} expects {expected}. "
            f"Received: inputs_shape={tuple(shape)}"
        )
