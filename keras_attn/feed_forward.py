"""The position-wise feed-forward part of a Transformer block, plain and gated."""

from keras import activations, initializers, layers
from keras.saving import register_keras_serializable

from keras_attn.checks import check_positive, check_rate
from keras_attn.gating import gated
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["FeedForward", "GatedFeedForward"]


@register_keras_serializable(package="keras_attn")
class FeedForward(layers.Layer):
    r"""Two dense layers with a non-linearity between, the same at every position.

    $$\mathrm{FFN}(x) = f(x W_1 + b_1) W_2 + b_2$$

    Masks pass through: each position is computed from itself alone.

    Args:
        intermediate_dim: width between the two layers.
        activation: the non-linearity; `"relu"` in the paper, `"gelu"` in BERT and ViT.
        dropout: rate on the activated intermediate, in `[0, 1)`.
        output_dim: width of the output. Defaults to the width of the input.
        use_bias: whether the dense layers have biases.
        kernel_initializer: initializer of both kernels.
        bias_initializer: initializer of both biases.
        seed: seed of the dropout.

    Call arguments:
        inputs: `(..., dim)`.

    Returns:
        `(..., output_dim)`.

    Example:
    >>> tuple(FeedForward(128)(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.3.
    """

    def __init__(
        self,
        intermediate_dim,
        activation="relu",
        dropout=0.0,
        output_dim=None,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.intermediate_dim = check_positive("intermediate_dim", intermediate_dim)
        self.activation = activations.get(activation)
        self.dropout = check_rate("dropout", dropout)
        self.output_dim = check_positive("output_dim", output_dim, optional=True)
        self.use_bias = use_bias
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.seed = seed
        self.intermediate_dense = self._dense(intermediate_dim, "intermediate_dense")
        self.intermediate_dropout = layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="intermediate_dropout"
        )

    def build(self, inputs_shape):
        self.output_dense = self._dense(
            self.output_dim or inputs_shape[-1], "output_dense"
        )
        self.intermediate_dense.build(inputs_shape)
        self.output_dense.build((*inputs_shape[:-1], self.intermediate_dim))

    def call(self, inputs, training=None):
        x = self.activation(self.intermediate_dense(inputs))  # (..., intermediate_dim)
        x = self.intermediate_dropout(x, training=training)
        return self.output_dense(x)

    def compute_output_shape(self, inputs_shape):
        return (*inputs_shape[:-1], self.output_dim or inputs_shape[-1])

    def get_config(self):
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "activation": activations.serialize(self.activation),
            "dropout": self.dropout,
            "output_dim": self.output_dim,
            "use_bias": self.use_bias,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "seed": self.seed,
            **quantized_dtype(self),
        }

    def _dense(self, units, name):
        return layers.Dense(
            units,
            use_bias=self.use_bias,
            kernel_initializer=fresh(self.kernel_initializer),
            bias_initializer=fresh(self.bias_initializer),
            dtype=self.dtype_policy,
            name=name,
        )


@register_keras_serializable(package="keras_attn")
class GatedFeedForward(FeedForward):
    r"""A feed-forward whose intermediate is gated: SwiGLU, GeGLU and their family.

    $$\mathrm{FFN}(x) = (f(x W_g) \odot x W_1)\, W_2$$

    `"silu"` is SwiGLU (PaLM, LLaMA), `"gelu"` GeGLU, `"relu"` ReGLU, `"sigmoid"` the
    gated linear unit itself. Three kernels instead of two: with two thirds of the
    `intermediate_dim` it has the weights of a `FeedForward`.

    Masks pass through: each position is computed from itself alone. In float16 the
    gated product, where it would be infinite, is the largest finite number.

    Args:
        intermediate_dim: width between the layers.
        activation: of the gate.
        dropout: rate on the gated intermediate, in `[0, 1)`.
        output_dim: width of the output. Defaults to the width of the input.
        use_bias: whether the dense layers have biases; the paper has none.
        kernel_initializer: initializer of the three kernels.
        bias_initializer: initializer of the three biases.
        seed: seed of the dropout.

    Call arguments:
        inputs: `(..., dim)`.

    Returns:
        `(..., output_dim)`.

    Example:
    >>> tuple(GatedFeedForward(128)(keras.random.normal((2, 10, 64))).shape)
    (2, 10, 64)
    >>> block = EncoderBlock(num_heads=4, feed_forward=GatedFeedForward(128))

    Reference: [Shazeer, 2020](https://arxiv.org/abs/2002.05202), section 2.
    """

    def __init__(
        self,
        intermediate_dim,
        activation="silu",
        dropout=0.0,
        output_dim=None,
        use_bias=False,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        super().__init__(
            intermediate_dim,
            activation=activation,
            dropout=dropout,
            output_dim=output_dim,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            seed=seed,
            **kwargs,
        )
        self.gate_dense = self._dense(intermediate_dim, "gate_dense")

    def build(self, inputs_shape):
        super().build(inputs_shape)
        self.gate_dense.build(inputs_shape)

    def call(self, inputs, training=None):
        gate = self.activation(self.gate_dense(inputs))  # (..., intermediate_dim)
        x = gated(gate, self.intermediate_dense(inputs))
        x = self.intermediate_dropout(x, training=training)
        return self.output_dense(x)
