"""The distortion table and plans as files: parquet, one row a unit, with a JSON header."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from tasks import store
from tasks.errors import UserError
from windquant import units
from windquant.features import FEATURES
from windquant.grids import GRIDS, WIDTHS
from windquant.salient import Protection, protection, total_size
from windquant.units import Matrix, Unit

TRAINED = "-trained"
"""After a plan's name: its checkpoint was trained on."""
UNIT_COLUMNS = ("unit", "matrix", "block", "kind", "first_column", "columns", "rows")
COLUMNS = (*UNIT_COLUMNS, "salient")
_COLUMN_TYPES = {c: str if c in ("matrix", "kind") else int for c in COLUMNS}
_NUMBER = (int, float)
_HEADER: dict[str, tuple[type, ...]] = {
    "model_hash": (str,),
    "chunk_size": (int,),
    "salient": (str,),
    "salient_share": _NUMBER,
}
TABLE_HEADER = _HEADER | {"other_bytes": (dict,)}
PLAN_HEADER = _HEADER | {
    "target_bits": _NUMBER,
    "allocator": (str,),
    "seed": (int,),
    "other_bytes": (int,),
    "embedding_bits": (int, NoneType),
}


@dataclass(frozen=True)
class Table:
    """The distortion table: D (units, widths) nats, B (units, widths) bytes; header: model_hash, chunk_size,
    other_bytes (all that is in the model file beside the body, by `allocate.embedding_bits`), salient and salient_share.
    salient: how many weights of every unit are kept in INT8. features: (units, len(FEATURES))."""

    body: list[Unit]
    D: Tensor
    B: Tensor
    header: dict[str, Any]
    salient: list[int]
    features: Tensor

    @property
    def protection(self) -> Protection | None:
        return _protection(self.header)

    @property
    def salient_bytes(self) -> int:
        """What salient weights take of any plan's bytes."""
        return total_size(self.protection, self.body)

    def budget(self, target_bits: float) -> int:
        """The bytes that a target leaves to the units. Raises InputError when it is out of reach."""
        return units.budget_bytes(target_bits, self.body, self.salient_bytes)

    def plan(self, choice: Tensor, **header: Any) -> "Plan":
        """An allocator's choice; header: what the plan's says beside the table's."""
        return Plan(self.body, [WIDTHS[c] for c in choice.tolist()], self.header | header, self.salient)


@dataclass(frozen=True)
class Plan:
    """The width of every unit, and how many of its weights are kept in INT8 whatever it is. header: model_hash, chunk_size,
    target_bits, allocator, seed, other_bytes, embedding_bits, salient, salient_share."""

    body: list[Unit]
    bits: list[float]
    header: dict[str, Any]
    salient: list[int]

    @property
    def protection(self) -> Protection | None:
        return _protection(self.header)

    def of(self, matrix: str) -> list[float]:
        return self._by_matrix[matrix]

    @cached_property
    def _by_matrix(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for u, b in zip(self.body, self.bits, strict=True):
            found.setdefault(u.matrix.name, []).append(b)
        return found

    @property
    def size(self) -> int:
        units_size = sum(u.size(b) for u, b in zip(self.body, self.bits, strict=True))
        return units_size + total_size(self.protection, self.body)

    @property
    def effective_bits(self) -> float:
        return units.effective_bits(self.size, units.weights_in(self.body))

    def shares(self) -> dict[float, float]:
        """Share of the weights at each width."""
        total = units.weights_in(self.body)
        return {w: sum(u.weights for u, b in zip(self.body, self.bits, strict=True) if b == w) / total for w in WIDTHS}


def _protection(header: dict[str, Any]) -> Protection | None:
    return protection(header["salient"], header["salient_share"])


def _check(file: Path, header: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> None:
    """That a header has these fields, of these types, and a protection that there is. Raises UserError."""
    for name, types in fields.items():
        if not isinstance(header.get(name), types) or isinstance(header[name], bool):
            raise UserError(f"{file}: {name} in its header is {header.get(name)!r}; run `dvc repro` to make it again")
    if header["chunk_size"] < 1:
        raise UserError(f"{file}: chunks of {header['chunk_size']} columns; run `dvc repro` to make it again")
    try:
        _protection(header)
    except (ValueError, OverflowError) as e:
        raise UserError(f"{file}: {e}; run `dvc repro` to make it again") from e


def unit_columns(body: list[Unit]) -> dict[str, list[Any]]:
    return {
        "unit": list(range(len(body))),
        "matrix": [u.matrix.name for u in body],
        "block": [u.matrix.block for u in body],
        "kind": [u.matrix.kind for u in body],
        "first_column": [u.first_column for u in body],
        "columns": [u.columns for u in body],
        "rows": [u.matrix.rows for u in body],
    }


def save_distortions(file: Path, table: Table) -> None:
    widths = {
        f"{prefix}_{b:g}": values[:, j].tolist()
        for prefix, values in (("distortion", table.D), ("bytes", table.B))
        for j, b in enumerate(WIDTHS)
    }
    features = {name: table.features[:, j].tolist() for j, name in enumerate(FEATURES)}
    columns = unit_columns(table.body) | widths | {"salient": table.salient} | features
    store.save_table(file, columns, table.header)


def load_distortions(file: Path) -> Table:
    columns, header = store.load_table(file)
    _check(file, header, TABLE_HEADER)
    wanted = {f"{prefix}_{b:g}" for prefix in ("distortion", "bytes") for b in WIDTHS} | set(FEATURES)
    if missing := sorted(wanted - columns.keys()):
        raise UserError(f"{file} lacks the column {missing[0]}; run `dvc repro sensitivity` again")
    body = _body(columns, header, file)
    D, B = (
        torch.tensor([columns[f"{prefix}_{b:g}"] for b in WIDTHS], dtype=dtype).T.contiguous()
        for prefix, dtype in (("distortion", torch.float64), ("bytes", torch.int64))
    )
    if not torch.equal(B, units.sizes(body)):
        raise UserError(f"{file} counts bytes otherwise than this release; run `dvc repro sensitivity` again")
    features = torch.tensor([columns[name] for name in FEATURES], dtype=torch.float64).T.contiguous()
    return Table(body, D, B, header, columns["salient"], features)


def save_plan(file: Path, plan: Plan, distortion: list[float]) -> None:
    columns = unit_columns(plan.body) | {
        "bits": plan.bits,
        "salient": plan.salient,
        "bytes": [u.size(b) for u, b in zip(plan.body, plan.bits, strict=True)],
        "distortion": distortion,
    }
    store.save_table(file, columns, plan.header)


def load_plan(file: Path) -> Plan:
    """Raises UserError when the file is not a plan, or one that was changed by hand into something impossible."""
    columns, header = store.load_table(file)
    _check(file, header, PLAN_HEADER)
    bits = columns.get("bits", [])
    if not bits or not all(type(b) in _NUMBER and b in GRIDS for b in bits):
        raise UserError(f"{file} is not a plan: its column `bits` must hold only {', '.join(f'{b:g}' for b in GRIDS)}")
    plan = Plan(_body(columns, header, file), bits, header, columns["salient"])
    if columns.get("bytes") != [u.size(b) for u, b in zip(plan.body, bits, strict=True)]:
        raise UserError(f"{file}: its column `bytes` is not what its widths take; run `dvc repro allocate` to make it again")
    if not plan.effective_bits <= header["target_bits"]:
        raise UserError(
            f"{file} takes {plan.effective_bits:.4f} effective bits, above its target_bits {header['target_bits']:g}; "
            f"run `dvc repro allocate` to make it again"
        )
    return plan


def _body(columns: dict[str, list[Any]], header: dict[str, Any], file: Path) -> list[Unit]:
    """Raises UserError when the rows are not all units of whole matrices, in order."""
    if missing := [c for c in COLUMNS if c not in columns]:
        raise UserError(f"{file} lacks the columns {', '.join(missing)}; run `dvc repro` to make it again")
    for name, wanted in _COLUMN_TYPES.items():
        if not all(type(v) is wanted for v in columns[name]):
            raise UserError(
                f"{file}: its column `{name}` must hold {wanted.__name__} alone; run `dvc repro` to make it again"
            )
    widths: dict[str, int] = {}
    for name, c in zip(columns["matrix"], columns["columns"], strict=True):
        widths[name] = widths.get(name, 0) + c
    body = [
        Unit(Matrix(name, block, rows, widths[name]), first, width)
        for name, block, rows, first, width in zip(
            *(columns[c] for c in ("matrix", "block", "rows", "first_column", "columns")), strict=True
        )
    ]
    if body != units.cut(dict.fromkeys(u.matrix for u in body), header["chunk_size"]):
        raise UserError(
            f"{file}: its rows are not all units of every matrix, from left to right in chunks of {header['chunk_size']} "
            f"columns; run `dvc repro` to make it again"
        )
    return body
