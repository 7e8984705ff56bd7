"""Transformer decoder block."""

from keras.saving import register_keras_serializable

from keras_attn.block import Block

__all__ = ["DecoderBlock"]


@register_keras_serializable(package="keras_attn")
class DecoderBlock(Block):
    r"""Causal self-attention, attention to a memory, a feed-forward; residual all.

    With `norm_placement="post"`, the paper's order, $M$ the output of the encoder:

    $$O_1 = \mathrm{Norm}(I + \mathrm{CausalAttention}(I)), \quad
      O_2 = \mathrm{Norm}(O_1 + \mathrm{Attention}(O_1, M)), \quad
      O_3 = \mathrm{Norm}(O_2 + \mathrm{FFN}(O_2))$$

    Without `memory` the block has no second part: a decoder-only block, as in GPT.

    Masking: a token sees itself and the real tokens before it, and the real tokens of
    the memory. Masks that ride on `inputs` and `memory`, or are given, are applied; the
    mask of `inputs` leaves with the output.

    Args:
        num_heads: number of attention heads.
        intermediate_dim: width inside the feed-forward.
        **kwargs: the other arguments of `EncoderBlock`.

    Call arguments:
        inputs: `(batch, length, dim)`.
        memory: `(batch, memory_length, memory_dim)`, what the encoder gave. A block is
            built with or without it and stays so.
        mask: `(batch, length)`, `True` at real tokens.
        memory_mask: `(batch, memory_length)`, `True` at real tokens.
        attention_mask: of the self-attention, beside the causal one:
            `(batch, query, key)`, `(batch, heads, query, key)` or `(query, key)`.
        bias: of the self-attention: float, added to the scores; broadcasts to
            `(batch, heads, query, key)`.
        training: whether dropout is on.

    Returns:
        `(batch, length, dim)`.

    Raises:
        ValueError: `memory` missing where the block was built with it, or given where
            it was built without.

    Example:
    >>> block = DecoderBlock(num_heads=4, intermediate_dim=128)
    >>> target = keras.random.normal((2, 9, 64))
    >>> memory = keras.random.normal((2, 7, 32))
    >>> tuple(block(target, memory).shape)
    (2, 9, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.1.
    """

    def build(self, inputs_shape, memory_shape=None, attention_mask_shape=None):
        self.self_attention = self.make_attention("self_attention")
        self.self_attention_residual = self.make_residual("self_attention_residual")
        self.self_attention.build(
            inputs_shape, inputs_shape, attention_mask_shape=attention_mask_shape
        )
        self.self_attention_residual.build(inputs_shape)
        self.cross_attention = self.cross_attention_residual = None
        if memory_shape is not None:
            self.cross_attention = self.make_attention("cross_attention")
            self.cross_attention.build(inputs_shape, memory_shape)
            self.cross_attention_residual = self.make_residual(
                "cross_attention_residual"
            )
            self.cross_attention_residual.build(inputs_shape)
        self.feed_forward = self.make_feed_forward("feed_forward")
        self.feed_forward_residual = self.make_residual("feed_forward_residual")
        self.feed_forward.build(inputs_shape)
        self.feed_forward_residual.build(inputs_shape)

    def call(
        self,
        inputs,
        memory=None,
        mask=None,
        memory_mask=None,
        attention_mask=None,
        bias=None,
        training=None,
    ):
        self._check_memory(memory)

        def attend_to_past(x):
            return self.self_attention(
                x,
                x,
                query_mask=mask,
                value_mask=mask,
                attention_mask=attention_mask,
                bias=bias,
                use_causal_mask=True,
                training=training,
            )

        def attend_to_memory(x):
            return self.cross_attention(
                x,
                memory,
                query_mask=mask,
                value_mask=memory_mask,
                training=training,
            )

        x = self.self_attention_residual(
            inputs, branch=attend_to_past, training=training
        )
        if memory is not None:
            x = self.cross_attention_residual(
                x, branch=attend_to_memory, training=training
            )
        return self.feed_forward_residual(
            x, branch=self.feed_forward, training=training
        )

    def compute_output_shape(self, inputs_shape, memory_shape=None):
        if self.built:
            self._check_memory(memory_shape)
        return inputs_shape

    def _check_memory(self, memory):
        if (memory is None) != (self.cross_attention is None):
            built, called = (
                ("without", "with") if memory is not None else ("with", "without")
            )
            raise ValueError(
                f"{self.name!r} was built {built} `memory` and was called {called} it. "
                "A decoder block reads a memory always or never."
            )
