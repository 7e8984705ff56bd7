"""Which tokens stay, which go, and how the sequence is put together again."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, padding, riding_mask

from keras_attn import (
    AttentionPooling,
    MaskTokens,
    PatchDropout,
    RandomMasking,
    restore_tokens,
)


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def marked(batch, length):
    """Tokens that say which they are: the image, and the place in it."""
    image, place = np.meshgrid(np.arange(batch), np.arange(length), indexing="ij")
    return np.stack([image, place], -1).astype("float32")


@pytest.mark.parametrize(
    "length, rate, front, kept",
    [
        (16, 0.5, 0, 8),
        (17, 0.5, 1, 8),
        (13, 0.25, 3, 7),
        (10, 0.9, 0, 1),
        (3, 0.9, 1, 1),
        (196, 0.75, 0, 49),
        (7, 0.0, 1, 6),
    ],
)
def test_training_keeps_a_part_in_its_order(length, rate, front, kept):
    x, layer = marked(5, length), PatchDropout(rate, front, seed=1)
    output = numpy(layer(x, training=True))
    assert output.shape == (5, front + kept, 2)
    for image, tokens in enumerate(output):
        places = list(tokens[:, 1].astype(int))
        assert (tokens[:, 0] == image).all()
        assert places == sorted(set(places))
        assert places[:front] == list(range(front))
    np.testing.assert_array_equal(numpy(layer(x)), x)
    np.testing.assert_array_equal(numpy(layer(x, training=False)), x)


def test_every_image_and_every_call_is_another_choice():
    x, layer = marked(7, 31), PatchDropout(0.5, seed=1)
    one, two = (numpy(layer(x, training=True))[..., 1] for _ in range(2))
    assert len({tuple(row) for row in [*one, *two]}) == 14


def test_every_patch_is_kept_as_often():
    x, layer = marked(2000, 9), PatchDropout(1 / 3, num_prefix_tokens=1, seed=1)
    places = numpy(layer(x, training=True))[..., 1].astype(int)
    share = np.bincount(places.ravel(), minlength=9) / 2000
    assert share[0] == 1
    assert np.abs(share[1:] - 5 / 8).max() < 0.05


def test_the_mask_goes_with_its_tokens():
    x, mask = marked(3, 11), padding(11)
    output = PatchDropout(0.5, 1, seed=1)(x, mask=mask, training=True)
    kept = riding_mask(output)
    for image, tokens in enumerate(numpy(output)):
        np.testing.assert_array_equal(
            kept[image], mask[image][tokens[:, 1].astype(int)]
        )
    assert not kept.all()


def test_a_model_trains_on_a_part_and_predicts_from_all():
    inputs = keras.Input((None, 3))
    x = PatchDropout(0.5, seed=1)(inputs)
    assert x.shape == (None, None, 3)
    lengths = keras.ops.sum(keras.ops.ones_like(x[..., :1]), axis=1)
    model = keras.Model(inputs, lengths + 0 * keras.layers.Dense(1)(lengths))
    model.compile("sgd", "mse")
    x, eight, four = array(4, 8, 3), np.full((4, 1), 8.0), np.full((4, 1), 4.0)
    assert model.evaluate(x, eight, verbose=0) == 0
    assert model.fit(x, four, verbose=0).history["loss"] == [0]
    np.testing.assert_array_equal(model.predict(x, verbose=0), eight)


# --- Masked autoencoders -------------------------------------------------------------


@pytest.mark.parametrize("length, rate", [(16, 0.75), (7, 0.5), (5, 0.0), (11, 0.25)])
def test_random_masking_is_the_papers(length, rate):
    x, noise = array(3, length, 5), array(3, length, seed=1)
    found = RandomMasking(rate)(x, noise)
    expected = oracle.random_masking(x, rate, noise)
    for one, two in zip(found, expected, strict=True):
        assert one.shape == two.shape
        np.testing.assert_array_equal(numpy(one), two)


def test_random_masking_draws_in_training_and_outside():
    x, layer = marked(5, 16), RandomMasking(0.75, seed=1)
    choices = set()
    for _ in range(3):
        tokens, removed, ids_restore = (numpy(y) for y in layer(x))
        assert tokens.shape == (5, 4, 2) and (removed.sum(1) == 12).all()
        assert (np.sort(ids_restore, 1) == np.arange(16)).all()
        for image in range(5):
            places = tokens[image, :, 1].astype(int)
            assert not removed[image][places].any()
            choices.add(tuple(places))
    assert len(choices) == 15


def test_the_sequence_is_restored():
    x, token = array(3, 16, 5), array(5, seed=2)
    tokens, removed, ids_restore = RandomMasking(0.75, seed=1)(x)
    restored = numpy(restore_tokens(tokens, token, ids_restore))
    removed = numpy(removed)
    np.testing.assert_array_equal(restored[~removed], x[~removed])
    np.testing.assert_array_equal(
        restored[removed], np.tile(token, (int(removed.sum()), 1))
    )
    layer = MaskTokens(initializer="normal")
    learned = numpy(layer(tokens, ids_restore))
    np.testing.assert_array_equal(learned[~removed], x[~removed])
    token = numpy(layer.token)
    assert np.abs(token).max() > 0
    assert (learned[removed] == token).all()


def test_a_masked_autoencoder_is_a_functional_model():
    """Open batch, compiled: the loss sees the removed tokens alone."""
    inputs = keras.Input((8, 3))
    tokens, removed, ids_restore = RandomMasking(0.5, seed=1)(inputs)
    assert tokens.shape == (None, 4, 3)
    x = keras.layers.Dense(5)(tokens)
    x = keras.layers.Dense(3)(MaskTokens()(x, ids_restore))
    error = keras.ops.mean(keras.ops.square(x - inputs), axis=-1)
    lost = keras.ops.cast(removed, "float32")
    loss = keras.ops.sum(error * lost, axis=1) / keras.ops.sum(lost, axis=1)
    model = keras.Model(inputs, loss)
    model.compile("adam", lambda y, predicted: keras.ops.mean(predicted))
    history = model.fit(array(32, 8, 3), np.zeros(32), epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


BAD = [
    (lambda: PatchDropout(1.0), r"\[0, 1\).*rate=1.0"),
    (lambda: PatchDropout(0.5, num_prefix_tokens=-1), "num_prefix_tokens=-1"),
    (lambda: PatchDropout(0.5)(array(2, 3, 4, 5)), r"length, dim.*\(2, 3, 4, 5\)"),
    (lambda: PatchDropout(0.5, 3)(array(2, 3, 4)), r"behind.*\(2, 3, 4\).*=3"),
    (lambda: RandomMasking(-0.5), r"\[0, 1\).*rate=-0.5"),
    (lambda: RandomMasking()(array(2, 3, 4, 5)), r"length, dim.*\(2, 3, 4, 5\)"),
]


@pytest.mark.parametrize("make, said", BAD, ids=lambda x: x if x is str else "")
def test_a_bad_argument_is_refused(make, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        make()


def test_a_graph_that_trains_has_the_mask_of_what_was_kept():
    ids = np.array([[1, 2, 0, 3], [4, 5, 6, 0]])
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, 8, mask_zero=True)(inputs)
    x = PatchDropout(0.5)(x)
    model = keras.Model(inputs, AttentionPooling(2)(x))
    assert tuple(model(ids, training=True).shape) == (2, 8)
    longer = np.pad(ids, ((0, 0), (0, 2)))
    np.testing.assert_allclose(
        numpy(model(ids)), numpy(model(longer)), rtol=1e-5, atol=1e-5
    )
