"""Transformer decoder block."""

import keras
from keras import ops
from keras.saving import register_keras_serializable

from keras_attn.block import Block
from keras_attn.cache import counts_of, in_order, rewind

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

    With `parallel=True`, for decoder-only blocks, self-attention and feed-forward read
    the same input and share one residual connection, as in GPT-J and PaLM. Any layer
    can take the place of a part, as in `EncoderBlock`; one that attends to the past
    must take `use_causal_mask` or `attention_mask`, one that attends to the memory a
    second input.

    Args:
        num_heads: number of attention heads. Not needed where no attention is made.
        intermediate_dim: width inside the feed-forward. Not with `feed_forward`.
        self_attention: a layer in place of the `MultiHeadAttention` over the past.
        cross_attention: a layer in place of the `MultiHeadAttention` over the memory.
        feed_forward: a layer in place of the `FeedForward`.
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
        positions: `(batch, length)`, ints, handed on to the self-attention.
        cache: what `make_cache` gave, or an earlier call: the block sees the tokens in
            it too, and the memory that it was made with.
        cache_index: see `MultiHeadAttention`.
        training: whether dropout is on.

    Returns:
        `(batch, length, dim)`; with a cache a pair with the new cache.

    Raises:
        ValueError: `memory` missing where the block was built with it, or given where
            it was built without, or with `parallel`; a `cross_attention` without
            `memory`; and what `EncoderBlock` raises.

    Example:
    >>> block = DecoderBlock(num_heads=4, intermediate_dim=128)
    >>> target = keras.random.normal((2, 9, 64))
    >>> memory = keras.random.normal((2, 7, 32))
    >>> tuple(block(target, memory).shape)
    (2, 9, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.1.
    """

    PARTS = ("self_attention", "cross_attention", "feed_forward")

    def __init__(
        self,
        num_heads=None,
        intermediate_dim=None,
        *,
        self_attention=None,
        cross_attention=None,
        feed_forward=None,
        **kwargs,
    ):
        super().__init__(
            num_heads,
            intermediate_dim,
            self_attention=self_attention,
            cross_attention=cross_attention,
            feed_forward=feed_forward,
            **kwargs,
        )

    def build(self, inputs_shape, memory_shape=None, attention_mask_shape=None):
        self._check_parts(memory_shape)
        self.attend_to_past = self.add_attention(
            "self_attention",
            inputs_shape,
            mask_shape=attention_mask_shape,
            is_causal=True,
        )
        if self.parallel:
            self.feed = self.add_feed_forward(inputs_shape)
            self.residual = self.add_residual("residual", inputs_shape)
            return
        self.self_attention_residual = self.add_residual(
            "self_attention_residual", inputs_shape
        )
        if memory_shape is not None:
            self.attend_to_memory = self.add_attention(
                "cross_attention", inputs_shape, memory_shape
            )
            self.cross_attention_residual = self.add_residual(
                "cross_attention_residual", inputs_shape
            )
        self.feed = self.add_feed_forward(inputs_shape)
        self.feed_forward_residual = self.add_residual(
            "feed_forward_residual", inputs_shape
        )

    def call(
        self,
        inputs,
        memory=None,
        mask=None,
        memory_mask=None,
        attention_mask=None,
        bias=None,
        positions=None,
        cache=None,
        cache_index=None,
        training=None,
    ):
        cache = dict(cache or {})
        past, known = cache.get("self_attention"), cache.get("cross_attention")
        self._check_memory(memory if known is None else known)

        def attend_to_past(x):
            result = self.attend_to_past(
                x,
                x,
                layer=self.self_attention,
                query_mask=mask,
                value_mask=mask,
                attention_mask=attention_mask,
                bias=bias,
                positions=positions,
                cache=past,
                cache_index=cache_index,
                training=training,
            )
            if past is None:
                return result
            output, cache["self_attention"] = result
            return output

        places = None  # where the queries stand, for an attention that asks
        position = getattr(self.cross_attention, "position", None)
        if past is not None and position is not None:
            places = positions
            if places is None:
                held = past if cache_index is None else rewind(past, cache_index)
                places = counts_of(held, mask, ops.shape(inputs)[1])

        def attend_to_memory(x):
            return self.attend_to_memory(
                x,
                x if memory is None else memory,  # a cache stands for it
                layer=self.cross_attention,
                query_mask=mask,
                value_mask=memory_mask,
                positions=places,
                cache=known,
                training=training,
            )

        def feed(x):
            return self.feed(x, layer=self.feed_forward, mask=mask, training=training)

        if self.parallel:
            x = self.residual(
                inputs, branch=lambda x: attend_to_past(x) + feed(x), training=training
            )
            return (x, in_order(cache)) if cache else x
        x = self.self_attention_residual(
            inputs, branch=attend_to_past, training=training
        )
        if self.cross_attention is not None:
            x = self.cross_attention_residual(
                x, branch=attend_to_memory, training=training
            )
        x = self.feed_forward_residual(x, branch=feed, training=training)
        return (x, in_order(cache)) if cache else x

    def make_cache(
        self, batch_size, max_length, memory=None, memory_mask=None, rolling=False
    ):
        """An empty cache, see `keras_attn.cache`; the memory is projected once, here.

        Args:
            batch_size: number of rows.
            max_length: how many tokens a row may have.
            memory: `(batch, memory_length, memory_dim)`, where the block reads one.
            memory_mask: `(batch, memory_length)`, `True` at real tokens.
            rolling: see `MultiHeadAttention.make_cache`.

        Returns:
            A dictionary of caches, `"self_attention"` and, with a memory,
            `"cross_attention"`.
        """
        if not self.built:
            raise ValueError(
                f"The sizes of {self.name!r} are known once it is built: call it, or "
                "`build` it, before `make_cache`."
            )
        self._check_memory(memory)
        cache = {}
        cache["self_attention"] = self.self_attention.make_cache(
            batch_size, max_length, rolling=rolling
        )
        if memory is not None:
            cache["cross_attention"] = self.cross_attention.make_memory_cache(
                memory, mask=memory_mask
            )
        return in_order(cache)

    def compute_output_spec(self, inputs, memory=None, cache=None, **kwargs):
        output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not cache:
            self.compute_output_shape(
                inputs.shape, None if memory is None else memory.shape
            )
            return output
        return output, keras.tree.map_structure(
            lambda x: keras.KerasTensor(x.shape, dtype=x.dtype), in_order(dict(cache))
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

    def _check_parts(self, memory_shape):
        if memory_shape is None and self.cross_attention is not None:
            raise ValueError(
                f"{self.name!r} was given a `cross_attention` without `memory`. "
                "Received: memory=None"
            )
        if memory_shape is not None and self.parallel:
            raise ValueError(
                "Self-attention and feed-forward side by side leave no place for "
                "attention to a memory. Received: parallel=True, "
                f"memory_shape={tuple(memory_shape)}"
            )
