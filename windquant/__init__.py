"""windquant: mixed-precision quantization of language models to about two bits a weight.

Pure numerics on tensors and modules; files, tracking and orchestration live in `tasks` and `flows`. After
`import windquant` transformers loads packed checkpoints (`plugin`). That takes no time by itself: importing transformers'
quantizers takes 2 s (torch among it 1.3 s more), so the plug-in waits until somebody else imports them.
"""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
_AFTER = "transformers.quantizers.auto"
_PLUGIN = "windquant.plugin"  # by name: a stage that loads no checkpoint does not depend on it


class _Register(MetaPathFinder):
    """Imports the plug-in as soon as transformers' table of quantizers is there."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _AFTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def then_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(_PLUGIN)

        spec.loader.exec_module = then_register
        return spec


if _AFTER in sys.modules:
    importlib.import_module(_PLUGIN)
else:
    sys.meta_path.insert(0, _Register())
