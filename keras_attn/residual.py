"""The residual connection: one for every block, whatever its norm placement."""

import functools

import keras
from keras import layers, ops
from keras.saving import register_keras_serializable

from keras_attn.checks import check_choice, check_greater, check_rate
from keras_attn.layer_scale import LayerScale
from keras_attn.masks import CarryMask
from keras_attn.normalization import make_norm
from keras_attn.serialization import quantized_dtype, serialized
from keras_attn.stochastic_depth import StochasticDepth

__all__ = ["Residual"]

NORM_PLACEMENTS = ("post", "pre", "sandwich", "deep")


def check_alpha(alpha, norm_placement):
    """`alpha`, which DeepNorm needs and nothing else takes."""
    if (alpha is None) == (norm_placement == "deep"):
        raise ValueError(
            '`alpha` belongs to `norm_placement="deep"`, which needs it: see '
            f"`deep_norm_constants`. Received: alpha={alpha}, "
            f"norm_placement={norm_placement!r}"
        )
    return None if alpha is None else float(check_greater("alpha", alpha, 0))


@register_keras_serializable(package="keras_attn")
class Residual(layers.Layer):
    r"""Adds a branch to its input, and normalizes.

    $$\begin{aligned}
      \text{post:}\quad & y = \mathrm{Norm}(x + F(x)) \\
      \text{pre:}\quad & y = x + F(\mathrm{Norm}(x)) \\
      \text{sandwich:}\quad & y = x + \mathrm{Norm}_2(F(\mathrm{Norm}_1(x))) \\
      \text{deep:}\quad & y = \mathrm{Norm}(\alpha x + F(x))
      \end{aligned}$$

    "post" is the Transformer of 2017; "pre" what GPT-2, ViT and most since then do;
    "sandwich" CogView and Gemma 2; "deep" DeepNorm, for post-norm models of many
    layers. Right before the sum the branch passes dropout, layer scale and stochastic
    depth, in this order. The mask of the input leaves with the output.

    Args:
        layer: the branch $F$, any layer of one input that keeps its shape. `None` if
            the caller hands the branch to `call`, as the blocks of this library do.
        norm_placement: `"post"`, `"pre"`, `"sandwich"` or `"deep"`.
        normalization: `"layer"` or `"rms"`.
        epsilon: of the normalization.
        dropout: rate on the branch's output, in `[0, 1)`.
        seed: seed of dropout and stochastic depth.
        layer_scale: first value of the factors of a `LayerScale` on the branch; `None`
            for none.
        stochastic_depth: rate at which samples skip the branch, in `[0, 1)`.
        alpha: factor of the input in `"deep"`, see `deep_norm_constants`.

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

    References: [Xiong et al., 2020](https://arxiv.org/abs/2002.04745) compares post and
    pre; [Ding et al., 2021](https://arxiv.org/abs/2105.13290), sandwich;
    [Wang et al., 2022](https://arxiv.org/abs/2203.00555), deep.
    """

    def __init__(
        self,
        layer=None,
        norm_placement="post",
        normalization="layer",
        epsilon=1e-5,
        dropout=0.0,
        seed=None,
        layer_scale=None,
        stochastic_depth=0.0,
        alpha=None,
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
        self.layer_scale = layer_scale
        self.stochastic_depth = check_rate("stochastic_depth", stochastic_depth)
        self.alpha = check_alpha(alpha, norm_placement)
        norm = functools.partial(
            make_norm, normalization, epsilon=epsilon, dtype=self.dtype_policy
        )
        self.norm = norm(name="norm")
        self.output_norm = None
        if norm_placement == "sandwich":
            self.output_norm = norm(name="output_norm")
        self.carry_mask = CarryMask(dtype=self.dtype_policy, name="carry_mask")
        self.branch_dropout = layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="branch_dropout"
        )
        self.branch_scale = None
        if layer_scale is not None:
            check_greater("layer_scale", layer_scale, 0)
            self.branch_scale = LayerScale(
                layer_scale, dtype=self.dtype_policy, name="branch_scale"
            )
        self.branch_depth = None
        if stochastic_depth:
            self.branch_depth = StochasticDepth(
                stochastic_depth, seed, dtype=self.dtype_policy, name="branch_depth"
            )

    def build(self, inputs_shape):
        self.norm.build(inputs_shape)
        for part in (self.output_norm, self.branch_scale):
            if part is not None:
                part.build(inputs_shape)
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
            inputs = self.carry_mask(ops.copy(inputs), mask=mask)  # not on the caller's
        if branch is None and self.layer is None:
            raise ValueError(
                "Residual needs a branch: `Residual(layer)`, or `branch=` at call. "
                "Received: layer=None, branch=None"
            )
        if branch is None:
            branch = functools.partial(self.layer, training=training)
        if self.norm_placement == "pre":
            return inputs + self._drop(branch(self.norm(inputs)), training)
        if self.norm_placement == "sandwich":
            x = self.output_norm(branch(self.norm(inputs)))
            return inputs + self._drop(x, training)
        x = inputs if self.alpha is None else self.alpha * inputs
        return self.norm(x + self._drop(branch(inputs), training))

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "layer": serialized(self.layer),
            "norm_placement": self.norm_placement,
            "normalization": self.normalization,
            "epsilon": self.epsilon,
            "dropout": self.dropout,
            "seed": self.seed,
            "layer_scale": self.layer_scale,
            "stochastic_depth": self.stochastic_depth,
            "alpha": self.alpha,
            **quantized_dtype(self),
        }

    @classmethod
    def from_config(cls, config):
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return super().from_config({**config, "layer": layer})

    def _drop(self, x, training):
        x = self.branch_dropout(x, training=training)
        if self.branch_scale is not None:
            x = self.branch_scale(x)
        if self.branch_depth is not None:
            x = self.branch_depth(x, training=training)
        return x
