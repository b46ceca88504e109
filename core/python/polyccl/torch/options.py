"""What a process group is created with: ``pg_options``, and the device that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import arguments, create, devices, environment
from ..errors import InvalidArgument


@dataclass
class Options:
    """The ``pg_options`` of a group. What is None or empty follows from the environment, as for `polyccl.new_comm`.

    ``backend`` is ``"auto"`` (a plain library where all ranks have one, else a bridge), ``"bridge"``, or a library's name; None is
    POLYCCL_TORCH_BACKEND. ``device`` is where the communicator works, e.g. ``"cuda:1"``; tensors that are elsewhere are copied
    there and back. ``hints`` are those of `polyccl.new_comm`; they may differ by rank where the hint may (``local``, ``island``).
    """

    backend: str | None = None
    device: str | torch.device | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    abort_process_on_timeout_or_error: bool | None = None
    is_high_priority_stream: bool | None = None


def read(given: Any, inherited: Options | None = None) -> Options:
    """The options that ``pg_options`` stands for: `Options`, its fields as a dict, or a backend's name; None: those inherited.

    Raises InvalidArgument for anything else, above all for the options of other backends.
    """
    if given is None:
        return inherited or Options()
    if isinstance(given, Options):
        return _checked(given)
    if isinstance(given, str):
        return Options(backend=given)
    if isinstance(given, Mapping):
        known = Options.__dataclass_fields__
        if not all(key in known for key in given):
            raise InvalidArgument(f"pg_options has the keys {arguments.shown(list(given))}; there are: {', '.join(known)}")
        return _checked(Options(**given))
    kind = type(given)
    raise InvalidArgument(
        f"pg_options is a {kind.__module__}.{kind.__qualname__}, which PolyCCL cannot honour; give polyccl.torch.Options, e.g. "
        'Options(backend="bridge", hints={"island": "a"})'
    )


def _checked(options: Options) -> Options:
    """The options, if each field has a value of its type. `polyccl.new_comm` checks what the values mean."""
    if options.backend is not None:
        arguments.text("pg_options.backend", options.backend, "a backend's name, or None")
    if options.device is not None:
        devices.parse(options.device)
    arguments.string_mapping("pg_options.hints", options.hints)
    for name in ("abort_process_on_timeout_or_error", "is_high_priority_stream"):
        arguments.optional_flag(f"pg_options.{name}", getattr(options, name))
    return options


def backend_of(options: Options) -> str:
    """The backend as `polyccl.new_comm` takes it."""
    return options.backend or environment.text("POLYCCL_TORCH_BACKEND")


def device_of(options: Options, device_types: Sequence[str], bound: torch.device | None) -> str:
    """Where the group's communicator works.

    In this order: the option; the device that the group is bound to (``device_id``); host memory, where this rank's library
    works there or no accelerator is there for one of ``device_types``; the current accelerator.
    """
    if options.device is not None:
        return str(options.device)
    if bound is not None:
        return str(bound)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type not in device_types:
        return "cpu"
    backend = backend_of(options)
    library = (
        (options.hints or {}).get("local") or environment.text("POLYCCL_LOCAL")
        if backend in (create.AUTO, create.BRIDGE)
        else backend
    )
    if library:
        plugin = create.find_library(library).plugin
        if plugin is None or not plugin.has_device:
            return "cpu"
    return f"{accelerator.type}:{torch.accelerator.current_device_index()}"


__all__ = ["Options", "backend_of", "device_of", "read"]
