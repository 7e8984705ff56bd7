"""T5's relative position bias: a learned term for every bucket of distances."""

from keras import initializers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_positive
from keras_attn.encodings import relative_position_buckets
from keras_attn.positions.base import PositionBias, distances
from keras_attn.serialization import fresh

__all__ = ["RelativePositionBias"]


@register_keras_serializable(package="keras_attn")
class RelativePositionBias(PositionBias):
    r"""Adds to every score a learned number for the head and the bucket of distances.

    $$B_{hij} = b_{h,\, \mathrm{bucket}(j - i)}$$

    Near distances have a bucket each, far ones share them; see
    `encodings.relative_position_buckets`.

    T5 shares one bias among all blocks: call the layer once on the sequence and pass
    what it gives as `bias=` to each. As the `position=` of one attention layer it is
    that layer's own, and also counts with a cache.

    Args:
        num_heads: number of attention heads.
        num_buckets: of both directions together.
        max_distance: from here on all distances share a bucket.
        bidirectional: whether keys after the query have buckets of their own
            (encoders); else they share bucket 0 (decoders).
        embeddings_initializer: initializer of the numbers.

    Call arguments:
        inputs: `(batch, length, dim)`, of which only the length is read.
        mask: `(batch, length)`, `True` at real tokens: distances then skip padding.
        positions: `(length,)` or `(batch, length)`, when they are not counted.

    Returns:
        `(1, heads, length, length)`, float32; `(batch, ...)` with a mask.

    Example:
    >>> x = keras.random.normal((2, 10, 64))
    >>> bias = RelativePositionBias(num_heads=4)(x)
    >>> for _ in range(3):
    ...     x = EncoderBlock(num_heads=4, intermediate_dim=128)(x, bias=bias)

    Reference: [Raffel et al., 2020](https://arxiv.org/abs/1910.10683), section 2.1.
    """

    def __init__(
        self,
        num_heads,
        num_buckets=32,
        max_distance=128,
        bidirectional=True,
        embeddings_initializer="truncated_normal",
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        self.num_buckets = check_positive("num_buckets", num_buckets)
        self.max_distance = check_positive("max_distance", max_distance)
        self.bidirectional = bidirectional
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        exact = num_buckets // (4 if bidirectional else 2)
        if exact < 1 or max_distance <= exact or num_buckets % (1 + bidirectional):
            raise ValueError(
                f"{'Both directions' if bidirectional else 'A direction'} must have at "
                f"least 2 buckets each, evenly, and `max_distance` be greater than the "
                f"{exact} that lie alone. Received: num_buckets={num_buckets}, "
                f"max_distance={max_distance}, bidirectional={bidirectional}"
            )

    def build(self, inputs_shape):
        super().build(inputs_shape)
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.num_buckets, self.num_heads),
            initializer=fresh(self.embeddings_initializer),
        )

    def attention_bias(self, query_positions, key_positions):
        farthest = self.max_distance
        buckets = relative_position_buckets(
            self.num_buckets, farthest, self.bidirectional
        )
        table = ops.cast(ops.convert_to_tensor(self.embeddings), "float32")
        table = ops.take(table, buckets, axis=0)  # (distances, heads)
        away = distances(query_positions, key_positions)
        bias = ops.take(table, ops.clip(away, -farthest, farthest) + farthest, axis=0)
        return ops.transpose(bias, (0, 3, 1, 2))  # (batch, heads, query, key)

    def get_config(self):
        return {
            **super().get_config(),
            "num_buckets": self.num_buckets,
            "max_distance": self.max_distance,
            "bidirectional": self.bidirectional,
            "embeddings_initializer": initializers.serialize(
                self.embeddings_initializer
            ),
        }
