"""Configurations of an attention layer, and what each of them must hold.

The table of single options, their pairs and the drawn ones all pass through the same
two checks: against the float64 oracle, and in pieces through a cache against the whole.
"""

import dataclasses
import functools
import itertools
import random

import numpy as np
import oracle
from cases import numpy, padding, randomize
from keras import ops

from keras_attn import (
    AlibiBias,
    MultiHeadAttention,
    RelativePositionBias,
    RotaryEmbedding,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

POSITIONS = {
    "rotary": ("rotary", {}),
    "rotary_interleaved": ("rotary", {"layout": "interleaved", "base": 100}),
    "rotary_partial": ("rotary", {"rotary_dim": 2}),
    "rotary_linear": ("rotary", {"scaling": {"rope_type": "linear", "factor": 3.0}}),
    "rotary_ntk": ("rotary", {"scaling": {"rope_type": "ntk", "factor": 3.0}}),
    "rotary_yarn": ("rotary", {"scaling": YARN}),
    "rotary_llama3": ("rotary", {"scaling": LLAMA3}),
    "alibi": ("alibi", {}),
    "t5": ("t5", {"num_buckets": 8, "max_distance": 6}),
    "t5_causal": (
        "t5",
        {"num_buckets": 6, "max_distance": 5, "bidirectional": False},
    ),
}

# Every option alone: what it adds to the settings of a configuration.
OPTIONS = {
    "multi_query": {"num_kv_heads": 1},
    "grouped": {"num_kv_heads": 2},
    "value_dim": {"value_dim": 5},
    **{name: {"position": name} for name in POSITIONS},
    "norm_rms": {"query_key_norm": "rms"},
    "norm_layer": {"query_key_norm": "layer"},
    "norm_l2": {"query_key_norm": "l2"},
    "soft_cap": {"logit_soft_cap": 1.5},
    "sinks": {"use_sinks": True},
    "gate": {"use_gate": True},
    "no_bias": {"use_bias": False},
    "window": {"sliding_window": 3},
    "window_pair": {"sliding_window": (2, 1)},
    "bias_shared": {"bias": "shared"},
    "bias_by_row": {"bias": "row"},
    "bias_by_head": {"bias": "head"},
    "bias_full": {"bias": "full"},
    "causal": {"causal": True},
    "padded_right": {"mask": "right"},
    "padded_left": {"mask": "left"},
    "attention_mask": {"attention_mask": "row"},
    "attention_mask_by_head": {"attention_mask": "head"},
    "cross": {"keys": 4},
}


# The same as factors with levels: what a table of all pairs is made of.
FACTORS = {
    "num_kv_heads": (None, 1, 2),
    "value_dim": (None, 5),
    "position": (None, *POSITIONS),
    "query_key_norm": (None, "rms", "layer", "l2"),
    "logit_soft_cap": (None, 1.5),
    "use_sinks": (False, True),
    "use_gate": (False, True),
    "use_bias": (True, False),
    "sliding_window": (None, 3, (2, 1)),
    "bias": (None, "shared", "row", "head", "full"),
    "causal": (False, True),
    "mask": (None, "right", "left"),
    "attention_mask": (None, "row", "head"),
    "keys": (None, 4),
}


def pairwise(is_allowed=lambda row: True):
    """Rows of levels in which every two levels of two factors meet at least once.

    Greedy: a row starts at a pair that has not met and takes, factor by factor, the
    level that makes most new pairs meet.
    """
    by_size = sorted(FACTORS, key=lambda name: -len(FACTORS[name]))
    missing = [
        frozenset(pair)
        for one, two in itertools.combinations(FACTORS, 2)
        for pair in itertools.product(
            [(one, level) for level in FACTORS[one]],
            [(two, level) for level in FACTORS[two]],
        )
        if is_allowed(dict(pair))
    ]
    missing = dict.fromkeys(missing)  # a set that keeps its order
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in by_size:
            if name not in row:
                levels = [x for x in FACTORS[name] if is_allowed({**row, name: x})]
                row[name] = max(levels, key=functools.partial(_met, missing, row, name))
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({name: row[name] for name in FACTORS})
    return rows


def _met(missing, row, name, level):
    """How many pairs that have not met this level of this factor makes meet."""
    return sum(frozenset({(name, level), item}) in missing for item in row.items())


@dataclasses.dataclass
class Configuration:
    """One attention layer and one call of it; `arguments` are the constructor's."""

    batch: int = 2
    length: int = 6
    keys: int | None = None  # cross-attention to that many
    width: int = 6
    num_heads: int = 4
    key_dim: int = 4
    position: str | None = None
    bias: str | None = None
    mask: str | None = None
    attention_mask: str | None = None
    causal: bool = False
    seed: int = 0
    arguments: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, **settings):
        own = {field.name for field in dataclasses.fields(cls)}
        arguments = {k: v for k, v in settings.items() if k not in own}
        settings = {k: v for k, v in settings.items() if k in own}
        return cls(**settings, arguments=arguments)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.x = self.normal(self.batch, self.length, self.width)
        self.memory = None
        if self.keys is not None:
            self.memory = self.normal(self.batch, self.keys, self.width + 1)
        self.num_keys = self.keys or self.length
        self.padding = None
        if self.mask is not None:
            self.padding = padding(self.num_keys, self.batch, self.mask)
        self.layer = self.make()

    def normal(self, *shape):
        return self.random.normal(size=shape).astype("float32")

    def make(self):
        random.seed(self.seed)
        position = None
        if self.position is not None:
            kind, settings = POSITIONS[self.position]
            position = {
                "rotary": RotaryEmbedding,
                "alibi": lambda **k: AlibiBias(self.num_heads, **k),
                "t5": lambda **k: RelativePositionBias(self.num_heads, **k),
            }[kind](**settings)
        layer = MultiHeadAttention(
            self.num_heads, self.key_dim, position=position, **self.arguments
        )
        memory_shape = None if self.memory is None else self.memory.shape
        layer.build(self.x.shape, memory_shape or self.x.shape)
        randomize(layer)
        return layer

    def bias_array(self):
        if self.bias is None:
            return None
        shape = (self.batch, self.num_heads, self.length, self.num_keys)
        kept = {"shared": (2, 3), "row": (0, 2, 3), "head": (1, 2, 3), "full": range(4)}
        kept = kept[self.bias]
        return self.normal(*(n if axis in kept else 1 for axis, n in enumerate(shape)))

    def attention_mask_array(self):
        if self.attention_mask is None:
            return None
        heads = self.num_heads if self.attention_mask == "head" else 1
        shape = (self.batch, heads, self.length, self.num_keys)
        return self.random.random(shape) < 0.6  # now and then a row sees nothing

    def call_arguments(self):
        arguments = {"use_causal_mask": self.causal}
        bias, mask = self.bias_array(), self.attention_mask_array()
        if bias is not None:
            arguments["bias"] = bias
        if mask is not None:
            arguments["attention_mask"] = mask if mask.shape[1] > 1 else mask[:, 0]
        if self.memory is not None:
            arguments |= {"value": self.memory, "value_mask": self.padding}
        elif self.padding is not None:
            arguments |= {"query_mask": self.padding, "value_mask": self.padding}
        return arguments

    def expected(self, bias=None, attention_mask=None, **_):
        weights = oracle.weights_of(self.layer)
        seen = np.ones((self.batch, 1, self.length, self.num_keys), bool)
        positions = key_positions = None
        if self.padding is not None:
            seen &= self.padding[:, None, None, :]
            key_positions = oracle.token_positions(self.padding)
            if self.memory is None:
                seen &= self.padding[:, None, :, None]
                positions = key_positions
        if attention_mask is not None:
            seen = seen & np.reshape(
                attention_mask, (self.batch, -1, self.length, self.num_keys)
            )
        rotary = position_bias = None
        if self.position is not None:
            kind, settings = POSITIONS[self.position]
            if kind == "rotary":
                rotary = settings
            elif kind == "alibi":
                position_bias = oracle.alibi(self.num_heads)
            else:
                (table,) = oracle.weights_of(self.layer.position).values()
                position_bias = oracle.t5_bias(
                    table,
                    settings["max_distance"],
                    settings.get("bidirectional", True),
                )
        return oracle.multi_head_attention(
            weights,
            self.x,
            self.memory,
            mask=seen,
            bias=bias,
            positions=positions,
            key_positions=key_positions,
            rotary=rotary,
            position_bias=position_bias,
            is_causal=self.causal,
            window=self.arguments.get("sliding_window"),
            soft_cap=self.arguments.get("logit_soft_cap"),
        )


def check_oracle(configuration, tolerance=1e-5):
    """Output and weights are the oracle's, with scores asked for and without."""
    call = configuration.call_arguments()
    expected, shares = configuration.expected(**call)
    layer, x = configuration.layer, configuration.x
    output, scores = layer(x, return_attention_scores=True, **call)
    close(output, expected, tolerance)
    close(scores, shares, tolerance)
    close(layer(x, **call), expected, tolerance)


def check_cache(configuration, chunks, rolling=False, tolerance=1e-5):
    """In pieces through a cache, each row gives what it gives whole and alone."""
    layer, x, real = configuration.layer, configuration.x, configuration.padding
    call = configuration.call_arguments()
    whole = numpy(layer(x, **call))
    cache = layer.make_cache(len(x), configuration.length, rolling=rolling)
    pieces, scores, start = [], [], 0
    for size in chunks:
        rows = slice(start, start + size)
        options = {"cache_index": 0} if start == 0 else {}
        if real is not None:
            options |= {"query_mask": real[:, rows], "value_mask": real[:, rows]}
        for name in ("bias", "attention_mask"):
            if name in call:
                part = call[name]
                if part.shape[-2] > 1:
                    part = part[..., rows, :]
                options[name] = part[..., : size if start == 0 else None]
        piece, share, cache = layer(
            x[:, rows], cache=cache, return_attention_scores=True, **options
        )
        pieces.append(numpy(piece))
        scores.append(numpy(share))
        start += size
    found = np.concatenate(pieces, 1)
    if real is not None:  # what stands at padding is free
        found, whole = found[real], whole[real]
    close(found, whole, tolerance)
    counted = configuration.length if real is None else real.sum(1)
    np.testing.assert_array_equal(numpy(cache["length"]), counted)
    for share in scores:
        assert (share >= 0).all() and (share.sum(-1) < 1 + 1e-5).all()


def close(found, expected, tolerance):
    found = numpy(ops.cast(found, "float32"))
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
