"""Learned vectors, one a position, added to a sequence or to a grid."""

from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import (
    check_choice,
    check_positive,
    check_rank,
    is_known_false,
)
from keras_attn.encodings import resize_grid
from keras_attn.masks import token_positions
from keras_attn.serialization import fresh

__all__ = ["LearnedPositionEmbedding"]

INTERPOLATIONS = ("bicubic", "bilinear")


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
        check_rank(self, inputs_shape, len(self.table_shape) + 2, shape)
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
            rows, cols = ops.shape(inputs)[1:3]
            return inputs + resize_grid(table, rows, cols, self.interpolation)
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

    def _looked_up(self, table, positions):
        positions = ops.convert_to_tensor(positions, dtype="int32")
        length = self.table_shape[0]
        inside = ops.logical_and(positions >= 0, positions < length)
        if is_known_false(ops.all(inside)):
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
