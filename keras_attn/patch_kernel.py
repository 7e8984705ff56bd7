"""The kernel of a patch embedding at another patch size (FlexiViT)."""

import numpy as np
from keras import ops

from keras_attn.checks import check_choice, check_sides
from keras_attn.encodings import interpolation_matrix

__all__ = ["resample_patch_kernel"]

INTERPOLATIONS = ("bilinear", "bicubic")


def resample_patch_kernel(kernel, new_size, interpolation="bilinear"):
    r"""Resizes the kernel of a patch embedding so that resized patches embed the same.

    With $B$ the matrix that resizes a patch, the new kernel is the pseudo-inverse

    $$\hat{w} = (B^T)^{+} w, \qquad
      \langle \hat{w}, B x \rangle = \langle w, x \rangle$$

    for every patch $x$ where $B$ enlarges; where it makes patches smaller, the least
    squares best. (A kernel resized like an image gives vectors of another length.)

    Args:
        kernel: an array `(rows, cols, channels, dim)`, the `projection/kernel` of a
            `PatchEmbedding`, or `(frames, rows, cols, channels, dim)` of a
            `TubeletEmbedding`.
        new_size: the new patch size, an int or one for each side.
        interpolation: `"bilinear"` (the paper) or `"bicubic"`, how images are resized;
            half-pixel centres, no antialias.

    Returns:
        A numpy array, `(new_rows, new_cols, channels, dim)`, in the dtype of `kernel`.
        A side that keeps its size keeps its numbers.

    Example:
    >>> kernel = np.random.default_rng(0).normal(size=(16, 16, 3, 64))
    >>> resample_patch_kernel(kernel, (8, 12)).shape
    (8, 12, 3, 64)

    Reference: [Beyer et al., 2023](https://arxiv.org/abs/2212.08013), section 3.4.
    """
    kernel = ops.convert_to_numpy(kernel)
    if kernel.ndim not in (4, 5):
        raise ValueError(
            "`kernel` must be `(rows, cols, channels, dim)` or `(frames, rows, cols, "
            f"channels, dim)`. Received: kernel of shape {kernel.shape}"
        )
    check_choice("interpolation", interpolation, INTERPOLATIONS)
    resampled = kernel
    for axis, new in enumerate(check_sides("new_size", new_size, kernel.ndim - 2)):
        old = kernel.shape[axis]
        if new == old:
            continue
        resize = interpolation_matrix(old, new, interpolation)
        resize = ops.convert_to_numpy(resize).astype("float64")
        # B is a product of one matrix a side, and so is its pseudo-inverse.
        inverse = np.linalg.pinv(resize.T)  # (new, old)
        resampled = np.moveaxis(np.tensordot(inverse, resampled, (1, axis)), 0, axis)
    return resampled.astype(kernel.dtype)
