"""Learned tokens in front of a sequence: class, register and distillation tokens."""

import math

from keras import initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_positive
from keras_attn.masks import as_mask
from keras_attn.serialization import fresh

__all__ = ["PrefixTokens"]


@register_keras_serializable(package="keras_attn")
class PrefixTokens(layers.Layer):
    """Flattens a grid to a sequence and puts learned tokens in front of it.

    One token is a ViT's class token; more are register or distillation tokens. They
    stand behind the positions: a model whose tokens have positions of their own, as
    the first ViT and DeiT, holds the sum of token and position here. The mask of a
    sequence leaves with the output, `True` at the new tokens.

    Args:
        num_tokens: how many.
        initializer: initializer of the tokens.

    Call arguments:
        inputs: `(batch, length, dim)`, or a grid, `(batch, rows, cols, dim)` or
            `(batch, times, rows, cols, dim)`.
        mask: `(batch, length)`, `True` at real tokens; sequences only.

    Returns:
        `(batch, num_tokens + length, dim)`, where the length of a grid is
        `rows * cols`, row by row, or `times * rows * cols`, frame by frame.

    Example:
    >>> tuple(PrefixTokens()(keras.random.normal((2, 4, 6, 64))).shape)
    (2, 25, 64)

    Reference: [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929) (class),
    [Darcet et al., 2024](https://arxiv.org/abs/2309.16588) (registers).
    """

    def __init__(self, num_tokens=1, initializer="zeros", **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_tokens = check_positive("num_tokens", num_tokens)
        self.initializer = initializers.get(initializer)

    def build(self, inputs_shape):
        if len(inputs_shape) not in (3, 4, 5):
            raise ValueError(
                "PrefixTokens expects `(batch, length, dim)` or a grid, `(batch, rows, "
                "cols, dim)` or `(batch, times, rows, cols, dim)`. "
                f"Received: inputs_shape={tuple(inputs_shape)}"
            )
        self.tokens = self.add_weight(
            name="tokens",
            shape=(self.num_tokens, inputs_shape[-1]),
            initializer=fresh(self.initializer),
        )

    def call(self, inputs, mask=None):
        batch, dim = ops.shape(inputs)[0], inputs.shape[-1]
        if len(inputs.shape) > 3:
            length = inputs.shape[1:-1]
            length = -1 if None in length else math.prod(length)
            batch_size = batch if length == -1 else -1
            inputs = ops.reshape(inputs, (batch_size, length, dim))
        tokens = ops.expand_dims(ops.convert_to_tensor(self.tokens), 0)
        tokens = ops.broadcast_to(tokens, (batch, self.num_tokens, dim))
        return ops.concatenate([ops.cast(tokens, inputs.dtype), inputs], axis=1)

    def compute_mask(self, inputs, mask=None):
        if mask is None:
            return None
        mask = as_mask(mask)
        front = ops.ones_like(mask[:, :1])
        front = ops.repeat(front, self.num_tokens, axis=1)
        return ops.concatenate([front, mask], axis=1)

    def compute_output_shape(self, inputs_shape):
        batch, *sides, dim = inputs_shape
        length = None if None in sides else math.prod(sides) + self.num_tokens
        return (batch, length, dim)

    def get_config(self):
        return {
            **super().get_config(),
            "num_tokens": self.num_tokens,
            "initializer": initializers.serialize(self.initializer),
        }
