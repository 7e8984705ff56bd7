"""All scores at once: the backend's kernel, or the formula as it stands."""

import keras
from keras import ops
from keras.backend import standardize_dtype

from keras_attn.dot_product.scoring import MASKED_SCORE, per_group
from keras_attn.masks import combine_masks

__all__ = ["dense_attention", "has_kernel"]


def dense_attention(query, key, value, scoring, return_scores=False):
    """The output and, with `return_scores`, the weights before dropout, else `None`."""
    query_length, key_length = ops.shape(query)[2], ops.shape(key)[2]
    mask, is_causal = scoring.mask, scoring.is_causal
    bias = scoring.with_position(scoring.bias, scoring.key_positions)
    fused = has_kernel(scoring, query.dtype) and not return_scores
    # Among keys as many as queries a query itself is always in its window.
    may_be_blind = mask is not None or (
        scoring.sliding_window is not None
        and not (isinstance(query_length, int) and query_length == key_length)
    )
    # Of patterns a kernel knows the causal one alone.
    if not (fused and scoring.is_plain):
        pattern = scoring.pattern(query_length, key_length)
        mask, is_causal = combine_masks(mask, pattern), False

    if fused:
        weights = None
        output = _fused(query, key, value, mask, bias, is_causal, scoring)
    else:
        weights = ops.cast(_weights(query, key, mask, bias, scoring), value.dtype)
        dropped = weights if scoring.dropout is None else scoring.dropout(weights)
        output = per_group(dropped, value)
    if may_be_blind:
        sees = ops.any(mask, axis=-1, keepdims=True)  # (..., query, 1)
        output = ops.where(sees, output, ops.zeros_like(output))
        if return_scores:
            weights = ops.where(sees, weights, ops.zeros_like(weights))
    return output, weights


def has_kernel(scoring, dtype):
    """Whether a fused kernel is taken: on torch it gives these numbers.

    But for a bias in half precision, in which the kernel would add it.
    """
    if scoring.needs_scores or scoring.flash_attention:
        return not scoring.needs_scores
    has_bias = scoring.bias is not None or scoring.position_bias is not None
    is_exact = not has_bias or standardize_dtype(dtype) == "float32"
    return is_exact and keras.backend.backend() == "torch"


def _weights(query, key, mask, bias, scoring):
    """The softmax of the scores, float32, `(batch, heads, query, key)`."""
    scores = scoring.scores(query, key, bias)
    if mask is not None:
        scores = ops.where(mask, scores, MASKED_SCORE)
    if scoring.sinks is not None:
        return _softmax_beside(scores, scoring.sinks)
    if scores.shape[-1] == 1:
        return ops.exp(scores - scores)  # 1; Keras warns of a softmax over one key
    return ops.softmax(scores, axis=-1)


def _softmax_beside(scores, sinks):
    """The softmax over the scores of the keys and one more a head."""
    sinks = ops.reshape(ops.cast(sinks, "float32"), (1, -1, 1, 1))
    sinks = ops.broadcast_to(sinks, (*ops.shape(scores)[:3], 1))
    weights = ops.softmax(ops.concatenate([scores, sinks], axis=-1), axis=-1)
    return weights[..., :-1]


def _fused(query, key, value, mask, bias, is_causal, scoring):
    """The backend's kernel; it takes a mask or a bias, so both become one bias."""
    if bias is not None:
        masked = MASKED_SCORE
        if standardize_dtype(query.dtype) == "float16":  # whose lowest is -65504
            bias, masked = ops.maximum(bias, -3e4), -6e4
        if mask is not None:
            bias = ops.where(mask, bias, masked)
        mask, bias = None, ops.cast(bias, query.dtype)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = ops.repeat(key, groups, axis=1), ops.repeat(value, groups, axis=1)
    query, key, value = (ops.swapaxes(x, 1, 2) for x in (query, key, value))
    output = ops.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scoring.scale,
        is_causal=is_causal,
        flash_attention=scoring.flash_attention,
    )
    return ops.swapaxes(output, 1, 2)
