"""Rotary position embedding, on sequences and on grids."""

from keras import ops
from keras.saving import register_keras_serializable

from keras_attn.checks import (
    check_choice,
    check_count,
    check_greater,
    check_pair,
    check_positive,
    check_rank,
)
from keras_attn.encodings.rotary import (
    check_rotary_scaling,
    rotary_angles,
    rotary_frequencies,
    rotate,
)
from keras_attn.positions.base import AttentionPosition

__all__ = ["RotaryEmbedding"]


@register_keras_serializable(package="keras_attn")
class RotaryEmbedding(AttentionPosition):
    r"""Turns the features of queries and keys in pairs, by angles of their positions.

    $$\langle R_m q, R_n k \rangle = \langle q, R_{n-m} k \rangle$$

    so that scores depend on distances alone. Hand it to an attention layer as
    `position=`: that rotates queries and keys, also with masks (a position is the count
    of real tokens before) and with a cache (positions are absolute).

    With `grid` the positions are those of an image: the first half of the rotated
    features turns with the row, the second with the column, and tokens in front of the
    patches are not turned.

    Args:
        base: the base of the frequencies.
        layout: `"halves"` (GPT-NeoX, Llama as Hugging Face stores it) or
            `"interleaved"` (the paper, GPT-J, Llama as Meta stores it).
        rotary_dim: how many features of a head, the first ones, are rotated. Defaults
            to all.
        scaling: a dictionary that stretches the frequencies to longer sequences, see
            `encodings.rotary_frequencies`.
        grid: `(rows, cols)` of the patches, where `positions` are not given.
        num_prefix_tokens: number of tokens in front of the grid's.

    Call arguments:
        inputs: `(batch, heads, length, head_dim)`.
        positions: `(length,)` or `(batch, length)`; with `grid` `(length, 2)` or
            `(batch, length, 2)`, rows and columns, fractions too. Defaults to
            0, 1, 2, ... or to the grid's.

    Returns:
        The shape of `inputs`.

    Raises:
        ValueError: an odd number of features to rotate (with `grid` no multiple of 4),
            or more than there are; a grid that does not have as many tokens as the
            sequence.

    Example:
    >>> attention = MultiHeadAttention(num_heads=4, position=RotaryEmbedding())
    >>> tuple(attention(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)

    Reference: [Su et al., 2021](https://arxiv.org/abs/2104.09864); on grids
    [Heo et al., 2024](https://arxiv.org/abs/2403.13298).
    """

    def __init__(
        self,
        base=10_000,
        layout="halves",
        rotary_dim=None,
        scaling=None,
        grid=None,
        num_prefix_tokens=0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.base = check_greater("base", base, 1)
        self.layout = check_choice("layout", layout, ("halves", "interleaved"))
        self.rotary_dim = check_positive("rotary_dim", rotary_dim, optional=True)
        check_rotary_scaling(scaling)
        self.scaling = None if scaling is None else dict(scaling)
        self.grid = None if grid is None else check_pair("grid", grid)
        self.num_prefix_tokens = check_count("num_prefix_tokens", num_prefix_tokens)

    def build(self, inputs_shape):
        check_rank(self, inputs_shape, 4, "(batch, heads, length, head_dim)")
        self._check_width(inputs_shape[-1])

    def call(self, inputs, positions=None):
        return self.rotate(inputs, positions)

    def count(self, x, mask=None):
        if self.grid is None:
            return super().count(x, mask)
        rows, cols = self.grid
        length = x.shape[2]
        if length not in (None, self.num_prefix_tokens + rows * cols):
            raise ValueError(
                f"{self.name!r} counts {self.num_prefix_tokens} prefix tokens and a "
                f"grid of {rows} x {cols}. Received: {length} tokens"
            )
        row, col = ops.meshgrid(
            ops.arange(0, rows, dtype="int32"),
            ops.arange(0, cols, dtype="int32"),
            indexing="ij",
        )
        patches = ops.reshape(ops.stack([row, col], axis=-1), (rows * cols, 2))
        return ops.pad(patches, ((self.num_prefix_tokens, 0), (0, 0)))

    def rotate(self, x, positions=None):
        positions = self.count(x) if positions is None else positions
        positions = ops.convert_to_tensor(positions)
        width = self._check_width(x.shape[-1])
        if self.grid is None:
            return self._rotate_first(width, x, positions)
        if len(positions.shape) < 2 or positions.shape[-1] != 2:
            raise ValueError(
                "The positions of a grid are pairs, `(..., length, 2)`. "
                f"Received: positions of shape {tuple(positions.shape)}"
            )
        half = width // 2
        return ops.concatenate(
            [
                self._rotate_first(half, x[..., :half], positions[..., 0]),
                self._rotate_first(half, x[..., half:], positions[..., 1]),
            ],
            axis=-1,
        )

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "base": self.base,
            "layout": self.layout,
            "rotary_dim": self.rotary_dim,
            "scaling": None if self.scaling is None else dict(self.scaling),
            "grid": self.grid,
            "num_prefix_tokens": self.num_prefix_tokens,
        }

    def _rotate_first(self, width, x, positions):
        """The first `width` features turned, the others as they are."""
        frequencies, factor = rotary_frequencies(width, self.base, self.scaling)
        angles = rotary_angles(positions, frequencies)
        if len(angles.shape) == 3:
            angles = ops.expand_dims(angles, 1)  # (batch, 1, length, pairs)
        turned = rotate(x[..., :width], angles, self.layout, factor)
        if x.shape[-1] == width:
            return turned
        return ops.concatenate([turned, x[..., width:]], axis=-1)

    def _check_width(self, head_dim):
        """How many features are rotated."""
        width = self.rotary_dim or head_dim
        divisor = 2 if self.grid is None else 4
        if width % divisor or width > head_dim:
            raise ValueError(
                "A rotary embedding turns pairs of features, for rows and columns on a "
                f"grid: their number must be a multiple of {divisor} and at most the "
                "size of a head. Received: "
                f"rotary_dim={self.rotary_dim}, head_dim={head_dim}, grid={self.grid}"
            )
        return width
