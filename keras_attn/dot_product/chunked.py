"""Full attention without all scores at once: chunks of queries walk over the keys."""

import keras
from keras import ops

from keras_attn.dot_product.scoring import MASKED_SCORE, per_group
from keras_attn.masks import combine_masks, window_sides

__all__ = ["chunked_attention"]

CHUNK = 512
WALKS = 16  # each is written out: more would make a graph too large to compile


def chunked_attention(query, key, value, scoring):
    """The softmax and its sum of values, kept up to date chunk by chunk of keys.

    A chunk of queries walks over those keys that the causal rule and the window leave
    it. A training step keeps no scores: it walks a second time for the gradients.
    """
    queries, keys = query.shape[2], key.shape[2]
    size = max(CHUNK, -(-queries // WALKS))
    parts = []
    for start in range(0, queries, size):
        rows = range(start, min(start + size, queries))
        here = scoring.replace(
            mask=_rows_of(scoring.mask, rows, axis=2),
            bias=_rows_of(scoring.bias, rows, axis=2),
            query_positions=_rows_of(scoring.query_positions, rows, axis=-1),
        )
        parts.append(_walk(_rows_of(query, rows, axis=2), key, value, here, rows, keys))
    return ops.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def _walk(query, key, value, scoring, rows, length):
    """What these rows of queries read, `(batch, heads, rows, value_dim)`."""
    given = {
        "query": query,
        "key": key,
        "value": value,
        "bias": scoring.bias,
        "sinks": scoring.sinks,
    }
    names = [name for name, tensor in given.items() if tensor is not None]

    # What is to have a gradient must be an argument.
    def walk(*tensors):
        tensors = dict.fromkeys(given) | dict(zip(names, tensors, strict=True))
        bias, sinks = tensors.pop("bias"), tensors.pop("sinks")
        here = scoring.replace(bias=bias, sinks=sinks)
        return _online_softmax(**tensors, scoring=here, rows=rows, length=length)

    return keras.remat(walk)(*(given[name] for name in names))


def _online_softmax(query, key, value, scoring, rows, length):
    """Keeps of the keys so far the greatest score and, relative to it, the two sums."""
    chunk = min(CHUNK, length)
    batch, heads = ops.shape(query)[0], query.shape[1]
    first, last = _reach(scoring, rows, length)
    keys, values = _chunks(key, chunk, 2), _chunks(value, chunk, 2)
    mask, bias = scoring.mask, scoring.bias
    if mask is not None:
        mask = _chunks(ops.cast(_every_key(mask, length), "int32"), chunk, 3)
    if bias is not None:
        bias = _chunks(_every_key(bias, length), chunk, 3)
    positions = scoring.key_positions
    if scoring.position_bias is not None:
        positions = _chunks(positions, chunk, len(positions.shape) - 1)

    def step(index, carry):
        total, norm, top = carry
        terms = None if bias is None else ops.take(bias, index, axis=3)
        if scoring.position_bias is not None:
            axis = len(positions.shape) - 2
            terms = scoring.with_position(terms, ops.take(positions, index, axis=axis))
        scores = scoring.scores(query, ops.take(keys, index, axis=2), terms)
        start = index * chunk
        inside = start + ops.arange(0, chunk, dtype="int32") < length
        visible = combine_masks(
            None if mask is None else ops.cast(ops.take(mask, index, axis=3), "bool"),
            scoring.pattern(len(rows), chunk, rows.start - start),
            ops.expand_dims(inside, 0),  # the last chunk is filled up
        )
        scores = ops.where(visible, scores, MASKED_SCORE)
        new_top = ops.maximum(top, ops.max(scores, axis=-1, keepdims=True))
        weights = ops.exp(scores - new_top) * ops.cast(visible, "float32")
        fade = ops.exp(top - new_top)
        some = ops.take(values, index, axis=2)
        seen = ops.cast(per_group(ops.cast(weights, some.dtype), some), "float32")
        norm = norm * fade + ops.sum(weights, axis=-1, keepdims=True)
        return total * fade + seen, norm, new_top

    one = (batch, heads, len(rows), 1)
    total = ops.zeros((*one[:3], value.shape[3]), "float32")
    norm, top = ops.zeros(one, "float32"), ops.full(one, MASKED_SCORE, "float32")
    if scoring.sinks is not None:
        sinks = ops.reshape(ops.cast(scoring.sinks, "float32"), (1, heads, 1, 1))
        norm, top = ops.ones(one, "float32"), ops.broadcast_to(sinks, one)
    total, norm, _ = _loop(first // chunk, -(-last // chunk), step, (total, norm, top))
    # A row that saw nothing has a norm of 0, and a total of 0.
    norm = ops.where(norm > 0.0, norm, ops.ones_like(norm))
    return ops.cast(total / norm, value.dtype)


def _loop(first, last, step, carry):
    """`ops.fori_loop`; on TensorFlow of known length, or XLA has no gradient."""
    if keras.backend.backend() != "tensorflow":
        return ops.fori_loop(first, last, step, carry)
    _, *carry = ops.while_loop(
        lambda index, *carry: index < last,
        lambda index, *carry: (index + 1, *step(index, carry)),
        (first, *carry),
        maximum_iterations=max(last - first, 0),
    )
    return carry


def _reach(scoring, rows, length):
    """The keys that any of the rows may see, from the first to before the last."""
    first, last = 0, length
    if scoring.sliding_window is not None:
        left, right = window_sides(scoring.sliding_window)
        first, last = max(first, rows.start - left), min(last, rows.stop + right)
    if scoring.is_causal:
        last = min(last, rows.stop)
    return first, last


def _rows_of(x, rows, axis):
    """The part of an axis, unless `x` is `None` or the same for every row."""
    if x is None or x.shape[axis] == 1:
        return x
    axis %= len(x.shape)
    return x[(*(slice(None),) * axis, slice(rows.start, rows.stop))]


def _every_key(x, length):
    return ops.broadcast_to(x, (*ops.shape(x)[:3], length))


def _chunks(x, chunk, axis):
    """`(..., length, ...)` to `(..., chunks, chunk, ...)`, with zeros at the end."""
    widths = [(0, 0)] * len(x.shape)
    widths[axis] = (0, -x.shape[axis] % chunk)
    x = ops.pad(x, widths) if any(widths[axis]) else x
    shape = ops.shape(x)
    return ops.reshape(x, (*shape[:axis], -1, chunk, *shape[axis + 1 :]))
