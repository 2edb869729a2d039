"""CUDA C++ that is compiled in this process for the device at hand, and run there.

NVRTC comes with every CUDA build of torch, and the driver with the device: nothing has to be
installed for it, no compiler and no headers. Both are C libraries with a documented interface.
torch's own way to them, ``torch.cuda._compile_kernel``, asks for an installed toolkit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Every operation is IEEE binary32 and rounds by itself, as on a CPU.
ARITHMETIC = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
OPTIONS = ("--std=c++17", "--disable-warnings", *ARITHMETIC)


class NoKernel(Exception):
    """A kernel cannot be compiled, loaded or launched; nothing was done on the device."""


class Target(NamedTuple):
    """A CUDA device, for those who compile for it."""

    ordinal: int
    capability: int
    """As 90 for 9.0."""


def target_of(place: torch.device) -> Target:
    """Return what a CUDA device of torch is to NVRTC and the driver."""
    index = torch.cuda.current_device() if place.index is None else place.index
    major, minor = torch.cuda.get_device_capability(index)
    return Target(index, 10 * major + minor)


def stream_of(index: int) -> int:
    """Return the handle of the calling thread's current stream on a device."""
    return int(torch.cuda.current_stream(index).cuda_stream)


class Nvrtc:
    """The compiler."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def compile(self, source: str, capability: int) -> bytes:
        """Return machine code for devices of a compute capability.

        For a device that is newer than this NVRTC, it is PTX, which the driver compiles.
        """
        known = self._known()
        arch = max((each for each in known if each <= capability), default=None)
        if arch is None:
            raise NoKernel(f"NVRTC compiles for sm_{min(known, default=0)} on, not sm_{capability}")
        machine, output = ("sm", "CUBIN") if arch == capability else ("compute", "PTX")
        program = ctypes.c_void_p()
        made = ctypes.byref(program)
        self._call("CreateProgram", made, source.encode(), b"update.cu", 0, None, None)
        try:
            self._compile(program, (f"--gpu-architecture={machine}_{arch}", *OPTIONS))
            return self._text(program, output)
        finally:
            self._call("DestroyProgram", made)

    def _known(self) -> list[int]:
        """Return the compute capabilities that it compiles for."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", found)
        return list(found)

    def _compile(self, program: ctypes.c_void_p, options: tuple[str, ...]) -> None:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        try:
            self._call("CompileProgram", program, len(options), words)
        except NoKernel as error:
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise NoKernel(f"{error}: {_first_error(log)}") from None

    def _text(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"Get{name}", program, found)
        return found.raw

    def _call(self, name: str, *args: object) -> None:
        status = _function(self._library, f"nvrtc{name}")(*args)
        if status:
            text = _function(self._library, "nvrtcGetErrorString")
            text.restype = ctypes.c_char_p
            said = text(status) or b"an error"
            raise NoKernel(f"nvrtc{name}: {said.decode(errors='replace')} ({status})")


class Driver:
    """The driver of the devices, which torch has initialised."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def load(self, code: bytes, name: str, index: int) -> ctypes.c_void_p:
        """Return the function ``name`` of compiled code, on a device; it stays loaded."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self._on(index):
            self._call("cuModuleLoadData", ctypes.byref(module), code)
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        argument: ctypes.Structure,
        *,
        index: int,
        stream: int,
        blocks: int,
        threads: int,
    ) -> None:
        """Queue a function on a stream; its one argument is passed by value."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        with self._on(index):
            self._call(
                "cuLaunchKernel",
                *(function, blocks, 1, 1, threads, 1, 1, 0),
                *(ctypes.c_void_p(stream), arguments, None),
            )

    @contextmanager
    def _on(self, index: int) -> Iterator[None]:
        """Make torch's context on a device current in a block: a thread may never have had one."""
        if index not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *args: object) -> None:
        status = _function(self._library, name)(*args)
        if status:
            said = ctypes.c_char_p()
            _function(self._library, "cuGetErrorString")(status, ctypes.byref(said))
            text = (said.value or b"an error").decode(errors="replace")
            raise NoKernel(f"{name}: {text} ({status})")


class CudaKernel:
    """A kernel on one device, to be launched by any thread."""

    def __init__(
        self,
        driver: Driver,
        function: ctypes.c_void_p,
        index: int,
        stream: Callable[[int], int],
    ) -> None:
        self._driver = driver
        self._function = function
        self._index = index
        self._stream = stream

    def launch(self, argument: ctypes.Structure, *, blocks: int, threads: int) -> None:
        """Queue it on the calling thread's current stream; raises NoKernel."""
        self._driver.launch(
            self._function,
            argument,
            index=self._index,
            stream=self._stream(self._index),
            blocks=blocks,
            threads=threads,
        )


class Toolchain:
    """NVRTC and the driver: from a text to a kernel on a device.

    Args:
        target: returns what a device of torch is to both.
        stream: returns the handle of the calling thread's current stream, by a device's index.
    """

    def __init__(
        self,
        nvrtc: ctypes.CDLL,
        driver: ctypes.CDLL,
        *,
        target: Callable[[torch.device], Target] = target_of,
        stream: Callable[[int], int] = stream_of,
    ) -> None:
        self._nvrtc = Nvrtc(nvrtc)
        self._driver = Driver(driver)
        self._target = target
        self._stream = stream

    def build(self, source: str, name: str, place: torch.device) -> CudaKernel:
        """Compile a text for a device, and return its function ``name``; raises NoKernel."""
        index, capability = self._target(place)
        function = self._driver.load(self._nvrtc.compile(source, capability), name, index)
        return CudaKernel(self._driver, function, index, self._stream)


@functools.cache
def open_toolchain() -> Toolchain:
    """Return the NVRTC of torch's CUDA and the driver; raises NoKernel if one is missing."""
    version = torch.version.cuda
    if version is None:
        raise NoKernel("this torch was built without CUDA")
    try:
        nvrtc = open_nvrtc(Path(torch.__file__).parents[1], version.split(".")[0])
        return Toolchain(nvrtc, ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise NoKernel(str(error)) from None


def open_nvrtc(packages: Path, major: str) -> ctypes.CDLL:
    """Load NVRTC from torch's own wheels, or as the loader finds it; OSError without one."""
    name = f"libnvrtc.so.{major}"
    for path in sorted(packages.glob(f"nvidia/*/lib/{name}")):
        for part in sorted(path.parent.glob(f"libnvrtc-builtins.so.{major}.*")):
            ctypes.CDLL(str(part))  # NVRTC opens it by its bare name
        return ctypes.CDLL(str(path))
    return ctypes.CDLL(name)


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError:
        raise NoKernel(f"{library._name} has no {name}") from None


def _first_error(log: str) -> str:
    lines = log.strip().splitlines() or ["no reason was given"]
    return next((line for line in lines if "error" in line), lines[0])
