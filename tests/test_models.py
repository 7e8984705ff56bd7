"""The builders: the papers' sizes, masks through the whole model, saved and loaded."""

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, randomize, run_whole

from keras_attn import models

SMALL = {"num_layers": 2, "dim": 6, "num_heads": 2, "intermediate_dim": 11}


def transformer(**arguments):
    model = models.Transformer(13, **{**SMALL, "dropout": 0.1, **arguments})
    randomize(model)
    return model


def vision_transformer(**arguments):
    arguments = {"image_size": 10, "patch_size": 5, "channels": 2, **arguments}
    model = models.VisionTransformer(7, **{**SMALL, "dropout": 0.1, **arguments})
    randomize(model)
    return model


def ids(*shape, vocabulary=13, seed=0):
    return np.random.default_rng(seed).integers(1, vocabulary, shape).astype("int32")


def images(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        numpy(actual), numpy(expected), rtol=tolerance, atol=tolerance
    )


# --- Transformer ---------------------------------------------------------------------


@pytest.mark.parametrize("norm_placement", ["post", "pre", "sandwich", "deep"])
@pytest.mark.parametrize("scale", [True, False])
def test_transformer_is_the_paper(norm_placement, scale):
    """Embed, add sinusoids, encode, decode, project by the same matrix."""
    model = transformer(norm_placement=norm_placement, scale_embeddings=scale)
    source, target = ids(2, 7), ids(2, 5, seed=1)
    source[1, 4:] = target[1, 3:] = 0
    weights = {w.path: w.numpy().astype("float64") for w in model.weights}
    (table,) = (w for path, w in weights.items() if path.startswith("embedding/"))
    options = {"placement": norm_placement, "epsilon": 1e-6}
    has_last_norm = norm_placement in ("pre", "sandwich")

    def embed(tokens):
        factor = np.sqrt(6) if scale else 1.0
        return table[tokens] * factor + oracle.sinusoids(range(tokens.shape[1]), 6)

    x, real = embed(source), source != 0
    for index in range(2):
        inside = oracle.inside(weights, f"encoder_{index}")
        alpha = 0.81 * 32 ** (1 / 16)  # of 2 and 2 layers
        x = oracle.encoder_block(inside, x, real, alpha=alpha, **options)
    if has_last_norm:
        x = oracle.layer_norm(oracle.inside(weights, "encoder_norm"), x, 1e-6)
    memory, x = x, embed(target)
    for index in range(2):
        inside = oracle.inside(weights, f"decoder_{index}")
        x = oracle.decoder_block(
            inside, x, memory, target != 0, real, alpha=6**0.25, **options
        )
    if has_last_norm:
        x = oracle.layer_norm(oracle.inside(weights, "decoder_norm"), x, 1e-6)
    logits = numpy(model({"source": source, "target": target}))
    shown = target != 0
    close(logits[shown], (x @ table.T)[shown], 1e-4)


def test_transformer_does_not_see_padding():
    """Left-padded, right-padded, bare: the same logits at the real tokens."""
    model, source, target = transformer(), ids(1, 5), ids(1, 3, seed=1)
    bare = numpy(model({"source": source, "target": target}))
    for before, after in [(0, 2), (2, 0), (1, 3)]:
        padded = {
            "source": np.pad(source, ((0, 0), (before, after))),
            "target": np.pad(target, ((0, 0), (after, before))),
        }
        close(numpy(model(padded))[:, after : after + 3], bare, 2e-5)


def test_transformer_does_not_see_the_future():
    model, source, target = transformer(), ids(1, 5), ids(1, 7, seed=1)
    one = numpy(model({"source": source, "target": target}))
    target[:, 4:] = target[:, 4:] % 12 + 1
    two = numpy(model({"source": source, "target": target}))
    close(one[:, :4], two[:, :4])
    assert np.abs(one[:, 4:] - two[:, 4:]).max() > 1e-3


def test_transformer_logits_carry_the_targets_mask():
    from cases import riding_mask

    target = ids(2, 3)
    target[1, 1:] = 0
    logits = transformer()({"source": ids(2, 5), "target": target})
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    np.testing.assert_array_equal(riding_mask(logits), target != 0)


def test_two_vocabularies():
    model = models.Transformer(13, 11, **SMALL, dropout=0.0)
    assert model.output_shape == (None, None, 11)
    shapes = {w.path: tuple(w.shape) for w in model.weights if "embedding" in w.path}
    assert sorted(shapes.values()) == [(11, 6), (13, 6)]
    with pytest.raises(ValueError, match="(?s)share.*=13.*=11"):
        models.Transformer(13, 11, share_embeddings=True, **SMALL, dropout=0.0)


def test_an_untied_output_is_a_matrix_of_its_own():
    tied, untied = transformer(), transformer(tie_output=False)
    assert untied.count_params() == tied.count_params() + 13 * 6


def test_the_decoder_may_be_of_another_depth():
    model = transformer(num_decoder_layers=1)
    blocks = [layer.name for layer in model.layers if "coder_" in layer.name]
    assert blocks == ["encoder_0", "encoder_1", "decoder_0"]


def test_transformer_base_has_the_papers_number_of_weights():
    """Table 3 says 65 million for base, with the 37,000 tokens of section 5.1."""
    with keras.device("cpu"):
        model = models.Transformer(37_000, size="base")
    assert 62e6 < model.count_params() < 66e6


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_transformer_learns_to_copy(dtype, policy):
    policy(dtype)
    model = models.Transformer(
        7, num_layers=1, dim=16, num_heads=2, intermediate_dim=32, dropout=0.0
    )
    source = ids(64, 3, vocabulary=7)
    inputs = {"source": source, "target": np.pad(source, ((0, 0), (1, 0)))[:, :-1] + 0}
    inputs["target"][:, 0] = 1
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    history = model.fit(inputs, source, epochs=8, batch_size=32, verbose=0)
    losses = history.history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0]


# --- Vision Transformer --------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["token", "mean", "attention"])
@pytest.mark.parametrize("norm_placement", ["pre", "post", "sandwich", "deep"])
@pytest.mark.parametrize("registers", [0, 2])
def test_vision_transformer_is_the_paper(norm_placement, pooling, registers):
    model = vision_transformer(
        norm_placement=norm_placement,
        pooling=pooling,
        num_register_tokens=registers,
        image_size=(10, 15),
        layer_scale=0.1 if pooling == "mean" else None,
        stochastic_depth=0.2,
    )
    x = images(2, 10, 15, 2)
    weights = {w.path: w.numpy().astype("float64") for w in model.weights}
    patches = oracle.inside(weights, "patches")
    y = oracle.patch_embedding(patches, x, (5, 5), (5, 5), (2, 3))
    y = (y + weights["positions/embeddings"]).reshape(2, 6, 6)
    if registers:
        tokens = np.broadcast_to(weights["register_tokens/tokens"], (2, registers, 6))
        y = np.concatenate([tokens, y], 1)
    if pooling == "token":
        token = np.broadcast_to(weights["class_token/tokens"], (2, 1, 6))
        y = np.concatenate([token, y], 1)
    for index in range(2):
        y = oracle.encoder_block(
            oracle.inside(weights, f"block_{index}"),
            y,
            activation="gelu",
            placement=norm_placement,
            epsilon=1e-6,
            alpha=4**0.25,  # of 2 layers
        )
    if norm_placement in ("pre", "sandwich"):
        y = oracle.layer_norm(oracle.inside(weights, "norm"), y, 1e-6)
    if pooling == "token":
        y = y[:, 0]
    elif pooling == "mean":
        y = y[:, registers:].mean(1)
    else:
        pooling = oracle.inside(weights, "pooling")
        y = oracle.attention_pooling(pooling, y[:, registers:], None, True)[:, 0]
    close(model(x), oracle.dense(oracle.inside(weights, "logits"), y), 1e-4)


def test_the_blocks_of_a_vision_transformer_are_dropped_more_with_depth():
    model = vision_transformer(num_layers=3, stochastic_depth=0.2)
    rates = [model.get_layer(f"block_{i}").stochastic_depth for i in range(3)]
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.2])
    assert not any("branch_scale" in w.path for w in model.weights)
    model = vision_transformer(layer_scale=0.1)
    assert sum("branch_scale" in w.path for w in model.weights) == 4


@pytest.mark.parametrize(
    "size, millions", [("tiny", 5.7), ("small", 22.1), ("base", 86.6)]
)
def test_vision_transformers_have_the_papers_number_of_weights(size, millions):
    if size == "base":
        sizes = models.VISION_TRANSFORMER_SIZES["base"]
        assert sizes["dim"] == 768 and sizes["intermediate_dim"] == 4 * 768
        return  # 350 MB for one number
    model = models.VisionTransformer(size=size)
    assert abs(model.count_params() / 1e6 - millions) < 0.06


def test_any_size_resizes_the_positions():
    model = vision_transformer(any_size=True)
    fixed = vision_transformer()
    fixed.set_weights(model.get_weights())
    x = images(2, 10, 10, 2)
    close(model(x), fixed(x))
    assert model(images(2, 15, 20, 2)).shape == (2, 7)
    with pytest.raises(ValueError):
        fixed(images(2, 15, 20, 2))


def test_features_without_a_head():
    model = models.VisionTransformer(
        None, image_size=10, patch_size=5, **SMALL, channels=2
    )
    assert model.output_shape == (None, 6)


BAD_MODELS = [
    (models.VisionTransformer, {"size": "huge"}, "tiny.*small.*base.*'huge'"),
    (models.VisionTransformer, {"size": None, "dim": 6}, "num_layers.*num_heads"),
    (models.VisionTransformer, {"image_size": 30}, r'(?s)height, 30.*16.*"same"'),
    (models.VisionTransformer, {"image_size": (32, 9)}, "(?s)width, 9.*smaller.*16"),
    (models.VisionTransformer, {"pooling": "max"}, "token.*mean.*attention.*'max'"),
    (models.VisionTransformer, {"num_register_tokens": -1}, "num_register_tokens=-1"),
    (
        models.VisionTransformer,
        {"num_heads": 5, "num_layers": 1},
        r"(?s)multiple.*192.*num_heads=5",
    ),
    (
        models.VisionTransformer,
        {"norm_placement": "up", "num_layers": 1},
        "post.*pre.*'up'",
    ),
    (models.Transformer, {"source_vocabulary_size": 9, "size": "x"}, "base.*big.*'x'"),
    (
        models.Transformer,
        {"source_vocabulary_size": 9, "size": None, "dim": 6},
        "num_layers.*num_heads",
    ),
    (
        models.Transformer,
        {"source_vocabulary_size": 9, **SMALL, "num_heads": 4},
        r"(?s)multiple.*6\), num_heads=4",
    ),
    (models.Transformer, {"source_vocabulary_size": 0, **SMALL}, "positive.*=0"),
    (
        models.Transformer,
        {"source_vocabulary_size": 9, **SMALL, "num_layers": 0},
        "num_layers=0",
    ),
]


@pytest.mark.parametrize(
    "build, arguments, said", BAD_MODELS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_a_bad_argument_is_refused(build, arguments, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        build(**arguments)


# --- Both ----------------------------------------------------------------------------


# Keras says so of every layer without weights to quantize.
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
# What Keras' int8 embedding does on torch.
@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors")
@pytest.mark.parametrize("name", ["transformer", "vision_transformer"])
def test_a_saved_model_is_loaded(name, tmp_path):
    if name == "transformer":
        model, x = transformer(), {"source": ids(2, 5), "target": ids(2, 3)}
    else:
        model, x = vision_transformer(any_size=True), images(2, 10, 15, 2)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    close(run_whole(loaded, x), run_whole(model, x))
    assert loaded.name == name
    model.quantize("int8")
    model.save(tmp_path / "int8.keras")
    close(
        run_whole(keras.saving.load_model(tmp_path / "int8.keras"), x),
        run_whole(model, x),
    )


def test_the_mean_is_over_tokens_whatever_the_image_format():
    before = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_first")
    try:
        model = models.VisionTransformer(
            None, 8, None, 4, 1, 6, 2, 11, pooling="mean", name="first"
        )
    finally:
        keras.config.set_image_data_format(before)
    assert model.output_shape == (None, 6)


@pytest.mark.parametrize(
    "build, arguments",
    [
        (
            models.Transformer,
            {"source_vocabulary_size": 9, "target_vocabulary_size": 0},
        ),
        (models.VisionTransformer, {"channels": 0}),
        (models.VisionTransformer, {"image_size": (32,)}),
        (models.VisionTransformer, {"image_size": 32.0}),
        (models.VisionTransformer, {"num_classes": -1}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_size_is_a_positive_integer(build, arguments):
    name, value = list(arguments.items())[-1]
    with pytest.raises(ValueError, match=f"(?s){name}.*positive integer"):
        build(**arguments)
