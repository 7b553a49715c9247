"""`python -m flows.ui`: the MLflow UI on loopback, over this project's runs."""

import os
import sys

from flows.environment import ROOT, setup

setup()

from tasks import tracking  # noqa: E402


def main() -> None:
    os.chdir(ROOT)
    tracking.client()  # creates the database when nothing has run yet
    artifacts = (ROOT / "mlruns/artifacts").as_uri()
    command = ["mlflow", "ui", "--backend-store-uri", tracking.uri(), "--default-artifact-root", artifacts]
    address = ["--host", "127.0.0.1", "--port", os.environ.get("PORT", "5000"), "--workers", "1"]
    os.execv(sys.executable, [sys.executable, "-m", *command, *address])


if __name__ == "__main__":
    main()
