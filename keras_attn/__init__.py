"""Transformer and ViT layers for Keras 3 on TensorFlow, JAX and torch."""

from keras_attn import cache, encodings, masks, models
from keras_attn.attention import MultiHeadAttention
from keras_attn.decoder import DecoderBlock
from keras_attn.dot_product import dot_product_attention
from keras_attn.embeddings import TokenEmbedding
from keras_attn.encoder import EncoderBlock
from keras_attn.feed_forward import FeedForward
from keras_attn.patches import PatchEmbedding, PrefixTokens
from keras_attn.positions import (
    AlibiBias,
    LearnedPositionEmbedding,
    RelativePositionBias,
    RotaryEmbedding,
    SinusoidalPositionEncoding,
    SinusoidalPositionEncoding2D,
)
from keras_attn.residual import Residual
from keras_attn.training import (
    InverseSquareRootWarmup,
    MaskedAccuracy,
    MaskedSparseCategoricalCrossentropy,
)

__version__ = "0.1.0"

__all__ = [
    "AlibiBias",
    "DecoderBlock",
    "EncoderBlock",
    "FeedForward",
    "InverseSquareRootWarmup",
    "LearnedPositionEmbedding",
    "MaskedAccuracy",
    "MaskedSparseCategoricalCrossentropy",
    "MultiHeadAttention",
    "PatchEmbedding",
    "PrefixTokens",
    "RelativePositionBias",
    "Residual",
    "RotaryEmbedding",
    "SinusoidalPositionEncoding",
    "SinusoidalPositionEncoding2D",
    "TokenEmbedding",
    "cache",
    "dot_product_attention",
    "encodings",
    "masks",
    "models",
]
