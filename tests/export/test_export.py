"""Files from the current backend: what they compute, hold, and how they are refused."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import keras
import models
import numpy as np
import pytest
import sample_layers
from keras import layers

from keras_attn import export
from keras_attn.export import api, flatbuffer, parity, process, runtime
from keras_attn.export.modules import modules_of
from keras_attn.export.precision import as_float32
from keras_attn.export.signature import Tensor, input_tensors, output_names

# Keras warns of attention over a single token.
pytestmark = pytest.mark.filterwarnings("ignore:.*softmax over axis")

RNG = np.random.default_rng(7)


def run(model, inputs):
    return model.predict_on_batch(inputs)


def assert_close(got, expected, tolerance=1e-5):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance),
        got,
        expected,
    )


def in_fresh_python(code, blocked, *args, **environment):
    """Runs `code` where importing one of `blocked` raises; returns its JSON output."""
    block = f"""
        import importlib.machinery, json, sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {blocked!r}:
                    return importlib.machinery.ModuleSpec(name, self)
            def create_module(self, spec):
                raise ImportError(f"blocked: {{spec.name}}")
            def exec_module(self, module):
                pass
        sys.meta_path.insert(0, Block())
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(block) + textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def text(folder):
    model = models.text_encoder()
    model.compile("adam", "mse")
    path = folder / "new" / "text.tflite"
    return model, path, export.to_litert(model, path, batch=None, verbose=False)


@pytest.fixture(scope="module")
def pair(folder):
    model = models.encoder_decoder()
    path = folder / "pair.tflite"
    return model, path, export.to_litert(model, path, batch=None, verbose=False)


@pytest.fixture(scope="module")
def served(pair, folder):
    return folder / "served", export.to_saved_model(
        pair[0], folder / "served", verbose=False
    )


@pytest.fixture(scope="module")
def image(folder):
    """Trained in half precision, exported with int8 weights."""
    model = models.image_classifier()
    path = folder / "image.tflite"
    report = export.to_litert(model, path, "dynamic_int8", verbose=False)
    return model, path, report


@pytest.fixture
def no_child(monkeypatch, text):
    """The child, but done already: it made the file of `text`."""

    def run_child(job, folder, progress):
        pathlib.Path(job["target"]).write_bytes(text[1].read_bytes())

    monkeypatch.setattr(api, "run_child", run_child)


class TestTextEncoder:
    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("length", [1, 5, 8])
    def test_any_batch_and_length(self, text, batch, length):
        model, path, _ = text
        tokens = RNG.integers(1, 53, (batch, length)).astype("int32")
        tokens[0, 1 + length // 2 :] = 0
        assert_close(runtime.LiteRTModel(path)(tokens), run(model, tokens))

    def test_padding_is_ignored(self, text):
        file = runtime.LiteRTModel(text[1])
        short = file(tokens=np.array([[5, 9, 2]]))["pooled"]
        assert_close(file(np.array([[5, 9, 2, 0, 0]]))["pooled"], short)

    def test_report(self, text):
        _, path, report = text
        assert report.path == str(path)
        assert report.size == path.stat().st_size
        assert report.inputs == (Tensor("tokens", (None, None), "int32"),)
        assert {tensor.name for tensor in report.outputs} == {"states", "pooled"}
        assert report.max_difference < 1e-5
        assert report.largest_output > 0.1
        assert report.cases == 3
        assert report.ops["BATCH_MATMUL"] == 2
        assert not any("CUSTOM" in name for name in report.ops)
        for word in ("text.tflite", "tokens (?, ?) int32", "SOFTMAX", "parity"):
            assert word in str(report)

    def test_runs_without_keras(self, text):
        """`runtime.py` alone, by its path, with every framework blocked."""
        model, path, _ = text
        code = """
            import importlib.util, numpy as np
            spec = importlib.util.spec_from_file_location("runtime", sys.argv[1])
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            model = module.LiteRTModel(sys.argv[2])
            print(json.dumps(model(tokens=np.array([[3, 8, 0]]))["pooled"].tolist()))
        """
        blocked = ("keras", "keras_attn", "tensorflow", "jax", "torch")
        got = in_fresh_python(code, blocked, runtime.__file__, str(path))
        expected = run(model, np.array([[3, 8, 0]], "int32"))["pooled"]
        assert_close(np.array(got), expected)


class TestEveryLayer:
    """The exporter itself compares the file with the model and refuses other ops."""

    @pytest.mark.parametrize("name", ["every_attention", "every_vision_part"])
    def test_builtin_ops_and_the_same_numbers(self, folder, name):
        model = getattr(models, name)()
        batch = None if name == "every_attention" else 1
        report = export.to_litert(
            model, folder / f"{name}.tflite", batch=batch, verbose=False
        )
        assert report.max_difference < 1e-5
        assert report.largest_output > 0.1

    def test_a_step_with_its_caches(self, folder):
        model, path = models.one_step(), folder / "step.tflite"
        export.to_litert(model, path, verbose=False)
        file = runtime.LiteRTModel(path)
        kept = {x.name: np.zeros((1, *x.shape[1:]), x.dtype) for x in model.inputs}
        same = dict(kept)
        for _ in range(7):  # past the window, which is as long as the cache
            kept["token"] = same["token"] = RNG.normal(size=(1, 1, 16)).astype(
                "float32"
            )
            got, expected = file(**kept), run(model, same)
            assert_close(got["output"], expected["output"])
            kept, same = (
                {
                    name.removeprefix("new_"): np.asarray(x)
                    for name, x in part.items()
                    if name != "output"
                }
                for part in (got, expected)
            )
        assert kept["length"] == 7


class TestEncoderDecoder:
    @pytest.mark.parametrize("lengths", [(1, 5), (8, 1), (5, 8)])
    def test_two_lengths(self, pair, lengths):
        model, path, _ = pair
        source = RNG.integers(1, 31, (2, lengths[0])).astype("int32")
        target = RNG.integers(1, 17, (2, lengths[1])).astype("int32")
        source[1, 1:] = 0
        got = runtime.LiteRTModel(path)(source=source, target=target)
        assert_close(got, run(model, {"source": source, "target": target}))

    def test_saved_model_without_keras(self, pair, served):
        model, _, _ = pair
        path, report = served
        assert report.size > 1000
        assert report.ops == {}
        code = """
            import numpy as np, tensorflow as tf
            loaded = tf.saved_model.load(sys.argv[1])
            signature = loaded.signatures["serving_default"]
            out = []
            for n in (3, 6):
                source = tf.constant(np.arange(2 * n).reshape(2, n) + 1, "int32")
                target = tf.constant(np.arange(n - 1)[None].repeat(2, 0), "int32")
                named = signature(source=source, target=target)["logits"]
                same = loaded.serve({"source": source, "target": target})
                assert np.array_equal(named, same)
                out.append(named.numpy().tolist())
            print(json.dumps(out))
        """
        got = in_fresh_python(code, ("keras", "keras_attn", "jax", "torch"), str(path))
        for n, logits in zip((3, 6), got, strict=True):
            source = (np.arange(2 * n).reshape(2, n) + 1).astype("int32")
            target = np.arange(n - 1)[None].repeat(2, 0).astype("int32")
            assert_close(
                np.array(logits), run(model, {"source": source, "target": target})
            )


class TestImageClassifier:
    def test_int8_weights(self, image):
        model, path, report = image
        assert report.inputs == (Tensor("images", (1, 14, 21, 3), "float32"),)
        assert report.outputs == (Tensor("logits", (1, 5), "float32"),)
        weights = 4 * model.count_params()
        assert report.size < 0.5 * weights
        assert 1e-6 < report.max_difference < 0.1
        images = RNG.standard_normal((1, 14, 21, 3)).astype("float32")
        assert_close(runtime.LiteRTModel(path)(images), run(model, images), 0.1)


class TestFailureLeavesNothing:
    @pytest.fixture
    def older(self, tmp_path):
        path = tmp_path / "model.tflite"
        path.write_bytes(b"older")
        yield path
        assert path.read_bytes() == b"older"
        assert os.listdir(tmp_path) == ["model.tflite"]

    def test_operation_without_builtin(self, older, capsys):
        with pytest.raises(
            export.ExportError, match="`Cholesky` of the layer 'outer/inner_factor'"
        ):
            export.to_litert(models.without_builtin(), older)
        shown = capsys.readouterr().out
        assert "Converting… failed" in shown
        assert "Loading…" in shown

    def test_other_numbers(self, older, no_child):
        other = models.text_encoder()  # may draw the same numbers as `text`
        other.set_weights([weight + 0.1 for weight in other.get_weights()])
        with pytest.raises(export.ExportError, match=r"differs by .* at most"):
            export.to_litert(other, older, batch=None, verbose=False)

    def test_other_outputs(self, older, no_child):
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        outputs = layers.Embedding(11, 3, name="table")(tokens)
        with pytest.raises(export.ExportError, match=r"\['table'\].*\['pooled'"):
            export.to_litert(
                keras.Model(tokens, outputs), older, batch=None, verbose=False
            )

    def test_custom_operation(self, older, no_child, monkeypatch, text):
        monkeypatch.setattr(api, "count_ops", lambda path: {"CUSTOM FlexErf": 1})
        with pytest.raises(export.ExportError, match="FlexErf"):
            export.to_litert(text[0], older, batch=None, verbose=False)

    def test_interrupted(self, older, monkeypatch, text):
        def interrupted(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(process, "_follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export.to_litert(text[0], older, verbose=False)

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("import os; os.kill(os.getpid(), 9)", "signal 9"),
            ("import sys; sys.exit('no space left')", "(?s)exit status 1.*no space"),
        ],
    )
    def test_child_ended(self, older, monkeypatch, text, code, reason):
        monkeypatch.setattr(process, "_START", code)
        with pytest.raises(export.ExportError, match=reason):
            export.to_litert(text[0], older, verbose=False)

    def test_saved_model(self, tmp_path, monkeypatch, text):
        path = tmp_path / "served"
        path.mkdir()
        (path / "saved_model.pb").write_bytes(b"older")
        monkeypatch.setattr(process, "_START", "import sys; sys.exit(3)")
        with pytest.raises(export.ExportError):
            export.to_saved_model(text[0], path, verbose=False)
        assert (path / "saved_model.pb").read_bytes() == b"older"
        assert os.listdir(tmp_path) == ["served"]

    def test_new_folders(self, tmp_path, monkeypatch, text):
        monkeypatch.setattr(process, "_START", "import sys; sys.exit(3)")
        with pytest.raises(export.ExportError):
            export.to_litert(text[0], tmp_path / "a" / "b.tflite", verbose=False)
        assert os.listdir(tmp_path) == []

    def test_replaces_an_older_file(self, tmp_path, no_child, text):
        path = tmp_path / "model.tflite"
        path.write_bytes(b"older")
        export.to_litert(text[0], path, batch=None, verbose=False)
        assert path.read_bytes() == text[1].read_bytes()
        assert os.listdir(tmp_path) == ["model.tflite"]


def linear(**options):
    inputs = keras.Input((3,), name="x")
    return keras.Model(inputs, layers.Dense(2, **options)(inputs))


class TestBadArguments:
    @pytest.fixture(autouse=True)
    def no_process(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("a process was started")

        monkeypatch.setattr(process.subprocess, "Popen", refuse)

    def test_path(self, tmp_path):
        with pytest.raises(ValueError, match=r"\.tflite.*model\.lite"):
            export.to_litert(linear(), tmp_path / "model.lite")
        (tmp_path / "folder.tflite").mkdir()
        with pytest.raises(IsADirectoryError, match=r"folder\.tflite"):
            export.to_litert(linear(), tmp_path / "folder.tflite")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(NotADirectoryError, match="file"):
            export.to_saved_model(linear(), tmp_path / "file")
        with pytest.raises(FileExistsError, match="other things"):
            export.to_saved_model(linear(), tmp_path)
        with pytest.raises(OSError, match="can be written"):
            export.to_litert(linear(), tmp_path / "file" / "m.tflite", verbose=False)

    def test_quantization(self, tmp_path):
        path = tmp_path / "model.tflite"
        with pytest.raises(ValueError, match=r"dynamic_int8.*'int8'"):
            export.to_litert(linear(), path, quantization="int8")
        with pytest.raises(ValueError, match="representative_data"):
            export.to_litert(linear(), path, representative_data=[1])

    def test_missing_extra(self, tmp_path, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: None if name == "ai_edge_litert" else find(name),
        )
        with pytest.raises(ImportError, match=r'pip install "keras-attn\[export\]"'):
            export.to_litert(linear(), tmp_path / "model.tflite")

    def test_model(self, tmp_path):
        path = tmp_path / "model.tflite"

        class Own(keras.Model):
            def call(self, inputs):
                return inputs

        own = Own()
        own(np.zeros((1, 2), "float32"))
        with pytest.raises(ValueError, match=r"functional.*Own"):
            export.to_litert(own, path)
        with pytest.raises(ValueError, match="not built"):
            export.to_litert(keras.Sequential([layers.Dense(2)]), path)
        with pytest.raises(TypeError, match="Dense"):
            export.to_litert(layers.Dense(2), path)

    def test_shapes(self, tmp_path):
        path = tmp_path / "model.tflite"
        with pytest.raises(ValueError, match="batch=2"):
            inputs = keras.Input((3,), batch_size=5)
            export.to_litert(keras.Model(inputs, inputs * 2), path, batch=2)
        with pytest.raises(ValueError, match="Received 0"):
            export.to_litert(linear(), path, batch=0)
        with pytest.raises(ValueError, match="name inputs"):
            export.to_litert(linear(), path, length={"y": 3})

    def test_inputs(self, tmp_path):
        path = tmp_path / "model.tflite"
        for inputs in (np.zeros((1, 4)), [np.zeros((1, 3))] * 2, np.zeros((0, 3))):
            with pytest.raises(ValueError, match="Received"):
                export.to_litert(linear(), path, inputs=inputs, verbose=False)

    def test_lambda(self):
        inputs = keras.Input((3,))
        model = keras.Model(inputs, layers.Lambda(lambda x: x, name="mine")(inputs))
        with pytest.raises(ValueError, match=r"'mine' holds a Python lambda"):
            modules_of(model)

    def test_main(self, monkeypatch):
        inputs = keras.Input((3,))
        model = keras.Model(inputs, sample_layers.Scaled(name="mine")(inputs))
        monkeypatch.setattr(sample_layers.Scaled, "__module__", "__main__")
        with pytest.raises(ValueError, match=r"'mine'.*Scaled.*`__main__`.*module"):
            modules_of(model)

    def test_class_inside_a_function(self):
        @keras.saving.register_keras_serializable(package="sample")
        class Inside(layers.Layer):
            def call(self, inputs):
                return inputs

        inputs = keras.Input((3,))
        with pytest.raises(ValueError, match=r"'mine'.*inside a function"):
            modules_of(keras.Model(inputs, Inside(name="mine")(inputs)))

    def test_unregistered_function(self):
        model = linear(activation=sample_layers.unregistered, name="mine")
        with pytest.raises(ValueError, match=r"'mine'.*'unregistered'.*registered"):
            modules_of(model)
        with pytest.raises(ValueError, match="no_such_module"):
            modules_of(linear(), imports=["no_such_module"])
        with pytest.raises(TypeError, match="list"):
            modules_of(linear(), imports="sample_layers")


def test_modules_are_found():
    assert set(modules_of(models.text_encoder())) == {
        "keras_attn.embeddings",
        "keras_attn.encoder",
        "keras_attn.positions.sinusoidal",
        "sample_layers",
    }
    assert modules_of(linear(), imports=[sample_layers]) == ["sample_layers"]


class TestSignature:
    def test_names(self):
        a, b = keras.Input((3,), name="a-b"), keras.Input((None,), name="c")
        as_list = keras.Model([a, b], [layers.Dense(2, name="left")(a), b * 2])
        assert [t.name for t in input_tensors(as_list)] == ["a_b", "c"]
        assert output_names(as_list)[0] == "left"
        a, b = keras.Input((3,), name="y"), keras.Input((None,), name="x")
        as_dict = keras.Model({"y": a, "x": b}, {"sum": a * 2, "other": b * 2})
        assert [t.name for t in input_tensors(as_dict)] == ["x", "y"]
        assert output_names(as_dict) == ["other", "sum"]
        sequential = keras.Sequential([keras.Input((3,), name="x"), layers.Dense(2)])
        assert [t.name for t in input_tensors(sequential)] == ["x"]

    def test_shapes(self):
        images = keras.Input((None, None, 3), name="images")
        model = keras.Model(images, images * 2)

        def shape(**options):
            return input_tensors(model, **options)[0].shape

        assert shape() == (None, None, None, 3)
        assert shape(batch=1, length=8) == (1, 8, 8, 3)
        assert shape(length=(8, 4)) == (None, 8, 4, 3)
        assert shape(length={"images": (8, 4)}) == (None, 8, 4, 3)
        with pytest.raises(ValueError, match="2 open axes"):
            shape(length=(8,))


class TestParity:
    def test_ids_fit_their_own_embedding(self):
        model = models.encoder_decoder()
        cases = parity.reference_cases(model, input_tensors(model))
        feeds = cases[0][0]
        assert 17 <= feeds["source"].max() < 31
        assert feeds["target"].max() < 17
        assert feeds["source"].shape[1] != feeds["target"].shape[1]
        assert (feeds["source"][0, -2:] == 0).all()
        assert (feeds["source"][:, 0] > 0).all()

    def test_finds_a_size_that_fits(self):
        images = keras.Input((None, None, 3), name="images")
        model = keras.Model(images, layers.Conv2D(2, 20)(images))
        cases = parity.reference_cases(model, input_tensors(model, batch=1))
        assert [feeds["images"].shape[1] for feeds, _ in cases] == [32, 64, 96]

    def test_given_inputs_run_in_batches(self):
        model, inputs = linear(), RNG.standard_normal((5, 3))
        cases = parity.reference_cases(model, input_tensors(model, batch=2), inputs)
        assert [feeds["x"].shape for feeds, _ in cases] == [(2, 3), (2, 3)]

    def test_bound_grows_with_the_output(self):
        cases = [({"x": np.zeros((1, 1))}, {"y": np.array([100.0, 0.0])})]

        def file(error):
            return lambda feeds: {"y": np.array([100.0, error])}

        assert parity.max_difference(cases, file(0.009), 1e-4) == pytest.approx(0.009)
        for error in (0.011, np.nan, np.inf):
            with pytest.raises(export.ExportError, match="differs"):
                parity.max_difference(cases, file(error), 1e-4)
        with pytest.raises(export.ExportError, match="shape"):
            parity.max_difference(cases, lambda feeds: {"y": np.zeros(3)}, 1e-4)

    def test_equal_infinities_pass_and_nan_does_not(self):
        def case(value):
            return [({"x": np.zeros(1)}, {"y": np.array([value, 1.0])})]

        def file(value):
            return lambda feeds: {"y": np.array([value, 1.0])}

        assert parity.max_difference(case(np.inf), file(np.inf), 1e-4) == 0
        with pytest.raises(export.ExportError, match="NaN in the model"):
            parity.max_difference(case(np.nan), file(np.nan), 1e-4)


def test_half_precision_becomes_float32():
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, dtype="mixed_float16"), layers.Dense(2)]
    )
    copy = as_float32(model)
    assert {layer.compute_dtype for layer in copy.layers} == {"float32"}
    x = RNG.standard_normal((2, 3)).astype("float32")
    assert_close(run(copy, x), run(model, x), 0.02)
    assert as_float32(copy) is copy
    model = linear(name="dense")
    model.get_layer("dense").quantize("int8")
    with pytest.raises(ValueError, match=r"model\.quantize"):
        as_float32(model)


class TestRunner:
    def test_refuses_what_does_not_fit(self, text, pair, tmp_path):
        file = runtime.LiteRTModel(text[1])
        for wrong in (np.zeros((2,), "int32"), np.zeros((1, 0), "int32")):
            with pytest.raises(ValueError, match=r"`tokens`.*Received"):
                file(wrong)
        with pytest.raises(ValueError, match=r"int32.*float64"):
            file(np.zeros((1, 2)))
        with pytest.raises(ValueError, match="cannot hold"):
            file(np.array([[2**40]]))
        with pytest.raises(ValueError, match=r"\['tokens'\].*\['token'\]"):
            file(token=np.zeros((1, 2), "int32"))
        with pytest.raises(ValueError, match="by name"):
            runtime.LiteRTModel(pair[1])(np.zeros((1, 2), "int32"))
        with pytest.raises(ValueError, match=r"serving_default.*'step'"):
            runtime.LiteRTModel(text[1], signature="step")
        with pytest.raises(FileNotFoundError):
            runtime.LiteRTModel(tmp_path / "none.tflite")
        (tmp_path / "bad.tflite").write_bytes(b"not a model at all")
        with pytest.raises(ValueError, match=r"bad\.tflite"):
            runtime.LiteRTModel(tmp_path / "bad.tflite")

    def test_takes_a_dictionary(self, pair):
        file = runtime.LiteRTModel(pair[1], num_threads=1)
        feeds = {"source": np.array([[1, 2]]), "target": np.array([[3]])}
        assert_close(file(feeds), file(**feeds))
        assert file.inputs["source"] == ((None, None), np.dtype("int32"))


def test_custom_operations_are_counted(text):
    assert flatbuffer.count_ops(text[1]) == text[2].ops
    flatbuffer.refuse_custom_ops(text[2].ops)


def test_import_is_light():
    code = """
        import keras
        before = {name.split(".")[0] for name in sys.modules}
        import keras_attn.export
        print(json.dumps(sorted({name.split(".")[0] for name in sys.modules} - before)))
    """
    assert in_fresh_python(code, (), KERAS_BACKEND="numpy") == ["keras_attn"]
