"""What encoder and decoder blocks share."""

import functools
import zlib

import keras
from keras import activations, initializers, layers

from keras_attn.attend import Attend, Feed, build_by_call, check_layer
from keras_attn.attention import MultiHeadAttention
from keras_attn.checks import check_choice, check_greater, check_positive, check_rate
from keras_attn.deep_norm import scaled
from keras_attn.feed_forward import FeedForward
from keras_attn.normalization import NORMALIZATIONS
from keras_attn.residual import (
    NORM_PLACEMENTS,
    Residual,
    check_alpha,
)
from keras_attn.serialization import quantized_dtype, serialized

__all__ = ["Block"]


class Block(layers.Layer):
    """The arguments of a block, and the parts made from them."""

    # The parts that a caller may give in place of the block's own.
    PARTS = ("feed_forward",)

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
        layer_scale=None,
        stochastic_depth=0.0,
        parallel=False,
        alpha=None,
        beta=None,
        **kwargs,
    ):
        given = {name: kwargs.pop(name, None) for name in self.PARTS}
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = check_positive("num_heads", num_heads, optional=True)
        self.intermediate_dim = check_positive(
            "intermediate_dim", intermediate_dim, optional=True
        )
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
        if layer_scale is not None:
            check_greater("layer_scale", layer_scale, 0)
        self.layer_scale = layer_scale
        self.stochastic_depth = check_rate("stochastic_depth", stochastic_depth)
        self.parallel = parallel
        self.alpha = check_alpha(alpha, norm_placement)
        self.beta = self._check_beta(beta)
        if parallel and norm_placement == "deep":
            raise ValueError(
                "DeepNorm's constants hold for parts one after the other. Received: "
                f"parallel={parallel}, norm_placement='deep'"
            )
        self.given = tuple(name for name, layer in given.items() if layer is not None)
        for name, layer in given.items():
            setattr(self, name, check_layer(name, layer))
        self._check_sizes()

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
            "layer_scale": self.layer_scale,
            "stochastic_depth": self.stochastic_depth,
            "parallel": self.parallel,
            "alpha": self.alpha,
            "beta": self.beta,
            **{name: self._serialized_part(name) for name in self.PARTS},
            **quantized_dtype(self),
        }

    @classmethod
    def from_config(cls, config):
        parts = {
            name: keras.saving.deserialize_keras_object(config.get(name))
            for name in cls.PARTS
        }
        return super().from_config({**config, **parts})

    def add_attention(
        self, name, inputs_shape, memory_shape=None, mask_shape=None, is_causal=False
    ):
        """Makes the attention of this name, unless it was given, and builds it.

        Returns the layer that calls it.
        """
        layer = getattr(self, name)
        if layer is None:
            layer = self._make_attention(name)
            setattr(self, name, layer)
        is_own = isinstance(layer, MultiHeadAttention)
        attend = Attend(
            layer,
            is_own,
            is_causal,
            is_cross=memory_shape is not None,
            dtype=self.dtype_policy,
            name=f"call_{name}",
        )
        value_shape = inputs_shape if memory_shape is None else memory_shape
        if is_own and not layer.built:
            layer.build(inputs_shape, value_shape, attention_mask_shape=mask_shape)
        shapes = [inputs_shape, value_shape][: 1 if attend.value_name is None else 2]
        if name in self.given:
            build_by_call(layer, *shapes, dtype=self.compute_dtype)
        return attend

    def add_feed_forward(self, inputs_shape):
        """The same for the feed-forward."""
        if self.feed_forward is None:
            self.feed_forward = self._make_feed_forward("feed_forward")
            self.feed_forward.build(inputs_shape)
        else:
            build_by_call(self.feed_forward, inputs_shape, dtype=self.compute_dtype)
        return Feed(
            self.feed_forward,
            is_own=isinstance(self.feed_forward, FeedForward),
            dtype=self.dtype_policy,
            name="call_feed_forward",
        )

    def add_residual(self, name, inputs_shape):
        residual = Residual(
            norm_placement=self.norm_placement,
            normalization=self.normalization,
            epsilon=self.epsilon,
            dropout=self.dropout,
            seed=self._seed_of(name),
            layer_scale=self.layer_scale,
            stochastic_depth=self.stochastic_depth,
            alpha=self.alpha,
            dtype=self.dtype_policy,
            name=name,
        )
        residual.build(inputs_shape)
        return residual

    def _make_attention(self, name):
        if self.num_heads is None:
            raise ValueError(
                f"{self.name!r} needs `num_heads` to make its {name!r}, or the layer "
                f"itself. Received: num_heads=None, {name}=None"
            )
        make = MultiHeadAttention
        if self.beta is not None:
            make = functools.partial(_DeepAttention, self.beta)
        return make(
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

    def _make_feed_forward(self, name):
        initializer = self.kernel_initializer
        if self.beta is not None:
            initializer = scaled(initializer, self.beta)
        return FeedForward(
            self.intermediate_dim,
            activation=self.activation,
            use_bias=self.use_bias,
            kernel_initializer=initializer,
            bias_initializer=self.bias_initializer,
            dtype=self.dtype_policy,
            name=name,
        )

    def _seed_of(self, name):
        """Another seed for every part: with one for all they drop the same places."""
        if self.seed is None:
            return None
        return (self.seed + zlib.crc32(name.encode())) % 2**31

    def _serialized_part(self, name):
        return serialized(getattr(self, name) if name in self.given else None)

    def _check_beta(self, beta):
        if (beta is None) != (self.alpha is None):
            raise ValueError(
                "`alpha` and `beta` go together: see `deep_norm_constants`. Received: "
                f"alpha={self.alpha}, beta={beta}"
            )
        return None if beta is None else float(check_greater("beta", beta, 0))

    def _check_sizes(self):
        """The sizes of parts that the block makes are needed; of others, unheard."""
        attentions = [name for name in self.PARTS if name.endswith("attention")]
        own = [name for name in attentions if name not in self.given]
        # Whether a decoder has a cross-attention is known when it is built.
        if attentions[0] in own and self.num_heads is None:
            raise ValueError(
                f"`num_heads` is needed where no `{attentions[0]}` is given. "
                f"Received: num_heads=None, {attentions[0]}=None"
            )
        if not own and (self.num_heads, self.key_dim) != (None, None):
            raise ValueError(
                "The heads of an attention that is given are its own. Received: "
                f"num_heads={self.num_heads}, key_dim={self.key_dim} and "
                f"{', '.join(attentions)}"
            )
        if ("feed_forward" in self.given) != (self.intermediate_dim is None):
            raise ValueError(
                "A block needs either `intermediate_dim` or `feed_forward`, not both. "
                f"Received: intermediate_dim={self.intermediate_dim}, "
                f"feed_forward={self.feed_forward}"
            )


class _DeepAttention(MultiHeadAttention):
    """Attention whose value and output kernels start smaller by `beta` (DeepNorm)."""

    def __init__(self, beta, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.beta = beta

    def _initializer_of(self, name):
        initializer = super()._initializer_of(name)
        is_smaller = name in ("value", "attention_output")
        return scaled(initializer, self.beta) if is_smaller else initializer
