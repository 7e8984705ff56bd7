"""Where a file is made and how it gets to its target: whole, or not at all."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path


def litert_target(path):
    """`path` as a `Path`, or an error that says why no `.tflite` can be put there."""
    target = _absolute(path)
    if target.suffix != ".tflite":
        raise ValueError(f"`path` must end in `.tflite`. Received: {str(path)!r}")
    if target.is_dir():
        raise IsADirectoryError(
            f"`path` must name a file. Received a directory: {str(path)!r}"
        )
    return target


def saved_model_target(path):
    """The same for the folder of a SavedModel; only a SavedModel is replaced."""
    target = _absolute(path)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(
            "`path` must name a folder, new, empty or holding a SavedModel. "
            f"Received a file: {str(path)!r}"
        )
    is_other = target.is_dir() and not (target / "saved_model.pb").is_file()
    if is_other and any(target.iterdir()):
        raise FileExistsError(
            "`path` must name a folder, new, empty or holding a SavedModel. "
            f"Received a folder with other things in it: {str(path)!r}"
        )
    return target


@contextlib.contextmanager
def workspace(target):
    """A temporary folder beside `target`, gone at the end however that comes."""
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"The folder of `path` must be one that can be written to "
            f"({error.strerror}). Received",
            str(target.parent),
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, folder, missing)
        yield Path(folder)


def put(made, target, folder):
    """Moves `made` to `target` in one step; `folder` takes what was there."""
    if not target.is_dir():
        os.replace(made, target)
        return
    older = folder / "older"
    os.replace(target, older)
    try:
        os.replace(made, target)
    except BaseException:
        os.replace(older, target)
        raise


def size_of(path):
    """The bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _absolute(path):
    return Path(os.path.abspath(os.fspath(path)))


def _remove(folder, made_parents):
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # they hold the target when all went well
        for parent in made_parents:
            parent.rmdir()
