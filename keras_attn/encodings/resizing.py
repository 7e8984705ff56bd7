"""Resizing a table of positions to another grid."""

from keras import ops

__all__ = ["interpolation_matrix"]


def interpolation_matrix(source, target, method):
    """Weights that resize an axis of `source` points to `target` points.

    torch's rule for images without antialias: half-pixel centres, edges clamped,
    `method="bicubic"` with a = -0.75. The same size gives the identity exactly.

    Returns:
        `(target, source)`, float32; each row sums to 1.
    """
    last = float(source - 1)
    scale = source / ops.cast(ops.convert_to_tensor(target), "float32")
    centres = (ops.arange(0, target, dtype="float32") + 0.5) * scale - 0.5
    if method == "bilinear":
        centres = ops.clip(centres, 0.0, last)
        taps = (0, 1)
        kernel = _linear_kernel
    else:
        taps = (-1, 0, 1, 2)
        kernel = _cubic_kernel
    start = ops.floor(centres)
    points = ops.expand_dims(ops.arange(0, source, dtype="float32"), 0)
    matrix = 0.0
    for tap in taps:
        neighbour = start + tap
        weight = kernel(ops.abs(centres - neighbour))
        neighbour = ops.clip(neighbour, 0.0, last)
        hit = ops.cast(ops.equal(ops.expand_dims(neighbour, 1), points), "float32")
        matrix = matrix + hit * ops.expand_dims(weight, 1)
    return matrix


def _linear_kernel(distance):
    return ops.relu(1.0 - distance)


def _cubic_kernel(distance, a=-0.75):
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = ((a * distance - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a
    return ops.where(
        distance <= 1.0, near, ops.where(distance < 2.0, far, ops.zeros_like(far))
    )
