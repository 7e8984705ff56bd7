"""Positional layers: what says where a token stands."""

from keras_attn.positions.alibi import AlibiBias
from keras_attn.positions.base import AttentionPosition, PositionBias
from keras_attn.positions.learned import LearnedPositionEmbedding
from keras_attn.positions.relative import RelativePositionBias
from keras_attn.positions.relative_2d import RelativePositionBias2D
from keras_attn.positions.rotary import RotaryEmbedding
from keras_attn.positions.sinusoidal import (
    SinusoidalPositionEncoding,
    SinusoidalPositionEncoding2D,
)

__all__ = [
    "AlibiBias",
    "AttentionPosition",
    "LearnedPositionEmbedding",
    "PositionBias",
    "RelativePositionBias",
    "RelativePositionBias2D",
    "RotaryEmbedding",
    "SinusoidalPositionEncoding",
    "SinusoidalPositionEncoding2D",
]
