"""ALiBi: attention with linear biases."""

from keras import ops
from keras.saving import register_keras_serializable

from keras_attn.encodings import alibi_slopes
from keras_attn.positions.base import PositionBias, distances

__all__ = ["AlibiBias"]


@register_keras_serializable(package="keras_attn")
class AlibiBias(PositionBias):
    r"""Lowers a score in proportion to the distance of its key: no other positions.

    $$B_{hij} = -m_h \, |i - j|$$

    Under a causal mask this is the paper's bias; without one it looks both ways alike.
    The slopes $m_h$ are fixed; a model reads longer sequences than it was trained on.

    Hand it to an attention layer as `position=`, which also counts with masks and with
    a cache; or call it on a sequence and pass what it gives as `bias=`.

    Args:
        num_heads: number of attention heads; any, not only powers of two.

    Call arguments:
        inputs: `(batch, length, dim)`, of which only the length is read.
        mask: `(batch, length)`, `True` at real tokens: distances then skip padding.
        positions: `(length,)` or `(batch, length)`, when they are not counted.

    Returns:
        `(1, heads, length, length)`, float32; `(batch, ...)` with a mask.

    Example:
    >>> attention = MultiHeadAttention(num_heads=4, position=AlibiBias(num_heads=4))
    >>> tuple(attention(keras.random.normal((2, 10, 64)), use_causal_mask=True).shape)
    (2, 10, 64)
    >>> tuple(AlibiBias(num_heads=4)(keras.random.normal((2, 10, 64))).shape)
    (1, 4, 10, 10)

    Reference: [Press et al., 2022](https://arxiv.org/abs/2108.12409).
    """

    def attention_bias(self, query_positions, key_positions):
        away = ops.abs(distances(query_positions, key_positions))
        slopes = ops.convert_to_tensor(alibi_slopes(self.num_heads), dtype="float32")
        slopes = ops.reshape(slopes, (1, self.num_heads, 1, 1))
        away = ops.cast(ops.expand_dims(away, 1), "float32")  # (batch, 1, query, key)
        return ops.negative(away * slopes)
