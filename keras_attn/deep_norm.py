"""DeepNorm: the constants that let post-norm Transformers be a thousand layers deep."""

import keras
from keras import initializers
from keras.saving import register_keras_serializable

from keras_attn.checks import check_greater, check_positive
from keras_attn.serialization import fresh

__all__ = ["deep_norm_constants"]


def deep_norm_constants(num_encoder_layers=None, num_decoder_layers=None):
    r"""The factors $\alpha$ and $\beta$ of DeepNorm, by the depth of the model.

    $$\mathrm{DeepNorm}(x) = \mathrm{Norm}(\alpha x + F(x))$$

    with the kernels of the feed-forward and of attention's value and output smaller by
    $\beta$ at the start. For $N$ encoder and $M$ decoder layers:

    | model | encoder $\alpha$ | encoder $\beta$ | decoder $\alpha$ | decoder $\beta$ |
    | --- | --- | --- | --- | --- |
    | encoder alone | $(2N)^{1/4}$ | $(8N)^{-1/4}$ | | |
    | decoder alone | | | $(2M)^{1/4}$ | $(8M)^{-1/4}$ |
    | both | $0.81 (N^4 M)^{1/16}$ | $0.87 (N^4 M)^{-1/16}$ | $(3M)^{1/4}$ | $(12M)^{-1/4}$ |

    Args:
        num_encoder_layers: number of encoder blocks, `None` where there is no encoder.
        num_decoder_layers: number of decoder blocks, `None` where there is no decoder.

    Returns:
        A dict with an entry for `"encoder"` and `"decoder"`, whichever there is, each
        the arguments `{"alpha": ..., "beta": ...}` of a block.

    Raises:
        ValueError: neither is given.

    Example:
    >>> constants = deep_norm_constants(num_encoder_layers=8)
    >>> constants
    {'encoder': {'alpha': 2.0, 'beta': 0.3535533905932738}}
    >>> block = EncoderBlock(2, 64, norm_placement="deep", **constants["encoder"])

    Reference: [Wang et al., 2022](https://arxiv.org/abs/2203.00555), figure 2.
    """  # noqa: E501 (a table row)
    encoder = check_positive("num_encoder_layers", num_encoder_layers, optional=True)
    decoder = check_positive("num_decoder_layers", num_decoder_layers, optional=True)
    if encoder and decoder:
        depth = encoder**4 * decoder
        return {
            "encoder": _constants(0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16)),
            "decoder": _constants((3 * decoder) ** 0.25, (12 * decoder) ** -0.25),
        }
    if encoder or decoder:
        layers = encoder or decoder
        constants = _constants((2 * layers) ** 0.25, (8 * layers) ** -0.25)
        return {"encoder" if encoder else "decoder": constants}
    raise ValueError(
        "DeepNorm's constants depend on the depth of the model. Received: "
        "num_encoder_layers=None, num_decoder_layers=None"
    )


def scaled(initializer, gain):
    """An initializer whose values are those of `initializer` times `gain`."""
    gain = float(check_greater("gain", gain, 0))
    initializer = initializers.get(initializer)
    if isinstance(initializer, initializers.VarianceScaling):
        # Layers tell such an initializer which axes of a kernel are its inputs.
        return initializers.VarianceScaling(
            initializer.scale * gain**2,
            initializer.mode,
            initializer.distribution,
            seed=initializer.get_config()["seed"],
            input_axes=initializer.input_axes,
            output_axes=initializer.output_axes,
        )
    return Scaled(initializer, gain)


@register_keras_serializable(package="keras_attn")
class Scaled(initializers.Initializer):
    """The values of another initializer times `gain`."""

    def __init__(self, initializer, gain):
        self.initializer = fresh(initializer)
        self.gain = gain

    def __call__(self, shape, dtype=None):
        return self.initializer(shape, dtype=dtype) * self.gain

    def get_config(self):
        initializer = keras.saving.serialize_keras_object(self.initializer)
        return {"initializer": initializer, "gain": self.gain}

    @classmethod
    def from_config(cls, config):
        initializer = keras.saving.deserialize_keras_object(config["initializer"])
        return cls(initializer, config["gain"])


def _constants(alpha, beta):
    return {"alpha": alpha, "beta": beta}
