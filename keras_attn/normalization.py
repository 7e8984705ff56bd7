"""The normalizations that layers take by name."""

from keras import layers, ops

from keras_attn.checks import check_choice

__all__ = ["NORMALIZATIONS", "make_norm", "unit_length"]

NORMALIZATIONS = {
    "layer": layers.LayerNormalization,
    "rms": layers.RMSNormalization,
}


def make_norm(normalization, **kwargs):
    """The normalization layer that goes by this name: `"layer"` or `"rms"`."""
    check_choice("normalization", normalization, NORMALIZATIONS)
    norm = NORMALIZATIONS[normalization](**kwargs)
    norm.supports_masking = True  # Keras' RMSNormalization forgets to say so
    return norm


def unit_length(x, epsilon=1e-12):
    """`x` with every vector on its last axis of length 1, computed in float32."""
    wide = ops.cast(x, "float32")
    length = ops.sum(ops.square(wide), axis=-1, keepdims=True)
    return ops.cast(wide * ops.rsqrt(length + epsilon), x.dtype)
