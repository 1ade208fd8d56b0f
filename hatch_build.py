"""Build hook: compiles the C kernels when a wheel or an editable install is made. Why so: docs/decisions/kernels.md.

A wheel gets the library and the platform's tag; an editable install gets it beside the sources. What can be built and
how is in src/tinkex/engine/packed/kernels/build.py. Where nothing can be built, the package is made without the
library: then torch does the kernels' work, and the engine logs it.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src", "tinkex", "engine", "packed", "kernels")

# By path: the package itself cannot be imported while it is being built, for want of its dependencies.
spec = importlib.util.spec_from_file_location("kernel_build", Path(__file__).parent / FOLDER / "build.py")
assert spec is not None and spec.loader is not None
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    def dependencies(self) -> list[str]:
        """Ask pip for zig, a C compiler (90 MB), where the machine has none of its own."""
        target = kernels.wanted_target()
        return ["ziglang"] if target is not None and next(kernels.compilers(target), None) is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        target = kernels.wanted_target()
        if target is None:
            return
        library = kernels.library_path(target)
        try:
            if version == "editable":
                kernels.build(target, library)
                return
            self._folder = tempfile.TemporaryDirectory()
            built = Path(self._folder.name, library.name)
            kernels.build(target, built)
        except (kernels.BuildError, OSError) as error:
            self.app.display_warning(f"Without the C kernels, so that the engine is slower: {error}")
            return
        build_data["force_include"][str(built)] = str(Path(*FOLDER.parts[1:], library.name))
        build_data["tag"] = f"py3-none-{kernels.TARGETS[target].wheel}"
        build_data["pure_python"] = False
