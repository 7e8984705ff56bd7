"""What the configs of composite layers have in common."""

import keras
from keras import initializers

__all__ = ["fresh", "quantized_dtype", "serialized"]


def fresh(initializer):
    """A copy of `initializer`: one instance used twice gives identical weights."""
    initializer = initializers.get(initializer)
    if not hasattr(initializer, "get_config"):
        return initializer
    return initializer.__class__.from_config(initializer.get_config())


def quantized_dtype(layer):
    """The `"dtype"` entry that lets a quantized composite layer be loaded again.

    Keras quantizes the sublayers and writes none of that into the config of the layer
    that holds them. Returns `{}` for a layer that is not quantized.
    """
    policy = layer.dtype_policy
    quantized = [
        sublayer
        for sublayer in layer._flatten_layers(include_self=False)
        if getattr(sublayer, "quantization_mode", None)
    ]
    if not quantized or isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return {}
    policies = {sublayer.path: sublayer.dtype_policy for sublayer in quantized}
    policy = keras.dtype_policies.DTypePolicyMap(policy.name, policies)
    return {"dtype": keras.dtype_policies.serialize(policy)}


def serialized(layer):
    """The config of a layer that another layer holds, or `None`."""
    config = keras.saving.serialize_keras_object(layer)
    if layer is not None:
        # Built by itself it would get other paths than inside its holder, and the
        # policies of quantized layers are kept by path.
        config.pop("build_config", None)
    return config
