"""Transformer encoder block."""

from keras.saving import register_keras_serializable

from keras_attn.block import Block

__all__ = ["EncoderBlock"]


@register_keras_serializable(package="keras_attn")
class EncoderBlock(Block):
    r"""Self-attention, then a feed-forward, each inside a residual connection.

    With `norm_placement="post"`, the paper's order:

    $$O_1 = \mathrm{Norm}(I + \mathrm{Attention}(I)), \qquad
      O_2 = \mathrm{Norm}(O_1 + \mathrm{FFN}(O_1))$$

    Masking: a token sees the tokens that the mask calls real. The mask that rides on
    the input, or `mask`, is applied and leaves with the output.

    Args:
        num_heads: number of attention heads.
        intermediate_dim: width inside the feed-forward.
        key_dim: size of each head. Defaults to the width of the input over `num_heads`,
            which must divide.
        dropout: rate on the output of either part, in `[0, 1)`: the paper's.
        attention_dropout: rate on the attention weights, in `[0, 1)`.
        activation: of the feed-forward; `"relu"` in the paper, `"gelu"` in ViT.
        norm_placement: `"post"` or `"pre"`, see `Residual`.
        normalization: `"layer"` or `"rms"`.
        epsilon: of the normalization.
        use_bias: whether the dense layers have biases.
        kernel_initializer: initializer of the kernels.
        bias_initializer: initializer of the biases.
        seed: seed of the dropout.

    Call arguments:
        inputs: `(batch, length, dim)`.
        mask: `(batch, length)`, `True` at real tokens.
        attention_mask: `(batch, query, key)`, `(batch, heads, query, key)` or
            `(query, key)`, `True` where a key may be seen.
        bias: float, added to the scores; broadcasts to `(batch, heads, query, key)`.
        training: whether dropout is on.

    Returns:
        `(batch, length, dim)`.

    Example:
    >>> block = EncoderBlock(num_heads=4, intermediate_dim=128)
    >>> tuple(block(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.1.
    """

    def build(self, inputs_shape, attention_mask_shape=None):
        self.attention = self.make_attention("attention")
        self.attention_residual = self.make_residual("attention_residual")
        self.feed_forward = self.make_feed_forward("feed_forward")
        self.feed_forward_residual = self.make_residual("feed_forward_residual")
        self.attention.build(
            inputs_shape, inputs_shape, attention_mask_shape=attention_mask_shape
        )
        self.attention_residual.build(inputs_shape)
        self.feed_forward.build(inputs_shape)
        self.feed_forward_residual.build(inputs_shape)

    def call(self, inputs, mask=None, attention_mask=None, bias=None, training=None):
        def attend(x):
            return self.attention(
                x,
                x,
                query_mask=mask,
                value_mask=mask,
                attention_mask=attention_mask,
                bias=bias,
                training=training,
            )

        x = self.attention_residual(inputs, branch=attend, training=training)
        return self.feed_forward_residual(
            x, branch=self.feed_forward, training=training
        )
