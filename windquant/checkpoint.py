"""Packed checkpoints: a folder with safetensors, config.json with our `quantization_config`, and the tokenizer.

A quantized matrix `m` is three tensors, `m.codes`, `m.scale`, `m.span` (see `PackedMatrix`); its shape and its widths, one
letter a unit, are in `quantization_config.plan`, or in `.embeddings` for embeddings and the head when they are packed too.
With salient weights it has four tensors more, `m.salient_...` (see `Salient`), and their mode and share are beside the plan.
All other tensors are stored in float16 under their own names; what is nearer to zero than 3e-8 becomes zero there. Every
shard carries a digest of the `quantization_config`: letters of equal size could be swapped without any shape telling.
`plugin` loads such a folder into transformers.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from windquant import blocks, grids, unpacking
from windquant.errors import InputError
from windquant.packing import DTYPES
from windquant.quantize import PARTS, PackedMatrix
from windquant.salient import SALIENT_PARTS, Mode, Protection, Salient, protection
from windquant.units import Matrix, Unit, columns_of, effective_bits

VERSION = 2
SHARD_BYTES = 2_000_000_000
AGAIN = "; make or copy the checkpoint again"
STORED_AS = PARTS | SALIENT_PARTS
DIGEST = "windquant"
"""The key in a shard's metadata."""
Entry = tuple[int, int, str]
"""Rows, columns, and one letter a unit."""


def entry(matrix: Matrix, bits: Iterable[float]) -> Entry:
    return matrix.rows, matrix.columns, grids.symbols(bits)


class CheckpointError(InputError):
    """A folder is not a checkpoint of ours, or not whole; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Quantization:
    """The `quantization_config` of a checkpoint: chunk_size, the entries of the body's matrices by name (plan) and those of
    packed embeddings and heads, what of the body's matrices is kept in INT8, and made_from, which tells apart checkpoints
    that have one plan: a hash of the model and of what was done to it.

    Raises CheckpointError when something in it is not what a checkpoint of ours says.
    """

    chunk_size: int
    plan: dict[str, Entry]
    embeddings: dict[str, Entry]
    salient: Mode = "none"
    salient_share: float = 0.0
    made_from: str = ""

    def __post_init__(self) -> None:
        if type(self.chunk_size) is not int or self.chunk_size < 1:
            raise CheckpointError(f"chunk_size {self.chunk_size!r} is not a number of columns{AGAIN}")
        for what in ("plan", "embeddings"):
            table = getattr(self, what)
            if not isinstance(table, dict):
                raise CheckpointError(f"{what} is a {type(table).__name__}, not entries by a matrix's name{AGAIN}")
            for name, found in table.items():
                self._check(name, found)
        for name, (_, _, letters) in self.embeddings.items():
            if not set(letters) <= {"4", "8"}:
                raise CheckpointError(f"{name}: an embedding is packed at 4 or 8 bits, not '{letters}'{AGAIN}")
        if type(self.salient_share) not in (int, float) or not 0 <= self.salient_share <= 1:
            raise CheckpointError(f"salient_share {self.salient_share!r} is not between 0 and 1{AGAIN}")
        if not isinstance(self.made_from, str):
            raise CheckpointError(f"made_from {self.made_from!r} is not a hash{AGAIN}")
        try:
            _ = self.protection
        except InputError as e:
            raise CheckpointError(f"{e}{AGAIN}") from e

    def _check(self, name: str, found: Entry) -> None:
        try:
            rows, columns, letters = found
            if not (type(rows) is type(columns) is int and min(rows, columns) > 0 and isinstance(letters, str)):
                raise ValueError
        except (TypeError, ValueError):
            raise CheckpointError(f"{name}: {found!r} is not rows, columns and one letter a unit{AGAIN}") from None
        try:
            unpacking.layout(rows, columns, self.chunk_size, letters)
        except InputError as e:
            raise CheckpointError(f"{name}: {e}{AGAIN}") from e

    @property
    def protection(self) -> Protection | None:
        return protection(self.salient, self.salient_share)

    @classmethod
    def of(cls, found: object) -> "Quantization":
        """From what a config.json holds. Raises CheckpointError when it is of another format or version, or damaged."""
        if not isinstance(found, dict) or found.get("quant_method") != "windquant":
            raise CheckpointError("its config.json has no quantization_config of windquant: it is not a checkpoint of ours")
        if type(found.get("version")) is not int or found["version"] != VERSION:
            raise CheckpointError(
                f"the checkpoint's config.json has format version {found.get('version')!r}, this release reads {VERSION}; "
                f"update windquant, or make the checkpoint again"
            )
        fields = {f.name for f in dataclasses.fields(cls)}
        if missing := sorted(fields - found.keys()):
            raise CheckpointError(f"its quantization_config lacks {missing[0]}{AGAIN}")
        return cls(**{name: found[name] for name in fields})

    def to_dict(self) -> dict[str, Any]:
        """As a config.json holds it."""
        return {"quant_method": "windquant", "version": VERSION} | dataclasses.asdict(self)

    @cached_property
    def digest(self) -> str:
        """sha256, what shards are marked with."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of packed matrices."""
        out = {}
        for table, protected in ((self.plan, self.protection), (self.embeddings, None)):
            for name, (rows, columns, symbols) in table.items():
                shapes = unpacking.shapes(unpacking.layout(rows, columns, self.chunk_size, symbols))
                shapes |= protected.shapes(rows, columns) if protected else {}
                out |= {f"{name}.{part}": shape for part, shape in shapes.items()}
        return out


def store_other(name: str, tensor: Tensor) -> Tensor:
    """Everything but the quantized matrices is stored in float16. Raises InputError when it does not fit."""
    stored = tensor.to(torch.float16)
    # Of the extremes, for they pass NaN on, and no copy of an embedding is made.
    if stored.numel() and not bool(torch.isfinite(torch.stack(stored.aminmax())).all()):
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
    """Writes a checkpoint's tensors to shards as they come, at most `shard_bytes` in memory; None: SHARD_BYTES. Raises
    CheckpointError when the folder holds a checkpoint already, whose shards would be mixed with the new ones."""

    def __init__(self, folder: Path, quantization: Quantization, shard_bytes: int | None = None) -> None:
        self.folder, self.quantization, self.shard_bytes = folder, quantization, shard_bytes or SHARD_BYTES
        self.pending: dict[str, Tensor] = {}
        self.files: list[Path] = []
        self.weight_map: dict[str, int] = {}
        self.total = 0
        folder.mkdir(parents=True, exist_ok=True)
        if used := sorted([*folder.glob("*.safetensors*"), *folder.glob("shard-*")]):
            raise CheckpointError(f"{folder} holds {used[0].name} already; give a folder without a checkpoint, or empty it")

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu().contiguous()
        if sum(t.nbytes for t in self.pending.values()) + tensor.nbytes > self.shard_bytes and self.pending:
            self._flush()
        self.pending[name] = tensor
        self.total += tensor.nbytes

    def add_matrix(self, name: str, packed: PackedMatrix) -> None:
        """A matrix of the body, an embedding or a head. Raises CheckpointError when it is not as the plan has it."""
        wanted = (self.quantization.plan | self.quantization.embeddings).get(name)
        if wanted is None or (packed.rows, packed.columns, packed.symbols) != tuple(wanted):
            raise CheckpointError(f"{name} was packed as {packed.symbols!r}, the plan has {wanted}")
        for part, tensor in packed.tensors().items():
            self.add(f"{name}.{part}", tensor)

    def _flush(self) -> None:
        file = self.folder / f"shard-{len(self.files)}"
        file.touch()
        mode = file.stat().st_mode
        save_file(self.pending, file, {DIGEST: self.quantization.digest})  # of two keys the order would be left to chance
        file.chmod(mode)  # safetensors leaves it to its owner alone
        self.weight_map |= dict.fromkeys(self.pending, len(self.files))
        self.files.append(file)
        self.pending = {}

    def close(self, config: dict[str, Any]) -> None:
        """Name the shards and write config.json. config: the reference model's, as a dict; its dtype stays, for that is
        what to compute in, not what the tensors are stored as. Raises CheckpointError when a matrix is missing."""
        self._flush()
        if missing := sorted(self.quantization.tensors().keys() - self.weight_map.keys()):
            raise CheckpointError(f"{missing[0]} was never written, though the plan has it")
        if len(self.files) == 1:
            self.files[0].rename(self.folder / "model.safetensors")
        else:
            names = [f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors" for i in range(len(self.files))]
            for file, name in zip(self.files, names, strict=True):
                file.rename(self.folder / name)
            index = {"metadata": {"total_size": self.total}, "weight_map": {k: names[i] for k, i in self.weight_map.items()}}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        text = json.dumps(config | {"quantization_config": self.quantization.to_dict()}, indent=2)
        (self.folder / "config.json").write_text(text + "\n")


@dataclass(frozen=True)
class Bytes:
    """Where the bytes of a checkpoint go, counted from the files. body and model are totals; padding is the part of
    `codes` that whole groups of packed codes leave unused, salient all of `salient_...`, other what is neither matrix nor
    table: norms, biases, routers. `nominal_bits` is the papers' own accounting: nominal bits, 8 of a salient weight, no
    scales, no positions."""

    codes: int
    scales: int
    salient: int
    plan: int
    padding: int
    embeddings: int
    head: int
    other: int
    header: int
    weights: int
    parameters: int
    nominal_bits: float

    @property
    def body(self) -> int:
        return self.codes + self.scales + self.salient + self.plan

    @property
    def model(self) -> int:
        return self.body + self.embeddings + self.head + self.other + self.header

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
    quantization, found, stored = _whole(folder)
    chunk, plan, embeddings = quantization.chunk_size, quantization.plan, quantization.embeddings
    sizes: dict[str, int] = dict.fromkeys(("codes", "scales", "salient", "embeddings", "head", "other"), 0)
    parameters, wanted = 0, quantization.tensors()
    check_fits({name: what for name, what in stored.items() if name in wanted}, wanted)
    inside = tuple({re.split(r"\.\d+\.", name)[0] + "." for name in plan})  # the decoder blocks
    for name, (dtype, shape) in stored.items():
        size = DTYPES[dtype].itemsize * math.prod(shape)
        owner, _, part = name.rpartition(".")
        if owner in embeddings:
            sizes[_role(name)] += size
        elif name in wanted:
            sizes["salient" if part in SALIENT_PARTS else "codes" if part == "codes" else "scales"] += size
        else:
            parameters += math.prod(shape)
            table = len(shape) > 1 and not name.startswith(inside)
            sizes[_role(name) if table else "other"] += size
    header = sum(f.stat().st_size for f in found) - sum(sizes.values())
    for name, (rows, columns, symbols) in embeddings.items():
        parameters += rows * columns
        sizes[_role(name)] += len(symbols)
    weights, padding, nominal = 0, 0, 0.0
    salient = _salient_counts(found, quantization)
    for name, (rows, columns, symbols) in plan.items():
        widths = columns_of(columns, chunk)
        for symbol, width, in_int8 in zip(symbols, widths, salient.get(name, [0] * len(widths)), strict=True):
            grid, n = grids.BY_SYMBOL[symbol], rows * width
            padding += grid.code_bytes(n) - n * grid.bytes_per_group // grid.codes_per_group
            nominal += (n - in_int8) * grid.bits + in_int8 * 8
            weights += n
    letters = sum(len(symbols) for _, _, symbols in plan.values())
    return Bytes(**sizes, plan=letters, padding=padding, header=header, weights=weights,
                 parameters=parameters + weights, nominal_bits=nominal)  # fmt: skip


def _salient_counts(found: Iterable[Path], quantization: Quantization) -> dict[str, list[int]]:
    """Salient weights in every unit of the matrices that have some."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for file in found:
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                owner, _, part = name.rpartition(".")
                if owner in quantization.plan and part in SALIENT_PARTS:
                    tensors.setdefault(owner, {})[part] = f.get_tensor(name)
    out = {}
    for name, parts in tensors.items():
        try:
            salient = Salient.of(*quantization.plan[name][:2], parts)
            assert salient is not None
            out[name] = salient.counts(quantization.chunk_size)
        except InputError as e:
            raise CheckpointError(f"{name}: {e}{AGAIN}") from e
    return out


def _role(name: str) -> str:
    return "head" if "lm_head" in name or "embed_out" in name else "embeddings"


def read_quantization(folder: Path) -> Quantization:
    """The `quantization_config` of a checkpoint. Raises CheckpointError as `Quantization.of` does."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json: it is not a checkpoint")
    config = _json(file)
    try:
        return Quantization.of(config.get("quantization_config"))
    except CheckpointError as e:
        raise CheckpointError(f"{folder}: {e}") from e


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it does not hold an object")
    except ValueError as e:  # of the encoding, too
        raise CheckpointError(f"{file} is damaged: {e}") from e
    return found


def files(folder: Path) -> list[Path]:
    """A checkpoint's safetensors files, all there, none cut short, all of this checkpoint. Raises CheckpointError."""
    return _whole(folder)[1]


def _whole(folder: Path) -> tuple[Quantization, list[Path], dict[str, tuple[str, tuple[int, ...]]]]:
    """What config.json says, the files as `files` gives them, and what `headers` read in them."""
    quantization = read_quantization(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    found = [single]
    if index.exists():
        if single.exists():
            both = f"{single.name} and {index.name}"
            raise CheckpointError(f"{folder} holds {both}: transformers would read the first; remove what is not of it")
        content = _json(index)
        where = content.get("weight_map")
        names = set(where.values()) if isinstance(where, dict) and all(isinstance(n, str) for n in where.values()) else set()
        if not names or not isinstance(content.get("metadata"), dict):
            raise CheckpointError(f"{index} is damaged: it names no files, or lacks its metadata{AGAIN}")
        found = [folder / name for name in sorted(names)]
    stored = headers(found)
    check_digests(found, quantization)
    return quantization, found, stored


def check_digests(found: Iterable[Path], quantization: Quantization) -> None:
    """Raises CheckpointError when a file was written with another `quantization_config`."""
    for file in found:
        with safe_open(file, "pt") as f:
            if (f.metadata() or {}).get(DIGEST) != quantization.digest:
                raise CheckpointError(
                    f"{file} was not written with the plan that config.json has now: one of them was changed{AGAIN}"
                )


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
                    if name in out:
                        raise ValueError(f"{name} is in another file too")
                    out[name] = view.get_dtype(), tuple(view.get_shape())
                    if out[name][0] not in DTYPES:
                        raise ValueError(f"{name} is stored as {out[name][0]}")
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
        raise CheckpointError(f"the checkpoint {what}: it does not fit its own config.json{AGAIN}")
    for name in sorted(found):
        dtype, shape = found[name]
        if shape != wanted[name]:
            raise CheckpointError(
                f"{name} has the shape {shape} in the checkpoint, its config.json says {wanted[name]}{AGAIN}"
            )
        owner, _, part = name.rpartition(".")
        right = (STORED_AS[part],) if f"{owner}.codes" in wanted and part in STORED_AS else ("F16", "BF16", "F32")
        if dtype not in right:
            raise CheckpointError(f"{name} is stored as {dtype}, not as {' or '.join(right)}{AGAIN}")
