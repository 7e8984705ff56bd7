"""Resizing a table of positions to another grid."""

from keras import ops

__all__ = ["interpolation_matrix", "resize_grid"]


def interpolation_matrix(source, target, method):
    """Weights that resize an axis of `source` points to `target` points.

    torch's rule for images without antialias: half-pixel centres, edges clamped,
    `method="bicubic"` with a = -0.75. The same size gives the identity exactly.

    Returns:
        `(target, source)`, float32; each row sums to 1.
    """
    points = ops.expand_dims(ops.arange(0, source, dtype="int32"), 0)
    matrix = 0.0
    for neighbour, weight in _interpolation_taps(source, target, method):
        hit = ops.cast(ops.equal(ops.expand_dims(neighbour, 1), points), "float32")
        matrix = matrix + hit * ops.expand_dims(weight, 1)
    return matrix


def resize_grid(table, rows, cols, method):
    """A grid of vectors at another size, by the rule of `interpolation_matrix`.

    Neighbours are gathered and weighted, never multiplied as matrices: a size equal to
    the old gives the same bits, also where the size is a tensor and on a device whose
    matrix products round.

    Args:
        table: `(table_rows, table_cols, dim)`.
        rows: number of rows, an int or a scalar tensor.
        cols: number of columns.
        method: `"bicubic"` or `"bilinear"`.

    Returns:
        `(rows, cols, dim)`, in the dtype of `table`; computed in float32.
    """
    sizes = tuple(table.shape[:2])
    if isinstance(rows, int) and isinstance(cols, int) and (rows, cols) == sizes:
        return table
    resized = ops.cast(table, "float32")
    for axis, target in enumerate((rows, cols)):
        resized = sum(
            ops.take(resized, neighbour, axis=axis)
            * ops.reshape(weight, (-1, 1, 1) if axis == 0 else (1, -1, 1))
            for neighbour, weight in _interpolation_taps(sizes[axis], target, method)
        )
    return ops.cast(resized, table.dtype)


def _interpolation_taps(source, target, method):
    """For each tap of the kernel: `(target,)` neighbours, int32, and their weights."""
    last = float(source - 1)
    scale = source / ops.cast(ops.convert_to_tensor(target), "float32")
    centres = (ops.arange(0, target, dtype="float32") + 0.5) * scale - 0.5
    if method == "bilinear":
        centres = ops.clip(centres, 0.0, last)
        taps, kernel = (0, 1), _linear_kernel
    else:
        taps, kernel = (-1, 0, 1, 2), _cubic_kernel
    start = ops.floor(centres)
    for tap in taps:
        weight = kernel(ops.abs(centres - (start + tap)))
        yield ops.cast(ops.clip(start + tap, 0.0, last), "int32"), weight


def _linear_kernel(distance):
    return ops.relu(1.0 - distance)


def _cubic_kernel(distance, a=-0.75):
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = ((a * distance - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a
    return ops.where(
        distance <= 1.0, near, ops.where(distance < 2.0, far, ops.zeros_like(far))
    )
