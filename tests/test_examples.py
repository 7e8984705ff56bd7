"""The image examples: their parts, and a `--smoke` run of each as a user starts it."""

import gzip
import importlib
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_attn as ka

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name, as Python does when it runs one beside it."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def smoke(name, output):
    """The finished `--smoke` run of an example in a process of its own."""
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--smoke", "--output", output],
        env={**os.environ, "KERAS_BACKEND": keras.backend.backend()},
        capture_output=True,
        text=True,
        check=False,
    )


def reported(output, name):
    """The percentage behind `name` in the table at the end of a run."""
    return float(re.search(rf"^  {re.escape(name)} +([\d.]+)%$", output, re.M)[1])


def test_vit_digits_learns_exports_and_shows_its_attention(tmp_path):
    for package in ("tensorflow", "ai_edge_litert", "matplotlib", "sklearn"):
        pytest.importorskip(package)
    run = smoke("vit_digits", tmp_path)
    assert run.returncode == 0, run.stderr
    assert reported(run.stdout, "accuracy, Keras") > 60
    assert reported(run.stdout, "accuracy, Keras") == reported(
        run.stdout, "accuracy, .tflite"
    )
    assert (tmp_path / "saved_model" / "saved_model.pb").is_file()
    assert sorted(os.listdir(tmp_path / "device")) == [
        "digits.tflite",
        "digits_on_device.py",
        "held_out.npz",
        "runtime.py",
    ]
    assert (tmp_path / "attention.png").read_bytes().startswith(PNG)


def test_fashion_vit_learns_and_shows_its_attention(tmp_path):
    pytest.importorskip("matplotlib")
    run = smoke("fashion_vit", tmp_path)
    if run.returncode == 3:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    assert reported(run.stdout, "test accuracy") > 40
    assert len(re.findall(r"^  .*%.*%   .+ \(\d+\)$", run.stdout, re.M)) == 10
    assert (tmp_path / "fashion.png").read_bytes().startswith(PNG)


def test_fashion_vit_says_how_to_get_its_data(example, capsys, tmp_path):
    assert example("fashion_vit").main(["--data", str(tmp_path)]) == 3
    message = capsys.readouterr().err
    assert "apt-get install dataset-fashion-mnist" in message
    assert "train-images-idx3-ubyte.gz" in message


def test_fashion_vit_reads_idx_files(example, tmp_path):
    with gzip.open(tmp_path / "bytes.gz", "wb") as file:
        file.write(b"\0\0\x08\x02" + b"\0\0\0\x02" + b"\0\0\0\x03" + bytes(range(6)))
    array = example("fashion_vit").read_idx(tmp_path / "bytes.gz")
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])


def test_vit_digits_moves_every_digit_by_one_pixel(example):
    image = np.zeros((1, 8, 8, 1), "float32")
    image[0, 3, 4] = 1
    images, labels = example("vit_digits").shifted(image, np.array([7]))
    assert [tuple(place[:2]) for place in np.argwhere(images[..., 0])[:, 1:]] == [
        (3, 4),
        (4, 4),
        (2, 4),
        (3, 5),
        (3, 3),
    ]
    assert list(labels) == [7] * 5


def test_class_attention_of_one_block_is_half_its_attention(example):
    images = keras.Input((4, 4, 1))
    x = ka.PrefixTokens(1)(ka.PatchEmbedding(8, patch_size=2)(images))
    block = ka.EncoderBlock(num_heads=2, intermediate_dim=8, norm_placement="pre")
    vit = keras.Model(images, block(x))
    pixels = np.random.default_rng(0).random((3, 4, 4, 1), dtype="float32")

    attention = example("class_attention").class_attention(vit, pixels)

    tokens = keras.Model(images, x)(pixels)
    normed = block.attention_residual.norm(tokens)
    _, scores = block.attention(normed, return_attention_scores=True)
    expected = keras.ops.convert_to_numpy(scores).mean(1)[:, 0, 1:] / 2
    np.testing.assert_allclose(attention, expected, atol=1e-6)
