"""Scaled dot-product attention, by several implementations of the same function."""

from keras_attn.dot_product.attend import IMPLEMENTATIONS, dot_product_attention

__all__ = ["IMPLEMENTATIONS", "dot_product_attention"]
