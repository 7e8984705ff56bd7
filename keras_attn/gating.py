"""The product of a gated linear unit."""

from keras import ops
from keras.backend import standardize_dtype

__all__ = ["gated"]

FLOAT16_MAX = 65504.0


def gated(gate, x):
    """`gate * x`; in float16 the largest finite number where that is exceeded.

    Two terms of a few hundred are ordinary and their product is beyond float16, whose
    infinity would become NaN in the next layer. Every other dtype has the room.
    """
    if standardize_dtype(x.dtype) != "float16":
        return ops.multiply(gate, x)
    product = ops.multiply(ops.cast(gate, "float32"), ops.cast(x, "float32"))
    return ops.cast(ops.clip(product, -FLOAT16_MAX, FLOAT16_MAX), "float16")
