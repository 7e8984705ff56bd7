"""A Swin Transformer made of the library's parts, in an example-sized file."""

import importlib
import pathlib
import re

import keras
import numpy as np
import oracle
import pytest
from cases import numpy, randomize
from test_examples import PNG, smoke

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture
def swin(monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("swin_digits")


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def cell(place, window, shift):
    """Which window of the plane, shifted but not rolled, a row or column stands in."""
    return (place - shift) // window


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_shifted_window_attention_is_the_papers(swin, shift):
    """Attention over the whole grid, hidden outside the shifted windows, in loops."""
    rows, cols, window, heads = 8, 4, 4, 2
    inputs = keras.Input((rows, cols, 6))
    outputs = swin.window_attention(inputs, heads, window, shift, "block")
    model = keras.Model(inputs, outputs)
    randomize(model)
    places = list(np.ndindex(rows, cols))
    seen = np.zeros((len(places), len(places)), bool)
    bias = np.zeros((heads, *seen.shape))
    table = numpy(model.get_layer("block_bias").table).astype("float64")
    for q, k in np.ndindex(*seen.shape):
        (r, c), (r2, c2) = places[q], places[k]
        cells = [
            (cell(row, window, shift), cell(col, window, shift))
            for row, col in ((r, c), (r2, c2))
        ]
        if cells[0] == cells[1]:
            seen[q, k] = True
            bias[:, q, k] = table[r - r2 + window - 1, c - c2 + window - 1]
    x = array(2, rows, cols, 6)
    weights = oracle.weights_of(model.get_layer("block_attention"))
    expected, _ = oracle.multi_head_attention(
        weights, x.reshape(2, rows * cols, 6), mask=seen, bias=bias
    )
    np.testing.assert_allclose(
        numpy(model(x)), expected.reshape(x.shape), rtol=2e-5, atol=2e-5
    )


def test_nothing_leaks_between_regions(swin):
    """One token changes: those of its shifted window follow, no other does."""
    inputs = keras.Input((8, 8, 6))
    model = keras.Model(inputs, swin.window_attention(inputs, 2, 4, 2, "block"))
    randomize(model)
    x = array(1, 8, 8, 6)
    before = numpy(model(x))
    for row, col in [(0, 0), (1, 7), (3, 4), (7, 2)]:
        other = x.copy()
        other[0, row, col] += 50.0
        moved = (numpy(model(other)) != before).any(-1)[0]
        for r, c in np.ndindex(8, 8):
            same_window = cell(r, 4, 2) == cell(row, 4, 2)
            same_window = same_window and cell(c, 4, 2) == cell(col, 4, 2)
            assert moved[r, c] == same_window, ((row, col), (r, c))


def test_four_neighbours_become_one_token(swin):
    inputs = keras.Input((4, 6, 3))
    model = keras.Model(inputs, swin.merge_patches(inputs))
    randomize(model)
    x = array(2, 4, 6, 3)
    before = numpy(model(x))
    assert before.shape == (2, 2, 3, 6)
    x[:, 3, 2] += 5.0
    moved = (np.abs(numpy(model(x)) - before) > 1e-4).any((0, 3))
    assert np.argwhere(moved).tolist() == [[1, 1]]


def test_a_swin_is_saved_and_loaded(swin, tmp_path):
    model = swin.build_swin(dim=6, num_heads=(1, 2))
    randomize(model)
    x = 16 * np.random.default_rng(0).random((3, 8, 8, 1), dtype="float32")
    expected = numpy(model(x))
    assert expected.shape == (3, 10)
    model.save(tmp_path / "swin.keras")
    loaded = keras.saving.load_model(tmp_path / "swin.keras")
    for one in (model, loaded):
        found = one.predict(x, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_swin_digits_learns_and_shows_its_bias(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    run = smoke("swin_digits", tmp_path)
    assert run.returncode == 0, run.stderr
    found = re.search(r"^  accuracy +([\d.]+)%$", run.stdout, re.M)
    assert float(found[1]) > 30
    assert (tmp_path / "swin_bias.png").read_bytes().startswith(PNG)
