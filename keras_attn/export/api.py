"""`to_saved_model` and `to_litert`: from any backend, checked, then put in place."""

import importlib.util
import time

import keras
import numpy as np

from keras_attn.export import parity, place
from keras_attn.export.flatbuffer import count_ops, refuse_custom_ops
from keras_attn.export.modules import modules_of
from keras_attn.export.precision import as_float32
from keras_attn.export.process import Progress, run_child
from keras_attn.export.report import ExportReport
from keras_attn.export.runtime import LiteRTModel
from keras_attn.export.signature import Tensor, check_model, input_tensors, output_names

# The largest difference that passes, by quantization, for outputs of size 1.
TOLERANCES = {None: 1e-4, "float16": 5e-3, "dynamic_int8": 0.2}


def to_litert(
    model,
    path,
    quantization=None,
    representative_data=None,
    *,
    batch=1,
    length=None,
    inputs=None,
    tolerance=None,
    imports=(),
    verbose=True,
):
    """Writes `model` as a `.tflite` file for LiteRT, with builtin operations alone.

    The model may live on any backend. It is saved and converted in a process of its
    own with the TensorFlow backend, run with LiteRT, and compared with its own outputs;
    only then does the file appear at `path`. Input names are the keys of a dictionary
    input, or the names of the `keras.Input`.

    Args:
        model: a functional or `Sequential` model. Half precision becomes float32.
        path: the file to write, ending in `.tflite`; an older one is replaced.
        quantization: `None`; `"float16"` weights (half the size); `"dynamic_int8"`
            weights (a quarter, and faster).
        representative_data: not used by these.
        batch: the batch size, fixed; `None` for any.
        length: the sizes of axes that the model leaves open: an integer, a tuple with
            one integer for each open axis, `{input name: either}`; `None` for any.
        inputs: inputs to compare on, as the model takes them. Without, some are made:
            normal floats, and ids that the model's embeddings know, padded with 0.
        tolerance: how far an output of size 1 may differ. `None` is 1e-4, or 5e-3 for
            `"float16"` and 0.2 for `"dynamic_int8"`.
        imports: modules that register what the model is made of, where they are not
            found from the model itself.
        verbose: print the stages and the report.

    Returns:
        An `ExportReport`.

    Raises:
        ValueError, TypeError, OSError: an argument that cannot work, said before
            anything is done.
        ImportError: TensorFlow or LiteRT is not installed.
        ExportError: an operation has no builtin (names it and its layer), the outputs
            differ, or the process failed. The target is as it was.

    Example:
        report = keras_attn.export.to_litert(model, "model.tflite")
        logits = keras_attn.export.LiteRTModel("model.tflite")(images)
    """
    target = place.litert_target(path)
    _check_quantization(quantization, representative_data)
    _require("tensorflow", "ai_edge_litert")
    if tolerance is None:
        tolerance = TOLERANCES[quantization]
    export = _Export(model, batch, length, inputs, imports, verbose)
    with place.workspace(target) as folder:
        made = folder / "model.tflite"
        export.convert(folder, "litert", made, quantization)
        export.progress.stage("Checking")
        ops = count_ops(made)
        refuse_custom_ops(ops)
        difference = parity.max_difference(export.cases, _runner(made), tolerance)
        return export.finish(
            made, target, folder, difference, ops=ops, quantization=quantization
        )


def to_saved_model(
    model,
    path,
    *,
    batch=None,
    length=None,
    inputs=None,
    tolerance=1e-4,
    imports=(),
    verbose=True,
):
    """Writes `model` as a TensorFlow SavedModel, served without Keras.

    The model may live on any backend; see `to_litert` for how it is made and checked.
    The folder holds two functions: `signatures["serving_default"]`, from named inputs
    to named outputs, and `serve`, which takes and returns the model's own structure.

    Args:
        model: a functional or `Sequential` model. Half precision becomes float32.
        path: the folder to write: new, empty, or an older SavedModel to replace.
        batch: the batch size, fixed; `None` for any.
        length: as in `to_litert`.
        inputs: as in `to_litert`.
        tolerance: how far an output of size 1 may differ.
        imports: as in `to_litert`.
        verbose: print the stages and the report.

    Returns:
        An `ExportReport`.

    Raises:
        ValueError, TypeError, OSError: an argument that cannot work.
        ImportError: TensorFlow is not installed.
        ExportError: the outputs differ, or the process failed.

    Example:
        keras_attn.export.to_saved_model(model, "served")
        served = tf.saved_model.load("served")
        served.signatures["serving_default"](source=tokens)["logits"]
    """
    target = place.saved_model_target(path)
    _require("tensorflow")
    export = _Export(model, batch, length, inputs, imports, verbose)
    with place.workspace(target) as folder:
        made = folder / "saved_model"
        outputs = iter(export.convert(folder, "saved_model", made, None))
        difference = parity.max_difference(
            export.cases, lambda feeds: dict(np.load(next(outputs))), tolerance
        )
        return export.finish(made, target, folder, difference)


class _Export:
    """One export: the checked model, its names, and the cases it is compared on."""

    def __init__(self, model, batch, length, inputs, imports, verbose):
        check_model(model)
        self.started = time.monotonic()
        self.verbose = verbose
        self.progress = Progress(verbose)
        self.modules = modules_of(model, imports)
        self.model = as_float32(model)
        self.inputs = input_tensors(self.model, batch, length)
        self.outputs = output_names(self.model)
        self.progress.stage("Running the model")
        self.cases = parity.reference_cases(self.model, self.inputs, inputs)

    def convert(self, folder, kind, made, quantization):
        """Makes `made` in the child; returns the files of its outputs, if it ran."""
        try:
            self.progress.stage("Saving")
            self.model.save(folder / "model.keras")
            files = self._write_cases(folder) if kind == "saved_model" else []
            run_child(
                {
                    "format": kind,
                    "model": str(folder / "model.keras"),
                    "saved_model": str(folder / "saved_model"),
                    "target": str(made),
                    "inputs": [vars(tensor) for tensor in self.inputs],
                    "outputs": self.outputs,
                    "cases": files,
                    "quantization": quantization,
                    "imports": self.modules,
                    "floatx": keras.config.floatx(),
                    "image_data_format": keras.config.image_data_format(),
                },
                folder,
                self.progress,
            )
        except BaseException:
            self.progress.end("failed")
            raise
        return [case["outputs"] for case in files]

    def finish(self, made, target, folder, difference, **found):
        """Puts the checked file in place and reports on it."""
        size = place.size_of(made)
        place.put(made, target, folder)
        self.progress.end()
        report = ExportReport(
            path=str(target),
            size=size,
            inputs=tuple(self.inputs),
            outputs=self._output_tensors(),
            max_difference=difference,
            largest_output=parity.largest_output(self.cases),
            cases=len(self.cases),
            seconds=time.monotonic() - self.started,
            **found,
        )
        if self.verbose:
            print(report, flush=True)
        return report

    def _write_cases(self, folder):
        files = []
        for number, (feeds, _) in enumerate(self.cases):
            files.append(
                {
                    "inputs": str(folder / f"inputs_{number}.npz"),
                    "outputs": str(folder / f"outputs_{number}.npz"),
                }
            )
            np.savez(files[-1]["inputs"], **feeds)
        return files

    def _output_tensors(self):
        """Sizes that the model leaves open but the export fixes stay open here."""
        batch = self.inputs[0].shape[0]
        return tuple(
            Tensor(name, (batch, *tensor.shape[1:]), tensor.dtype)
            for name, tensor in zip(self.outputs, self.model.outputs, strict=True)
        )


def _runner(path):
    """The file as a function from inputs by name to outputs by name."""
    file = LiteRTModel(path)

    def run(feeds):
        outputs = file(**feeds)
        return outputs if isinstance(outputs, dict) else {[*file.outputs][0]: outputs}

    return run


def _check_quantization(quantization, representative_data):
    if quantization not in TOLERANCES:
        raise ValueError(
            f"`quantization` must be one of {list(TOLERANCES)}. "
            f"Received: quantization={quantization!r}"
        )
    if representative_data is not None:
        raise ValueError(
            "`representative_data` calibrates a full integer file, which is not among "
            f"{list(TOLERANCES)}. Received it with quantization={quantization!r}"
        )


def _require(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"The export needs {' and '.join(missing)}: "
            '`pip install "keras-attn[export]"`'
        )
