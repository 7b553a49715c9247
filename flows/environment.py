"""Prefect's own settings for this project: all state inside it, no telemetry. Import before prefect."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".prefect"


def setup() -> None:
    """Values already in the environment stand, so that a user's own Prefect server can be used.

    DVC runs the stages by the name `python`: this interpreter's folder comes first on the PATH.
    """
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name, value in {
        "PREFECT_HOME": str(HOME),
        "PREFECT_LOCAL_STORAGE_PATH": str(HOME / "storage"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_CLI_VERSION_CHECK": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DVC_NO_ANALYTICS": "true",
    }.items():
        os.environ.setdefault(name, value)
