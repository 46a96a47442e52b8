"""What GPU kernels share: CUDA C++ compiled at run time, launches on torch's stream, and a stand-in for Triton.

Source: NVRTC and driver API of CUDA 13.0 through cuda-bindings; Launch's attributes are those of cuLaunchKernelEx.
A kernel is one `.cu` beside its wrapper, specialised by macros; headers are in `include/`. Nothing here touches a GPU
before a kernel is asked for, and compiling needs none at all.
"""

import ctypes
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_INSTALL = "install cuda-bindings and nvidia-cuda-nvrtc of torch's CUDA version (pip install cuda-bindings)"


def default_cache_dir() -> Path:
    """Where cubins are kept between runs: the platform's cache directory of this user."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "stepfloor" / "kernels"
    if sys.platform == "win32":
        return home / "AppData" / "Local" / "stepfloor" / "kernels"
    return home / ".cache" / "stepfloor" / "kernels"


def device_arch(device: torch.device) -> str:
    """The target of a device's cubins, e.g. `sm_90a`: compiled on this machine, so for this chip's own instructions."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@cache
def missing_for_cuda() -> str | None:
    """What keeps CUDA C++ kernels from being built here, as the end of a sentence; None if nothing does."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); {_INSTALL}"
    try:
        _checked(nvrtc.nvrtcVersion(), "asking for the version of NVRTC")
    except RuntimeError as error:
        return f"NVRTC cannot be loaded ({str(error).splitlines()[0]}); {_INSTALL}"
    return None


def compile_cuda(source: str, defines: Mapping[str, int | str], arch: str, cache_dir: Path) -> bytes:
    """The cubin of one `.cu` of this room, from the cache where it was compiled before.

    source   file name beside this file; it may include `include/*.cuh`, and another `.cu`
    defines  macros that specialise it
    arch     e.g. `sm_90a`
    Raises RuntimeError with the compiler's log.
    """
    text = (_HERE / source).read_bytes()
    headers = {path.name: path.read_bytes() for path in sorted((_HERE / "include").glob("*.cuh"))}
    headers |= _included(text)
    options = [f"--gpu-architecture={arch}", "-std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    stem = source.removesuffix(".cu")
    key = hashlib.sha256()
    for part in (text, *headers.values(), "\n".join(options).encode(), str(_nvrtc_version()).encode()):
        key.update(hashlib.sha256(part).digest())
    path = cache_dir / f"{stem}-{arch}-{key.hexdigest()[:24]}.cubin"
    if path.is_file():
        return path.read_bytes()
    begin = time.perf_counter()
    cubin = _compile(source, text, headers, options)
    where = _store(path, cubin)
    logger.info("compiled %s for %s in %.1f s (%s)", source, arch, time.perf_counter() - begin, where)
    return cubin


def _included(text: bytes) -> dict[str, bytes]:
    """Every `.cu` that a text includes, and what those include."""
    found: dict[str, bytes] = {}
    for name in re.findall(r'#include "(\w+\.cu)"', text.decode()):
        found[name] = (_HERE / name).read_bytes()
        found |= _included(found[name])
    return found


class Launch:
    """A kernel with everything about its launch fixed but the arguments and the stream.

    grid, block   blocks, and threads of a block, along x
    shared_bytes  dynamic shared memory of a block
    cluster       blocks of a cluster; more than 8 where the chip allows it
    dependent     programmatic dependent launch: blocks may start before the previous kernel of the stream has ended,
                  and the kernel waits for it itself
    Not for two threads at once: the launch configuration is reused. Making one loads the kernel, which would spoil a
    graph that is being captured: RuntimeError then says to run the step once before.
    """

    def __init__(
        self,
        cubin: bytes,
        name: str,
        device: torch.device,
        grid: int,
        block: int,
        shared_bytes: int,
        cluster: int = 1,
        dependent: bool = True,
    ) -> None:
        from cuda.bindings import driver

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name} would be loaded while a graph is captured; run the step once before capturing it"
            )
        self._device, self._cluster = device, cluster
        self._function = _load(cubin, name, device, shared_bytes, cluster)
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        attributes: list[Any] = []
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._launch: Callable[..., tuple[Any]] = driver.cuLaunchKernelEx
        self._doing = f"launching {name}, {grid} blocks of {block} threads, {shared_bytes} bytes of shared memory"

    @property
    def clusters_at_once(self) -> int:
        """Clusters (blocks where there are none) that the device runs at the same time, if it runs nothing else."""
        from cuda.bindings import driver

        config, doing = self._config, "asking for what runs at once"
        if self._cluster == 1:  # the question about clusters is then answered with none
            held = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, config.blockDimX, config.sharedMemBytes
            )
            count = torch.cuda.get_device_properties(self._device).multi_processor_count
            return int(_checked(held, doing)) * count
        return int(_checked(driver.cuOccupancyMaxActiveClusters(self._function, config), doing))

    def __call__(self, arguments: bytes) -> None:
        """Queue the kernel on torch's current stream; `arguments` is its one by-value struct, packed as C packs it."""
        packed = ctypes.create_string_buffer(arguments, len(arguments))
        pointer = ctypes.c_void_p(ctypes.addressof(packed))
        self._config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        status = self._launch(self._config, self._function, ctypes.addressof(pointer), 0)
        if int(status[0]):
            _checked(status, self._doing)


def _load(cubin: bytes, name: str, device: torch.device, shared_bytes: int, cluster: int) -> Any:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes torch's context current in this thread
        image = ctypes.create_string_buffer(cubin, len(cubin))
        module = _checked(driver.cuModuleLoadData(ctypes.addressof(image)), f"loading {name}")
        function = _checked(driver.cuModuleGetFunction(module, name.encode()), f"looking up {name}")
        attribute = driver.CUfunction_attribute
        # above 48 KB only on request; every kernel asks for the largest carve-out, because a multiprocessor cannot
        # change it while blocks of the kernel before still run there
        wanted = [
            (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ]
        if cluster > 8:
            wanted.append((attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for which, value in wanted:
            doing = f"giving {name} {shared_bytes} shared bytes and clusters of {cluster}"
            _checked(driver.cuFuncSetAttribute(function, which, value), doing)
    return function


@cache
def _nvrtc_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    result = nvrtc.nvrtcVersion()
    _checked(result, "asking for the version of NVRTC")
    return result[1], result[2]


def _compile(source: str, text: bytes, headers: Mapping[str, bytes], options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    names = [name.encode() for name in headers]
    created = nvrtc.nvrtcCreateProgram(text, source.encode(), len(names), list(headers.values()), names)
    program = _checked(created, f"handing {source} to NVRTC")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status):
            log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program), "reading NVRTC's log"))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{source} does not compile with {' '.join(options)}:\n{log.decode(errors='replace')}")
        cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program), f"reading the cubin of {source}"))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin), f"reading the cubin of {source}")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _store(path: Path, cubin: bytes) -> str:
    """Keep a cubin; another process may do the same at this moment. Returns what to say about it."""
    part = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(cubin)
        part.replace(path)
    except OSError as error:
        return f"not kept: {error}"
    return f"kept as {path.name}"


def _checked(results: tuple[Any, ...], doing: str) -> Any:
    """The value behind a status; RuntimeError names the status and what was being done."""
    status = results[0]
    if int(status):
        raise RuntimeError(f"{doing}: CUDA reports {status.name} ({int(status)})")
    return results[1] if len(results) > 1 else None


class _NoTriton:
    """Stands where `triton` and `triton.language` would: kernels can be defined, launching one says what to do."""

    def __getattr__(self, name: str) -> Any:
        return _NoTriton()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _NoTriton()

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(
            "a Triton kernel was launched, but Triton is not installed; on Linux run `pip install triton`, elsewhere "
            "leave the tensors on the CPU, where every operator runs its reference"
        )


def runs_triton(tensor: Tensor) -> bool:
    """Whether an operator launches its Triton kernel on this tensor; on the CPU it runs its reference.

    Tests call the launching function itself, on the CPU too, where Triton's interpreter runs the kernel.
    """
    if tensor.is_cuda and not HAS_TRITON:
        _say_without_triton()
    return HAS_TRITON and tensor.is_cuda


@cache
def _say_without_triton() -> None:
    logger.warning("operators run their torch references on the GPU: Triton is not installed; run `pip install triton`")


def dependent_launch(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a Triton kernel that ends with `PDL: tl.constexpr` and begins with `start(PDL)`.

    A product and a sum are two roundings, as in the references: fused, they gave every hundredth value of a bf16 write
    other bits (H200, Triton 3.6), since there the product is not rounded. Dots are not concerned.
    With programmatic dependent launch (compute capability 9.0) the kernel may be resident before its predecessor has
    ended, and its successor before it has: what a launch costs in a chain falls from 1.2 to 0.75 us on an H200.
    """
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True, "enable_fp_fusion": False}
    return {"PDL": False, "enable_fp_fusion": False}


try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_TRITON = True
except ModuleNotFoundError:
    triton: Any = _NoTriton()
    tl: Any = _NoTriton()
    gdc_launch_dependents: Any = _NoTriton()
    gdc_wait: Any = _NoTriton()
    HAS_TRITON = False


@triton.jit
def start(PDL: tl.constexpr):
    """Let the successor's blocks in, then wait until everything the predecessors wrote can be read.

    Every kernel of a chain has to wait before it ends, and before it writes: the wait of a successor covers what came
    before this kernel only because this kernel waited too.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_successor_in(PDL: tl.constexpr):
    """The first half of `start`, for a kernel that reads before it waits: what nobody writes, or what is settled."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """The second half of `start`."""
    if PDL:
        gdc_wait()


@triton.jit
def start_in_turn(PDL: tl.constexpr):
    """The same, waiting first: for a kernel whose successor reads, before its own wait, what came before both."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
