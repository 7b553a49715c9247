"""Packed checkpoints: a folder with safetensors, config.json with our `quantization_config`, and the tokenizer.

A quantized matrix `m` is three tensors, `m.codes`, `m.scale`, `m.span` (see `PackedMatrix`); its shape and its widths, one
letter a unit, are in `quantization_config.plan`, or in `.embeddings` for embeddings and the head when they are packed too.
With salient weights it has four tensors more, `m.salient_...` (see `Salient`), and their mode and share are beside the plan.
All other tensors are stored in float16 under their own names. `plugin` loads such a folder into transformers.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from windquant import blocks
from windquant.errors import InputError
from windquant.grids import BY_SYMBOL
from windquant.packing import DTYPES
from windquant.quantize import PARTS, PackedMatrix
from windquant.salient import SALIENT_PARTS, Protection, Salient
from windquant.units import Matrix, Unit, columns_of, effective_bits

VERSION = 1
SHARD_BYTES = 2_000_000_000
_STORED_AS = PARTS | SALIENT_PARTS
Entry = tuple[int, int, str]
"""Rows, columns, and one letter a unit."""


class CheckpointError(InputError):
    """A folder is not a checkpoint of ours, or not whole; the message names the file and what is wrong with it."""


def store_other(name: str, tensor: Tensor) -> Tensor:
    """Everything but the quantized matrices is stored in float16. Raises InputError when it does not fit."""
    stored = tensor.to(torch.float16)
    if not bool(torch.isfinite(torch.stack(stored.aminmax())).all()):  # NaN is passed on; no copy of an embedding is made
        raise InputError(f"{name} holds a value that float16 cannot (NaN, Inf or above 65504); the model cannot be stored")
    return stored


def others(model: nn.Module, embeddings: Iterable[Matrix] = ()) -> dict[str, Tensor]:
    """What is not quantized: parameters, tied ones once, and the buffers that checkpoints hold (routers' corrections).
    embeddings: those that are packed."""
    packed = {f"{m.name}.weight" for m in (*blocks.matrices(model), *embeddings)}
    kept = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in kept}
    return {name: p for name, p in model.named_parameters() if name not in packed} | buffers


def other_bytes(
    model: nn.Module, embeddings: Iterable[Unit] = (), bits: float = 16, protection: Protection | None = None
) -> int:
    """Bytes of the file beside the body, headers bounded from above. embeddings: the units packed at `bits`. protection: of
    the body's salient weights, which are of the body, but whose tensors have names."""
    units = list(embeddings)
    packed = list(dict.fromkeys(u.matrix for u in units))
    rest = others(model, packed)
    # A header names every tensor: its dtype, its shape, and two offsets of up to 13 digits.
    parts = (*PARTS, *SALIENT_PARTS) if protection else PARTS
    names = [*rest, *(f"{m.name}.{part}" for m in packed for part in PARTS)]
    names += [f"{m.name}.{part}" for m in blocks.matrices(model) for part in parts]
    header = 1024 + sum(len(n) + 110 for n in names)
    return sum(2 * p.numel() for p in rest.values()) + sum(u.size(bits) for u in units) + header


def shard_bytes(model: nn.Module) -> int:
    """Shards that stay small beside the model's largest block in float32: a quarter of it, but 32 MB to SHARD_BYTES."""
    largest = max(4 * sum(p.numel() for p in block.parameters()) for block in blocks.decoder_blocks(model)[1])
    return min(max(largest // 4, 32_000_000), SHARD_BYTES)


class Writer:
    """Writes tensors to shards as they come, at most `shard_bytes` in memory; None: SHARD_BYTES."""

    def __init__(self, folder: Path, shard_bytes: int | None = None) -> None:
        self.shard_bytes = shard_bytes or SHARD_BYTES
        self.folder, self.pending, self.files = folder, {}, []
        self.weight_map: dict[str, int] = {}
        self.plan: dict[str, Entry] = {}
        self.embeddings: dict[str, Entry] = {}
        self.total = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu().contiguous()
        if sum(t.nbytes for t in self.pending.values()) + tensor.nbytes > self.shard_bytes and self.pending:
            self._flush()
        self.pending[name] = tensor
        self.total += tensor.nbytes

    def add_matrix(self, name: str, packed: PackedMatrix, *, embedding: bool = False) -> None:
        """embedding: not a matrix of the body but an embedding or a head."""
        for part, tensor in packed.tensors().items():
            self.add(f"{name}.{part}", tensor)
        (self.embeddings if embedding else self.plan)[name] = (packed.rows, packed.columns, packed.symbols)

    def _flush(self) -> None:
        file = self.folder / f"shard-{len(self.files)}"
        save_file(self.pending, file, {"format": "pt"})
        self.weight_map |= dict.fromkeys(self.pending, len(self.files))
        self.files.append(file)
        self.pending = {}

    def close(self, config: dict[str, Any], chunk_size: int, protection: Protection | None = None) -> None:
        """Name the shards and write config.json. config: the reference model's, as a dict; its dtype stays, for that is
        what to compute in, not what the tensors are stored as. protection: of the matrices' salient weights."""
        self._flush()
        if len(self.files) == 1:
            self.files[0].rename(self.folder / "model.safetensors")
        else:
            names = [f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors" for i in range(len(self.files))]
            for file, name in zip(self.files, names, strict=True):
                file.rename(self.folder / name)
            index = {"metadata": {"total_size": self.total}, "weight_map": {k: names[i] for k, i in self.weight_map.items()}}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        quantization = {"quant_method": "windquant", "version": VERSION, "chunk_size": chunk_size, "plan": self.plan,
                        "embeddings": self.embeddings, "salient": protection.mode if protection else "none",
                        "salient_share": protection.share if protection else 0.0}  # fmt: skip
        text = json.dumps(config | {"quantization_config": quantization}, indent=2)
        (self.folder / "config.json").write_text(text + "\n")


@dataclass(frozen=True)
class Bytes:
    """Where the bytes of a checkpoint go, counted from the files. body and model are totals; padding is the part of
    `codes` that whole groups of packed codes leave unused, salient all of `salient_...`. `nominal_bits` is the papers'
    own accounting: nominal bits, 8 of a salient weight, no scales, no positions."""

    codes: int
    scales: int
    salient: int
    plan: int
    padding: int
    embeddings: int
    head: int
    norms: int
    header: int
    weights: int
    parameters: int
    nominal_bits: float

    @property
    def body(self) -> int:
        return self.codes + self.scales + self.salient + self.plan

    @property
    def model(self) -> int:
        return self.body + self.embeddings + self.head + self.norms + self.header

    @property
    def effective_bits(self) -> float:
        return effective_bits(self.body, self.weights)

    @property
    def effective_bits_model(self) -> float:
        return effective_bits(self.model, self.parameters)

    @property
    def effective_bits_paper(self) -> float:
        return self.nominal_bits / self.weights


def count(folder: Path) -> Bytes:
    """Count a checkpoint's bytes from the files on disk, nothing else. Raises CheckpointError when it is not whole."""
    quantization = read_quantization(folder)
    chunk, plan, embeddings = quantization["chunk_size"], quantization["plan"], quantization.get("embeddings", {})
    sizes: dict[str, int] = dict.fromkeys(("codes", "scales", "salient", "embeddings", "head", "norms"), 0)
    found, parameters = files(folder), 0
    stored = headers(found)
    for name, (dtype, shape) in stored.items():
        size = DTYPES[dtype].itemsize * math.prod(shape)
        owner, _, part = name.rpartition(".")
        if owner in embeddings and part in PARTS:
            sizes[_role(name, embeddings[owner][:2])] += size
        elif owner in plan and part in PARTS:
            sizes["codes" if part == "codes" else "scales"] += size
        elif owner in plan and part in SALIENT_PARTS:
            sizes["salient"] += size
        else:
            parameters += math.prod(shape)
            sizes[_role(name, shape)] += size
    header = sum(f.stat().st_size for f in found) - sum(sizes.values())
    for name, (rows, columns, symbols) in embeddings.items():
        parameters += rows * columns
        sizes[_role(name, (rows, columns))] += len(symbols)
    weights, padding, nominal = 0, 0, 0.0
    salient = _salient_counts(found, plan, chunk)
    for name, (rows, columns, symbols) in plan.items():
        widths = columns_of(columns, chunk)
        for symbol, width, in_int8 in zip(symbols, widths, salient.get(name, [0] * len(widths)), strict=True):
            grid, n = BY_SYMBOL[symbol], rows * width
            padding += grid.code_bytes(n) - n * grid.bytes_per_group // grid.codes_per_group
            nominal += (n - in_int8) * grid.bits + in_int8 * 8
            weights += n
    letters = sum(len(symbols) for _, _, symbols in plan.values())
    return Bytes(**sizes, plan=letters, padding=padding, header=header, weights=weights,
                 parameters=parameters + weights, nominal_bits=nominal)  # fmt: skip


def _salient_counts(found: Iterable[Path], plan: Mapping[str, Entry], chunk_size: int) -> dict[str, list[int]]:
    """Salient weights in every unit of the matrices that have some."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for file in found:
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                owner, _, part = name.rpartition(".")
                if owner in plan and part in SALIENT_PARTS:
                    tensors.setdefault(owner, {})[part] = f.get_tensor(name)
    out = {}
    for name, parts in tensors.items():
        try:
            salient = Salient.of(*plan[name][:2], parts)
            assert salient is not None
            out[name] = salient.counts(chunk_size)
        except InputError as e:
            raise CheckpointError(f"{name}: {e}; make or copy the checkpoint again") from e
    return out


def _role(name: str, shape: Sequence[int]) -> str:
    if len(shape) < 2:
        return "norms"
    return "head" if "lm_head" in name or "embed_out" in name else "embeddings"


def read_quantization(folder: Path) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint. Raises CheckpointError when it is missing, or of another version."""
    file = folder / "config.json"
    if not file.exists():
        raise CheckpointError(f"{folder} has no config.json: it is not a checkpoint")
    try:
        found = json.loads(file.read_text()).get("quantization_config") or {}
    except json.JSONDecodeError as e:
        raise CheckpointError(f"{file} is damaged: {e}") from e
    if found.get("quant_method") != "windquant":
        raise CheckpointError(f"{file} has no quantization_config of windquant: it is not a checkpoint of ours")
    check_version(found.get("version"))
    return found


def check_version(version: object) -> None:
    if version != VERSION:
        raise CheckpointError(
            f"the checkpoint's config.json has format version {version}, this release reads {VERSION}; update windquant"
        )


def files(folder: Path) -> list[Path]:
    """A checkpoint's safetensors files, all there and none cut short. Raises CheckpointError."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = [folder / name for name in names]
    headers(found)
    return found


def headers(found: Iterable[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of every tensor. Raises CheckpointError when a file is missing, damaged or cut short."""
    out = {}
    for file in found:
        if not file.exists():
            raise CheckpointError(f"{file.parent} lacks {file.name}; copy the checkpoint again")
        try:
            with safe_open(file, "pt") as f:
                for name in f.keys():  # noqa: SIM118
                    view = f.get_slice(name)
                    out[name] = view.get_dtype(), tuple(view.get_shape())
        except Exception as e:  # safetensors' own error is not exported
            raise CheckpointError(f"{file} is damaged or cut short ({e}); copy the checkpoint again") from e
    return out


def check_fits(
    found: Mapping[str, tuple[str, tuple[int, ...]]], wanted: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()
) -> None:
    """found: what `headers` read. wanted: the model's tensors and their shapes; `optional` ones may be missing.

    Raises CheckpointError naming the first tensor that is missing, too many, or of another shape or type.
    """
    missing = sorted(wanted.keys() - found.keys() - set(optional))
    extra = sorted(found.keys() - wanted.keys())
    if missing or extra:
        what = f"lacks the tensor {missing[0]}" if missing else f"holds the tensor {extra[0]}, which the model has not"
        raise CheckpointError(f"the checkpoint {what}: it does not fit its own config.json; make or copy it again")
    for name in sorted(found):
        dtype, shape = found[name]
        if shape != wanted[name]:
            raise CheckpointError(
                f"{name} has the shape {shape} in the checkpoint, its config.json says {wanted[name]}; make or copy it again"
            )
        owner, _, part = name.rpartition(".")
        if f"{owner}.codes" in wanted and dtype != _STORED_AS.get(part, dtype):
            raise CheckpointError(
                f"{name} is stored as {dtype}, not as {_STORED_AS[part]}; make or copy the checkpoint again"
            )
