"""Warm-up, masked loss and masked accuracy against numpy and, on torch, torch."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_attn.training import (
    InverseSquareRootWarmup,
    MaskedAccuracy,
    MaskedSparseCategoricalCrossentropy,
)

LABELS = np.array([[3, 1, 0, 0, 0], [2, 4, 1, 5, 6], [6, 0, 0, 0, 0]], "int32")
LOGITS = (3.0 * np.random.default_rng(0).normal(size=(3, 5, 7))).astype("float32")


def numpy_loss(labels, logits, smoothing=0.0, ignore_id=0, weights=None):
    """The rule of `torch.nn.CrossEntropyLoss`, written out in float64."""
    logits = logits.astype("float64")
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    real = labels != ignore_id
    picked = np.take_along_axis(log_p, np.where(real, labels, 0)[..., None], -1)
    cost = -(1 - smoothing) * picked[..., 0] - smoothing * log_p.mean(-1)
    weights = real * (1.0 if weights is None else weights)
    return (cost * weights).sum() / max(weights.sum(), 1e-300)


def with_mask(logits, mask):
    """`logits` as a layer gives them, with a mask riding on them."""
    rows = logits.reshape(-1, logits.shape[-1])
    table = keras.layers.Embedding(len(rows) + 1, rows.shape[-1], mask_zero=True)
    table.build()
    table.set_weights([np.vstack([0 * rows[:1], rows])])
    return table(mask * np.arange(1, mask.size + 1).reshape(mask.shape))


@pytest.mark.parametrize("step", [1, 7, 100, 101, 5000])
def test_warmup_is_the_papers_formula(step):
    schedule = InverseSquareRootWarmup(dim=64, warmup_steps=100, scale=2.0)
    expected = 2.0 * 64**-0.5 * min(step**-0.5, step * 100**-1.5)
    np.testing.assert_allclose(float(schedule(step - 1)), expected, rtol=1e-5)


def test_warmup_first_step_moves_and_peak_is_last_warmup_step():
    schedule = InverseSquareRootWarmup(dim=64, warmup_steps=10)
    rates = [float(schedule(i)) for i in range(30)]
    assert rates[0] > 0
    assert int(np.argmax(rates)) == 9
    np.testing.assert_allclose(rates[9], (64 * 10) ** -0.5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"dim": 0}, {"warmup_steps": 0}, {"scale": -1.0}])
def test_warmup_refuses_what_is_not_positive(wrong):
    name, value = next(iter(wrong.items()))
    said = f"`{name}`: expected a number greater than 0.*{name}={value}"
    with pytest.raises(ValueError, match=said):
        InverseSquareRootWarmup(**{"dim": 8, **wrong})


@pytest.mark.parametrize("ignore_id", [0, 3, -100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_loss_is_torchs_rule(smoothing, ignore_id):
    labels = np.where(LABELS == 0, ignore_id, LABELS)
    loss = MaskedSparseCategoricalCrossentropy(smoothing, ignore_id)(labels, LOGITS)
    np.testing.assert_allclose(
        float(loss), numpy_loss(labels, LOGITS, smoothing, ignore_id), rtol=1e-5
    )


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="compares with torch")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_equals_torch(smoothing):
    import torch

    theirs = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=0)
    expected = theirs(
        torch.tensor(LOGITS.reshape(-1, 7)), torch.tensor(LABELS.reshape(-1)).long()
    )
    loss = MaskedSparseCategoricalCrossentropy(smoothing)(LABELS, LOGITS)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)


def test_loss_does_not_see_padding():
    loss = MaskedSparseCategoricalCrossentropy(0.1)
    padded_labels = np.pad(LABELS, ((0, 2), (0, 4)))
    padded_logits = np.pad(LOGITS, ((0, 2), (0, 4), (0, 0)), constant_values=9.0)
    np.testing.assert_allclose(
        float(loss(padded_labels, padded_logits)), float(loss(LABELS, LOGITS)), 1e-5
    )


def test_no_real_token_gives_zero_not_nan():
    nothing = np.zeros((2, 3), "int32")
    assert float(MaskedSparseCategoricalCrossentropy(0.1)(nothing, LOGITS[:2, :3])) == 0
    accuracy = MaskedAccuracy()
    accuracy.update_state(nothing, LOGITS[:2, :3])
    assert float(accuracy.result()) == 0


@pytest.mark.parametrize(
    "weights", [np.array([1.0, 0.0, 3.0]), np.linspace(0, 2, 15).reshape(3, 5)]
)
def test_sample_weight_is_a_weighted_mean(weights):
    token_weights = weights if weights.ndim == 2 else weights[:, None]
    loss = MaskedSparseCategoricalCrossentropy(0.1)(LABELS, LOGITS, weights)
    expected = numpy_loss(LABELS, LOGITS, 0.1, weights=token_weights)
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)

    accuracy = MaskedAccuracy()
    accuracy.update_state(LABELS, LOGITS, sample_weight=weights)
    w = (LABELS != 0) * token_weights
    expected = ((LOGITS.argmax(-1) == LABELS) * w).sum() / w.sum()
    np.testing.assert_allclose(float(accuracy.result()), expected, rtol=1e-5)


def test_mask_on_predictions_counts_too():
    mask = np.array([[0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], bool)
    masked = with_mask(LOGITS, mask)
    loss = MaskedSparseCategoricalCrossentropy(0.1)(LABELS, masked)
    expected = numpy_loss(LABELS, LOGITS, 0.1, weights=mask)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(loss), expected, rtol=1e-5)

    accuracy = MaskedAccuracy()
    accuracy.update_state(LABELS, masked)
    real = (LABELS != 0) & mask
    expected = (LOGITS.argmax(-1) == LABELS)[real].mean()
    np.testing.assert_allclose(float(accuracy.result()), expected, rtol=1e-5)


def test_accuracy_counts_tokens_over_batches_of_unlike_length():
    accuracy = MaskedAccuracy()
    accuracy.update_state(LABELS[:1, :2], LOGITS[:1, :2])
    accuracy.update_state(LABELS[1:], LOGITS[1:])
    hits = (LOGITS.argmax(-1) == LABELS)[LABELS != 0]
    np.testing.assert_allclose(float(accuracy.result()), hits.mean(), rtol=1e-6)
    accuracy.reset_state()
    assert float(accuracy.result()) == 0


def test_float32_inside_whatever_the_logits():
    loss = MaskedSparseCategoricalCrossentropy(0.1)
    half = ops.convert_to_tensor(LOGITS.astype("float16"))
    value = loss(LABELS, half)
    assert keras.backend.standardize_dtype(value.dtype) == "float32"
    expected = numpy_loss(LABELS, LOGITS.astype("float16"), 0.1)
    np.testing.assert_allclose(float(value), expected, rtol=1e-5)
    assert np.isfinite(float(loss(LABELS, LOGITS * 1e4)))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="label_smoothing=1.5"):
        MaskedSparseCategoricalCrossentropy(1.5)
    with pytest.raises(ValueError, match=r"y_true.shape=\(3, 5\), y_pred.shape=\(3, 5"):
        MaskedSparseCategoricalCrossentropy()(LABELS, LABELS)
    with pytest.raises(ValueError, match="one axis more"):
        MaskedAccuracy().update_state(LABELS, LABELS)


def small_model():
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(8, 16, mask_zero=True),
            keras.layers.Dense(8),
        ]
    )
    model.compile(
        keras.optimizers.Adam(InverseSquareRootWarmup(16, warmup_steps=10)),
        loss=MaskedSparseCategoricalCrossentropy(0.1),
        metrics=[MaskedAccuracy()],
    )
    return model


def test_fit_save_load(tmp_path):
    tokens = np.random.default_rng(1).integers(1, 8, (64, 6)).astype("int32")
    tokens[:, 4:] = 0
    model = small_model()
    history = model.fit(tokens, tokens, batch_size=16, epochs=15, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert history["masked_accuracy"][-1] > 0.9

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before = model.evaluate(tokens, tokens, verbose=0)
    np.testing.assert_allclose(loaded.evaluate(tokens, tokens, verbose=0), before, 1e-5)
    assert loaded.loss.get_config() == model.loss.get_config()
    schedule = loaded.optimizer.get_config()["learning_rate"]
    assert schedule["registered_name"] == "keras_attn>InverseSquareRootWarmup"


@pytest.mark.parametrize(
    "thing",
    [
        InverseSquareRootWarmup(8, 30, 0.5),
        MaskedSparseCategoricalCrossentropy(0.2, ignore_id=3, reduction="sum"),
        MaskedAccuracy(ignore_id=3, name="hits"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_config_round_trip(thing):
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(thing)
    )
    assert type(again) is type(thing)
    assert again.get_config() == thing.get_config()
