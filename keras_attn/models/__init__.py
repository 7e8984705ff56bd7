"""Functional models made of the layers of this library."""

from keras_attn.models.transformer import TRANSFORMER_SIZES, Transformer
from keras_attn.models.vision_transformer import (
    VISION_TRANSFORMER_SIZES,
    VisionTransformer,
)

__all__ = [
    "TRANSFORMER_SIZES",
    "Transformer",
    "VISION_TRANSFORMER_SIZES",
    "VisionTransformer",
]
