"""Transformer and ViT layers for Keras 3 on TensorFlow, JAX and torch."""

from keras_attn import cache, encodings, masks, models, windows
from keras_attn.attention import MultiHeadAttention
from keras_attn.conv_stem import ConvStem
from keras_attn.decoder import DecoderBlock
from keras_attn.deep_norm import deep_norm_constants
from keras_attn.dot_product import dot_product_attention
from keras_attn.embeddings import TokenEmbedding
from keras_attn.encoder import EncoderBlock
from keras_attn.feed_forward import FeedForward, GatedFeedForward
from keras_attn.layer_scale import LayerScale
from keras_attn.mixture_of_experts import MixtureOfExperts
from keras_attn.patch_dropout import (
    MaskTokens,
    PatchDropout,
    RandomMasking,
    restore_tokens,
)
from keras_attn.patch_kernel import resample_patch_kernel
from keras_attn.patches import PatchEmbedding, TubeletEmbedding
from keras_attn.pooling import AttentionPooling
from keras_attn.positions import (
    AlibiBias,
    LearnedPositionEmbedding,
    RelativePositionBias,
    RelativePositionBias2D,
    RotaryEmbedding,
    SinusoidalPositionEncoding,
    SinusoidalPositionEncoding2D,
)
from keras_attn.prefix_tokens import PrefixTokens
from keras_attn.residual import Residual
from keras_attn.stochastic_depth import StochasticDepth, stochastic_depth_rates
from keras_attn.training import (
    InverseSquareRootWarmup,
    MaskedAccuracy,
    MaskedSparseCategoricalCrossentropy,
)

__version__ = "0.1.0"

__all__ = [
    "AlibiBias",
    "AttentionPooling",
    "ConvStem",
    "DecoderBlock",
    "EncoderBlock",
    "FeedForward",
    "GatedFeedForward",
    "InverseSquareRootWarmup",
    "LayerScale",
    "LearnedPositionEmbedding",
    "MaskTokens",
    "MaskedAccuracy",
    "MaskedSparseCategoricalCrossentropy",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "PatchDropout",
    "PatchEmbedding",
    "PrefixTokens",
    "RandomMasking",
    "RelativePositionBias",
    "RelativePositionBias2D",
    "Residual",
    "RotaryEmbedding",
    "SinusoidalPositionEncoding",
    "SinusoidalPositionEncoding2D",
    "StochasticDepth",
    "TokenEmbedding",
    "TubeletEmbedding",
    "cache",
    "deep_norm_constants",
    "dot_product_attention",
    "encodings",
    "masks",
    "models",
    "resample_patch_kernel",
    "restore_tokens",
    "stochastic_depth_rates",
    "windows",
]
