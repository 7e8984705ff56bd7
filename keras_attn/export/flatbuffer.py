"""What is written in a `.tflite` file, read without running it."""

import collections

from keras_attn.export.errors import ExportError


def count_ops(path):
    """`{op name: how often}` over all subgraphs, most frequent first.

    Custom operations, Flex among them, carry the names `CUSTOM <name>`.
    """
    from ai_edge_litert import schema_py_generated as schema

    with open(path, "rb") as file:
        model = schema.Model.GetRootAs(file.read(), 0)
    names = {
        code: name
        for name, code in vars(schema.BuiltinOperator).items()
        if isinstance(code, int)
    }
    counts = collections.Counter()
    for g in range(model.SubgraphsLength()):
        graph = model.Subgraphs(g)
        for o in range(graph.OperatorsLength()):
            code = model.OperatorCodes(graph.Operators(o).OpcodeIndex())
            # Files older than the 32-bit field keep the code in the other one.
            builtin = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
            if builtin == schema.BuiltinOperator.CUSTOM:
                counts[f"CUSTOM {code.CustomCode().decode()}"] += 1
            else:
                counts[names.get(builtin, f"BUILTIN {builtin}")] += 1
    return dict(counts.most_common())


def refuse_custom_ops(ops):
    """Raises when `ops` of `count_ops` holds one that plain LiteRT does not have."""
    custom = [name for name in ops if name.startswith("CUSTOM ")]
    if custom:
        raise ExportError(
            "The file must hold builtin operations alone, so that every device runs "
            f"it. It holds {', '.join(custom)}"
        )
