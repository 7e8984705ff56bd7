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


def softmax(x, sink=-np.inf):
    """Of a vector; -inf is a masked entry, and a vector of nothing else gives 0.

    `sink` is one more score, of no entry.
    """
    if np.all(np.isneginf(x)):
        return np.zeros_like(x)
    top = max(x.max(), sink)
    e = np.exp(x - top)
    return e / (e.sum() + np.exp(sink - top))


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
    sinks=None,
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
        sink = -np.inf if sinks is None else sinks[h]
        weights[b, h, i] = softmax(scores, sink)
        output[b, h, i] = weights[b, h, i] @ value[b, group]
    return output, weights


def multi_head_attention(
    weights,
    query,
    value=None,
    key=None,
    attention_axes=None,
    mask=None,
    bias=None,
    positions=None,
    key_positions=None,
    rotary=None,
    position_bias=None,
    **options,
):
    """A whole layer: project, normalize, turn, attend, gate, project back.

    query (batch, ..., width). `mask` and `bias` broadcast to (batch and other axes...,
    heads, query axes..., key axes...). `rotary` holds arguments of `rotary()`;
    `position_bias` is a function of the positions of a query and a key that gives a
    number a head. Norms, sinks and gate are there if their weights are. Returns output
    and weights, as Keras lays them out.
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
    bias = np.broadcast_to(0.0 if bias is None else bias, full)
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
        terms = bias[where].reshape(heads, len(q), len(k)).copy()
        heads_of = {"query": project("query", q), "key": project("key", k)}
        stands = {
            "query": np.arange(len(q)) if positions is None else positions[where[0]],
            "key": np.arange(len(k)),
        }
        if key_positions is not None:
            stands["key"] = key_positions[where[0]]
        elif positions is not None and len(positions[where[0]]) == len(k):
            stands["key"] = positions[where[0]]
        scale = options.get("scale")
        for name in heads_of:
            norm = inside(weights, f"{name}_norm")
            if "scale" in norm:
                heads_of[name] = rms_norm(norm, heads_of[name], 1e-6)
            if "gamma" in norm:
                heads_of[name] = layer_norm(norm, heads_of[name], 1e-6)
            if "logit_scale" in weights:
                length = np.linalg.norm(heads_of[name], axis=-1, keepdims=True)
                heads_of[name] = heads_of[name] / length
                scale = 1.0
            if rotary is not None:
                heads_of[name] = np.stack(
                    [
                        [
                            turned(x, at, **rotary)
                            for x, at in zip(head, stands[name], strict=True)
                        ]
                        for head in heads_of[name]
                    ]
                )
        if "logit_scale" in weights:
            heads_of["query"] *= weights["logit_scale"][:, None, None]
        if position_bias is not None:
            for i, j in np.ndindex(len(q), len(k)):
                terms[:, i, j] += position_bias(stands["query"][i], stands["key"][j])
        attended, shares = attention(
            heads_of["query"][None],
            heads_of["key"][None],
            project("value", v)[None],
            mask=seen[None],
            bias=terms[None],
            sinks=weights.get("sinks"),
            **{**options, "scale": scale},
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


def frequency(pair, dim, base=10_000, scaling=None):
    """The angle by which pair `pair` of `dim` features turns a position.

    Llama 3 (Grattafiori et al., 2024, as its released code has it) and YaRN (Peng et
    al., 2023, sections 3.1 and 3.2; the ramp over pairs as in the authors' code).
    """
    theta = base ** (-2 * pair / dim)
    if scaling is None:
        return theta
    kind, factor = scaling["rope_type"], scaling["factor"]
    if kind == "linear":
        return theta / factor
    if kind == "ntk":
        if pair == 0:
            return 1.0
        return (base * factor ** (dim / (dim - 2))) ** (-2 * pair / dim)
    length = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wavelength = 2 * math.pi / theta
        if wavelength < length / high:
            return theta
        if wavelength > length / low:
            return theta / factor
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * theta / factor + smooth * theta
    assert kind == "yarn"
    first, last = (
        dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (32, 1)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
    ramp = min(max((pair - first) / max(last - first, 1e-3), 0), 1)
    return theta / factor * ramp + theta * (1 - ramp)


def turned(
    x, position, base=10_000, layout="halves", rotary_dim=None, scaling=None, grid=None
):
    """A head's vector, rotated as its position says: every pair a complex number.

    `position` is a number, or with `grid` a row and a column.
    """
    width = rotary_dim or len(x)
    if grid is not None:
        half = width // 2
        settings = dict(base=base, layout=layout, scaling=scaling)
        return np.concatenate(
            [
                turned(x[:half], position[0], **settings),
                turned(x[half:width], position[1], **settings),
                x[width:],
            ]
        )
    y = np.array(x, "float64")
    factor = 1.0
    if scaling is not None and scaling["rope_type"] == "yarn":
        factor = 0.1 * math.log(scaling["factor"]) + 1
    for pair in range(width // 2):
        a, b = pair, pair + width // 2
        if layout == "interleaved":
            a, b = 2 * pair, 2 * pair + 1
        angle = position * frequency(pair, width, base, scaling)
        number = (
            factor * complex(x[a], x[b]) * complex(math.cos(angle), math.sin(angle))
        )
        y[a], y[b] = number.real, number.imag
    return y


def alibi(num_heads):
    """-m |i - j|: m from 2^(-8/n), by its own powers; n the next power of two below,

    then every second slope of the one above (Press et al., 2022, appendix A.3)."""
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    slopes = np.array(slopes[:num_heads])
    return lambda query, key: -slopes * abs(query - key)


def t5_bias(table, max_distance, bidirectional):
    """`table` (buckets, heads); Raffel et al., 2020, as their released code has it."""

    def bias(query, key):
        buckets, first, distance = len(table), 0, query - key
        if bidirectional:
            buckets //= 2
            first = buckets if distance < 0 else 0
            distance = abs(distance)
        distance = max(distance, 0)
        exact = buckets // 2
        if distance >= exact:
            share = math.log(distance / exact) / math.log(max_distance / exact)
            distance = min(exact + int(share * (buckets - exact) + 1e-9), buckets - 1)
        return table[first + distance]

    return bias


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


def patch_embedding(weights, images, patch, strides, grid, before=None):
    """Each patch times the kernel; pixels outside the image (`"same"`) are 0.

    images (batch, height, width, channels), or videos with frames in front of the
    height. `grid` is how many patches there are on each side, `before` how many rows
    and columns of zeros come first.
    """
    images = np.asarray(images, "float64")
    kernel = weights["projection/kernel"]
    bias = weights.get("projection/bias", np.zeros(kernel.shape[-1]))
    before = before or (0,) * len(grid)
    output = np.zeros((len(images), *grid, kernel.shape[-1]))
    for b, *cell in np.ndindex(len(images), *grid):
        output[b, *cell] = bias
        for offset in np.ndindex(*patch):
            at = [
                c * stride + o - zeros
                for c, stride, o, zeros in zip(
                    cell, strides, offset, before, strict=True
                )
            ]
            sides = images.shape[1:-1]
            if all(0 <= i < side for i, side in zip(at, sides, strict=True)):
                output[b, *cell] += images[b, *at] @ kernel[offset]
    return output


def conv_stem(weights, images, strides, normalization, epsilon=1e-5):
    """3x3 convolutions inside a border of zeros, each normalized, then ReLU."""
    x = np.asarray(images, "float64")
    for index, stride in enumerate(strides):
        kernel = {"projection/kernel": weights[f"conv_{index}/kernel"]}
        grid = [(side + 2 - 3) // stride + 1 for side in x.shape[1:3]]
        x = patch_embedding(kernel, x, (3, 3), (stride, stride), grid, (1, 1))
        norm = inside(weights, f"norm_{index}")
        if normalization == "layer":
            x = layer_norm(norm, x, epsilon)
        else:
            mean, variance = norm["moving_mean"], norm["moving_variance"]
            x = (x - mean) / np.sqrt(variance + epsilon) * norm["gamma"] + norm["beta"]
        x = np.maximum(x, 0)
    kernel, bias = weights["projection/kernel"], weights["projection/bias"]
    return x @ kernel[0, 0] + bias


def random_masking(x, rate, noise):
    """Masked autoencoders, appendix A: shuffle, keep the first ones, unshuffle."""
    batch, length, dim = x.shape
    kept = int(length * (1 - rate))
    tokens = np.zeros((batch, kept, dim))
    removed = np.ones((batch, length), bool)
    ids_restore = np.zeros((batch, length), int)
    for b in range(batch):
        shuffled = sorted(range(length), key=lambda i: noise[b, i])
        for place, token in enumerate(shuffled):
            ids_restore[b, token] = place
            if place < kept:
                tokens[b, place] = x[b, token]
                removed[b, token] = False
    return tokens, removed, ids_restore


def attention_pooling(weights, x, mask=None, intermediate=False, epsilon=1e-6):
    """Queries attend to x; with a feed-forward, y = z + FFN(Norm(z))."""
    x = np.asarray(x, "float64")
    queries = np.broadcast_to(weights["queries"], (len(x), *weights["queries"].shape))
    seen = padding(None, mask) if mask is not None else None
    z, _ = multi_head_attention(inside(weights, "attention"), queries, x, mask=seen)
    if not intermediate:
        return z
    return residual(
        inside(weights, "feed_forward_residual"),
        z,
        lambda z: feed_forward(inside(weights, "feed_forward"), z, "gelu"),
        placement="pre",
        epsilon=epsilon,
    )


def grid_bias(table, rows, cols, prefix=0, prefix_table=None):
    """(heads, query, key): the table's entry at the offset, query minus key.

    Pairs with a token of the prefix have entries of their own: prefix to grid, grid to
    prefix, prefix to prefix.
    """
    heads, length = table.shape[-1], prefix + rows * cols
    bias = np.zeros((heads, length, length))
    for q, k in np.ndindex(length, length):
        if q < prefix and k < prefix:
            bias[:, q, k] = prefix_table[2]
        elif q < prefix:
            bias[:, q, k] = prefix_table[0]
        elif k < prefix:
            bias[:, q, k] = prefix_table[1]
        else:
            down = (q - prefix) // cols - (k - prefix) // cols
            right = (q - prefix) % cols - (k - prefix) % cols
            bias[:, q, k] = table[down + rows - 1, right + cols - 1]
    return bias
