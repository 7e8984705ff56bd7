"""A small ViT learns handwritten digits, becomes a `.tflite`, and shows where it looks.

    python examples/vit_digits.py            # a minute or two on two cores
    python examples/vit_digits.py --smoke    # the same path: one block, one epoch

Runs unchanged on TensorFlow, JAX and torch: `KERAS_BACKEND` chooses. Needs one of them
and `pip install "keras-attn[export,plot,real]"`.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import keras
import numpy as np
from class_attention import class_attention, draw_attention
from keras import layers
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_attn as ka
from keras_attn import export


def main(argv=None):
    args = parse_arguments(argv)
    keras.utils.set_random_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    train_images, test_images, train_labels, test_labels = load_data()

    vit = build_vit(num_layers=1 if args.smoke else 2)
    started = time.monotonic()
    train(vit, *shifted(train_images, train_labels), epochs=1 if args.smoke else 10)
    seconds = time.monotonic() - started
    logits = vit.predict(test_images, batch_size=len(test_images), verbose=0)

    export.to_saved_model(vit, args.output / "saved_model")
    device = args.output / "device"
    report = export.to_litert(vit, device / "digits.tflite")
    tflite = run_on_device(device, test_images, test_labels)

    picture = args.output / "attention.png"
    plot_attention(vit, test_images, test_labels, picture)
    print_table(
        {
            "backend": keras.backend.backend(),
            "parameters": f"{vit.count_params():,}",
            "training": f"{seconds:.0f} s",
            "held-out digits": len(test_labels),
            "accuracy, Keras": f"{np.mean(logits.argmax(-1) == test_labels):.2%}",
            "accuracy, .tflite": f"{tflite['accuracy']:.2%}",
            "time, .tflite": f"{tflite['milliseconds']:.2f} ms a digit, one thread",
            "size, .tflite": f"{report.size / 1000:,.0f} kB",
            "SavedModel": args.output / "saved_model",
            "for the device": device,
            "attention": picture,
        }
    )


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one block, one epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default="out/digits")
    return parser.parse_args(argv)


def load_data():
    """1,797 digits of 8x8 pixels from 0 to 16; a quarter of each class is held out."""
    digits = load_digits()
    return train_test_split(
        digits.images[..., np.newaxis].astype("float32"),
        digits.target,
        test_size=0.25,
        stratify=digits.target,
        random_state=0,
    )


def shifted(images, labels):
    """Every digit five times: as it is, and moved by one pixel to each side."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    corners = (1, 1), (0, 1), (2, 1), (1, 0), (1, 2)
    moved = [padded[:, row : row + 8, col : col + 8] for row, col in corners]
    return np.concatenate(moved), np.tile(labels, len(moved))


def build_vit(num_layers, dim=48):
    images = keras.Input((8, 8, 1), name="images")
    x = layers.Rescaling(1 / 6, offset=-5 / 6)(images)  # mean 0, deviation 1
    x = ka.PatchEmbedding(dim, patch_size=4, strides=2, padding="same")(x)
    x = ka.LearnedPositionEmbedding(
        (4, 4), initializer=keras.initializers.TruncatedNormal(stddev=0.5)
    )(x)  # (batch, 4, 4, dim)
    x = ka.PrefixTokens(1)(x)  # the class token, then the patches: (batch, 17, dim)
    for index in range(num_layers):
        x = ka.EncoderBlock(
            num_heads=4,
            intermediate_dim=2 * dim,
            norm_placement="pre",
            activation="gelu",
            name=f"block_{index}",
        )(x)
    x = layers.LayerNormalization()(x)
    logits = layers.Dense(10, name="logits")(x[:, 0])  # what the class token gathered
    return keras.Model(images, logits, name="vit_digits")


def train(vit, images, labels, epochs, batch_size=64):
    steps = epochs * (len(images) // batch_size + 1)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=3e-3, warmup_steps=steps // 10
    )
    vit.compile(
        optimizer=keras.optimizers.AdamW(rate, weight_decay=0.05),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        ),
        metrics=["accuracy"],
    )
    vit.summary()
    vit.fit(
        images,
        keras.utils.to_categorical(labels, 10),
        batch_size=batch_size,
        epochs=epochs,
        verbose="auto" if sys.stdout.isatty() else 2,
    )


def run_on_device(folder, images, labels):
    """Classifies with the `.tflite` in a process that has no Keras and no framework.

    `folder` then holds all that a device needs, next to numpy and ai-edge-litert.
    """
    here = pathlib.Path(__file__).parent
    shutil.copy(export.runtime.__file__, folder / "runtime.py")
    shutil.copy(here / "digits_on_device.py", folder / "digits_on_device.py")
    np.savez_compressed(folder / "held_out.npz", images=images, labels=labels)
    child = subprocess.run(
        [sys.executable, "digits_on_device.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(child.stdout)


def plot_attention(vit, images, labels, path):
    """Draws the first of each of the ten digits under the class token's attention."""
    firsts = images[[np.argmax(labels == digit) for digit in range(10)]]
    attention = class_attention(vit, firsts)
    figure = Figure(figsize=(10, 1.6), layout="constrained")
    figure.suptitle("Where the class token looks (attention rollout; red is most)")
    for digit, axis in enumerate(figure.subplots(1, 10)):
        draw_attention(axis, firsts[digit] / 16, attention[digit])
        axis.set_title(f"a {digit}", fontsize=10)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def print_table(rows):
    print()
    for name, value in rows.items():
        print(f"  {name:<18}{value}")


if __name__ == "__main__":
    main()
