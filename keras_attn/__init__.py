"""Transformer and ViT layers for Keras 3 on TensorFlow, JAX and torch."""

from keras_attn import encodings, masks, models
from keras_attn.attention import MultiHeadAttention
from keras_attn.decoder import DecoderBlock
from keras_attn.deep_norm import deep_norm_constants
from keras_attn.dot_product import dot_product_attention
from keras_attn.embeddings import TokenEmbedding
from keras_attn.encoder import EncoderBlock
from keras_attn.feed_forward import FeedForward, GatedFeedForward
from keras_attn.layer_scale import LayerScale
from keras_attn.mixture_of_experts import MixtureOfExperts
from keras_attn.patches import PatchEmbedding, PrefixTokens
from keras_attn.positions import (
    LearnedPositionEmbedding,
    SinusoidalPositionEncoding,
    SinusoidalPositionEncoding2D,
)
from keras_attn.residual import Residual
from keras_attn.stochastic_depth import StochasticDepth, stochastic_depth_rates
from keras_attn.training import (
    InverseSquareRootWarmup,
    MaskedAccuracy,
    MaskedSparseCategoricalCrossentropy,
)

__version__ = "0.1.0"

__all__ = [
    "DecoderBlock",
    "EncoderBlock",
    "FeedForward",
    "GatedFeedForward",
    "InverseSquareRootWarmup",
    "LayerScale",
    "LearnedPositionEmbedding",
    "MaskedAccuracy",
    "MaskedSparseCategoricalCrossentropy",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "PatchEmbedding",
    "PrefixTokens",
    "Residual",
    "SinusoidalPositionEncoding",
    "SinusoidalPositionEncoding2D",
    "StochasticDepth",
    "TokenEmbedding",
    "deep_norm_constants",
    "dot_product_attention",
    "encodings",
    "masks",
    "models",
    "stochastic_depth_rates",
]
