"""Rotary, ALiBi and T5 positions: the papers' rules, other libraries, packed rows."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, randomize
from configurations import LLAMA3, YARN, close

import keras_attn as ka
from keras_attn import encodings, masks

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "ntk": {"rope_type": "ntk", "factor": 3.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# --- Rotary --------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_by_their_papers(scaling):
    found, _ = encodings.rotary_frequencies(32, 10_000, SCALINGS[scaling])
    expected = [
        oracle.frequency(pair, 32, scaling=SCALINGS[scaling]) for pair in range(16)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_llama3_leaves_fast_pairs_and_stretches_slow_ones():
    settings = {**LLAMA3, "original_max_position_embeddings": 8192}
    plain, _ = encodings.rotary_frequencies(128, 500_000)
    found, factor = encodings.rotary_frequencies(128, 500_000, settings)
    assert factor == 1.0
    np.testing.assert_allclose(found[:20], plain[:20])
    np.testing.assert_allclose(found[-20:], plain[-20:] / 8)
    assert (np.diff(found) < 0).all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotation_is_a_complex_product(layout, scaling):
    settings = {"layout": layout, "rotary_dim": 8, "scaling": SCALINGS[scaling]}
    x, positions = normal(2, 3, 5, 10), np.array([[0, 1, 2, 3, 4], [7, 9, 30, 2, 2]])
    expected = np.array(
        [
            [
                [
                    oracle.turned(v, at, **settings)
                    for v, at in zip(head, row, strict=True)
                ]
                for head in heads
            ]
            for heads, row in zip(x, positions, strict=True)
        ]
    )
    close(ka.RotaryEmbedding(**settings)(x, positions=positions), expected, 1e-5)


def test_scores_depend_on_distances_alone():
    rotary, q, k = ka.RotaryEmbedding(), normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(m, n):
        turned = rotary(q, positions=[m]), rotary(k, positions=[n])
        return float(np.sum(numpy(turned[0]) * numpy(turned[1])))

    assert abs(score(3, 1) - score(103, 101)) < 1e-4
    assert abs(score(3, 1) - score(3, 2)) > 1e-2


def test_positions_are_float32_whatever_the_policy():
    """In bfloat16 position 4001 would be 4000."""
    x = np.ones((1, 1, 2, 4), "float32")
    one, two = numpy(
        keras.ops.cast(
            ka.RotaryEmbedding(dtype="bfloat16")(x, positions=[4000, 4001]), "float32"
        )
    )[0, 0]
    exact = [oracle.turned(np.ones(4), at) for at in (4000, 4001)]
    close(one, exact[0], 1e-2)
    close(two, exact[1], 1e-2)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_a_grid_turns_by_row_and_column_beside_prefix_tokens(layout):
    settings = {"grid": (2, 3), "layout": layout, "base": 100}
    rotary, x = ka.RotaryEmbedding(num_prefix_tokens=2, **settings), normal(2, 3, 8, 12)
    places = [(0, 0), (0, 0), *np.ndindex(2, 3)]
    expected = np.array(
        [
            [
                [
                    oracle.turned(v, at, **settings)
                    for v, at in zip(head, places, strict=True)
                ]
                for head in heads
            ]
            for heads in x
        ]
    )
    close(rotary(x), expected, 1e-5)
    close(rotary(x)[:, :, :2], x[:, :, :2], 1e-6)  # prefix tokens are not turned
    close(rotary(x, positions=np.array(places)), expected, 1e-5)
    half = np.array(places) / 2  # fractions, as where a grid is resized
    assert np.abs(numpy(rotary(x, positions=half)) - expected).max() > 1e-2


@pytest.fixture
def keras_hub():
    return pytest.importorskip("keras_hub")


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
def test_keras_hub_rotary(keras_hub, scaling):
    settings = SCALINGS[scaling] or {"rope_type": "linear", "factor": 1.0}
    peer = keras_hub.layers.RotaryEmbedding(
        scaling_factor=settings["factor"],
        rope_type=settings["rope_type"],
        original_max_position_embeddings=64,
    )
    x = normal(2, 5, 3, 16)
    ours = ka.RotaryEmbedding(scaling=SCALINGS[scaling])(x.transpose(0, 2, 1, 3))
    close(keras.ops.transpose(ours, (0, 2, 1, 3)), numpy(peer(x)), 1e-5)


# --- Biases --------------------------------------------------------------------------


def test_slopes_of_the_paper():
    close(encodings.alibi_slopes(8), [2.0**-n for n in range(1, 9)], 1e-12)
    close(encodings.alibi_slopes(12)[8:], 2.0 ** -(np.arange(4) + 0.5), 1e-6)


@pytest.mark.parametrize("heads", [4, 8, 12])
def test_keras_hub_alibi_under_a_causal_mask(keras_hub, heads):
    """KerasHub's differs by a number a query, which the softmax does not see."""
    scores = normal(2, heads, 6, 6)
    causal = np.tril(np.ones((6, 6), bool))
    peer = numpy(keras_hub.layers.AlibiBias()(scores))
    ours = numpy(ka.AlibiBias(heads)(normal(2, 6, 3))) + scores

    def shares(x):
        return numpy(keras.ops.softmax(np.where(causal, x, -1e9)))

    close(shares(ours), shares(peer), 1e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("sizes", [(32, 128), (8, 20), (6, 5)])
def test_t5_buckets(sizes, bidirectional):
    buckets, farthest = sizes
    found = encodings.relative_position_buckets(buckets, farthest, bidirectional)
    assert len(found) == 2 * farthest + 1
    table = np.arange(buckets)
    rule = oracle.t5_bias(table, farthest, bidirectional)
    for distance in range(-farthest, farthest + 1):
        assert found[farthest + distance] == rule(0, distance)


@pytest.mark.parametrize("masked", [False, True])
def test_a_shared_bias_is_the_layers_own(masked):
    """Called once and passed as `bias=`, or as `position=`: the same numbers."""
    x, mask = normal(2, 6, 8), np.array([[True] * 6, [False] * 2 + [True] * 4])
    options = {"mask": mask} if masked else {}
    bias = ka.RelativePositionBias(2, num_buckets=8, max_distance=5)
    term = bias(x, **options)
    randomize(bias)
    term = bias(x, **options)
    own = ka.MultiHeadAttention(
        2, position=ka.RelativePositionBias(2, num_buckets=8, max_distance=5)
    )
    shared = ka.MultiHeadAttention(2)
    own.build(x.shape)
    shared.build(x.shape)
    own.position.set_weights(bias.get_weights())
    for name in ("query", "key", "value", "attention_output"):
        getattr(shared, name).set_weights(getattr(own, name).get_weights())
    options = {"query_mask": mask, "value_mask": mask} if masked else {}
    close(own(x, **options), numpy(shared(x, bias=term, **options)), 1e-5)


def test_a_bias_goes_through_a_stack_of_blocks():
    inputs = keras.Input((None, 8))
    bias, x = ka.AlibiBias(2)(inputs), inputs
    for _ in range(2):
        x = ka.EncoderBlock(2, 11)(x, bias=bias)
    model, array = keras.Model(inputs, x), normal(3, 6, 8)
    plain = keras.Model(inputs, x)
    assert model.predict(array, verbose=0).shape == (3, 6, 8)
    swapped = plain.predict(array[:, ::-1], verbose=0)[:, ::-1]
    close(model.predict(array, verbose=0), swapped, 1e-5)  # it looks both ways alike


# --- Packed rows ---------------------------------------------------------------------

PACKED = {
    "rotary": lambda: ka.RotaryEmbedding(),
    "alibi": lambda: ka.AlibiBias(2),
    "t5": lambda: ka.RelativePositionBias(2, num_buckets=8, max_distance=5),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("position", PACKED)
def test_a_packed_row_gives_each_text_what_it_has_alone(position):
    texts = [normal(1, n, 8, seed=n) for n in (3, 1, 4)]
    row = np.concatenate([*texts, normal(1, 2, 8, seed=9)], 1)
    ids = np.array([[1] * 3 + [2] + [3] * 4 + [0] * 2])
    layer = ka.MultiHeadAttention(2, position=PACKED[position]())
    layer.build(row.shape)
    randomize(layer)
    places = masks.segment_positions(ids)
    packed = numpy(
        layer(
            row,
            attention_mask=masks.segment_mask(ids),
            positions=places,
            use_causal_mask=True,
        )
    )
    start = 0
    for text in texts:
        alone = numpy(layer(text, use_causal_mask=True))
        close(packed[:, start : start + text.shape[1]], alone, 1e-5)
        start += text.shape[1]


def test_a_packed_row_through_a_whole_block():
    texts = [normal(1, n, 8, seed=n) for n in (3, 4)]
    row, ids = np.concatenate(texts, 1), np.array([[1] * 3 + [2] * 4])
    block = ka.DecoderBlock(
        intermediate_dim=11,
        self_attention=ka.MultiHeadAttention(2, position=ka.RotaryEmbedding()),
    )
    positions = masks.segment_positions(ids)
    packed = numpy(
        block(row, attention_mask=masks.segment_mask(ids), positions=positions)
    )
    for text, rows in zip(texts, (slice(0, 3), slice(3, 7)), strict=True):
        close(packed[:, rows], numpy(block(text)), 1e-5)


# --- Bad input -----------------------------------------------------------------------

BAD = {
    "base": (lambda: ka.RotaryEmbedding(base=1), "base=1"),
    "layout": (lambda: ka.RotaryEmbedding(layout="thirds"), "'thirds'"),
    "kind": (lambda: ka.RotaryEmbedding(scaling={"rope_type": "x"}), "'x'"),
    "missing": (lambda: ka.RotaryEmbedding(scaling={"rope_type": "yarn"}), "factor"),
    "unknown": (
        lambda: ka.RotaryEmbedding(scaling={**LLAMA3, "beta": 1}),
        "needs.*'beta': 1",
    ),
    "odd": (lambda: ka.RotaryEmbedding()(normal(1, 1, 2, 5)), "multiple of 2.*5"),
    "grid": (
        lambda: ka.RotaryEmbedding(grid=2)(normal(1, 1, 4, 6)),
        "multiple of 4.*head_dim=6",
    ),
    "tokens": (
        lambda: ka.RotaryEmbedding(grid=2)(normal(1, 1, 5, 8)),
        "grid of 2 x 2.*5 tokens",
    ),
    "pairs": (
        lambda: ka.RotaryEmbedding(grid=2)(normal(1, 1, 4, 8), positions=np.arange(4)),
        r"\(\.\.\., length, 2\).*\(4,\)",
    ),
    "heads": (
        lambda: ka.MultiHeadAttention(4, position=ka.AlibiBias(3))(normal(1, 4, 8)),
        "4.*num_heads=3",
    ),
    "buckets": (
        lambda: ka.RelativePositionBias(2, num_buckets=2),
        "num_buckets=2.*bidirectional=True",
    ),
    "distance": (
        lambda: ka.RelativePositionBias(2, num_buckets=32, max_distance=8),
        "max_distance=8",
    ),
    "norm": (lambda: ka.MultiHeadAttention(2, query_key_norm="batch"), "'batch'"),
    "cap": (lambda: ka.MultiHeadAttention(2, logit_soft_cap=0), "logit_soft_cap=0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    make, said = BAD[name]
    with pytest.raises(ValueError, match=f"(?s){said}"):
        make()


def test_a_position_that_is_none():
    with pytest.raises(TypeError, match=r"(?s)position.*Dense"):
        ka.MultiHeadAttention(2, position=keras.layers.Dense(2))


def test_a_learned_bias_belongs_to_one_layer():
    position, x = ka.RelativePositionBias(2), normal(1, 4, 8)
    ka.MultiHeadAttention(2, position=position)(x)
    with pytest.raises(ValueError, match=r"(?s)another layer.*bias="):
        ka.MultiHeadAttention(2, position=position)(x)
