"""The Transformer of `examples/pronounce.py` beside an LSTM, in one run.

    python benchmarks/pronounce_lstm.py --minutes 5

Both are encoder-decoders of one width on the same words, batches, loss and optimizer.
The LSTM is bidirectional in the encoder and reads it by dot-product attention (Luong et
al., 2015, https://arxiv.org/abs/1508.04025). They train in turns of a few steps, so
that whatever else the machine does falls on both alike, until each has used its
minutes; time to compile a shape is not counted. The learning rate follows the time
used: up for a tenth of it, then down to 0 on a cosine. The table gives steps per
second, and error rates on held-out words after equal time.
"""

import argparse
import math
import pathlib
import sys
import time

import keras
from keras import layers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import pronounce

TURN = 10  # steps


def build_lstm(recipe):
    """The same interface as the Transformer: logits from source and target."""
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    num_letters, num_phones = len(pronounce.LETTERS) + 1, len(pronounce.PHONES) + 3

    x = layers.Embedding(num_letters, recipe.dim, mask_zero=True)(source)
    encoder = layers.LSTM(recipe.dim // 2, return_sequences=True, return_state=True)
    memory, h, c, back_h, back_c = layers.Bidirectional(encoder)(x)
    state = [layers.Concatenate()([h, back_h]), layers.Concatenate()([c, back_c])]

    embedding = layers.ReversibleEmbedding(num_phones, recipe.dim, mask_zero=True)
    decoder = layers.LSTM(recipe.dim, return_sequences=True)
    y = decoder(embedding(target), initial_state=state)
    context = layers.Attention()([y, memory])
    y = layers.Concatenate()([y, context])
    y = layers.Dense(recipe.dim, activation="tanh")(y)
    logits = embedding(y, reverse=True)
    return keras.Model({"source": source, "target": target}, logits, name="lstm")


class Contestant:
    """A model, its batches, and the time it has used."""

    def __init__(self, name, model, recipe, batches, seconds):
        self.name, self.model, self.recipe = name, model, recipe
        self.batches, self.seconds = batches, seconds
        self.used = self.cpu = self.steps = 0
        self.met = set()
        self.stream = self._stream()
        pronounce.compile_model(model, recipe, recipe.learning_rate)

    def _stream(self):
        while True:
            yield from (self.batches[index] for index in range(len(self.batches)))
            self.batches.on_epoch_end()

    @property
    def running(self):
        return self.used < self.seconds

    def turn(self):
        for _ in range(TURN):
            inputs, labels = next(self.stream)
            self.model.optimizer.learning_rate = self._rate()
            start = time.perf_counter(), time.process_time()
            self.model.train_on_batch(inputs, labels)
            if labels.shape in self.met:  # else it was compiled
                self.used += time.perf_counter() - start[0]
                self.cpu += time.process_time() - start[1]
                self.steps += 1
            self.met.add(labels.shape)

    def _rate(self):
        share = min(1.0, self.used / self.seconds)
        if share < 0.1:
            return self.recipe.learning_rate * max(share, 1e-3) / 0.1
        return (
            self.recipe.learning_rate
            * (1 + math.cos((share - 0.1) / 0.9 * math.pi))
            / 2
        )

    def row(self, dictionary, words):
        spoken = pronounce.pronounce(self.model, words, self.recipe.lengths)
        per, wer = pronounce.error_rates(spoken, dictionary)
        weights = self.model.count_params()
        return [
            weights,
            self.steps,
            self.steps / self.used,
            self.steps / self.cpu,
            per,
            wer,
        ]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="each (default: 5)")
    parser.add_argument("--test-words", type=int, default=2000)
    arguments = parser.parse_args(argv)
    if not arguments.minutes > 0:
        parser.error(f"--minutes must be positive. Received: {arguments.minutes}")

    keras.utils.set_random_seed(0)
    recipe = pronounce.RECIPES["full"]
    dictionary = pronounce.read_dictionary(pronounce.find_dictionary())
    parts = pronounce.split_words(dictionary)
    contestants = []
    for name, build in {
        "Transformer": pronounce.build_model,
        "LSTM": build_lstm,
    }.items():
        batches = pronounce.Batches(
            parts["train"], dictionary, recipe.lengths, recipe.batch_size
        )
        model, seconds = build(recipe), 60 * arguments.minutes
        contestants.append(Contestant(name, model, recipe, batches, seconds))
    compete(contestants)
    words = pronounce.take(parts["test"], arguments.test_words)
    print_table({c.name: c.row(dictionary, words) for c in contestants}, arguments)


def compete(contestants):
    """Turns, until all have used their time."""
    total = sum(math.ceil(c.seconds) for c in contestants)
    progress = keras.utils.Progbar(total, unit_name="second")
    while any(c.running for c in contestants):
        for contestant in contestants:
            if contestant.running:
                contestant.turn()
        used = sum(min(c.used, c.seconds) for c in contestants)
        progress.update(min(total, int(used)))
    progress.update(total, finalize=True)


def print_table(rows, arguments):
    """One line a model, and the ratio of the first to the second."""
    names = ["weights", "steps", "steps/s", "steps/CPU-s", "PER %", "WER %"]
    (first, second) = rows.values()
    rows["ratio"] = [a / b for a, b in zip(first, second, strict=True)]
    print(
        f"\n{arguments.minutes:g} minutes each, backend {keras.backend.backend()}, "
        f"{arguments.test_words} held-out words"
    )
    print(f"{'':12}" + "".join(f"{name:>13}" for name in names))
    for name, row in rows.items():
        formats = (
            [".2f"] * 6 if name == "ratio" else ["d", "d", ".2f", ".2f", ".1f", ".1f"]
        )
        cells = (f"{value:>13{form}}" for value, form in zip(row, formats, strict=True))
        print(f"{name:12}" + "".join(cells))


if __name__ == "__main__":
    main()
