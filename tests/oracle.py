"""The papers' formulas in plain numpy float64, written from the papers with loops.

Nothing here looks at the code of the library. A weight is found by its path inside
the layer, `"query/kernel"`; `weights_of` reads them all.
"""

import math

import numpy as np


def weights_of(layer):
    """Every weight in float64, by its path in the layer: `"attention/query/bias"`."""
    found = {}
    for variable in layer.weights:
        path = variable.path.removeprefix(f"{layer.path}/")
        found[path] = variable.numpy().astype("float64")
    return found


def inside(weights, name):
    """The weights below `name`."""
    return {
        path.removeprefix(f"{name}/"): value
        for path, value in weights.items()
        if path.startswith(f"{name}/")
    }


# --- Attention -----------------------------------------------------------------------


def softmax(x):
    """Of a vector; -inf is a masked entry, and a vector of nothing else gives 0."""
    if np.all(np.isneginf(x)):
        return np.zeros_like(x)
    e = np.exp(x - x.max())
    return e / e.sum()


def attention(
    query,
    key,
    value,
    mask=None,
    bias=None,
    is_causal=False,
    scale=None,
    soft_cap=None,
    window=None,
):
    """Softmax(QK^T * scale + bias) V, one query at a time.

    query (batch, heads, query, head_dim), key (batch, kv_heads, key, head_dim), value
    (batch, kv_heads, key, value_dim). Returns the output and the weights.
    """
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    full = (batch, heads, queries, keys)
    if mask is not None and np.ndim(mask) == 3:
        mask = np.asarray(mask)[:, None]
    mask = np.broadcast_to(True if mask is None else mask, full)
    bias = np.broadcast_to(0.0 if bias is None else bias, full)
    output = np.zeros((batch, heads, queries, value.shape[-1]))
    weights = np.zeros(full)
    for b, h, i in np.ndindex(batch, heads, queries):
        group = h // (heads // kv_heads)
        scores = np.full(keys, -np.inf)
        for j in range(keys):
            seen = mask[b, h, i, j] and not (is_causal and j > i)
            if window is not None:
                left, right = (window - 1,) * 2 if isinstance(window, int) else window
                seen = seen and i - left <= j <= i + right
            if seen:
                score = query[b, h, i] @ key[b, group, j] * scale
                if soft_cap is not None:
                    score = soft_cap * math.tanh(score / soft_cap)
                scores[j] = score + bias[b, h, i, j]
        weights[b, h, i] = softmax(scores)
        output[b, h, i] = weights[b, h, i] @ value[b, group]
    return output, weights


def multi_head_attention(
    weights, query, value=None, key=None, attention_axes=None, mask=None, **options
):
    """A whole layer: project, attend, gate, project back.

    query (batch, ..., width). `mask` broadcasts to (batch and other axes..., heads,
    query axes..., key axes...). Returns output and weights, as Keras lays them out.
    """
    value = query if value is None else value
    key = value if key is None else key
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    rank = query.ndim
    if attention_axes is None:
        attention_axes = tuple(range(1, rank - 1))
    run = tuple(axis % rank for axis in attention_axes)
    order = [sorted(run).index(axis) for axis in run]
    others = tuple(axis for axis in range(rank - 1) if axis not in run)
    heads = weights["query/kernel"].shape[1]
    out_shape = weights["attention_output/kernel"].shape[2:]
    other_sizes = [query.shape[axis] for axis in others]
    query_sizes = [query.shape[axis] for axis in run]
    key_sizes = [key.shape[axis] for axis in run]
    full = (*other_sizes, heads, *query_sizes, *key_sizes)
    mask = np.broadcast_to(True if mask is None else mask, full)
    output = np.zeros((*query.shape[:-1], *out_shape))
    scores = np.zeros(full)

    def rows(x, where):
        """The positions that attend to each other, `(length, width)`."""
        index = [slice(None)] * (x.ndim - 1)
        for axis, at in zip(others, where, strict=True):
            index[axis] = at
        x = x[tuple(index)].transpose(*order, len(order))
        return x.reshape(-1, x.shape[-1]), tuple(index)

    def project(name, x):
        """`(length, width)` to `(heads, length, size)`."""
        kernel = weights[f"{name}/kernel"]
        bias = weights.get(f"{name}/bias", np.zeros(kernel.shape[1:]))
        return np.stack([x @ kernel[:, h] + bias[h] for h in range(kernel.shape[1])])

    for where in np.ndindex(*other_sizes):
        q, index = rows(query, where)
        k, v = rows(key, where)[0], rows(value, where)[0]
        seen = mask[where].reshape(heads, len(q), len(k))
        attended, shares = attention(
            project("query", q)[None],
            project("key", k)[None],
            project("value", v)[None],
            mask=seen[None],
            **options,
        )
        attended = attended[0]  # (heads, query, value_dim)
        if "gate/kernel" in weights:
            attended = attended / (1 + np.exp(-project("gate", q)))
        result = np.zeros((len(q), *out_shape))
        for i in range(len(q)):
            for h in range(heads):
                result[i] += np.tensordot(
                    attended[h, i], weights["attention_output/kernel"][h], 1
                )
            result[i] += weights.get("attention_output/bias", 0.0)
        result = result.reshape(*query_sizes, -1)
        result = result.transpose(*np.argsort(order), len(order))
        output[index] = result.reshape(*result.shape[:-1], *out_shape)
        scores[where] = shares[0].reshape(heads, *query_sizes, *key_sizes)
    return output, scores


# --- The parts of a block ------------------------------------------------------------


def dense(weights, x):
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def layer_norm(weights, x, epsilon):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * weights["gamma"] + weights["beta"]


def rms_norm(weights, x, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weights["scale"]


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "tanh": np.tanh,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def feed_forward(weights, x, activation="relu"):
    x = dense(inside(weights, "intermediate_dense"), np.asarray(x, "float64"))
    return dense(inside(weights, "output_dense"), ACTIVATIONS[activation](x))


def gated_feed_forward(weights, x, activation="silu"):
    """(f(x W_g) * x W_1) W_2, one feature of the intermediate at a time."""
    x = np.asarray(x, "float64")
    gate = ACTIVATIONS[activation](dense(inside(weights, "gate_dense"), x))
    line = dense(inside(weights, "intermediate_dense"), x)
    output = np.zeros((*x.shape[:-1], weights["output_dense/kernel"].shape[1]))
    for i in range(line.shape[-1]):
        product = gate[..., i] * line[..., i]
        output += product[..., None] * weights["output_dense/kernel"][i]
    return output + weights.get("output_dense/bias", 0.0)


def mixture_of_experts(
    weights, x, mask=None, top_k=2, capacity_factor=None, activation="relu"
):
    """Token by token, in order; x (batch, token, dim), mask (batch, token).

    Returns the output, how many tokens each expert got of each sample, and the
    unweighted losses: of balance and of the router's log-sum-exp.
    """
    x = np.asarray(x, "float64")
    batch, tokens, _ = x.shape
    mask = np.ones((batch, tokens), bool) if mask is None else mask
    num_experts = weights["router/kernel"].shape[1]
    output = np.zeros_like(x)
    counts = np.zeros((batch, num_experts), int)
    asked = np.zeros(num_experts)
    mean = np.zeros(num_experts)
    z = 0.0

    def expert(index, token):
        own = {
            path: weight[index, 0] if path.endswith("bias") else weight[index]
            for path, weight in weights.items()
            if "_dense/" in path
        }
        layer = gated_feed_forward if "gate_dense/kernel" in own else feed_forward
        return layer(own, token, activation)

    for b in range(batch):
        room = math.inf
        if capacity_factor is not None:
            share = capacity_factor * top_k * mask[b].sum() / num_experts
            room = math.ceil(round(share, 9))
        for t in range(tokens):
            if not mask[b, t]:
                continue
            logits = x[b, t] @ weights["router/kernel"]
            chances = softmax(logits)
            best = sorted(range(num_experts), key=lambda i: -chances[i])[:top_k]
            total = sum(chances[i] for i in best) if top_k > 1 else 1.0
            mean += chances
            z += math.log(np.exp(logits).sum()) ** 2
            for i in best:
                asked[i] += 1
                if counts[b, i] < room:
                    counts[b, i] += 1
                    output[b, t] += chances[i] / total * expert(i, x[b, t])
    real = mask.sum()
    balance = num_experts * (asked / (real * top_k)) @ (mean / real)
    return output, counts, balance, z / real


def residual(
    weights,
    x,
    branch,
    placement="post",
    normalization="layer",
    epsilon=1e-5,
    alpha=None,
):
    norm = {"layer": layer_norm, "rms": rms_norm}[normalization]
    norm_weights = inside(weights, "norm")
    scale = weights.get("branch_scale/gamma", 1.0)
    if placement == "post":
        return norm(norm_weights, x + scale * branch(x), epsilon)
    if placement == "deep":
        return norm(norm_weights, alpha * x + scale * branch(x), epsilon)
    y = branch(norm(norm_weights, x, epsilon))
    if placement == "sandwich":
        y = norm(inside(weights, "output_norm"), y, epsilon)
    return x + scale * y


def encoder_block(
    weights,
    x,
    mask=None,
    activation="relu",
    attention=None,
    feed=None,
    parallel=False,
    **norm,
):
    """O1 = Norm(I + Attention(I)), O2 = Norm(O1 + FFN(O1)); mask (batch, length).

    In parallel O = Norm(I + Attention(I) + FFN(I)). `feed` replaces the feed-forward.
    """
    mask = padding(mask, mask)

    def attend(x):
        return multi_head_attention(
            inside(weights, "attention"), x, mask=mask, **attention or {}
        )[0]

    def feed_on(x):
        inner = inside(weights, "feed_forward")
        return feed(inner, x) if feed else feed_forward(inner, x, activation)

    x = np.asarray(x, "float64")
    if parallel:
        return residual(
            inside(weights, "residual"), x, lambda x: attend(x) + feed_on(x), **norm
        )
    x = residual(inside(weights, "attention_residual"), x, attend, **norm)
    return residual(inside(weights, "feed_forward_residual"), x, feed_on, **norm)


def decoder_block(
    weights,
    x,
    memory=None,
    mask=None,
    memory_mask=None,
    activation="relu",
    feed=None,
    parallel=False,
    **norm,
):
    """Causal self-attention, attention to the memory, feed-forward; residual all."""

    def attend_to_past(x):
        return multi_head_attention(
            inside(weights, "self_attention"),
            x,
            mask=padding(mask, mask),
            is_causal=True,
        )[0]

    def attend_to_memory(x):
        return multi_head_attention(
            inside(weights, "cross_attention"),
            x,
            memory,
            mask=padding(mask, memory_mask),
        )[0]

    def feed_on(x):
        inner = inside(weights, "feed_forward")
        return feed(inner, x) if feed else feed_forward(inner, x, activation)

    x = np.asarray(x, "float64")
    if parallel:
        return residual(
            inside(weights, "residual"),
            x,
            lambda x: attend_to_past(x) + feed_on(x),
            **norm,
        )
    x = residual(inside(weights, "self_attention_residual"), x, attend_to_past, **norm)
    if memory is not None:
        x = residual(
            inside(weights, "cross_attention_residual"), x, attend_to_memory, **norm
        )
    return residual(inside(weights, "feed_forward_residual"), x, feed_on, **norm)


def padding(query_mask, key_mask):
    """(batch, query) and (batch, key) as one (batch, 1, query, key) mask."""
    query = True if query_mask is None else np.asarray(query_mask)[:, None, :, None]
    key = True if key_mask is None else np.asarray(key_mask)[:, None, None, :]
    return np.logical_and(query, key)


# --- Positions -----------------------------------------------------------------------


def sinusoids(positions, dim, max_wavelength=10_000, layout="interleaved"):
    """(len(positions), dim), entry by entry."""
    table = np.zeros((len(positions), dim))
    pairs = -(-dim // 2)
    for row, position in enumerate(positions):
        for i in range(pairs):
            if layout == "interleaved":
                angle = position / max_wavelength ** (2 * i / dim)
                sine, cosine = 2 * i, 2 * i + 1
            else:
                angle = position * max_wavelength ** (-i / max(pairs - 1, 1))
                sine, cosine = i, pairs + i
            table[row, sine] = math.sin(angle)
            if cosine < dim:
                table[row, cosine] = math.cos(angle)
    return table


def sinusoids_2d(rows, cols, dim, max_wavelength=10_000, layout="interleaved"):
    """(rows, cols, dim): the row's encoding, then the column's."""
    table = np.zeros((rows, cols, dim))
    for r, c in np.ndindex(rows, cols):
        half = dim // 2
        table[r, c, :half] = sinusoids([r], half, max_wavelength, layout)[0]
        table[r, c, half:] = sinusoids([c], half, max_wavelength, layout)[0]
    return table


def token_positions(mask):
    """How many real tokens stand before each token."""
    positions = np.zeros(np.shape(mask), int)
    for b, i in np.ndindex(*np.shape(mask)):
        positions[b, i] = sum(bool(m) for m in mask[b][:i])
    return positions


def resize(table, rows, cols, method="bicubic"):
    """An image (rows, cols, dim) to another size, by torch's rule, without antialias.

    Output pixel `i` reads the input at `(i + 0.5) * scale - 0.5`; a point outside is
    the edge's. Cubic convolution with a = -0.75 (Keys, 1981).
    """
    table = np.asarray(table, "float64")
    for axis, size in ((0, rows), (1, cols)):
        source = table.shape[axis]
        table = np.moveaxis(table, axis, 0)
        lines = []
        for i in range(size):
            at = (i + 0.5) * source / size - 0.5
            if method == "bilinear":
                at = max(at, 0.0)
                taps = {0: 1 - (at - math.floor(at)), 1: at - math.floor(at)}
            else:
                taps = {k: _keys(at - math.floor(at) - k) for k in (-1, 0, 1, 2)}
            lines.append(
                sum(
                    weight * table[min(max(math.floor(at) + k, 0), source - 1)]
                    for k, weight in taps.items()
                )
            )
        table = np.moveaxis(np.stack(lines), 0, axis)
    return table


def _keys(x, a=-0.75):
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    if x < 2:
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return 0.0


# --- Images --------------------------------------------------------------------------


def patch_embedding(weights, images, patch, strides, grid, before=(0, 0)):
    """Each patch times the kernel; pixels outside the image (`"same"`) are 0.

    images (batch, height, width, channels). `grid` is how many patches there are in
    rows and columns, `before` how many rows and columns of zeros come first.
    """
    images = np.asarray(images, "float64")
    kernel = weights["projection/kernel"]
    bias = weights.get("projection/bias", np.zeros(kernel.shape[-1]))
    output = np.zeros((len(images), *grid, kernel.shape[-1]))
    for b, r, c in np.ndindex(len(images), *grid):
        output[b, r, c] = bias
        for y, x in np.ndindex(*patch):
            row = r * strides[0] + y - before[0]
            col = c * strides[1] + x - before[1]
            if 0 <= row < images.shape[1] and 0 <= col < images.shape[2]:
                output[b, r, c] += images[b, row, col] @ kernel[y, x]
    return output
