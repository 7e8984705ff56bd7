"""What an attention layer asks of the layer that is its `position=`."""

import keras
from keras import layers, ops

from keras_attn.checks import check_positive, check_rank
from keras_attn.masks import token_positions

__all__ = ["AttentionPosition", "PositionBias"]


class AttentionPosition(layers.Layer):
    """A layer that tells an attention layer where its tokens stand.

    It may turn queries and keys, and it may add a term to the scores. To write one of
    your own, override `rotate`, or define `attention_bias`: a method of the positions
    of queries and keys, `(length,)` or `(batch, length)`, that gives the term,
    `(batch or 1, heads, query, key)`.
    """

    attention_bias = None

    def count(self, x, mask=None):
        """The positions of the tokens of `x`, `(batch, heads, length, head_dim)`.

        Args:
            x: queries or keys.
            mask: `(batch, length)`, `True` at real tokens.

        Returns:
            `(length,)`, or `(batch, length)` where a mask counts.
        """
        if mask is None:
            return ops.arange(0, ops.shape(x)[2], dtype="int32")
        return token_positions(mask)

    def rotate(self, x, positions):
        """`x`, `(batch, heads, length, head_dim)`, as it is at these positions."""
        return x


class PositionBias(AttentionPosition):
    """A term on the scores that depends on the distance from query to key.

    Called on a sequence it gives the term itself, to be passed as `bias=` to as many
    layers as shall share it.
    """

    def __init__(self, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = check_positive("num_heads", num_heads)

    def build(self, inputs_shape):
        if len(inputs_shape) == 4:  # the heads of the attention layer it belongs to
            if inputs_shape[1] != self.num_heads:
                raise ValueError(
                    f"{self.name!r} must have as many heads as its attention layer, "
                    f"{inputs_shape[1]}. Received: num_heads={self.num_heads}"
                )
            return
        check_rank(self, inputs_shape, 3, "(batch, length, dim)")

    def call(self, inputs, mask=None, positions=None):
        if positions is None and mask is not None:
            positions = token_positions(mask, inputs)
        if positions is None:
            positions = ops.arange(0, ops.shape(inputs)[1], dtype="int32")
        return self.attention_bias(positions, positions)

    def compute_mask(self, inputs, previous_mask=None):
        return None  # a bias is no sequence

    def compute_output_shape(self, inputs_shape):
        return (1, self.num_heads, inputs_shape[1], inputs_shape[1])

    def compute_output_spec(self, inputs, mask=None, positions=None):
        is_shared = mask is None and (positions is None or len(positions.shape) == 1)
        batch, length = 1 if is_shared else inputs.shape[0], inputs.shape[1]
        return keras.KerasTensor(
            (batch, self.num_heads, length, length), dtype="float32"
        )

    def get_config(self):
        return {**super().get_config(), "num_heads": self.num_heads}


def distances(query_positions, key_positions):
    """Position of the key minus that of the query, `(batch or 1, query, key)`."""
    query, key = (
        ops.convert_to_tensor(positions, dtype="int32")
        for positions in (query_positions, key_positions)
    )
    away = ops.expand_dims(key, -2) - ops.expand_dims(query, -1)
    return away if len(away.shape) == 3 else ops.expand_dims(away, 0)
