"""Builds the native CPU kernels when the package is built or installed; without a C++ compiler it goes on without."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = Path(__file__).resolve().parent / "gpuworker" / "native" / "build.py"


class NativeKernels(BuildHookInterface[Any]):
    """Puts the libraries into the wheel, which then is for this kind of machine alone."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, for a wheel and for an editable install alike."""
        native = _load()
        try:
            libraries = native.build()
        except native.NoCompiler as reason:
            self.app.display_warning(f"no native CPU kernels, so the slower torch ones will run: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [f"/{path.relative_to(self.root).as_posix()}" for path in libraries]


def _load() -> ModuleType:
    """Return gpuworker/native/build.py by its path: the package is not installed yet."""
    spec = importlib.util.spec_from_file_location("quire_native_build", _BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
