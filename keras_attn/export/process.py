"""Starts the process that converts, shows its stages, and tells why it failed."""

import json
import os
import subprocess
import sys
import time

from keras_attn.export.errors import ExportError

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from keras_attn.export.child import main; main(sys.argv[1])"
)


class Progress:
    """Prints `Converting… 2.1 s`, one line a stage, or nothing.

    Args:
        shown: whether to print.
    """

    def __init__(self, shown):
        self.shown = shown
        self._since = None

    def stage(self, name):
        self.end()
        self._since = time.monotonic()
        if self.shown:
            print(f"{name}… ", end="", flush=True)

    def end(self, outcome=None):
        if self._since is not None and self.shown:
            print(outcome or f"{time.monotonic() - self._since:.1f} s", flush=True)
        self._since = None


def run_child(job, folder, progress):
    """Runs `job` in a fresh Python with the TensorFlow backend and no GPU.

    Args:
        job: what `child.run` reads, JSON types only.
        folder: a folder for the job file and the child's messages.
        progress: a `Progress`, told of the child's stages.

    Raises:
        ExportError: the child failed or was ended; holds its reason.
    """
    job_path = os.path.join(folder, "job.json")
    with open(job_path, "w") as file:
        json.dump(job, file)
    with open(os.path.join(folder, "messages.txt"), "w+b") as messages:
        child = subprocess.Popen(
            [sys.executable, "-c", _START, job_path, json.dumps(_search_path())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            env=_environment(),
            encoding="utf-8",
        )
        try:
            progress.stage("Starting TensorFlow")
            last = _follow(child, progress)
            child.wait()
        finally:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
        if last.get("done") and child.returncode == 0:
            return
        raise ExportError(_reason(last, child.returncode, messages))


def _follow(child, progress):
    last = {"stage": "Starting TensorFlow"}
    for line in child.stdout:
        last |= json.loads(line)
        if not {"done", "error"} & set(last):
            progress.stage(last["stage"])
    return last


def _reason(last, code, messages):
    messages.seek(0)
    tail = messages.read().decode(errors="replace").strip().splitlines()[-15:]
    said = "\n".join(f"    {line}" for line in tail)
    if "error" in last and last["kind"] == "NoBuiltin":
        return last["error"]
    if "error" in last:
        return f"The export process failed: {last['kind']}: {last['error']}\n{said}"
    ended = f"signal {-code} (memory?)" if code < 0 else f"exit status {code}"
    return f"The export process ended with {ended} at {last['stage']!r}.\n{said}"


def _search_path():
    return [os.path.abspath(entry) for entry in sys.path]


def _environment():
    return os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONWARNINGS": "ignore",
    }
