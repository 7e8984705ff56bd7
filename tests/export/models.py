"""The models that the export tests send out, small and with primes for sizes."""

import keras
import sample_layers
from keras import layers

import keras_attn


def text_encoder():
    """One int input of any length, padding by `mask_zero`, two named outputs."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = keras_attn.TokenEmbedding(53, 12, mask_zero=True)(tokens)
    x = keras_attn.SinusoidalPositionEncoding()(x)
    x = keras_attn.EncoderBlock(num_heads=3, intermediate_dim=24)(x)
    states = layers.Dense(12, activation=sample_layers.squared_relu)(x)
    pooled = layers.GlobalAveragePooling1D()(sample_layers.Scaled()(states))
    return keras.Model(tokens, {"states": states, "pooled": pooled}, name="text")


def encoder_decoder():
    """Two int inputs of different vocabularies and lengths."""
    return keras_attn.models.Transformer(
        source_vocabulary_size=31,
        target_vocabulary_size=17,
        size=None,
        num_layers=1,
        dim=12,
        num_heads=3,
        intermediate_dim=24,
        dropout=0.1,
    )


def image_classifier():
    """A fixed, oblong image size; large enough for int8 weights to pay."""
    return keras_attn.models.VisionTransformer(
        num_classes=5,
        image_size=(14, 21),
        size=None,
        patch_size=7,
        num_layers=1,
        dim=64,
        num_heads=2,
        intermediate_dim=256,
    )


def without_builtin():
    """`Cholesky`, two layers deep."""
    inputs = keras.Input((6, 4), name="x")
    outputs = sample_layers.Outer(name="outer")(layers.Dense(4)(inputs))
    return keras.Model(inputs, outputs)
