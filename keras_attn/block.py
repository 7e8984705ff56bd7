"""What encoder and decoder blocks share."""

import zlib

from keras import activations, initializers, layers

from keras_attn.attention import MultiHeadAttention
from keras_attn.checks import check_choice, check_greater, check_positive, check_rate
from keras_attn.feed_forward import FeedForward
from keras_attn.residual import NORM_PLACEMENTS, NORMALIZATIONS, Residual
from keras_attn.serialization import quantized_dtype

__all__ = ["Block"]


class Block(layers.Layer):
    """The arguments of a block, and the parts made from them."""

    def __init__(
        self,
        num_heads,
        intermediate_dim,
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
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = check_positive("num_heads", num_heads)
        self.intermediate_dim = check_positive("intermediate_dim", intermediate_dim)
        self.key_dim = check_positive("key_dim", key_dim, optional=True)
        self.dropout = check_rate("dropout", dropout)
        self.attention_dropout = check_rate("attention_dropout", attention_dropout)
        self.activation = activations.get(activation)
        self.norm_placement = check_choice(
            "norm_placement", norm_placement, NORM_PLACEMENTS
        )
        self.normalization = check_choice(
            "normalization", normalization, NORMALIZATIONS
        )
        self.epsilon = check_greater("epsilon", epsilon, 0)
        self.use_bias = use_bias
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.seed = seed

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "key_dim": self.key_dim,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "activation": activations.serialize(self.activation),
            "norm_placement": self.norm_placement,
            "normalization": self.normalization,
            "epsilon": self.epsilon,
            "use_bias": self.use_bias,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "seed": self.seed,
            **quantized_dtype(self),
        }

    def make_attention(self, name):
        return MultiHeadAttention(
            self.num_heads,
            key_dim=self.key_dim,
            dropout=self.attention_dropout,
            use_bias=self.use_bias,
            kernel_initializer=self.kernel_initializer,
            bias_initializer=self.bias_initializer,
            seed=self._seed_of(name),
            dtype=self.dtype_policy,
            name=name,
        )

    def make_feed_forward(self, name):
        return FeedForward(
            self.intermediate_dim,
            activation=self.activation,
            use_bias=self.use_bias,
            kernel_initializer=self.kernel_initializer,
            bias_initializer=self.bias_initializer,
            dtype=self.dtype_policy,
            name=name,
        )

    def make_residual(self, name):
        return Residual(
            norm_placement=self.norm_placement,
            normalization=self.normalization,
            epsilon=self.epsilon,
            dropout=self.dropout,
            seed=self._seed_of(name),
            dtype=self.dtype_policy,
            name=name,
        )

    def _seed_of(self, name):
        """Another seed for every part: with one for all they drop the same places."""
        if self.seed is None:
            return None
        return (self.seed + zlib.crc32(name.encode())) % 2**31
