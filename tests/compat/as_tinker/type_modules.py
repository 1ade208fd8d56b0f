"""Run with an environment that has an official release: prints the modules under `tinker.types` and what each defines.

python tests/compat/as_tinker/type_modules.py > tests/compat/as_tinker/type_modules_0.36.0.json
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path


def main() -> None:
    spec = importlib.util.find_spec("tinker.types")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = sorted(name for name in defined(ast.parse(path.read_text())) if not name.startswith("_"))
    print("{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(names)}" for name, names in found.items()) + "\n}")


def defined(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


if __name__ == "__main__":
    main()
