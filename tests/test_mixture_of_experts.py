"""The mixture of experts against a reference that goes token by token."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, padding, randomize
from keras import ops

from keras_attn import EncoderBlock, GatedFeedForward, MixtureOfExperts

BATCH, LENGTH, DIM = 3, 13, 6


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(numpy(actual), expected, rtol=tolerance, atol=tolerance)


def built(layer, x):
    layer(x)
    randomize(layer)
    return layer, oracle.weights_of(layer)


@pytest.mark.parametrize("activation", ["relu", "silu", "tanh"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_gated_feed_forward(activation, use_bias):
    x = array(2, 3, DIM)
    layer, weights = built(GatedFeedForward(11, activation, use_bias=use_bias), x)
    assert len(weights) == (6 if use_bias else 3)
    close(layer(x), oracle.gated_feed_forward(weights, x, activation))


def test_the_gate_of_swiglu_is_the_activated_half():
    x = array(2, 3, DIM)
    layer, _ = built(GatedFeedForward(11), x)
    layer.gate_dense.kernel.assign(layer.gate_dense.kernel * 0)  # silu(0) is 0
    close(layer(x), np.zeros((2, 3, DIM)))


def test_a_product_beyond_float16_stays_finite():
    layer = GatedFeedForward(1, kernel_initializer="ones", dtype="mixed_float16")
    x = np.full((1, 1, 2), 200.0, "float32")  # 400 * 400 is 160,000
    close(layer(x), np.full((1, 1, 2), 65504.0))
    small = np.full((1, 1, 2), 20.0, "float32")
    close(layer(small), np.full((1, 1, 2), 1600.0), 1e-3)


ARGUMENTS = {
    "plain": {},
    "switch": {"top_k": 1},
    "all": {"top_k": 5},
    "no_bias": {"use_bias": False},
    "gated": {"use_gate": True, "activation": "silu"},
    "capacity": {"capacity_factor": 1.0},
    "tight": {"capacity_factor": 0.5},
    "switch_capacity": {"top_k": 1, "capacity_factor": 1.0},
    "gated_capacity": {"use_gate": True, "capacity_factor": 0.8, "top_k": 3},
    "roomy": {"capacity_factor": 2.5},
}


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_experts(name, side):
    arguments = {"top_k": 2, **ARGUMENTS[name]}
    x, mask = array(BATCH, LENGTH, DIM), side and padding(LENGTH, side=side)
    layer = MixtureOfExperts(
        5, 11, load_balancing_weight=0.3, z_loss_weight=0.7, **arguments
    )
    layer, weights = built(layer, x)
    expected, counts, balance, z = oracle.mixture_of_experts(
        weights,
        x,
        mask,
        arguments["top_k"],
        arguments.get("capacity_factor"),
        arguments.get("activation", "relu"),
    )
    output, found = layer(x, mask=mask, return_counts=True)
    close(output, expected)
    np.testing.assert_array_equal(numpy(found), counts)
    np.testing.assert_array_equal(numpy(layer.expert_counts), 0)
    assert layer.losses == []
    close(layer(x, mask=mask, training=True), expected)
    np.testing.assert_array_equal(numpy(layer.expert_counts), counts.sum(0))
    close([numpy(loss) for loss in layer.losses], [0.3 * balance, 0.7 * z])
    if side:
        assert (numpy(output)[~mask] == 0).all()
    asked = arguments["top_k"] * (mask.sum() if side else BATCH * LENGTH)
    drops = "capacity" in name or name == "tight"
    assert (counts.sum() < asked) == drops  # so that the row tests what it says


def test_equal_shares_have_a_loss_of_one():
    """And all tokens on one expert have that of the number of experts."""
    layer = MixtureOfExperts(4, 3, top_k=1, load_balancing_weight=1.0)
    x = 50.0 * np.eye(4, dtype="float32")[None].repeat(2, 0)
    layer(x)
    layer.router.kernel.assign(np.eye(4))
    layer(x, training=True)
    close(layer.losses[0], 1.0)
    layer(np.tile(x[:, :1], (1, 4, 1)), training=True)
    close(layer.losses[0], 4.0)


def test_the_loss_teaches_the_router_to_share():
    x = np.abs(array(4, 32, 3))
    inputs = keras.Input((None, 3))
    layer = MixtureOfExperts(4, 5, top_k=1, load_balancing_weight=1.0)
    model = keras.Model(inputs, layer(inputs))
    router = np.zeros((3, 4), "float32")
    router[:, 0] = 0.5  # every token goes to the first expert
    layer.router.kernel.assign(router)
    counts = numpy(layer(x, return_counts=True)[1]).sum(0)
    np.testing.assert_array_equal(counts, [128, 0, 0, 0])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, z: 0.0 * ops.mean(z))

    def chance_of_the_first():
        logits = x @ numpy(layer.router.kernel)
        return np.apply_along_axis(oracle.softmax, -1, logits)[..., 0].mean()

    before = chance_of_the_first()
    model.fit(x, x, batch_size=4, verbose=0)
    assert chance_of_the_first() < before - 0.05
    np.testing.assert_array_equal(numpy(layer.expert_counts), [128, 0, 0, 0])


def test_a_capacity_is_each_samples_own():
    """Neither other samples nor padding nor later tokens change what a token gets."""
    x = array(4, LENGTH, DIM)
    layer, _ = built(MixtureOfExperts(3, 11, capacity_factor=0.6), x)
    whole = numpy(layer(x))
    close(layer(x[:1]), whole[:1])
    padded = np.concatenate([9 * array(4, 7, DIM, seed=1), x], 1)
    mask = np.arange(LENGTH + 7) >= 7
    mask = np.broadcast_to(mask, (4, LENGTH + 7))
    close(numpy(layer(padded, mask=mask))[:, 7:], whole)
    changed = x.copy()
    changed[:, 5:] = array(4, LENGTH - 5, DIM, seed=2)
    close(numpy(layer(changed))[:, :5], whole[:, :5])


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_any_rank(capacity_factor):
    x = array(BATCH, 3, 4, DIM)
    layer, weights = built(MixtureOfExperts(3, 11, capacity_factor=capacity_factor), x)
    mask = np.random.default_rng(1).random((BATCH, 3, 4)) < 0.7
    expected, *_ = oracle.mixture_of_experts(
        weights,
        x.reshape(BATCH, 12, DIM),
        mask.reshape(BATCH, 12),
        capacity_factor=capacity_factor,
    )
    close(layer(x, mask=mask), expected.reshape(x.shape))
    flat, *_ = oracle.mixture_of_experts(weights, x[:, 0, :1])
    if capacity_factor is None:
        close(layer(x[:, 0, 0]), flat[:, 0])


def test_counts_are_symbolic_too():
    inputs = keras.Input((None, DIM))
    layer = MixtureOfExperts(3, 11, capacity_factor=0.7)
    output, counts = layer(inputs, return_counts=True)
    assert tuple(output.shape) == (None, None, DIM)
    assert tuple(counts.shape) == (None, 3) and counts.dtype == "int32"
    x = array(2, LENGTH, DIM)
    model = keras.Model(inputs, [output, counts])
    found = model.predict(x, verbose=0)
    expected = layer(x, return_counts=True)
    close(found[0], numpy(expected[0]))
    np.testing.assert_array_equal(found[1], numpy(expected[1]))


def test_each_experts_kernels_start_as_those_of_a_layer_of_its_own():
    layer = MixtureOfExperts(16, 64)
    layer(array(1, 2, 32))
    for dense in (layer.intermediate_dense, layer.output_dense):
        deviation = numpy(dense.kernel).std((1, 2))
        np.testing.assert_allclose(deviation, (2 / 96) ** 0.5, rtol=0.1)


def test_a_block_hands_its_experts_the_padding():
    x, mask = array(BATCH, LENGTH, DIM), padding(LENGTH)
    experts = MixtureOfExperts(3, 11, name="feed_forward")
    layer, weights = built(EncoderBlock(2, feed_forward=experts), x)
    expected = oracle.encoder_block(
        weights,
        x,
        mask,
        feed=lambda weights, x: oracle.mixture_of_experts(weights, x, mask)[0],
    )
    close(layer(x, mask=mask, training=True), expected, 3e-5)
    assert numpy(experts.expert_counts).sum() == 2 * mask.sum()
    assert len(layer.losses) == 1


def test_mixtral_of_keras_hub():
    pytest.importorskip("keras_hub")
    from keras_hub.src.models.mixtral.mixtral_decoder import MixtralSparseMoeBlock

    x = array(BATCH, LENGTH, DIM)
    theirs = MixtralSparseMoeBlock(DIM, 11, 5, router_aux_loss_coef=0.3)
    theirs.build(x.shape)
    ours = MixtureOfExperts(
        5,
        11,
        activation="silu",
        use_gate=True,
        use_bias=False,
        load_balancing_weight=0.3,
    )
    ours, _ = built(ours, x)
    experts = theirs.expert_bank
    theirs._sparse_feedforward_gate_dense.kernel.assign(ours.router.kernel)
    experts._expert_feedforward_gate_dense.assign(ours.gate_dense.kernel)
    experts._expert_feedforward_intermediate_dense.assign(
        ours.intermediate_dense.kernel
    )
    experts._expert_feedforward_output_dense.assign(ours.output_dense.kernel)
    close(ours(x, training=True), numpy(theirs(x, training=True)[0]))
    close(ours.losses[0], numpy(theirs.losses[0]))


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"num_experts": 0}, "positive.*num_experts=0"),
        ({"intermediate_dim": 0}, "positive.*intermediate_dim=0"),
        ({"top_k": 4}, "top_k=4, num_experts=3"),
        ({"capacity_factor": 0}, "greater than 0.*capacity_factor=0"),
        ({"load_balancing_weight": -1}, "load_balancing_weight=-1"),
        ({"z_loss_weight": -1}, "z_loss_weight=-1"),
    ],
)
def test_a_bad_argument_is_refused(arguments, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        MixtureOfExperts(**{"num_experts": 3, "intermediate_dim": 11, **arguments})


def test_a_mask_of_another_shape_is_refused():
    x = array(BATCH, LENGTH, DIM)
    with pytest.raises(ValueError, match=r"(?s)\(3, 13\).*\(3, 12\)"):
        MixtureOfExperts(3, 11)(x, mask=np.ones((BATCH, 12), bool))
