"""Scaled dot-product attention: the one place where scores are made."""

import keras
from keras import ops
from keras.backend import is_float_dtype, standardize_dtype

from keras_attn.checks import broadcasts
from keras_attn.masks import as_mask, causal_mask, combine_masks

__all__ = ["dot_product_attention"]

MASKED_SCORE = -1e30  # softmax turns it into an exact 0 beside any visible score
LOWEST_BIAS = -1e29  # a bias from here on, -inf say, hides its key like a mask


def dot_product_attention(
    query,
    key,
    value,
    *,
    mask=None,
    query_mask=None,
    bias=None,
    is_causal=False,
    scale=None,
    logit_soft_cap=None,
    sinks=None,
    dropout=None,
    flash_attention=None,
    return_scores=False,
):
    r"""Every query reads the values, weighted by how well their keys match it.

    $$\mathrm{softmax}\left(\frac{Q K^T}{\sqrt{d}} + B\right) V$$

    The query is scaled before the product and the softmax is taken in float32, so half
    precision stays finite. A query that may see no key gives exactly 0, with finite
    gradients. Where the backend's fused kernel gives these same numbers (torch) it is
    used; scores, dropout, soft-capping and sinks take the explicit path.

    Glossary of shapes: `batch`, `heads`, `query` and `key` (lengths), `head_dim`. With
    fewer key/value heads than query heads (`heads = groups * kv_heads`), query head `h`
    reads key/value head `h // groups`.

    Args:
        query: `(batch, heads, query, head_dim)`.
        key: `(batch, kv_heads, key, head_dim)`.
        value: `(batch, kv_heads, key, value_dim)`.
        mask: boolean, `True` where a key may be seen; `(query, key)`,
            `(batch, query, key)` or `(batch, heads, query, key)`.
        query_mask: boolean, `(batch, query)`; a query that is `False` gives 0, like one
            that may see no key, without a mask of the size of the scores.
        bias: float, added to the scaled scores; broadcasts, from the right, to
            `(batch, heads, query, key)`. -inf hides a key, as a mask does.
        is_causal: query `i` sees the keys `0 .. i`.
        scale: factor on the scores. Defaults to `head_dim**-0.5`.
        logit_soft_cap: `c` bounds the scores to `(-c, c)` by `c * tanh(scores / c)`,
            before bias and mask (Gemma 2).
        sinks: `(heads,)`, a score that every row has beside those of its keys, with no
            value behind it: the weights then sum to less than 1 (gpt-oss;
            [Xiao et al., 2024](https://arxiv.org/abs/2309.17453)).
        dropout: a function applied to the attention weights, or `None`.
        flash_attention: `True` demands the backend's flash kernel (an error where it
            cannot run), `False` forbids it, `None` leaves the choice open.
        return_scores: also return the attention weights.

    Returns:
        `(batch, heads, query, value_dim)`; with `return_scores` a pair with the weights
        `(batch, heads, query, key)`, before dropout.

    Raises:
        TypeError: a float mask or a boolean bias.
        ValueError: a rank other than 4, head counts that do not divide, or
            `flash_attention=True` with what only the explicit path can do.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.2.
    """
    _check_heads(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    mask = combine_masks(mask)
    if mask is not None and len(mask.shape) == 3:
        mask = ops.expand_dims(mask, 1)  # (batch, 1, query, key)
    if bias is not None:
        bias = _as_bias(bias, query, key)
        # What is biased to -inf is hidden, and a row of nothing else is blind.
        mask = combine_masks(mask, bias > LOWEST_BIAS)
    explicit = return_scores or any(
        option is not None for option in (dropout, logit_soft_cap, sinks)
    )
    if flash_attention and explicit:
        raise ValueError(
            "A flash kernel gives no scores and takes no dropout, no soft cap and no "
            f"sinks. Received: flash_attention=True, return_scores={return_scores}, "
            f"dropout={dropout}, logit_soft_cap={logit_soft_cap}, sinks={sinks}"
        )
    fused = not explicit and (flash_attention or keras.backend.backend() == "torch")
    has_blind_rows = mask is not None  # a causal mask alone always shows a query itself
    if is_causal and not (fused and mask is None and bias is None):
        lengths = ops.shape(query)[2], ops.shape(key)[2]
        mask, is_causal = combine_masks(mask, causal_mask(*lengths)), False

    if fused:
        output = _fused(
            query, key, value, mask, bias, is_causal, scale, flash_attention
        )
    else:
        weights = _weights(query, key, mask, bias, scale, logit_soft_cap, sinks)
        weights = ops.cast(weights, value.dtype)
        output = _per_group(weights if dropout is None else dropout(weights), value)

    hidden = (mask if has_blind_rows else None), query_mask
    output = _hide_blind_rows(output, *hidden)
    return (output, _hide_blind_rows(weights, *hidden)) if return_scores else output


def _weights(query, key, mask, bias, scale, logit_soft_cap, sinks):
    """The softmax of the scores, float32, `(batch, heads, query, key)`."""
    scores = _per_group(query * scale, ops.swapaxes(key, -2, -1))
    scores = ops.cast(scores, "float32")
    if logit_soft_cap is not None:
        scores = ops.tanh(scores / logit_soft_cap) * logit_soft_cap
    if bias is not None:
        scores = scores + ops.cast(bias, "float32")
    if mask is not None:
        scores = ops.where(mask, scores, MASKED_SCORE)
    if sinks is not None:
        return _softmax_beside(scores, sinks)
    if scores.shape[-1] == 1:
        return ops.exp(scores - scores)  # 1; Keras warns of a softmax over one key
    return ops.softmax(scores, axis=-1)


def _softmax_beside(scores, sinks):
    """The softmax over the scores of the keys and one more a head."""
    sinks = ops.reshape(ops.cast(sinks, "float32"), (1, -1, 1, 1))
    sinks = ops.broadcast_to(sinks, (*ops.shape(scores)[:3], 1))
    weights = ops.softmax(ops.concatenate([scores, sinks], axis=-1), axis=-1)
    return weights[..., :-1]


def _per_group(left, right):
    """`left @ right`, where `right` has `kv_heads` and `left` a multiple of them."""
    heads, kv_heads = left.shape[1], right.shape[1]
    if heads == kv_heads:
        return ops.matmul(left, right)
    rows, width = ops.shape(left)[2], left.shape[3]
    width = ops.shape(left)[3] if width is None else width
    product = ops.matmul(
        ops.reshape(left, (-1, kv_heads, heads // kv_heads * rows, width)), right
    )  # (batch, kv_heads, groups * query, ...)
    return ops.reshape(product, (-1, heads, rows, ops.shape(right)[3]))


def _fused(query, key, value, mask, bias, is_causal, scale, flash_attention):
    """The backend's kernel; it takes a mask or a bias, so both become one bias."""
    if bias is not None:
        # The lowest float16 is -65504: a bias of that kind must not become -inf.
        masked = -3e4 if standardize_dtype(query.dtype) == "float16" else MASKED_SCORE
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
        scale=scale,
        is_causal=is_causal,
        flash_attention=flash_attention,
    )
    return ops.swapaxes(output, 1, 2)


def _hide_blind_rows(x, mask, query_mask):
    """0 in every row `(batch, heads, query, :)` that may see no key."""
    if mask is not None:
        x = ops.where(ops.any(mask, axis=-1, keepdims=True), x, ops.zeros_like(x))
    if query_mask is not None:
        rows = ops.expand_dims(ops.expand_dims(as_mask(query_mask), 1), -1)
        x = ops.where(rows, x, ops.zeros_like(x))  # (batch, 1, query, 1)
    return x


def _as_bias(bias, query, key):
    """`bias` on four axes; refused where it does not broadcast to the scores."""
    bias = ops.convert_to_tensor(bias)
    dtype = standardize_dtype(bias.dtype)
    if not is_float_dtype(dtype):
        raise TypeError(
            "`bias` is added to the scores and must be float. Received: "
            f"dtype={dtype}. Pass a boolean mask as `mask=`."
        )
    shape = tuple(bias.shape)
    scores = (*query.shape[:3], key.shape[2])
    if not 2 <= len(shape) <= 4 or not broadcasts(shape, scores[-len(shape) :]):
        raise ValueError(
            "`bias` must broadcast to the scores, `(batch, heads, query, key)`="
            f"{scores}, from the right. Received: bias of shape {shape}"
        )
    while len(bias.shape) < 4:
        bias = ops.expand_dims(bias, 0)
    return bias


def _check_heads(query, key, value):
    shapes = [tuple(x.shape) for x in (query, key, value)]
    received = f"Received: query, key, value shapes {shapes}"
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(
            "`query`, `key` and `value` must be `(batch, heads, length, dim)`. "
            + received
        )
    heads, kv_heads, value_heads = (shape[1] for shape in shapes)
    if kv_heads != value_heads or heads % kv_heads:
        raise ValueError(
            "The heads of `query` must be a multiple of those of `key` and `value`. "
            + received
        )
