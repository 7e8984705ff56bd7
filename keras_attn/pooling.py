"""Attention pooling: learned queries that read a sequence."""

from keras import activations, initializers, layers, ops
from keras.saving import register_keras_serializable

from keras_attn.attention import MultiHeadAttention
from keras_attn.checks import check_greater, check_positive, check_rate
from keras_attn.feed_forward import FeedForward
from keras_attn.residual import Residual
from keras_attn.serialization import fresh, quantized_dtype

__all__ = ["AttentionPooling"]


@register_keras_serializable(package="keras_attn")
class AttentionPooling(layers.Layer):
    r"""Learned queries attend to a sequence; what they gather stands for all of it.

    $$z = \mathrm{Attention}(q, x, x), \qquad y = z + \mathrm{FFN}(\mathrm{Norm}(z))$$

    The second step is there with `intermediate_dim`, which makes the layer the head of
    "Scaling Vision Transformers"; without it $y = z$, the pooler of CoCa.

    Masking: only tokens that the mask calls real are read; the mask ends here. From
    padding alone the queries gather 0.

    Args:
        num_heads: number of attention heads.
        num_queries: how many vectors to gather.
        key_dim: size of each head. Defaults to the width of the input over `num_heads`,
            which must divide.
        intermediate_dim: width inside the feed-forward; `None` for no feed-forward.
        dropout: rate on the attention weights and on the feed-forward's output.
        activation: of the feed-forward.
        epsilon: of the normalization before the feed-forward.
        use_bias: whether the dense layers have biases.
        query_initializer: initializer of the queries.
        kernel_initializer: initializer of the kernels.
        bias_initializer: initializer of the biases.
        seed: seed of the dropout.

    Call arguments:
        inputs: `(batch, length, dim)`.
        mask: `(batch, length)`, `True` at real tokens.
        training: whether dropout is on.

    Returns:
        `(batch, dim)` from one query, else `(batch, num_queries, dim)`.

    Example:
    >>> tuple(AttentionPooling(num_heads=4)(keras.random.normal((2, 16, 64))).shape)
    (2, 64)

    Reference: [Zhai et al., 2022](https://arxiv.org/abs/2106.04560),
    [Yu et al., 2022](https://arxiv.org/abs/2205.01917) (CoCa).
    """

    def __init__(
        self,
        num_heads,
        num_queries=1,
        key_dim=None,
        intermediate_dim=None,
        dropout=0.0,
        activation="gelu",
        epsilon=1e-6,
        use_bias=True,
        query_initializer="glorot_uniform",
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = check_positive("num_heads", num_heads)
        self.num_queries = check_positive("num_queries", num_queries)
        self.key_dim = check_positive("key_dim", key_dim, optional=True)
        self.intermediate_dim = check_positive(
            "intermediate_dim", intermediate_dim, optional=True
        )
        self.dropout = check_rate("dropout", dropout)
        self.activation = activations.get(activation)
        self.epsilon = check_greater("epsilon", epsilon, 0)
        self.use_bias = use_bias
        self.query_initializer = initializers.get(query_initializer)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.seed = seed
        dense = dict(
            use_bias=use_bias,
            kernel_initializer=self.kernel_initializer,
            bias_initializer=self.bias_initializer,
            dtype=self.dtype_policy,
        )
        self.attention = MultiHeadAttention(
            self.num_heads,
            key_dim=self.key_dim,
            dropout=self.dropout,
            seed=seed,
            name="attention",
            **dense,
        )
        self.feed_forward = self.feed_forward_residual = None
        if self.intermediate_dim is not None:
            self.feed_forward = FeedForward(
                self.intermediate_dim,
                activation=self.activation,
                name="feed_forward",
                **dense,
            )
            self.feed_forward_residual = Residual(
                norm_placement="pre",
                epsilon=epsilon,
                dropout=self.dropout,
                seed=None if seed is None else seed + 1,
                dtype=self.dtype_policy,
                name="feed_forward_residual",
            )

    def build(self, inputs_shape):
        if len(inputs_shape) != 3 or inputs_shape[-1] is None:
            raise ValueError(
                "AttentionPooling expects `(batch, length, dim)` with a known `dim`. "
                f"Received: inputs_shape={tuple(inputs_shape)}"
            )
        dim = inputs_shape[-1]
        self.queries = self.add_weight(
            name="queries",
            shape=(self.num_queries, dim),
            initializer=fresh(self.query_initializer),
        )
        queries_shape = (inputs_shape[0], self.num_queries, dim)
        self.attention.build(queries_shape, inputs_shape)
        if self.feed_forward is not None:
            self.feed_forward.build(queries_shape)
            self.feed_forward_residual.build(queries_shape)

    def call(self, inputs, mask=None, training=None):
        queries = ops.expand_dims(ops.convert_to_tensor(self.queries), 0)
        queries = ops.broadcast_to(
            queries, (ops.shape(inputs)[0], *self.queries.shape)
        )  # (batch, queries, dim)
        x = self.attention(queries, inputs, value_mask=mask, training=training)
        if self.feed_forward is not None:
            x = self.feed_forward_residual(
                x, branch=self.feed_forward, training=training
            )
        return x[:, 0] if self.num_queries == 1 else x

    def compute_mask(self, inputs, previous_mask=None):
        return None

    def compute_output_shape(self, inputs_shape):
        queries = () if self.num_queries == 1 else (self.num_queries,)
        return (inputs_shape[0], *queries, inputs_shape[-1])

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "num_queries": self.num_queries,
            "key_dim": self.key_dim,
            "intermediate_dim": self.intermediate_dim,
            "dropout": self.dropout,
            "activation": activations.serialize(self.activation),
            "epsilon": self.epsilon,
            "use_bias": self.use_bias,
            "query_initializer": initializers.serialize(self.query_initializer),
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "seed": self.seed,
            **quantized_dtype(self),
        }
