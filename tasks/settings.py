"""params.yaml to Params: strict, by dotted path."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tasks import store
from tasks.baselines import BaselinesConfig
from tasks.calibrate import CalibrateConfig
from tasks.compare import CompareConfig
from tasks.config import Common, resolve
from tasks.diagnose import DiagnoseConfig
from tasks.errors import UserError, first_line
from tasks.finetune import FinetuneConfig
from tasks.measure import BenchmarkConfig
from tasks.prepare import PrepareConfig
from tasks.quantize import QuantizeConfig
from tasks.searching import AllocateConfig
from tasks.sensitivity import SensitivityConfig
from tasks.supernet import SupernetConfig

log = logging.getLogger("windquant")
_YAML = YAML()
_YAML.preserve_quotes, _YAML.width = True, 4096
SECTIONS: dict[str, type] = {
    "common": Common,
    "prepare": PrepareConfig,
    "calibrate": CalibrateConfig,
    "sensitivity": SensitivityConfig,
    "supernet": SupernetConfig,
    "allocate": AllocateConfig,
    "quantize": QuantizeConfig,
    "finetune": FinetuneConfig,
    "diagnose": DiagnoseConfig,
    "benchmark": BenchmarkConfig,
    "baselines": BaselinesConfig,
    "compare": CompareConfig,
}


@dataclass(frozen=True)
class Params:
    """One section a stage, and `common`. Values left to the effort dial are filled in."""

    common: Common = field(default_factory=Common)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    sensitivity: SensitivityConfig = field(default_factory=SensitivityConfig)
    supernet: SupernetConfig = field(default_factory=SupernetConfig)
    allocate: AllocateConfig = field(default_factory=AllocateConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    baselines: BaselinesConfig = field(default_factory=BaselinesConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    def flat(self, section: str) -> dict[str, Any]:
        """`<section>.<key>` -> value, for MLflow."""
        return {f"{section}.{k}": v for k, v in asdict(getattr(self, section)).items()}


def load(file: Path = Path("params.yaml")) -> Params:
    """Raises UserError with the dotted path for an unknown key, a wrong type or a value out of range."""
    try:
        data = YAML(typ="safe").load(file.read_text())  # YAML 1.2: `1e-4` is a number
    except FileNotFoundError:
        raise UserError(f"{file.resolve()} is missing; run from the project's root") from None
    except YAMLError as e:
        problem, mark = getattr(e, "problem", None), getattr(e, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{file}{where} is not YAML: {problem or first_line(e)}") from e
    return parse(data or {}, file.name)


@contextmanager
def temporarily(section: str, values: dict[str, Any], file: Path = Path("params.yaml")) -> Iterator[None]:
    """Other values in the file while something runs: DVC makes the variants of a matrix from nowhere else. What others write
    into the file meanwhile stays; where the process dies, the next one takes the values out. Raises UserError as `load`
    does, and while another process does the same."""
    note = file.parent / ".state" / "params-before.json"
    note.parent.mkdir(exist_ok=True)
    lock = FileLock(note.with_suffix(".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if values:
            raise UserError(f"{file} is changed for a while by another run of all baselines; wait for its end") from None
        yield
        return
    try:
        if note.exists():
            _take_back(file, **store.load_json(note))
        load(file)
        if values:
            before = file.read_text()
            data = _YAML.load(before) or {}
            own = data[section] = data.get(section) or {}
            kept = {k: own[k] for k in values if k in own}
            own.update(values)
            written = _dumped(data)
            said = {"before": before, "written": written, "section": section, "kept": kept, "values": list(values)}
            store.save_json(note, said)
            store.save_text(file, written)
        yield
    finally:
        if values and note.exists():
            _take_back(file, **store.load_json(note))
            note.unlink()
        lock.release()


def _take_back(file: Path, before: str, written: str, section: str, kept: dict[str, Any], values: list[str]) -> None:
    now = file.read_text()
    if now == written:
        store.save_text(file, before)
        return
    try:
        data = _YAML.load(now)
        own = data[section]
        for key in values:
            own.pop(key, None)
        own.update(kept)
        store.save_text(file, _dumped(data))
    except (YAMLError, KeyError, TypeError, AttributeError):
        log.warning("%s was changed meanwhile; %s.%s in it may not be yours", file, section, f" and {section}.".join(values))


def _dumped(data: Any) -> str:
    stream = io.StringIO()
    _YAML.dump(data, stream)
    return stream.getvalue()


def parse(data: dict[str, Any], file: str = "params.yaml") -> Params:
    if not isinstance(data, dict):
        raise UserError(f"{file} must be a mapping of sections, not {type(data).__name__}")
    unknown = [k for k in data if k not in SECTIONS]
    if unknown:
        raise UserError(f"{file}: there is no section '{unknown[0]}'; the sections are {', '.join(SECTIONS)}")
    sections = {name: _section(cls, data.get(name) or {}, name, file) for name, cls in SECTIONS.items()}
    effort = sections["common"].effort
    return Params(**{name: resolve(section, effort) for name, section in sections.items()})


def _section(cls: type, values: Any, name: str, file: str) -> Any:
    adapter = TypeAdapter(validated(cls, frozen=True, config=ConfigDict(extra="forbid", strict=True)))
    try:
        return cls(**vars(adapter.validate_json(json.dumps(values, default=str))))
    except ValidationError as e:
        raise UserError(f"{file}: {_sentence(e, cls, name)}") from e


def _sentence(e: ValidationError, cls: type, section: str) -> str:
    """The first error: dotted path, value, rule."""
    first = e.errors()[0]
    path = ".".join([section, *(str(p) for p in first["loc"])])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path} is not a parameter; {section} has {', '.join(cls.__dataclass_fields__)}"
    if first["type"] == "value_error":
        return f"{section}: {first.get('ctx', {}).get('error')}"
    return f"{path} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
