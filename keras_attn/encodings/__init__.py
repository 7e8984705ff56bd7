"""Position encodings as pure functions, computed in float32 whatever the policy."""

from keras_attn.encodings.distances import alibi_slopes, relative_position_buckets
from keras_attn.encodings.resizing import interpolation_matrix, resize_grid
from keras_attn.encodings.rotary import rotary_angles, rotary_frequencies, rotate
from keras_attn.encodings.sinusoidal import (
    sinusoidal_encoding,
    sinusoidal_encoding_2d,
)

__all__ = [
    "alibi_slopes",
    "interpolation_matrix",
    "relative_position_buckets",
    "resize_grid",
    "rotary_angles",
    "rotary_frequencies",
    "rotate",
    "sinusoidal_encoding",
    "sinusoidal_encoding_2d",
]
