"""A sliding window, block by block: the cost is length times window."""

import math

from keras import ops
from keras.backend import standardize_dtype

from keras_attn.dot_product.dense import dense_attention
from keras_attn.masks import sliding_window_mask, window_sides

__all__ = ["blocked_attention", "span_of"]

SMALLEST_BLOCK = 64  # below it the products are too small to be fast


def blocked_attention(query, key, value, scoring):
    """Every block of queries attends to the blocks of keys that its window touches.

    The blocks join the batch, and the dense path does the rest. Queries and keys are
    equally many.
    """
    batch, length = ops.shape(query)[0], query.shape[2]
    block, before, after = _blocks(scoring)
    count = math.ceil(length / block)
    rest = count * block - length  # what the last block lacks

    def queries(x, axis):
        """`(batch, ..., length, ...)` to `(batch * count, ..., block, ...)`."""
        return _join_batch(_pad(x, axis, 0, rest), axis, block)

    def keys(x, axis):
        """The same, every block between its neighbours: `(..., span, ...)`."""
        x = _pad(x, axis, before * block, rest + after * block)
        parts = [
            _join_batch(_part(x, axis, first * block, count * block), axis, block)
            for first in range(before + 1 + after)
        ]
        return ops.concatenate(parts, axis=axis)

    visible = ops.ones((batch, 1, 1, length), "bool")
    if scoring.mask is not None:
        visible = ops.logical_and(visible, scoring.mask)
    pattern = sliding_window_mask(
        block, span_of(scoring), window=_sides(scoring), offset=before * block
    )
    mask = ops.logical_and(keys(visible, 3), pattern)
    changes = {"mask": mask, "is_causal": False, "sliding_window": None}
    if scoring.bias is not None:
        bias = ops.broadcast_to(scoring.bias, (batch, *scoring.bias.shape[1:3], length))
        changes["bias"] = keys(bias, 3)
    if scoring.position_bias is not None:
        stands = [
            ops.broadcast_to(positions, (batch, length))
            for positions in (scoring.query_positions, scoring.key_positions)
        ]
        changes["query_positions"] = queries(stands[0], 1)
        changes["key_positions"] = keys(stands[1], 1)
    output, _ = dense_attention(
        queries(query, 2), keys(key, 2), keys(value, 2), scoring.replace(**changes)
    )  # (batch * count, heads, block, value_dim)
    heads, dim = output.shape[1], output.shape[3]
    output = ops.reshape(output, (-1, count, heads, block, dim))
    output = ops.reshape(
        ops.transpose(output, (0, 2, 1, 3, 4)), (-1, heads, count * block, dim)
    )
    return output[:, :, :length]


def span_of(scoring):
    """How many keys a block of queries reads."""
    block, before, after = _blocks(scoring)
    return (before + 1 + after) * block


def _blocks(scoring):
    """The size of a block, and how many a window touches before and after its own."""
    left, right = _sides(scoring)
    block = max(left, right, SMALLEST_BLOCK)
    return block, int(left > 0), int(right > 0)


def _sides(scoring):
    left, right = window_sides(scoring.sliding_window)
    return left, 0 if scoring.is_causal else right


def _part(x, axis, start, size):
    return x[(*(slice(None),) * axis, slice(start, start + size))]


def _pad(x, axis, before, after):
    """Zeros, or `False`, on both ends of an axis."""
    widths = [(0, 0)] * len(x.shape)
    widths[axis] = (before, after)
    if standardize_dtype(x.dtype) == "bool":
        return ops.cast(ops.pad(ops.cast(x, "int32"), widths), "bool")
    return ops.pad(x, widths)


def _join_batch(x, axis, block):
    """The blocks of an axis to the batch, row by row."""
    shape = ops.shape(x)
    split = (*shape[:axis], -1, block, *shape[axis + 1 :])
    x = ops.moveaxis(ops.reshape(x, split), axis, 1)  # (batch, blocks, ...)
    return ops.reshape(x, (-1, *shape[1:axis], block, *shape[axis + 1 :]))
