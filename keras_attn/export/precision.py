"""A model trained in half precision, as the float32 model that a device runs."""

import keras

_HALF = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


def as_float32(model):
    """`model` itself, or its copy in float32 where a layer computes in half precision.

    LiteRT has few kernels for half floats; the weights of a mixed policy are float32
    anyway, so the copy is the more exact of the two.

    Raises:
        ValueError: `model` was quantized by Keras.
    """
    config = keras.saving.serialize_keras_object(model)
    changed = _without_half(config)
    if changed == config:
        return model
    config = {k: v for k, v in changed.items() if k != "compile_config"}
    copy = keras.saving.deserialize_keras_object(config)
    copy.set_weights(model.get_weights())
    return copy


def _without_half(config):
    if isinstance(config, (list, tuple)):
        return type(config)(_without_half(item) for item in config)
    if not isinstance(config, dict):
        return config
    if config.get("class_name") == "QuantizedDTypePolicy":
        raise ValueError(
            "A model quantized by `model.quantize` cannot be exported. Export the "
            "float model, with `quantization=` for the file."
        )
    return {key: _policy(key, value) for key, value in config.items()}


def _policy(key, value):
    if key == "dtype" and isinstance(value, str):
        return "float32" if value in _HALF else value
    is_policy = isinstance(value, dict) and value.get("class_name") == "DTypePolicy"
    if is_policy and value["config"].get("name") in _HALF:
        return value | {"config": value["config"] | {"name": "float32"}}
    return _without_half(value)
