import pytest
import torch

from tasks import preflight
from tasks.errors import UserError
from tasks.models import skeleton
from tasks.reach import other_bytes_by_bits, reach
from tests.conftest import tiny_config
from windquant import blocks
from windquant.allocate import Target
from windquant.salient import Protection, total_size
from windquant.units import cut


@pytest.fixture
def dial():
    return reach(skeleton(tiny_config()), 32)


@pytest.mark.parametrize("bits", [0.5, 16.4])
def test_bits_out_of_reach_name_the_range(dial, bits):
    with pytest.raises(
        UserError, match=rf"target_bits {bits:g} is out of reach for this model: target_bits can be 1\.27 to 16,"
    ):
        dial.target_bits(Target(target_bits=bits))


def test_a_size_becomes_bits(dial):
    """The whole file: embeddings, norms and header come off first."""
    size = dial.other_bytes + dial.body_weights * 2.5 / 8
    assert dial.target_bits(Target(target_size=f"{size}B")) == pytest.approx(2.5, abs=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_packed_embeddings_leave_more_for_the_body(tied):
    """Of 300 x 64 weights in two chunks: 16 bits come off, 8 bits and 300 + 4 + 1 bytes a chunk come on."""
    model = skeleton(tiny_config(tie_word_embeddings=tied))
    saved = reach(model, 32).other_bytes - reach(model, 32, 8).other_bytes
    tables = 1 if tied else 2
    names = 2 * 130 * tables  # of two tensors more in the header
    assert saved == pytest.approx(tables * (300 * 64 - 2 * 305), abs=2 * names)
    sizes = other_bytes_by_bits(model, 32)
    assert sizes["null"] > sizes["8"] > sizes["4"]


def test_embeddings_of_a_class_of_their_own_are_refused_by_name():
    model = skeleton(tiny_config())
    model.model.embed_tokens = type("ScaledEmbedding", (torch.nn.Embedding,), {})(300, 64, device="meta")
    with pytest.raises(UserError, match="model.embed_tokens is a ScaledEmbedding, which cannot be packed"):
        reach(model, 32, 8)
    assert list(other_bytes_by_bits(model, 32)) == ["null"]


@pytest.mark.parametrize("mode", ["weights", "columns"])
def test_salient_weights_lift_what_can_be_reached(dial, mode):
    protection = Protection(mode, 0.05)
    found = reach(skeleton(tiny_config()), 32, protection=protection)
    extra = 8 * total_size(protection, cut(blocks.matrices(skeleton(tiny_config())), 32)) / dial.body_weights
    assert found.bits == pytest.approx([b + extra for b in dial.bits])
    assert found.other_bytes > dial.other_bytes  # four names more a matrix


def test_a_size_below_the_embeddings_is_refused(dial):
    with pytest.raises(UserError, match="target_size 10KB is out of reach for this model.*of it embeddings"):
        dial.target_bits(Target(target_size="10KB"))


class Windows:
    window = 512
    calibration_windows = 32


def test_a_full_disk_is_seen_before_any_work(monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: type("U", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"the disk has 0\.0 GiB free, this model takes about .*free some space"):
        preflight.check(skeleton(tiny_config()), Windows())


def test_too_little_memory_is_seen_before_any_work(monkeypatch):
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: type("M", (), {"available": 1000})())
    with pytest.raises(UserError, match=r"0\.0 GiB of memory are available.*choose a smaller model"):
        preflight.check(skeleton(tiny_config()), Windows())


def test_a_skeleton_has_no_weights_but_its_buffers():
    model = skeleton(tiny_config())
    assert all(p.is_meta for p in model.parameters())
    assert all(b.device == torch.device("cpu") for b in model.buffers())
    assert model.lm_head.weight is model.model.embed_tokens.weight
