"""The parts of `examples/pronounce.py`, and one short training with all of them."""

import importlib.util
import pathlib

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "pronounce.py"
DICTIONARY = {
    "cat": [("K", "AE", "T")],
    "read": [("R", "IY", "D"), ("R", "EH", "D")],
    "ox": [("AA", "K", "S")],
}


@pytest.fixture(scope="module")
def pronounce():
    spec = importlib.util.spec_from_file_location("pronounce", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look their module up
        patch.setitem(__import__("sys").modules, "pronounce", module)
        spec.loader.exec_module(module)
        yield module


def test_dictionary_lines(pronounce, tmp_path):
    path = tmp_path / "small.dict"
    path.write_text(
        "read R IY1 D\nread(2) R EH1 D # past\nread(3) R EH0 D\ncat K AE1 T\n"
    )
    expected = {"read": DICTIONARY["read"], "cat": DICTIONARY["cat"]}
    assert pronounce.read_dictionary(path) == expected


def test_split_is_by_word_and_fixed(pronounce):
    words = [f"word{i}" for i in range(2000)]
    parts = pronounce.split_words(words)
    assert sorted(sum(parts.values(), [])) == sorted(words)
    assert parts == pronounce.split_words(words)
    assert 0.85 < len(parts["train"]) / 2000 < 0.95


def test_batches_shift_the_target_and_fill_the_last_batch(pronounce):
    batches = pronounce.Batches(DICTIONARY, DICTIONARY, lengths=(4, 6), batch_size=8)
    assert len(batches) == 1  # 4 pairs, all of length 4
    inputs, labels = batches[0]
    assert inputs["source"].shape == inputs["target"].shape == labels.shape == (8, 4)
    real = inputs["source"][:, 0] > 0
    assert real.sum() == 4
    assert (inputs["target"][real, 0] == pronounce.BEGIN).all()
    np.testing.assert_array_equal(
        inputs["target"][:, 1:] * (labels[:, 1:] > 0),
        labels[:, :-1] * (labels[:, 1:] > 0),
    )
    assert ((labels == pronounce.END).sum(axis=1) == real).all()


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)],
)
def test_edit_distance(pronounce, left, right, distance):
    assert pronounce.edit_distance(left, right) == distance


def test_error_rates_take_the_nearest_pronunciation(pronounce):
    spoken = {"read": ("R", "EH", "D"), "cat": ("K", "AH", "T"), "ox": ("AA", "K")}
    per, wer = pronounce.error_rates(spoken, DICTIONARY)
    np.testing.assert_allclose((per, wer), (100 * 2 / 9, 100 * 2 / 3))


def test_words_are_checked(pronounce, capsys):
    with pytest.raises(SystemExit):
        pronounce.main(["--words", "naïve"])
    assert "word='naïve'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pronounce.main(["--save", "model.txt"])
    assert "must end in .keras" in capsys.readouterr().err


def test_learns_and_speaks_a_tiny_dictionary(pronounce):
    recipe = pronounce.Recipe(
        dim=16,
        num_heads=2,
        intermediate_dim=32,
        num_encoder_layers=1,
        lengths=(4,),
        batch_size=4,
        learning_rate=1e-2,
        epochs=60,
        label_smoothing=0.0,
    )
    words = {word: listed[:1] for word, listed in DICTIONARY.items()}
    model = pronounce.build_model(recipe)
    batches = pronounce.Batches(words, words, recipe.lengths, recipe.batch_size)
    pronounce.compile_model(model, recipe, recipe.learning_rate)
    history = model.fit(batches, epochs=recipe.epochs, verbose=0).history
    assert history["loss"][-1] < 0.2 * history["loss"][0]
    spoken = pronounce.pronounce(model, words, recipe.lengths, batch_size=4, verbose=0)
    assert pronounce.error_rates(spoken, words) == (0.0, 0.0)
