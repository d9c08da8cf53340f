"""Devices that are not there: both compilers run on a machine that has only a CPU.

A GPU is described to XLA by its facts, and libtpu knows all TPUs by name. Without a
device XLA cannot try matrix multiplications out, so for GPUs autotuning is off.
"""

import importlib.metadata
import importlib.util
import math
import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

# Fields of `gpu_device_info` in XLA's GpuTargetConfigProto, of all these GPUs.
GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
GPUS = {
    "H100": {
        "description": "NVIDIA H100 80GB HBM3",
        "compute_capability": (9, 0),
        "shared_memory_per_core": 233472,
        "shared_memory_per_block_optin": 232448,
        "threads_per_core_limit": 2048,
        "core_count": 132,
        "fpus_per_core": 128,
        "memory_bandwidth": 3352320000000,
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 84942979072,
    },
    "A100": {
        "description": "NVIDIA A100-SXM4-40GB",
        "compute_capability": (8, 0),
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "threads_per_core_limit": 2048,
        "core_count": 108,
        "fpus_per_core": 64,
        "memory_bandwidth": 1555000000000,
        "l2_cache_size": 41943040,
        "clock_rate_ghz": 1.41,
        "device_memory_size": 42297786368,
    },
    "T4": {
        "description": "Tesla T4",
        "compute_capability": (7, 5),
        "shared_memory_per_core": 65536,
        "shared_memory_per_block_optin": 65536,
        "threads_per_core_limit": 1024,
        "core_count": 40,
        "fpus_per_core": 64,
        "memory_bandwidth": 320064000000,
        "l2_cache_size": 4194304,
        "clock_rate_ghz": 1.59,
        "device_memory_size": 15642329088,
    },
}
# The smallest topologies that libtpu knows; a program for one chip uses one of theirs.
TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
DEVICES = {"cuda": list(GPUS), "tpu": list(TPUS)}
# How arrays may lie on a mesh of two axes.
SPECS = [P("x", "y"), P(("x", "y")), P("x"), P(None, "y"), P()]


def prepare(platform: str) -> None:
    """Set the environment up; exit if the compiler for the platform is missing.

    Call it before jax looks for devices.
    """
    if not _is_installed(platform):
        raise SystemExit(
            f"The compiler for {platform} is not installed. It needs no device: "
            f"pip install -e '.[plots]' --group {platform}"
        )
    if platform == "cuda":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0"
    else:
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    jax.config.update("jax_platforms", "cpu")
    # What is loaded from a cache tells nothing about the time to compile.
    jax.config.update("jax_enable_compilation_cache", False)


def shardings(platform: str, name: str) -> list[Sharding]:
    """Return ways to lay an array out on a device, or on a mesh such as ``v5e:4x4``.

    The chips of a TPU topology can be another mesh, such as ``v5e:4x4:16``. The last
    way leaves an array whole on every device.
    """
    device, *sizes = name.split(":")
    axes = [int(n) for n in sizes[-1].split("x")] if sizes else []
    if platform == "cuda":
        devices = _gpus(device, math.prod(axes))
    else:
        devices = topologies.get_topology_desc(
            platform="tpu",
            topology_name=TPUS.get(name) or ":".join([device, sizes[0]]),
            num_slices=1,
        ).devices
    if not axes:
        return [SingleDeviceSharding(devices[0])]
    mesh = Mesh(np.reshape(devices, (axes[0], -1)), ("x", "y"))
    return [NamedSharding(mesh, spec) for spec in SPECS]


def _is_installed(platform: str) -> bool:
    if platform == "tpu":
        return importlib.util.find_spec("libtpu") is not None
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(plugin.name.startswith("xla_cuda") for plugin in plugins)


def _gpus(name: str, number: int) -> list[jax.Device]:
    shape = f"1x1x{number}"
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=shape,
        topology=shape,
        target_config=_target_config(**GPUS[name]),
    ).devices


def _target_config(
    description: str, compute_capability: tuple[int, int], **facts: float
) -> str:
    major, minor = compute_capability
    fields = "\n".join(f"{name}: {value}" for name, value in {**GPU, **facts}.items())
    return f"""
    gpu_device_info {{
        {fields}
        cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA"
    device_description_str: "{description}"
    dnn_version_info {{ major: 9 minor: 1 patch: 1 }}
    runtime_version {{ major: 12 minor: 4 }}
    """
