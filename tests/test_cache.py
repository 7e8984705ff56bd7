"""A cache: in pieces as in one, padded prompts, rolling, beams, memories, bounds."""

import keras
import numpy as np
import pytest
from cases import numpy, padding, randomize
from configurations import OPTIONS, Configuration, check_cache, close, pairwise
from keras import ops

from keras_attn import DecoderBlock, MultiHeadAttention, RotaryEmbedding, cache

CHUNKS = {"one": [1] * 6, "three": [3, 3], "all": [6], "mixed": [2, 1, 3]}
SINGLE = {
    name: {**settings, "causal": True}
    for name, settings in {"plain": {}, **OPTIONS}.items()
    if "keys" not in settings
}


def can_be_cached(row):
    """A bias and a mask speak of slots: there padding would move what they mean."""
    has_slots = row.get("bias") or row.get("attention_mask")
    return (
        row.get("causal", True)
        and row.get("keys") is None
        and not (has_slots and row.get("mask"))
    )


PAIRS = pairwise(can_be_cached)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", SINGLE)
def test_pieces_are_the_whole(name, chunks):
    check_cache(Configuration.of(**SINGLE[name]), CHUNKS[chunks])


@pytest.mark.parametrize("row", range(len(PAIRS)))
def test_options_together_in_pieces_are_the_whole(row):
    check_cache(Configuration.of(**PAIRS[row]), CHUNKS["mixed"])


@pytest.mark.parametrize("window", [1, 3, (2, 0), (0, 0)])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("mask", [None, "left", "right"])
def test_a_rolling_cache_gives_the_same_numbers(window, chunks, mask):
    configuration = Configuration.of(
        causal=True, sliding_window=window, position="rotary", mask=mask
    )
    check_cache(configuration, CHUNKS[chunks], rolling=True)
    slots = window if isinstance(window, int) else window[0] + 1
    assert configuration.layer.make_cache(2, 6, rolling=True)["key"].shape[2] == slots


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_goes_on_as_it_would_alone(side):
    """Prompts of 1, 3 and 5 tokens in one batch, then four more tokens for each."""
    generator = np.random.default_rng(0)
    layer = MultiHeadAttention(
        2, position=RotaryEmbedding(), sliding_window=4, num_kv_heads=1
    )
    lengths, new = [1, 3, 5], 4
    texts = [generator.normal(size=(1, n + new, 8)).astype("float32") for n in lengths]
    layer.build((None, None, 8))
    randomize(layer)
    prompts, mask = np.full((3, 5, 8), 7.0, "float32"), np.zeros((3, 5), bool)
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        where = slice(0, n) if side == "right" else slice(5 - n, 5)
        prompts[row, where], mask[row, where] = text[0, :n], True
    found = {}
    for rolling in (False, True):
        kept = layer.make_cache(3, 5 + new, rolling=rolling)
        _, kept = layer(prompts, query_mask=mask, value_mask=mask, cache=kept)
        steps = []
        for step in range(new):
            tokens = np.stack(
                [t[0, n + step] for t, n in zip(texts, lengths, strict=True)]
            )
            output, kept = layer(tokens[:, None], cache=kept)
            steps.append(numpy(output)[:, 0])
        found[rolling] = np.stack(steps, 1)  # (row, step, dim)
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        alone = numpy(layer(text, use_causal_mask=True))[0, n:]
        close(found[False][row], alone, 1e-5)
        close(found[True][row], alone, 1e-5)


def test_rows_are_reordered_with_all_they_hold():
    layer, x = attention(), inputs()
    _, kept = layer(x[:, :4], cache=layer.make_cache(3, 6))
    rows = [2, 0, 0, 1]
    turned = cache.reorder({"block": kept}, np.array(rows))["block"]
    one, _ = layer(x[rows][:, 4:5], cache=turned)
    whole = numpy(layer(x, use_causal_mask=True))
    close(one, whole[rows][:, 4:5], 1e-5)


def test_a_cache_is_rewound():
    layer, x = attention(), inputs()
    whole = numpy(layer(x, use_causal_mask=True))
    _, kept = layer(x[:, :3], cache=layer.make_cache(3, 6))
    _, wrong = layer(-x[:, 3:6], cache=kept)
    for again in (
        layer(x[:, 3:], cache=cache.rewind(wrong, 3))[0],
        layer(x[:, 3:], cache=wrong, cache_index=3)[0],
        layer(x[:, 3:], cache=wrong, cache_index=ops.convert_to_tensor(3))[0],
    ):
        close(again, whole[:, 3:], 1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_memory_is_projected_once(masked):
    layer, x = attention(position=RotaryEmbedding()), inputs()
    memory = np.random.default_rng(1).normal(size=(3, 7, 5)).astype("float32")
    layer = MultiHeadAttention(2, position=RotaryEmbedding())
    layer.build(x.shape, memory.shape)
    randomize(layer)
    mask = padding(7) if masked else None
    whole, shares = layer(x, memory, value_mask=mask, return_attention_scores=True)
    kept = layer.make_memory_cache(memory, mask=mask)
    output, scores = layer(x, cache=kept, return_attention_scores=True)
    close(output, numpy(whole), 1e-6)
    close(scores, numpy(shares), 1e-6)
    positions = np.arange(2, 5)
    part = layer(x[:, 2:5], cache=kept, positions=positions)
    close(part, numpy(whole)[:, 2:5], 1e-6)


def test_positions_that_are_given_are_kept_with_the_keys():
    layer, x = attention(position=RotaryEmbedding()), inputs()
    positions = np.array([5, 6, 7, 20, 21, 22])
    whole = layer(x, use_causal_mask=True, positions=positions)
    kept, pieces = layer.make_cache(3, 6), []
    for rows in (slice(0, 2), slice(2, 6)):
        piece, kept = layer(x[:, rows], cache=kept, positions=positions[rows])
        pieces.append(numpy(piece))
    close(np.concatenate(pieces, 1), numpy(whole), 1e-5)
    np.testing.assert_array_equal(numpy(kept["positions"])[1], positions)


def test_half_precision_keeps_its_caches_half():
    layer, x = attention(dtype="mixed_bfloat16"), inputs()
    kept = layer.make_cache(3, 6)
    output, kept = layer(x, cache=kept)
    for x in (output, kept["key"], kept["value"]):
        assert keras.backend.standardize_dtype(x.dtype) == "bfloat16"


def test_a_step_is_a_functional_model():
    """Caches are inputs and outputs like any other; the model is compiled."""
    layer, x = attention(position=RotaryEmbedding()), inputs()
    whole = numpy(layer(x, use_causal_mask=True))
    kept = layer.make_cache(3, 6)
    token = keras.Input((1, 8))
    symbols = {
        name: keras.Input(batch_shape=(None, *value.shape[1:]), dtype=value.dtype)
        for name, value in kept.items()
    }
    output, left = layer(token, cache=symbols)
    assert left.keys() == kept.keys()
    step = keras.Model([token, symbols], [output, left])
    kept = {name: numpy(value) for name, value in kept.items()}
    for index in range(6):
        output, kept = step.predict([x[:, index : index + 1], kept], verbose=0)
        close(output, whole[:, index : index + 1], 1e-5)


def test_a_cache_is_in_the_order_of_its_names():
    """Else a model saved on one backend takes the length for the value on another."""
    layer, x = attention(), inputs()
    mixed = dict(reversed(layer.make_cache(3, 6).items()))
    for kept in (
        layer.make_cache(3, 6),
        layer(x, cache=mixed)[1],
        cache.rewind(mixed, 0),
        layer.make_memory_cache(x),
        decoder_cache(),
    ):
        for names in (
            kept,
            *(part for part in kept.values() if isinstance(part, dict)),
        ):
            assert list(names) == sorted(names)


def decoder_cache():
    block, x = DecoderBlock(2, 11), inputs()
    block(x, x)
    kept = dict(reversed(block.make_cache(3, 6, memory=x).items()))
    return block(x, cache=kept)[1]


def test_the_symbolic_shapes_are_the_real_ones():
    layer = attention(sliding_window=3)
    for rolling, size, index in ((True, 1, None), (True, 4, None), (False, 4, 0)):
        kept = layer.make_cache(3, 6, rolling=rolling)
        options = {"return_attention_scores": True, "cache_index": index}
        symbols = {
            name: keras.KerasTensor(value.shape, value.dtype)
            for name, value in kept.items()
        }
        spec = layer(keras.KerasTensor((3, size, 8)), cache=symbols, **options)
        real = layer(inputs()[:, :size], cache=kept, **options)
        assert [tuple(x.shape) for x in keras.tree.flatten(spec)] == [
            tuple(x.shape) for x in keras.tree.flatten(real)
        ]


# --- Blocks --------------------------------------------------------------------------

BLOCKS = {
    "plain": {},
    "pre_rms": {"norm_placement": "pre", "normalization": "rms"},
    "parallel": {"parallel": True, "norm_placement": "pre"},
    "memory": {},
    "given": {
        "num_heads": None,
        "self_attention": {
            "num_heads": 4,
            "num_kv_heads": 2,
            "sliding_window": 3,
            "query_key_norm": "rms",
        },
    },
}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_decoder_block_in_pieces(name, chunks):
    arguments = {"num_heads": 2, "intermediate_dim": 11, **BLOCKS[name]}
    if "self_attention" in arguments:
        arguments["self_attention"] = MultiHeadAttention(
            position=RotaryEmbedding(), **arguments["self_attention"]
        )
    block, x, options = DecoderBlock(**arguments), inputs(), {}
    if name == "memory":
        memory = np.random.default_rng(1).normal(size=(3, 7, 5)).astype("float32")
        options = {"memory": memory, "memory_mask": padding(7)}
    block(x, **options)
    randomize(block)
    whole = numpy(block(x, **options))
    kept = block.make_cache(3, 6, rolling=name == "given", **options)
    pieces, start = [], 0
    for size in CHUNKS[chunks]:
        piece, kept = block(x[:, start : start + size], cache=kept)
        pieces.append(numpy(piece))
        start += size
    close(np.concatenate(pieces, 1), whole, 1e-5)


def test_a_step_of_a_block_is_a_functional_model():
    block, x = DecoderBlock(2, 11), inputs()
    memory = np.random.default_rng(1).normal(size=(3, 7, 5)).astype("float32")
    whole = numpy(block(x, memory))
    kept = block.make_cache(3, 6, memory)
    symbols = keras.tree.map_structure(
        lambda x: keras.Input(batch_shape=(None, *x.shape[1:]), dtype=x.dtype), kept
    )
    token = keras.Input((1, 8))
    step = keras.Model([token, symbols], list(block(token, cache=symbols)))
    for index in range(6):
        token = ops.convert_to_tensor(x[:, index : index + 1])
        output, kept = step([token, kept])
        close(output, whole[:, index : index + 1], 1e-5)


# --- Bad input -----------------------------------------------------------------------


@pytest.mark.parametrize("index", [4, None, "tensor"])
def test_a_write_past_the_end_is_refused(index):
    layer, x = attention(), inputs()
    _, kept = layer(x[:, :4], cache=layer.make_cache(3, 5))
    index = ops.convert_to_tensor(4) if index == "tensor" else index
    with pytest.raises(ValueError, match=r"(?s)5 slots.*2 tokens.*4"):
        layer(x[:, 4:6], cache=kept, cache_index=index)


def test_more_tokens_than_slots_are_refused():
    layer, x = attention(), inputs()
    with pytest.raises(ValueError, match=r"(?s)5 slots.*6 tokens"):
        layer(x, cache=layer.make_cache(3, 5), cache_index=0)


def test_only_a_window_rolls():
    with pytest.raises(ValueError, match="sliding_window=None"):
        attention().make_cache(2, 5, rolling=True)


def test_a_rolling_cache_takes_no_bias_once_it_rolls():
    layer, x = attention(sliding_window=3), inputs()
    bias = np.zeros((1, 3), "float32")
    _, kept = layer(x[:, :2], cache=layer.make_cache(3, 6, rolling=True))
    _, kept = layer(x[:, :1], cache=kept, bias=bias)  # the last slot
    with pytest.raises(ValueError, match=r"(?s)3 slots.*1 tokens"):
        layer(x[:, :1], cache=kept, bias=bias)


def test_a_cache_needs_a_built_layer():
    with pytest.raises(ValueError, match=r"(?s)build.*make_cache"):
        MultiHeadAttention(2).make_cache(2, 5)


def test_a_cache_is_for_sequences():
    layer = MultiHeadAttention(2)
    layer.build((2, 3, 4, 8))
    with pytest.raises(ValueError, match=r"(?s)batch, length, dim.*2, 3, 4, 8"):
        layer(np.ones((2, 3, 4, 8), "float32"), cache=layer.make_cache(2, 12))


def attention(**arguments):
    layer = MultiHeadAttention(2, **arguments)
    layer.build((None, None, 8))
    randomize(layer)
    return layer


def inputs():
    return np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")


@pytest.mark.parametrize("padded", [False, True])
def test_a_cross_attention_that_turns_its_queries_counts_on(padded):
    position = RotaryEmbedding()
    block = DecoderBlock(2, 8, cross_attention=MultiHeadAttention(2, position=position))
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 8)).astype("float32")
    memory = random.normal(size=(2, 4, 8)).astype("float32")
    mask = np.ones((2, 5), bool)
    if padded:
        mask[1, 1] = False
    expected = numpy(block(x, memory, mask=mask))
    kept, found = block.make_cache(2, 5, memory=memory), []
    for index in range(5):
        here = slice(index, index + 1)
        y, kept = block(x[:, here], mask=mask[:, here], cache=kept)
        found.append(numpy(y))
    found = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_a_memory_knows_no_window():
    layer = MultiHeadAttention(2, sliding_window=2)
    layer.build((2, 5, 8))
    with pytest.raises(ValueError, match="sliding_window=2"):
        layer.make_memory_cache(np.ones((2, 5, 8), "float32"))


def test_a_blocks_cache_is_rewound_whole():
    block = DecoderBlock(2, 8)
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 4, 8)).astype("float32")
    memory = random.normal(size=(2, 3, 8)).astype("float32")
    block(x, memory)
    empty = block.make_cache(2, 4, memory=memory)
    _, full = block(x, cache=empty)
    again, _ = block(x[:, 2:], cache=cache.rewind(full, 2))
    whole, _ = block(x, cache=empty)
    np.testing.assert_allclose(numpy(again), numpy(whole)[:, 2:], rtol=1e-5, atol=1e-5)
