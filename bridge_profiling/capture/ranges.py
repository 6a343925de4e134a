"""NVTX ranges and annotations: around the iterations and phases of a training, and megatron-core's own inside them."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint, c_uint16, c_uint32, c_void_p
from typing import Any, ClassVar

from bridge_profiling.common.errors import CaptureError

#: The variable in which a profiler names its library, for 64-bit processes.
INJECTION_VARIABLE = "NVTX_INJECTION64_PATH"

_NVTX_VERSION = 3
_REGISTERED_STRING = 3

#: Export tables (NvtxExportTableID).
_CALLBACKS, _VERSION_INFO = 1, 3

#: Slots of each module's table of functions (NvtxCallbackModule), slot 0 unused. nsys refuses a client that lacks a module.
_SLOTS = {1: 16, 2: 9, 3: 15, 4: 7, 5: 16, 6: 7}

#: Module CORE2, and its functions that are called here (NvtxCallbackIdCore2).
_DOMAINS, _PUSH, _POP, _REGISTER_STRING = 5, 4, 5, 10

#: The domain that torch uses for its ranges too.
_DEFAULT_DOMAIN = None


class NvtxRange:
    """A range pushed on enter and popped on exit, never raising on exit. `push` and `pop` take its name."""

    __slots__ = ("_name", "_pop", "_push")

    def __init__(self, name: str, push: Callable[[str], object], pop: Callable[[str], object]) -> None:
        self._name, self._push, self._pop = name, push, pop

    def __enter__(self) -> None:
        self._push(self._name)

    def __exit__(self, *_: object) -> None:
        # megatron-core's pop raises when an exception in the model has left its own ranges open. A range is never worth an
        # error in training, least of all one that hides the real one.
        with suppress(RuntimeError, ValueError):
            self._pop(self._name)


def range_functions(*, megatron_ranges: bool) -> tuple[Callable[[str], object], Callable[[str], object]]:
    """Push and pop of NVTX ranges. With neither a GPU nor a profiler that listens to NVTX they do nothing.

    `megatron_ranges` switches on megatron-core's own ranges and shares its stack of ranges; it needs a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        library = os.environ.get(INJECTION_VARIABLE)
        if not library:
            return lambda name: None, lambda name: None
        client = _client(library)
        return client.push, lambda name: client.pop()

    if megatron_ranges and importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        from megatron.core.utils import configure_nvtx_profiling, nvtx_range_pop, nvtx_range_push

        configure_nvtx_profiling(True)
        return nvtx_range_push, nvtx_range_pop
    return torch.cuda.nvtx.range_push, lambda name: torch.cuda.nvtx.range_pop()


@functools.cache
def standing_ranges() -> Callable[[str], AbstractContextManager]:
    """Makes the ranges of `nvtx_ranges`, which are emitted in every iteration: NVTX on a GPU, torch's annotations on a CPU."""
    import torch

    if torch.cuda.is_available():
        push, pop = range_functions(megatron_ranges=True)
        return lambda name: NvtxRange(name, push, pop)
    return torch.profiler.record_function


# -- NVTX without a GPU ------------------------------------------------------------------------------------------------


class _Attributes(ctypes.Structure):
    """nvtxEventAttributes_v2, 48 bytes. Category, color and payload stay unset."""

    _fields_: ClassVar = [
        ("version", c_uint16),
        ("size", c_uint16),
        ("unset", c_uint32 * 7),
        ("message_type", c_int32),
        ("message", c_void_p),
    ]


class _Callbacks(ctypes.Structure):
    """NvtxExportTableCallbacks."""

    _fields_: ClassVar = [("size", c_size_t), ("get_module_function_table", c_void_p)]


class _VersionInfo(ctypes.Structure):
    """NvtxExportTableVersionInfo."""

    _fields_: ClassVar = [("size", c_size_t), ("version", c_uint32), ("reserved", c_uint32), ("set_version", c_void_p)]


class NvtxClient:
    """Ranges without a GPU: calls the profiler around this process directly, with ctypes, as NVTX's C header does.

    The package nvtx is not used. Since 0.2.12 it asks NVTX's payload extension whether a profiler listens; nsys 2024.2 has an
    older extension (259, not 260) and answers "no", so the package drops every range. torch's own binding exists in CUDA builds
    only, and its ranges do not open `--capture-range=nvtx`, which takes registered strings only.

    NVTX is a protocol, stable since version 3: the profiler names its library in NVTX_INJECTION64_PATH, and fills the client's
    tables of function pointers when the library's InitializeInjectionNvtx2 is called (nvtxTypes.h, nvtxInit.h).
    """

    def __init__(self, library: str) -> None:
        # The profiler keeps pointers to all of these for as long as the process lives.
        self._slots = {module: (c_void_p * count)() for module, count in _SLOTS.items()}
        self._tables = {module: _addresses_of(slots) for module, slots in self._slots.items()}
        self._get_table = CFUNCTYPE(c_int, c_int, POINTER(c_void_p), POINTER(c_uint))(self._function_table)
        self._set_version = CFUNCTYPE(None, c_uint32)(lambda version: None)
        self._callbacks = _Callbacks(ctypes.sizeof(_Callbacks), ctypes.cast(self._get_table, c_void_p))
        self._version_info = _VersionInfo(
            ctypes.sizeof(_VersionInfo), _NVTX_VERSION, 0, ctypes.cast(self._set_version, c_void_p)
        )
        exported = {_CALLBACKS: ctypes.addressof(self._callbacks), _VERSION_INFO: ctypes.addressof(self._version_info)}
        self._export = CFUNCTYPE(c_void_p, c_uint32)(exported.get)
        try:
            initialize: Any = ctypes.CDLL(library).InitializeInjectionNvtx2
        except (OSError, AttributeError) as error:
            raise CaptureError(
                f"the library in {INJECTION_VARIABLE} cannot be used: {error}; unset the variable, or start the rank under nsys"
            ) from error
        taken = initialize(self._export)
        push, pop, register = (self._slots[_DOMAINS][slot] for slot in (_PUSH, _POP, _REGISTER_STRING))
        if not taken or not push or not pop or not register:
            raise CaptureError(f"the profiler does not accept NVTX ranges ({library})")
        self._push = CFUNCTYPE(c_int, c_void_p, POINTER(_Attributes))(push)
        self._pop = CFUNCTYPE(c_int, c_void_p)(pop)
        self._register = CFUNCTYPE(c_void_p, c_void_p, c_char_p)(register)
        self._attributes: dict[str, _Attributes] = {}

    def push(self, text: str) -> None:
        """Open a range on this thread."""
        # nsys' --capture-range=nvtx waits for a registered string. Registered once, since the profiler keeps it.
        attributes = self._attributes.get(text)
        if attributes is None:
            attributes = self._attributes[text] = _Attributes(
                version=_NVTX_VERSION,
                size=ctypes.sizeof(_Attributes),
                message_type=_REGISTERED_STRING,
                message=self._register(_DEFAULT_DOMAIN, text.encode(errors="replace")),
            )
        self._push(_DEFAULT_DOMAIN, attributes)

    def pop(self) -> None:
        """Close the range that this thread opened last."""
        self._pop(_DEFAULT_DOMAIN)

    def _function_table(self, module: int, table: Any, size: Any) -> int:
        """Give the profiler one module's table to fill: 1, or 0 for a module that NVTX 3 does not have."""
        if module not in self._tables:
            return 0
        if table:
            table[0] = ctypes.addressof(self._tables[module])
        if size:
            size[0] = len(self._tables[module])
        return 1


def _addresses_of(slots: ctypes.Array[c_void_p]) -> ctypes.Array[c_void_p]:
    """The address of each slot: NVTX calls this a function table."""
    first, step = ctypes.addressof(slots), ctypes.sizeof(c_void_p)
    return (c_void_p * len(slots))(*(first + number * step for number in range(len(slots))))


#: The one client of this process: a profiler keeps the pointers that it is given.
_client = functools.cache(NvtxClient)
