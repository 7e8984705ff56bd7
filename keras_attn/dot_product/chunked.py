"""Full attention without all scores at once: a walk over the keys."""

import math

from keras import ops

from keras_attn.dot_product.scoring import MASKED_SCORE, per_group
from keras_attn.masks import window_sides

__all__ = ["chunked_attention"]

CHUNK = 512


def chunked_attention(query, key, value, scoring):
    """The softmax and its sum of values, kept up to date chunk by chunk of keys.

    What is kept of the keys so far is the greatest score, the sum of the weights
    relative to it, and the weighted sum of the values.
    """
    batch, length = ops.shape(query)[0], key.shape[2]
    heads, rows = query.shape[1], query.shape[2]
    chunk = min(CHUNK, length)
    steps = math.ceil(length / chunk)
    rest = steps * chunk - length

    def chunks(x, axis):
        """`(steps, ..., chunk, ...)`: the walk's steps first."""
        widths = [(0, 0)] * len(x.shape)
        widths[axis] = (0, rest)
        x, shape = ops.pad(x, widths), ops.shape(x)
        x = ops.reshape(x, (*shape[:axis], steps, chunk, *shape[axis + 1 :]))
        return ops.moveaxis(x, axis, 0)

    keys, values = chunks(key, 2), chunks(value, 2)
    mask = bias = key_positions = None
    if scoring.mask is not None:
        mask = ops.broadcast_to(scoring.mask, (*ops.shape(scoring.mask)[:3], length))
        mask = chunks(ops.cast(mask, "int32"), 3)
    if scoring.bias is not None:
        bias = ops.broadcast_to(scoring.bias, (*ops.shape(scoring.bias)[:3], length))
        bias = chunks(bias, 3)
    if scoring.position_bias is not None:
        stands = scoring.key_positions
        key_positions = chunks(stands, len(stands.shape) - 1)
    place = ops.expand_dims(ops.arange(0, rows, dtype="int32"), 1)  # (query, 1)

    def step(index, carry):
        total, norm, top = carry
        places = None
        if key_positions is not None:
            places = ops.take(key_positions, index, axis=0)
        terms = None if bias is None else ops.take(bias, index, axis=0)
        terms = scoring.with_position(terms, places)
        scores = scoring.scores(query, ops.take(keys, index, axis=0), terms)
        number = index * chunk + ops.arange(0, chunk, dtype="int32")  # (chunk,)
        visible = _visible(scoring, place, number, length)
        if mask is not None:
            part = ops.cast(ops.take(mask, index, axis=0), "bool")
            visible = ops.logical_and(part, visible)
        scores = ops.where(visible, scores, MASKED_SCORE)
        new_top = ops.maximum(top, ops.max(scores, axis=-1, keepdims=True))
        weights = ops.exp(scores - new_top) * ops.cast(visible, "float32")
        fade = ops.exp(top - new_top)
        value = ops.take(values, index, axis=0)
        seen = ops.cast(per_group(ops.cast(weights, value.dtype), value), "float32")
        norm = norm * fade + ops.sum(weights, axis=-1, keepdims=True)
        return total * fade + seen, norm, new_top

    one = (batch, heads, rows, 1)
    total = ops.zeros((batch, heads, rows, value.shape[3]), "float32")
    norm, top = ops.zeros(one, "float32"), ops.full(one, MASKED_SCORE, "float32")
    if scoring.sinks is not None:
        sinks = ops.reshape(ops.cast(scoring.sinks, "float32"), (1, heads, 1, 1))
        norm, top = ops.ones(one, "float32"), ops.broadcast_to(sinks, one)
    total, norm, _ = ops.fori_loop(0, steps, step, (total, norm, top))
    # A row that saw nothing has a norm of 0, and a total of 0.
    norm = ops.where(norm > 0.0, norm, ops.ones_like(norm))
    return ops.cast(total / norm, value.dtype)


def _visible(scoring, query, key, length):
    """What the pattern shows of a chunk, and not the padding: `(query, chunk)`."""
    visible = ops.logical_and(key < length, query >= 0)
    if scoring.is_causal:
        visible = ops.logical_and(visible, key <= query)
    if scoring.sliding_window is not None:
        left, right = window_sides(scoring.sliding_window)
        distance = query - key
        near = ops.logical_and(distance <= left, distance >= -right)
        visible = ops.logical_and(visible, near)
    return visible
