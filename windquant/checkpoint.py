"""Packed checkpoints: a folder with safetensors, config.json with our `quantization_config`, and the tokenizer.

The one module of the library that knows transformers. A quantized matrix `m` is three tensors, `m.codes`, `m.scale`,
`m.span` (see `PackedMatrix`); its shape and its widths, one letter a unit, are in `quantization_config.plan`. All other
tensors are stored in float16 under their own names.
"""

import json
from collections.abc import Iterable, Iterator
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
from windquant.quantize import PackedMatrix
from windquant.units import columns_of, effective_bits

VERSION = 1
SHARD_BYTES = 2_000_000_000
PARTS = ("codes", "scale", "span")


class CheckpointError(InputError):
    """A folder is not a checkpoint of ours, or not whole; the message names the file and what is wrong with it."""


def store_other(name: str, tensor: Tensor) -> Tensor:
    """Everything but the quantized matrices is stored in float16. Raises InputError when it does not fit."""
    stored = tensor.to(torch.float16)
    if not bool(torch.isfinite(stored).all()):
        raise InputError(f"{name} holds a value that float16 cannot (NaN, Inf or above 65504); the model cannot be stored")
    return stored


def others(model: nn.Module) -> dict[str, Tensor]:
    """What is not quantized: parameters, tied ones once, and the buffers that checkpoints hold (routers' corrections)."""
    body = {f"{m.name}.weight" for m in blocks.matrices(model)}
    kept = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in kept}
    return {name: p for name, p in model.named_parameters() if name not in body} | buffers


def other_bytes(model: nn.Module) -> int:
    return sum(2 * p.numel() for p in others(model).values())


def header_bound(model: nn.Module) -> int:
    """An upper bound of the safetensors headers: name, dtype, shape and two offsets of up to 13 digits a tensor."""
    names = list(others(model)) + [f"{m.name}.{part}" for m in blocks.matrices(model) for part in PARTS]
    return 1024 + sum(len(n) + 110 for n in names)


class Writer:
    """Writes tensors to shards as they come, at most SHARD_BYTES in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pending, self.files = folder, {}, []
        self.weight_map: dict[str, int] = {}
        self.plan: dict[str, tuple[int, int, str]] = {}
        self.total = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu().contiguous()
        if sum(t.nbytes for t in self.pending.values()) + tensor.nbytes > SHARD_BYTES and self.pending:
            self._flush()
        self.pending[name] = tensor
        self.total += tensor.nbytes

    def add_matrix(self, name: str, packed: PackedMatrix) -> None:
        for part in PARTS:
            self.add(f"{name}.{part}", getattr(packed, part))
        self.plan[name] = (packed.rows, packed.columns, packed.symbols)

    def _flush(self) -> None:
        file = self.folder / f"shard-{len(self.files)}"
        save_file(self.pending, file, {"format": "pt"})
        self.weight_map |= dict.fromkeys(self.pending, len(self.files))
        self.files.append(file)
        self.pending = {}

    def close(self, config: dict[str, Any], chunk_size: int) -> None:
        """Name the shards and write config.json. config: the reference model's, as a dict."""
        self._flush()
        if len(self.files) == 1:
            self.files[0].rename(self.folder / "model.safetensors")
        else:
            names = [f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors" for i in range(len(self.files))]
            for file, name in zip(self.files, names, strict=True):
                file.rename(self.folder / name)
            index = {"metadata": {"total_size": self.total}, "weight_map": {k: names[i] for k, i in self.weight_map.items()}}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        quantization = {"quant_method": "windquant", "version": VERSION, "chunk_size": chunk_size, "plan": self.plan}
        text = json.dumps(config | {"dtype": "float16", "quantization_config": quantization}, indent=2)
        (self.folder / "config.json").write_text(text + "\n")


@dataclass(frozen=True)
class Bytes:
    """Where the bytes of a checkpoint go, counted from the files. body and model are totals; padding is the part of
    `codes` that whole groups of packed codes leave unused. `ideal_bits` is the papers' own accounting: nominal bits, no
    scales."""

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
    chunk, plan = quantization["chunk_size"], quantization["plan"]
    sizes: dict[str, int] = dict.fromkeys(("codes", "scales", "embeddings", "head", "norms"), 0)
    header = parameters = 0
    for file in _files(folder):
        payload = 0
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                view = f.get_slice(name)
                shape = tuple(view.get_shape())
                size = _ITEM[view.get_dtype()] * _product(shape)
                payload += size
                owner, _, part = name.rpartition(".")
                if owner in plan and part in PARTS:
                    sizes["codes" if part == "codes" else "scales"] += size
                else:
                    parameters += _product(shape)
                    sizes[_role(name, shape)] += size
        header += file.stat().st_size - payload
    weights, padding, nominal = 0, 0, 0.0
    for rows, columns, symbols in plan.values():
        for symbol, width in zip(symbols, columns_of(columns, chunk), strict=True):
            grid, n = BY_SYMBOL[symbol], rows * width
            padding += grid.code_bytes(n) - n * grid.bytes_per_group // grid.codes_per_group
            nominal += n * grid.bits
            weights += n
    letters = sum(len(symbols) for _, _, symbols in plan.values())
    return Bytes(**sizes, salient=0, plan=letters, padding=padding, header=header, weights=weights,
                 parameters=parameters + weights, nominal_bits=nominal)  # fmt: skip


_ITEM = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def _product(shape: Iterable[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _role(name: str, shape: tuple[int, ...]) -> str:
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
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {found.get('version')}, this release reads {VERSION}; update windquant"
        )
    return found


def _files(folder: Path) -> list[Path]:
    """The safetensors files, all there and none cut short."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for name in names:
        file = folder / name
        if not file.exists():
            raise CheckpointError(f"{folder} lacks {name}; copy the checkpoint again")
        try:
            with safe_open(file, "pt"):
                pass
        except Exception as e:  # safetensors' own error is not exported
            raise CheckpointError(f"{file} is damaged or cut short ({e}); copy the checkpoint again") from e
    return [folder / name for name in names]


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and float32 value of every parameter, matrices dequantized one by one. Raises CheckpointError as `count`."""
    quantization = read_quantization(folder)
    plan, chunk = quantization["plan"], quantization["chunk_size"]
    for file in _files(folder):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                owner, _, part = name.rpartition(".")
                if owner not in plan or part not in PARTS:
                    yield name, f.get_tensor(name).float()
    where = {name: file for file in _files(folder) for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    for name, (rows, columns, symbols) in plan.items():
        parts = {}
        for part in PARTS:
            full = f"{name}.{part}"
            if full not in where:
                raise CheckpointError(f"{folder} lacks the tensor {full} that its plan names; make the checkpoint again")
            with safe_open(where[full], "pt") as f:
                parts[part] = f.get_tensor(full)
        try:
            packed = PackedMatrix(rows, columns, chunk, symbols, **parts)
        except ValueError as e:
            raise CheckpointError(f"{folder}: {name}: {e}; make the checkpoint again") from e
        yield f"{name}.weight", packed.dequantize()


def load(folder: Path, skeleton: nn.Module, device: torch.device) -> nn.Module:
    """The checkpoint as a dense float32 model. skeleton: the model of its config, parameters on the meta device.

    Raises CheckpointError when the tensors are not exactly the model's.
    """
    state = {name: t.to(device) for name, t in tensors(folder)}
    result = skeleton.load_state_dict(state, strict=False, assign=True)
    skeleton.tie_weights()  # pyright: ignore[reportCallIssue]
    missing = [name for name, p in skeleton.named_parameters() if p.is_meta]
    if missing or result.unexpected_keys:
        raise CheckpointError(f"{folder} does not fit its own config: {(missing + result.unexpected_keys)[:3]}")
    return skeleton.eval().requires_grad_(False).to(device)
