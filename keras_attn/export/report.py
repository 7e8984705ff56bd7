"""What an export says about the file it made."""

import dataclasses

from keras_attn.export.signature import Tensor


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The proof that comes with an exported model; `print` it.

    Attributes:
        path: the file (a folder for a SavedModel).
        size: its bytes.
        inputs: the inputs of its signature, `Tensor(name, shape, dtype)`.
        outputs: the same for its outputs.
        max_difference: the largest difference from the live model that was seen.
        largest_output: the largest output there, to weigh the difference by.
        cases: on how many inputs it was compared.
        ops: `{op name: how often}`; empty for a SavedModel.
        quantization: as asked for.
        seconds: the time of the whole export.
    """

    path: str
    size: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_difference: float
    largest_output: float
    cases: int
    ops: dict[str, int] = dataclasses.field(default_factory=dict)
    quantization: str | None = None
    seconds: float = 0.0

    def __str__(self):
        kind = self.quantization or "float32"
        rows = [("file", f"{self.path}  ({_readable(self.size)}, {kind})")]
        rows += [("input", str(tensor)) for tensor in self.inputs]
        rows += [("output", str(tensor)) for tensor in self.outputs]
        if self.ops:
            names = ", ".join(f"{count} {name}" for name, count in self.ops.items())
            rows.append(("ops", f"{sum(self.ops.values())}, builtin only: {names}"))
        rows.append(
            (
                "parity",
                f"at most {self.max_difference:.2g} from the model's own outputs, "
                f"which reach {self.largest_output:.2g} ({self.cases} inputs compared)",
            )
        )
        rows.append(("time", f"{self.seconds:.1f} s"))
        return "\n".join(f"  {name:<8}{text}" for name, text in rows)


def _readable(size):
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"
