"""The residual connection: one for every block, whatever its norm placement."""

import functools

import keras
from keras import layers
from keras.saving import register_keras_serializable

from keras_attn.checks import check_choice, check_greater, check_rate
from keras_attn.masks import CarryMask
from keras_attn.serialization import quantized_dtype

__all__ = ["Residual"]

NORMALIZATIONS = {
    "layer": layers.LayerNormalization,
    "rms": layers.RMSNormalization,
}
NORM_PLACEMENTS = ("post", "pre")


def make_norm(normalization, **kwargs):
    """The normalization layer that goes by this name: `"layer"` or `"rms"`."""
    check_choice("normalization", normalization, NORMALIZATIONS)
    norm = NORMALIZATIONS[normalization](**kwargs)
    norm.supports_masking = True  # Keras' RMSNormalization forgets to say so
    return norm


@register_keras_serializable(package="keras_attn")
class Residual(layers.Layer):
    r"""Adds a branch to its input, and normalizes.

    $$\text{post:}\; y = \mathrm{Norm}(x + \mathrm{Dropout}(F(x))) \qquad
      \text{pre:}\; y = x + \mathrm{Dropout}(F(\mathrm{Norm}(x)))$$

    "post" is the Transformer of 2017, "pre" what GPT-2, ViT and most since then do.
    The mask of the input leaves with the output.

    Args:
        layer: the branch $F$, any layer of one input that keeps its shape. `None` if
            the caller hands the branch to `call`, as the blocks of this library do.
        norm_placement: `"post"` or `"pre"`.
        normalization: `"layer"` or `"rms"`.
        epsilon: of the normalization.
        dropout: rate on the branch's output, in `[0, 1)`.
        seed: seed of the dropout.

    Call arguments:
        inputs: `(..., dim)`.
        branch: a function of the branch's input, in place of `layer`: for a branch
            that needs more than one argument.
        mask: `(batch, length)`, `True` at real tokens, for a branch that reads masks.

    Returns:
        The shape of `inputs`.

    Example:
    >>> x = keras.random.normal((2, 10, 64))
    >>> tuple(Residual(FeedForward(128), norm_placement="pre")(x).shape)
    (2, 10, 64)

    Reference: [Xiong et al., 2020](https://arxiv.org/abs/2002.04745) compares the two.
    """

    def __init__(
        self,
        layer=None,
        norm_placement="post",
        normalization="layer",
        epsilon=1e-5,
        dropout=0.0,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        if layer is not None and not isinstance(layer, layers.Layer):
            raise TypeError(
                "`layer` must be a Keras layer or `None`. "
                f"Received: layer={layer!r} (a function is a `branch` of the call)"
            )
        self.layer = layer
        self.norm_placement = check_choice(
            "norm_placement", norm_placement, NORM_PLACEMENTS
        )
        self.normalization = normalization
        self.epsilon = check_greater("epsilon", epsilon, 0)
        self.dropout = check_rate("dropout", dropout)
        self.seed = seed
        self.norm = make_norm(
            normalization, epsilon=epsilon, dtype=self.dtype_policy, name="norm"
        )
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")
        self.branch_dropout = layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="branch_dropout"
        )

    def build(self, inputs_shape):
        self.norm.build(inputs_shape)
        if self.layer is None:
            return
        if not self.layer.built:
            self.layer.build(inputs_shape)
        branch_shape = tuple(self.layer.compute_output_shape(inputs_shape))
        if branch_shape != tuple(inputs_shape):
            raise ValueError(
                "The branch of a residual connection must keep the shape of its input, "
                f"{tuple(inputs_shape)}. Received: {self.layer.name!r}, which gives "
                f"{branch_shape}"
            )

    def call(self, inputs, branch=None, mask=None, training=None):
        if mask is not None:  # the branch and the norm read it where it rides
            inputs = self.carry_mask(inputs, mask=mask)
        if branch is None and self.layer is None:
            raise ValueError(
                "Residual needs a branch: `Residual(layer)`, or `branch=` at call. "
                "Received: layer=None, branch=None"
            )
        if branch is None:
            branch = functools.partial(self.layer, training=training)
        if self.norm_placement == "pre":
            return inputs + self._drop(branch(self.norm(inputs)), training)
        return self.norm(inputs + self._drop(branch(inputs), training))

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        layer = keras.saving.serialize_keras_object(self.layer)
        if self.layer is not None:
            # Built by itself it would get other paths than inside this layer, and the
            # policies of quantized layers are kept by path.
            layer.pop("build_config", None)
        return {
            **super().get_config(),
            "layer": layer,
            "norm_placement": self.norm_placement,
            "normalization": self.normalization,
            "epsilon": self.epsilon,
            "dropout": self.dropout,
            "seed": self.seed,
            **quantized_dtype(self),
        }

    @classmethod
    def from_config(cls, config):
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return super().from_config({**config, "layer": layer})

    def _drop(self, x, training):
        return self.branch_dropout(x, training=training)
