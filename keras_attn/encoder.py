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

    With `parallel=True` both read the same input and there is one residual connection,
    with its norm where `norm_placement` says; with `"pre"`, as in GPT-J, PaLM, ViT-22B:

    $$O = I + \mathrm{Attention}(\mathrm{Norm}(I)) + \mathrm{FFN}(\mathrm{Norm}(I))$$

    Any layer can take the place of a part. It gets what its `call` names: the first
    argument the tokens, `value` the same again, all masks together as `attention_mask`
    or padding as `mask`, and `bias`, `positions`, `training`. What the block is given
    and the layer does not take is refused by name.

    Masking: a token sees the tokens that the mask calls real. The mask that rides on
    the input, or `mask`, is applied and leaves with the output.

    Args:
        num_heads: number of attention heads. Not with `attention`.
        intermediate_dim: width inside the feed-forward. Not with `feed_forward`.
        key_dim: size of each head. Defaults to the width of the input over `num_heads`,
            which must divide.
        dropout: rate on the output of either part, in `[0, 1)`: the paper's. Of the sum
            with `parallel`.
        attention_dropout: rate on the attention weights, in `[0, 1)`.
        activation: of the feed-forward; `"relu"` in the paper, `"gelu"` in ViT.
        norm_placement: `"post"`, `"pre"`, `"sandwich"` or `"deep"`, see `Residual`.
        normalization: `"layer"` or `"rms"`.
        epsilon: of the normalization.
        use_bias: whether the dense layers that the block makes have biases.
        kernel_initializer: initializer of the kernels that the block makes.
        bias_initializer: initializer of the biases that the block makes.
        seed: seed of everything random that the block makes.
        attention: a layer in place of the `MultiHeadAttention` that the block makes:
            one with other settings, Keras' own, or yours. Give it the name
            `"attention"` to find its weights under that path.
        feed_forward: a layer in place of the `FeedForward` that the block makes:
            `GatedFeedForward`, `MixtureOfExperts`, or yours.
        parallel: attention and feed-forward side by side. Not with `"deep"`.
        layer_scale: first value of a `LayerScale` on each branch; `None` for none.
        stochastic_depth: rate at which samples skip a branch, see `StochasticDepth`;
            `stochastic_depth_rates` has one for each block.
        alpha: with `"deep"`, DeepNorm's factor of the input, see `deep_norm_constants`.
        beta: with `"deep"`, DeepNorm's factor of the first kernels of value, output and
            feed-forward, as far as the block makes them.

    Call arguments:
        inputs: `(batch, length, dim)`.
        mask: `(batch, length)`, `True` at real tokens.
        attention_mask: `(batch, query, key)`, `(batch, heads, query, key)` or
            `(query, key)`, `True` where a key may be seen.
        bias: float, added to the scores; broadcasts to `(batch, heads, query, key)`.
        positions: `(batch, length)`, ints, handed on to the attention.
        training: whether dropout is on.

    Returns:
        `(batch, length, dim)`.

    Raises:
        ValueError: a size that is missing and no layer in its place; a part that does
            not keep the shape, or does not take what the block is given.

    Example:
    >>> block = EncoderBlock(num_heads=4, intermediate_dim=128)
    >>> tuple(block(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)
    >>> modern = EncoderBlock(
    ...     attention=MultiHeadAttention(num_heads=4, num_kv_heads=2),
    ...     feed_forward=GatedFeedForward(128),
    ...     norm_placement="pre",
    ...     normalization="rms",
    ... )
    >>> tuple(modern(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.1.
    """

    PARTS = ("attention", "feed_forward")

    def __init__(
        self,
        num_heads=None,
        intermediate_dim=None,
        key_dim=None,
        dropout=0.0,
        attention_dropout=0.0,
        activation="relu",
        norm_placement="post",
        normalization="layer",
        epsilon=1e-5,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        seed=None,
        *,
        attention=None,
        feed_forward=None,
        parallel=False,
        layer_scale=None,
        stochastic_depth=0.0,
        alpha=None,
        beta=None,
        **kwargs,
    ):
        super().__init__(
            num_heads=num_heads,
            intermediate_dim=intermediate_dim,
            key_dim=key_dim,
            dropout=dropout,
            attention_dropout=attention_dropout,
            activation=activation,
            norm_placement=norm_placement,
            normalization=normalization,
            epsilon=epsilon,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            seed=seed,
            attention=attention,
            feed_forward=feed_forward,
            parallel=parallel,
            layer_scale=layer_scale,
            stochastic_depth=stochastic_depth,
            alpha=alpha,
            beta=beta,
            **kwargs,
        )

    def build(self, inputs_shape, attention_mask_shape=None):
        self.attend = self.add_attention(
            "attention", inputs_shape, mask_shape=attention_mask_shape
        )
        if self.parallel:
            self.feed = self.add_feed_forward(inputs_shape)
            self.residual = self.add_residual("residual", inputs_shape)
            return
        self.attention_residual = self.add_residual("attention_residual", inputs_shape)
        self.feed = self.add_feed_forward(inputs_shape)
        self.feed_forward_residual = self.add_residual(
            "feed_forward_residual", inputs_shape
        )

    def call(
        self,
        inputs,
        mask=None,
        attention_mask=None,
        bias=None,
        positions=None,
        training=None,
    ):
        def attend(x):
            return self.attend(
                x,
                x,
                layer=self.attention,
                query_mask=mask,
                value_mask=mask,
                attention_mask=attention_mask,
                bias=bias,
                positions=positions,
                training=training,
            )

        def feed(x):
            return self.feed(x, layer=self.feed_forward, mask=mask, training=training)

        if self.parallel:
            return self.residual(
                inputs, branch=lambda x: attend(x) + feed(x), training=training
            )
        x = self.attention_residual(inputs, branch=attend, training=training)
        return self.feed_forward_residual(x, branch=feed, training=training)
