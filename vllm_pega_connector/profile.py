# SPDX-License-Identifier: Apache-2.0
"""Device profiles: what was measured on a GPU, as data, from which the Auto policy decides.

Built-in profiles lie in `profiles/`, beside `schema.json`, which describes them to other tools.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .config import ConfigError, ObjectiveName, read_bounded

BUILT_IN = Path(__file__).parent / "profiles"
Backend = Literal["memcpy", "kernel", "chunked", "staged"]
# measured: as it stands; derived: computed from measurements, as the notes say; estimate: a considered guess.
Source = Literal["measured", "derived", "estimate"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Setting(_Model):
    """What a measurement was made with; 0 means the backend's default."""

    backend: Backend
    grid: int = Field(default=0, ge=0, le=65535, description="CTAs at most (workers on a host device)")
    chunk_descriptors: int = Field(default=0, ge=0, le=1 << 20, description="ranges in a chunk")
    chunk_bytes: int = Field(default=0, ge=0, le=1 << 30, description="bytes in a chunk; the stage of `staged`")
    source: Source = "measured"


class CurvePoint(Setting):
    range_bytes: int = Field(ge=1, description="size of every range; ranges are shuffled")
    gib_per_s: float = Field(gt=0, description="GiB/s of one direction, from submission to completion")


class InterferencePoint(Setting):
    range_bytes: int = Field(default=0, ge=0, description="size of every range; 0 = any")
    p99_growth: float = Field(ge=0, description="growth of decode p99 while moving: 0.05 = +5 %")


class DirectionProfile(_Model):
    contiguous_gib_per_s: float = Field(gt=0, description="pinned, contiguous copy: the wire")
    submit_us_per_range: dict[Backend, float] = Field(description="microseconds of the submitting thread per range")
    latency_us: dict[Backend, float] = Field(description="microseconds of the smallest transfer, completion seen")
    curve: list[CurvePoint]
    interference: list[InterferencePoint]

    @field_validator("submit_us_per_range", "latency_us")
    @classmethod
    def _not_negative(cls, costs: dict[str, float]) -> dict[str, float]:
        if any(cost < 0 for cost in costs.values()):
            raise ValueError("a cost cannot be negative")
        return costs

    @model_validator(mode="after")
    def _memcpy_is_measured(self) -> DirectionProfile:
        if not any(point.backend == "memcpy" for point in self.curve):
            raise ValueError("curve: memcpy must be measured, it is what every device can do")
        return self


class Defaults(_Model):
    """Fills what neither a policy nor a setting names; 0 = no bound of the profile's (kernel: one launch)."""

    max_grid_blocks: int = Field(default=0, ge=0, le=65535)
    chunk_descriptors: int = Field(default=0, ge=0, le=1 << 20)
    chunk_bytes: int = Field(default=0, ge=0, le=1 << 30)
    inflight_chunks: int = Field(default=0, ge=0, le=64)


Spread = Annotated[float, Field(ge=0, le=10_000)]


class Provenance(_Model):
    gpu: str
    driver: str = ""
    date: str = Field(description="of the measurement, YYYY-MM-DD, or empty")
    method: str = Field(description="how it was measured, in a sentence")
    notes: list[str] = Field(default=[], description="what is derived or estimated, and from what")


class Directions(_Model):
    load: DirectionProfile = Field(description="host to device")
    save: DirectionProfile = Field(description="device to host")


class DeviceProfile(_Model):
    """A device profile of vllm-pega-connector."""

    version: Literal[1] = 1
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    match: list[str] = Field(default=[], description="words that occur in the names of the GPUs it is for")
    provenance: Provenance
    directions: Directions
    defaults: dict[Backend, Defaults]
    spread_ms: dict[ObjectiveName, Spread] = Field(
        default={},
        description="milliseconds over which Auto spreads a transfer that would be faster, by objective; unnamed: none",
    )


def schema() -> dict[str, Any]:
    """The JSON schema of a profile; `profiles/schema.json` is this."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **DeviceProfile.model_json_schema()}


def built_in_names() -> list[str]:
    return sorted(path.stem for path in BUILT_IN.glob("*.json") if path.stem != "schema")


def read_profile(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A validated profile, every default filled in. Raises ConfigError naming the first thing wrong with it."""
    path = Path(path)
    try:
        text = read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"device_profile: cannot read {path}: {why}"]) from None
    try:
        return DeviceProfile.model_validate_json(text).model_dump(mode="json")
    except ValidationError as error:
        first, count = error.errors()[0], error.error_count()
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise ConfigError(
            [f"device_profile: {path}: {where}: {first['msg']}{more}; see profiles/schema.json"]
        ) from None


def load_profile(name_or_path: str, gpu_name: str = "", setting: str = "device_profile") -> dict[str, Any]:
    """The profile that a setting means, by default `device_profile`, as the native DeviceProfile takes it.

    `gpu_name` is the driver's name of the device, for "auto"; empty or "cpu" where there is no GPU. A path is
    recognised by its separator or by ending in ".json". Raises ConfigError.
    """
    if name_or_path == "auto":
        return read_profile(BUILT_IN / f"{match_gpu(gpu_name)}.json")
    if os.sep in name_or_path or name_or_path.endswith(".json"):
        return read_profile(Path(name_or_path).expanduser())
    if name_or_path not in built_in_names():
        names = ", ".join(built_in_names())
        raise ConfigError([f'{setting}: got "{name_or_path}"; allowed: auto, {names}, or the path of a JSON file'])
    return read_profile(BUILT_IN / f"{name_or_path}.json")


def match_gpu(gpu_name: str) -> str:
    """The built-in profile for a device: the one that matches it, else `generic`; without a GPU, `host`."""
    if gpu_name.lower() in ("", "cpu"):
        return "host"
    for name in built_in_names():
        words = json.loads((BUILT_IN / f"{name}.json").read_text(encoding="utf-8")).get("match", [])
        # Whole words: GH200 is no H200.
        if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", gpu_name, re.IGNORECASE) for word in words):
            return name
    return "generic"


def write_profile(profile: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Validates and writes a profile, one point a line, replacing the file at once. Raises ValueError, OSError."""
    text = _format(DeviceProfile.model_validate(profile).model_dump(mode="json", exclude_defaults=True)) + "\n"
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # goes away whatever happens
        file = Path(folder) / path.name
        file.write_text(text, encoding="utf-8")
        os.replace(file, path)


def _format(value: Any, indent: str = "") -> str:
    """JSON in which whatever fits takes one line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or len(indent) + len(line) <= 110:
        return line
    inner = indent + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _format(item, inner) for item in value) + "\n" + indent + "]"
    items = (f"{inner}{json.dumps(key)}: {_format(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + "\n" + indent + "}"
