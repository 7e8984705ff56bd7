"""The learned relative bias of a grid, for attention scores (Swin, BEiT)."""

from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_choice, check_count, check_pair, check_positive
from keras_attn.encodings import resize_grid
from keras_attn.serialization import fresh

__all__ = ["RelativePositionBias2D"]

INTERPOLATIONS = ("bicubic", "bilinear")


@register_keras_serializable(package="keras_attn")
class RelativePositionBias2D(layers.Layer):
    r"""A learned number a head for every offset between two tokens of a grid.

    $$B_{h,q,k} = T_h[\,\mathrm{row}_q - \mathrm{row}_k,\;
      \mathrm{col}_q - \mathrm{col}_k\,]$$

    Hand the result to attention as `bias=`. One layer may serve many blocks (BEiT's
    shared bias), or every block has one of its own (Swin).

    With prefix tokens three more numbers a head stand for the pairs that have no
    offset: prefix to grid token, grid token to prefix, and prefix to prefix (BEiT's
    class token). On a grid of another size the table is resized like an image, by the
    rule of `LearnedPositionEmbedding`; the prefix entries stay as they are.

    The weights are `table`, `(2 * rows - 1, 2 * cols - 1, num_heads)`, which is Swin's
    `relative_position_bias_table` with its first axis in two, and `prefix_table`,
    `(3, num_heads)`, the last three rows of BEiT's.

    Args:
        num_heads: number of attention heads.
        grid: an int or `(rows, cols)` of the grid, or the window, the table is learned
            on; the table has `(2 * rows - 1, 2 * cols - 1)` offsets.
        num_prefix_tokens: how many tokens stand in front of the grid's.
        initializer: initializer of the table and of the prefix entries.
        interpolation: `"bicubic"` or `"bilinear"`, for grids of another size.

    Call arguments:
        inputs: read for its shape alone. A grid, `(batch, rows, cols, dim)`, of any
            size; or the sequence that attention runs over, `(batch, num_prefix_tokens +
            rows * cols, dim)`, of `grid`'s size.

    Returns:
        `(1, num_heads, query, key)`, where `query` and `key` are the prefix tokens and
        then the grid, row by row.

    Raises:
        ValueError: a sequence that is not as long as the prefix and `grid`.

    Example:
    >>> grid = keras.random.normal((2, 3, 5, 64))
    >>> bias = RelativePositionBias2D(4, (3, 5), num_prefix_tokens=1)(grid)
    >>> tuple(bias.shape)
    (1, 4, 16, 16)

    Reference: [Liu et al., 2021](https://arxiv.org/abs/2103.14030), section 3.2,
    [Bao et al., 2022](https://arxiv.org/abs/2106.08254).
    """

    def __init__(
        self,
        num_heads,
        grid,
        num_prefix_tokens=0,
        initializer=None,
        interpolation="bicubic",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = check_positive("num_heads", num_heads)
        self.grid = check_pair("grid", grid)
        self.num_prefix_tokens = check_count("num_prefix_tokens", num_prefix_tokens)
        if initializer is None:
            initializer = initializers.TruncatedNormal(stddev=0.02)
        self.initializer = initializers.get(initializer)
        self.interpolation = check_choice(
            "interpolation", interpolation, INTERPOLATIONS
        )

    def build(self, inputs_shape):
        self._check(inputs_shape)
        rows, cols = self.grid
        self.table = self.add_weight(
            name="table",
            shape=(2 * rows - 1, 2 * cols - 1, self.num_heads),
            initializer=fresh(self.initializer),
        )
        self.prefix_table = None
        if self.num_prefix_tokens:
            self.prefix_table = self.add_weight(
                name="prefix_table",
                shape=(3, self.num_heads),
                initializer=fresh(self.initializer),
            )

    def call(self, inputs):
        self._check(inputs.shape)
        rows, cols = self.grid if len(inputs.shape) == 3 else ops.shape(inputs)[1:3]
        offsets = resize_grid(
            ops.convert_to_tensor(self.table),
            2 * rows - 1,
            2 * cols - 1,
            self.interpolation,
        )
        entries = ops.reshape(offsets, (-1, self.num_heads))
        if self.prefix_table is not None:
            prefix = ops.convert_to_tensor(self.prefix_table)
            entries = ops.concatenate([entries, prefix], axis=0)
        index = self._index(rows, cols)
        bias = ops.take(entries, index, axis=0)  # (query, key, heads)
        return ops.expand_dims(ops.transpose(bias, (2, 0, 1)), 0)

    def compute_output_shape(self, inputs_shape):
        self._check(inputs_shape)
        rows, cols = self.grid if len(inputs_shape) == 3 else inputs_shape[1:3]
        length = None
        if None not in (rows, cols):
            length = self.num_prefix_tokens + rows * cols
        return (1, self.num_heads, length, length)

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "grid": self.grid,
            "num_prefix_tokens": self.num_prefix_tokens,
            "initializer": initializers.serialize(self.initializer),
            "interpolation": self.interpolation,
        }

    def _index(self, rows, cols):
        """`(query, key)`: the entry of each pair, the prefix entries counted last."""
        front = self.num_prefix_tokens
        token = ops.arange(0, front + rows * cols, dtype="int32") - front
        row, col = token // cols, token % cols
        down = ops.expand_dims(row, 1) - ops.expand_dims(row, 0) + (rows - 1)
        right = ops.expand_dims(col, 1) - ops.expand_dims(col, 0) + (cols - 1)
        index = down * (2 * cols - 1) + right
        if not front:
            return index
        first = (2 * rows - 1) * (2 * cols - 1)
        query, key = ops.expand_dims(token < 0, 1), ops.expand_dims(token < 0, 0)
        index = ops.where(query, first, ops.where(key, first + 1, index))
        return ops.where(ops.logical_and(query, key), first + 2, index)

    def _check(self, shape):
        if len(shape) not in (3, 4):
            raise ValueError(
                f"{type(self).__name__} expects `(batch, rows, cols, dim)` or `(batch, "
                f"length, dim)`. Received: inputs_shape={tuple(shape)}"
            )
        length = self.num_prefix_tokens + self.grid[0] * self.grid[1]
        if len(shape) == 3 and shape[1] not in (None, length):
            raise ValueError(
                f"A sequence must hold the {self.num_prefix_tokens} prefix tokens and "
                f"the grid of {self.grid}, {length} tokens; pass the grid itself to "
                f"use another size. Received: inputs_shape={tuple(shape)}"
            )
