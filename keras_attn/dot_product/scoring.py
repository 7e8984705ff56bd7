"""All that makes a score but the query and the key themselves."""

import dataclasses
from collections.abc import Callable
from typing import Any

from keras import ops

from keras_attn.masks import causal_mask, combine_masks, sliding_window_mask

__all__ = ["MASKED_SCORE", "Scoring", "per_group"]

MASKED_SCORE = -1e30  # softmax turns it into an exact 0 beside any visible score


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What `dot_product_attention` was asked for, checked; see there.

    Masks and biases have four axes, `(batch, heads, query, key)`, 1 where shared.
    """

    scale: float
    mask: Any = None
    bias: Any = None
    is_causal: bool = False
    sliding_window: Any = None
    logit_soft_cap: float | None = None
    sinks: Any = None
    position_bias: Callable | None = None
    query_positions: Any = None
    key_positions: Any = None
    dropout: Callable | None = None
    flash_attention: bool | None = None

    @property
    def needs_scores(self):
        """Whether only the formula as it stands can do it, not a fused kernel."""
        options = self.dropout, self.logit_soft_cap, self.sinks
        return any(option is not None for option in options)

    @property
    def is_plain(self):
        """Whether a fused kernel can do it without a mask of the size of the scores."""
        hidden = self.mask, self.bias, self.sliding_window, self.position_bias
        return not self.needs_scores and all(option is None for option in hidden)

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def scores(self, query, key, bias=None):
        """The scores before any mask, float32, `(batch, heads, query, key)`."""
        scores = per_group(query * self.scale, ops.swapaxes(key, -2, -1))
        scores = ops.cast(scores, "float32")
        if self.logit_soft_cap is not None:
            scores = ops.tanh(scores / self.logit_soft_cap) * self.logit_soft_cap
        return scores if bias is None else scores + ops.cast(bias, "float32")

    def with_position(self, bias, key_positions):
        """`bias`, or `None`, and the term for keys at these positions."""
        if self.position_bias is None:
            return bias
        term = self.position_bias(self.query_positions, key_positions)
        return term if bias is None else bias + term

    def pattern(self, query_length, key_length, offset=0):
        """What the causal rule and the window show, `(query, key)`, or `None`.

        The first query stands at the key `offset`.
        """
        causal = window = None
        if self.is_causal:
            causal = causal_mask(query_length, key_length, offset)
        if self.sliding_window is not None:
            window = sliding_window_mask(
                query_length, key_length, window=self.sliding_window, offset=offset
            )
        return combine_masks(causal, window)


def per_group(left, right):
    """`left @ right`, where `right` has `kv_heads` and `left` a multiple of them."""
    heads, kv_heads = left.shape[1], right.shape[1]
    if heads == kv_heads:
        return ops.matmul(left, right)
    rows, width = ops.shape(left)[2], left.shape[3]
    width = ops.shape(left)[3] if width is None else width
    batch = ops.shape(left)[0]  # which may be 0
    product = ops.matmul(
        ops.reshape(left, (batch, kv_heads, heads // kv_heads * rows, width)), right
    )  # (batch, kv_heads, groups * query, ...)
    return ops.reshape(product, (batch, heads, rows, ops.shape(right)[3]))
