"""Norm placements, LayerScale, StochasticDepth and DeepNorm's constants."""

import math

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, randomize
from keras import ops

from keras_attn import (
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    LayerScale,
    Residual,
    StochasticDepth,
    deep_norm_constants,
    stochastic_depth_rates,
)
from keras_attn.deep_norm import scaled

DIM = 6


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer_scale", [None, 0.3])
@pytest.mark.parametrize("normalization", ["layer", "rms"])
@pytest.mark.parametrize("placement", ["post", "pre", "sandwich", "deep"])
def test_every_placement(placement, normalization, layer_scale):
    x, alpha = array(2, 3, DIM), 1.7 if placement == "deep" else None
    layer = Residual(
        FeedForward(11, name="layer"),
        placement,
        normalization,
        epsilon=0.1,
        layer_scale=layer_scale,
        alpha=alpha,
    )
    layer(x)
    randomize(layer)
    weights = oracle.weights_of(layer)
    assert ("branch_scale/gamma" in weights) == (layer_scale is not None)
    expected = oracle.residual(
        weights,
        x,
        lambda x: oracle.feed_forward(oracle.inside(weights, "layer"), x),
        placement,
        normalization,
        0.1,
        alpha,
    )
    close(layer(x), expected)


def test_the_names_of_the_weights_of_old_models_stay():
    layer = EncoderBlock(2, 11)
    layer(array(2, 3, DIM))
    assert set(oracle.weights_of(layer)) == {
        f"{part}/{kind}"
        for part in (
            "attention/query",
            "attention/key",
            "attention/value",
            "attention/attention_output",
            "feed_forward/intermediate_dense",
            "feed_forward/output_dense",
        )
        for kind in ("kernel", "bias")
    } | {
        f"{part}_residual/norm/{kind}"
        for part in ("attention", "feed_forward")
        for kind in ("gamma", "beta")
    }


# --- LayerScale ----------------------------------------------------------------------


def test_layer_scale_is_a_factor_for_each_feature():
    x = array(2, 3, DIM)
    layer = LayerScale(0.01)
    close(layer(x), 0.01 * x, 1e-6)
    factors = array(DIM, seed=1)
    layer.set_weights([factors])
    close(layer(x), x @ np.diag(factors))


# --- Stochastic depth ----------------------------------------------------------------


def test_whole_samples_are_dropped_and_the_mean_stays():
    x = array(2003, 2, 3)
    layer = StochasticDepth(0.3, seed=1)
    close(layer(x), x, 0)
    close(layer(x, training=False), x, 0)
    y = numpy(layer(x, training=True))
    dropped = (y == 0).all((1, 2))
    assert 0.27 < dropped.mean() < 0.33
    close(y[~dropped], x[~dropped] / 0.7)
    assert ((numpy(layer(x, training=True)) == 0).all((1, 2)) != dropped).any()
    close(StochasticDepth(0.3, seed=1)(x, training=True), y)


def test_a_dropped_sample_skips_the_branch():
    x = array(997, 2, 3)
    layer = Residual(FeedForward(3), "pre", stochastic_depth=0.5, seed=1)
    branch = numpy(layer(x)) - x
    dropped = numpy(layer(x, training=True)) - x
    skipped = np.abs(dropped).max((1, 2)) < 1e-6
    assert 0.45 < skipped.mean() < 0.55
    close(dropped[~skipped], 2 * branch[~skipped], 1e-4)


def test_the_parts_of_a_block_are_dropped_apart():
    x = np.ones((97, 1, DIM), "float32")
    layer = EncoderBlock(2, 11, stochastic_depth=0.5, seed=3)
    layer(x)
    parts = [layer.attention_residual, layer.feed_forward_residual]
    drops = [numpy(part.branch_depth(x, training=True)) == 0 for part in parts]
    assert (drops[0] != drops[1]).any()


def test_rates_grow_linearly():
    assert stochastic_depth_rates(1, 0.3) == (0.0,)
    np.testing.assert_allclose(
        stochastic_depth_rates(12, 0.1), np.linspace(0, 0.1, 12), rtol=1e-12
    )
    assert all(type(rate) is float for rate in stochastic_depth_rates(3, 0))


# --- DeepNorm ------------------------------------------------------------------------


def test_deep_norms_constants_are_the_papers():
    """Figure 2 of the paper, and its 1,000-layer model: 500 and 500."""
    assert deep_norm_constants(18) == {
        "encoder": {"alpha": pytest.approx(36**0.25), "beta": pytest.approx(144**-0.25)}
    }
    assert deep_norm_constants(num_decoder_layers=18) == {
        "decoder": {"alpha": pytest.approx(36**0.25), "beta": pytest.approx(144**-0.25)}
    }
    both = deep_norm_constants(12, 5)
    root = math.exp((4 * math.log(12) + math.log(5)) / 16)
    assert both["encoder"]["alpha"] == pytest.approx(0.81 * root)
    assert both["encoder"]["beta"] == pytest.approx(0.87 / root)
    assert both["decoder"]["alpha"] == pytest.approx(15**0.25)
    assert both["decoder"]["beta"] == pytest.approx(60**-0.25)
    with pytest.raises(ValueError, match="num_encoder_layers=None"):
        deep_norm_constants()


INITIALIZERS = [
    keras.initializers.GlorotUniform(seed=1),
    keras.initializers.HeNormal(seed=1),
    keras.initializers.TruncatedNormal(stddev=0.02, seed=1),
    keras.initializers.RandomUniform(seed=1),
    keras.initializers.Constant(3.0),
]


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda x: type(x).__name__)
def test_a_scaled_initializer_gives_so_many_times_the_values(initializer):
    smaller = scaled(initializer, 0.4)
    close(smaller((5, 7)), 0.4 * numpy(initializer((5, 7))), 1e-6)
    config = keras.saving.serialize_keras_object(smaller)
    again = keras.saving.deserialize_keras_object(config)
    close(again((5, 7)), smaller((5, 7)), 0)


@pytest.mark.parametrize("initializer", ["glorot_uniform", "random_normal"])
@pytest.mark.parametrize("make", [EncoderBlock, DecoderBlock])
def test_beta_makes_the_right_kernels_smaller(make, initializer):
    """Value, output and feed-forward; query and key start as ever."""
    inputs = [array(2, 3, 64), array(2, 4, 32)]
    inputs = inputs[:1] if make is EncoderBlock else inputs
    arguments = {"kernel_initializer": initializer}
    plain = make(4, 128, **arguments)
    deep = make(4, 128, norm_placement="deep", alpha=2, beta=0.25, **arguments)
    plain(*inputs), deep(*inputs)
    kernels = [
        {path: w for path, w in oracle.weights_of(layer).items() if "kernel" in path}
        for layer in (plain, deep)
    ]
    assert kernels[0].keys() == kernels[1].keys()
    for path, kernel in kernels[0].items():
        ratio = kernels[1][path].std() / kernel.std()
        is_plain = "/query/" in path or "/key/" in path
        assert ratio == pytest.approx(1.0 if is_plain else 0.25, rel=0.1), path


def test_the_config_of_a_deep_block_keeps_the_given_initializer():
    layer = EncoderBlock(2, 11, norm_placement="deep", alpha=2.0, beta=0.3)
    layer(array(2, 3, DIM))
    config = layer.get_config()
    assert config["kernel_initializer"]["class_name"] == "GlorotUniform"
    assert config["beta"] == 0.3
    assert layer.attention.kernel_initializer.get_config() == (
        keras.initializers.GlorotUniform().get_config()
    )


# --- Bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: LayerScale(0), "greater than 0.*initial_value=0"),
        (lambda: StochasticDepth(1.0), r"\[0, 1\).*rate=1.0"),
        (lambda: stochastic_depth_rates(0, 0.1), "num_layers=0"),
        (lambda: stochastic_depth_rates(3, 1), r"\[0, 1\).*max_rate=1"),
        (lambda: deep_norm_constants(0), "num_encoder_layers=0"),
        (lambda: Residual(norm_placement="deep"), "alpha=None.*deep"),
        (lambda: Residual(alpha=1.0), "alpha=1.0.*post"),
        (lambda: Residual(norm_placement="deep", alpha=-1), "alpha=-1"),
        (lambda: Residual(layer_scale=-1), "layer_scale=-1"),
        (lambda: Residual(stochastic_depth=2), "stochastic_depth=2"),
    ],
)
def test_a_bad_argument_is_refused(make, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        make()


def test_a_residual_leaves_the_callers_mask_alone():
    x = ops.convert_to_tensor(array(2, 3, DIM))
    Residual(FeedForward(11))(x, mask=np.ones((2, 3), bool))
    assert getattr(x, "_keras_mask", None) is None
