"""Scaled dot-product attention: the one place where scores are made."""

from keras import ops
from keras.backend import is_float_dtype, standardize_dtype

from keras_attn.checks import broadcasts, check_choice
from keras_attn.dot_product.blocked import blocked_attention, span_of
from keras_attn.dot_product.chunked import chunked_attention
from keras_attn.dot_product.dense import dense_attention, has_kernel
from keras_attn.dot_product.scoring import Scoring
from keras_attn.masks import as_mask, combine_masks

__all__ = ["IMPLEMENTATIONS", "dot_product_attention"]

IMPLEMENTATIONS = ("dense", "blocked", "chunked")
LOWEST_BIAS = -1e29  # a bias from here on, -inf say, hides its key like a mask
MANY_SCORES = 2**24  # of a head: where walking over the keys is no slower


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
    sliding_window=None,
    sinks=None,
    position_bias=None,
    query_positions=None,
    key_positions=None,
    dropout=None,
    flash_attention=None,
    return_scores=False,
    implementation=None,
):
    r"""Every query reads the values, weighted by how well their keys match it.

    $$\mathrm{softmax}\left(\frac{Q K^T}{\sqrt{d}} + B\right) V$$

    The query is scaled before the product and the softmax is taken in float32, so half
    precision stays finite. A query that may see no key gives exactly 0, with finite
    gradients.

    Every implementation gives the same numbers. `"dense"` holds all scores at once: the
    backend's fused kernel where that gives these numbers (torch), else explicitly, as
    scores, dropout, soft-capping and sinks need. `"blocked"` computes a sliding window
    in time and memory in proportion to its width, for a mask and a bias, if any, that
    are the same for every query. `"chunked"` lets chunks of queries walk over the keys
    with a running softmax ([Rabe and Staats, 2021](https://arxiv.org/abs/2112.05682)),
    in memory in proportion to the length, in training too: there it walks a second time
    for the gradients. Both need known lengths.

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
        sliding_window: an int or a pair `(left, right)`, see
            `masks.sliding_window_mask`.
        sinks: `(heads,)`, a score that every row has beside those of its keys, with no
            value behind it: the weights then sum to less than 1 (gpt-oss;
            [Xiao et al., 2024](https://arxiv.org/abs/2309.17453)).
        position_bias: a function of the positions of queries and keys that gives a term
            on the scores, `(batch or 1, heads, query, key)`: it is asked for the part
            that is needed.
        query_positions: `(query,)` or `(batch, query)`, for `position_bias`.
        key_positions: `(key,)` or `(batch, key)`.
        dropout: a function applied to the attention weights, or `None`.
        flash_attention: `True` demands the backend's flash kernel (an error where it
            cannot run), `False` forbids it, `None` leaves the choice open.
        return_scores: also return the attention weights.
        implementation: `"dense"`, `"blocked"`, `"chunked"`, or `None`: by size.

    Returns:
        `(batch, heads, query, value_dim)`; with `return_scores` a pair with the weights
        `(batch, heads, query, key)`, before dropout.

    Raises:
        TypeError: a float mask or a boolean bias.
        ValueError: a rank other than 4, head counts that do not divide, or
            `flash_attention=True` or an `implementation` with what it cannot do.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.2.
    """
    _check_heads(query, key, value)
    mask = combine_masks(mask)
    while mask is not None and len(mask.shape) < 4:  # (batch, 1, query, key)
        mask = ops.expand_dims(mask, len(mask.shape) - 2)
    if bias is not None:
        bias = _as_bias(bias, query, key)
        # What is biased to -inf is hidden, and a row of nothing else is blind.
        mask = combine_masks(mask, bias > LOWEST_BIAS)
    scoring = Scoring(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        sinks=None if sinks is None else ops.convert_to_tensor(sinks),
        position_bias=position_bias,
        query_positions=query_positions,
        key_positions=key_positions,
        dropout=dropout,
        flash_attention=flash_attention,
    )
    _check_flash(scoring, return_scores)
    implementation = _implementation(implementation, query, key, scoring, return_scores)
    weights = None
    if implementation == "blocked":
        output = blocked_attention(query, key, value, scoring)
    elif implementation == "chunked":
        output = chunked_attention(query, key, value, scoring)
    else:
        output, weights = dense_attention(query, key, value, scoring, return_scores)
    if query_mask is not None:
        rows = as_mask(query_mask)
        rows = ops.expand_dims(ops.expand_dims(rows, 1), -1)  # (batch, 1, query, 1)
        output = ops.where(rows, output, ops.zeros_like(output))
        if return_scores:
            weights = ops.where(rows, weights, ops.zeros_like(weights))
    return (output, weights) if return_scores else output


def _implementation(wish, query, key, scoring, return_scores):
    """The wish if it can be had; without one, what suits the size."""
    queries, keys = query.shape[2], key.shape[2]
    if wish is not None:
        check_choice("implementation", wish, IMPLEMENTATIONS)
        against = _against(wish, queries, keys, scoring, return_scores)
        if against:
            raise ValueError(
                f"Attention cannot be {wish} where {' and '.join(against)}. Received: "
                f"implementation={wish!r}, query and key of shapes "
                f"{tuple(query.shape)} and {tuple(key.shape)}"
            )
        return wish
    can_be_blocked = not _against("blocked", queries, keys, scoring, return_scores)
    if can_be_blocked and 2 * span_of(scoring) <= queries:
        return "blocked"
    if not _against("chunked", queries, keys, scoring, return_scores):
        has_light_kernel = scoring.is_plain and has_kernel(scoring, query.dtype)
        if queries * keys >= MANY_SCORES and not has_light_kernel:
            return "chunked"
    return "dense"


def _against(implementation, queries, keys, scoring, return_scores):
    """Why an implementation cannot be had, in words."""
    if implementation == "dense":
        return []
    reasons = {
        "the scores are asked for": return_scores,
        "a length is unknown": None in (queries, keys),
        "a flash kernel is demanded": scoring.flash_attention,
    }
    if implementation == "blocked":
        reasons |= {
            "there is no sliding window": scoring.sliding_window is None,
            "queries and keys are not equally many": queries != keys,
            "the mask differs by query": _differs_by_query(scoring.mask),
            "the bias differs by query": _differs_by_query(scoring.bias),
        }
    else:
        reasons |= {"there is dropout": scoring.dropout is not None}
    return [reason for reason, holds in reasons.items() if holds]


def _differs_by_query(x):
    return x is not None and x.shape[2] != 1


def _check_flash(scoring, return_scores):
    if scoring.flash_attention and (return_scores or scoring.needs_scores):
        raise ValueError(
            "A flash kernel gives no scores and takes no dropout, no soft cap and no "
            f"sinks. Received: flash_attention=True, return_scores={return_scores}, "
            f"dropout={scoring.dropout}, logit_soft_cap={scoring.logit_soft_cap}, "
            f"sinks={scoring.sinks}"
        )


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
