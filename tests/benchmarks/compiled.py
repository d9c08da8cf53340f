"""What a train step costs on a GPU or a TPU that is not there: counted, not timed.

    pip install -e '.[plots]' --group cuda && python tests/benchmarks/compiled.py cuda
    pip install -e '.[plots]' --group tpu && python tests/benchmarks/compiled.py tpu

XLA compiles each step for the device, and its program is counted as hlo.py says. Kernel
launches, caches and overlap are in no figure; the only times are those to trace and to
compile, on this machine.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import topology
import transformer
from count import Result, count, place
from recipes import RECIPES, make_steps, plain_first
from workload import DTYPES, OPTIMIZERS

CHECKED = [name for name in RECIPES if name != "its masks alone"]
CENTER = ["clip + adamw", "adamw"]
DEFAULTS = {
    "cuda": {
        "device": ["H100"],
        "arrays": [(64, 512, 512), (400, 128, 128)],
        "transformer": ["float16"],
        "mesh": ["H100:8", "H100:2x4"],
        "mesh_arrays": [],
        "mesh_transformer": ["float16"],
    },
    "tpu": {
        "device": ["v5e"],
        "arrays": [(16, 4096, 1024), (400, 128, 128)],
        # A minute a recipe.
        "transformer": [],
        "mesh": ["v5e:4x4", "v5e:16x16"],
        "mesh_arrays": [(60, 1024, 1024)],
        "mesh_transformer": ["bfloat16"],
    },
}
COLUMNS = [
    ("MB moved", ".1f", lambda r: r.bytes_moved / 1e6),
    ("/ plain", ".3f", lambda r: r.bytes_ratio),
    ("B/param", "+.2f", lambda r: r.extra_bytes_per_parameter),
    ("kernels", "d", lambda r: r.kernels),
    ("/ plain", ".2f", lambda r: r.kernels_ratio),
    ("Mcycles", ".3f", lambda r: r.estimated_cycles / 1e6),
    ("/ plain", ".3f", lambda r: r.cycles_ratio),
    ("collectives", "d", lambda r: sum(r.collectives.values())),
    ("async", "d", lambda r: r.asynchronous_collectives),
    ("MB sent", ".1f", lambda r: r.collective_bytes / 1e6),
    ("temp MB", ".2f", lambda r: r.temporary_bytes / 1e6),
    ("aliased MB", ".1f", lambda r: r.aliased_bytes / 1e6),
    ("copied MB", ".1f", lambda r: r.copied_bytes / 1e6),
    ("trace s", ".2f", lambda r: r.trace_seconds),
    ("compile s", ".2f", lambda r: r.compile_seconds),
    ("/ plain", ".2f", lambda r: r.trace_and_compile_ratio),
]


@dataclasses.dataclass(frozen=True)
class Case:
    device: str  # a name in `topology.DEVICES`, or the topology of a mesh
    optimizer: str
    dtype: str  # of the gradients; the transformer computes in it
    arrays: tuple[int, ...] | None = None  # number and shape; None: a transformer

    def __str__(self) -> str:
        if self.arrays is None:
            return f"{self.device}, {self.optimizer}, transformer in {self.dtype}"
        number, *shape = self.arrays
        arrays = f"{number} arrays of {' x '.join(map(str, shape))}"
        return f"{self.device}, {self.optimizer}, {arrays}, {self.dtype} gradients"


def main() -> None:
    args = parse_args()
    topology.prepare(args.platform)
    report: dict[str, Any] = {
        "platform": args.platform,
        "jax": jax.__version__,
        "optax": optax.__version__,
        "cases": [],
    }
    print(f"Counted, not timed: compiled for {args.platform}, jax {jax.__version__}")
    planned = list(cases(args))
    # What is compiled first waits until the compiler is loaded.
    for case in planned[:1]:
        compile_case(dataclasses.replace(case, arrays=(1, 1024, 1024)), args)
    for case in planned:
        results = compile_case(case, args)
        row = dataclasses.asdict(case)
        row["results"] = [dataclasses.asdict(r) for r in results]
        report["cases"].append(row)
        args.json.write_text(json.dumps(report, indent=1))
        show(str(case), results)
    print(f"\nwritten: {args.json}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    platforms = parser.add_subparsers(dest="platform", required=True)
    for platform in DEFAULTS:
        _add_options(
            platforms.add_parser(
                platform,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                epilog="Without --optimizers the first arrays have all of them, the "
                "transformer and the first mesh clip + adamw and adamw, and all else "
                "clip + adamw.",
            ),
            platform,
        )
    args = parser.parse_args()
    args.recipes = plain_first(args.recipes)
    return args


def _add_options(parser: argparse.ArgumentParser, platform: str) -> None:
    parser.set_defaults(**DEFAULTS[platform])
    some, any_number = ({"nargs": n, "metavar": "NAME"} for n in "+*")
    arrays = {"type": _sizes, "metavar": "NxROWSxCOLUMNS"}
    devices = topology.DEVICES[platform]
    parser.add_argument("--device", choices=devices, help="one each", **any_number)
    parser.add_argument("--optimizers", choices=OPTIMIZERS, **some)
    parser.add_argument("--recipes", choices=RECIPES, default=CHECKED, **some)
    parser.add_argument("--arrays", nargs="*", help="on one device", **arrays)
    dtypes = {"choices": DTYPES, "default": ["float32"]}
    parser.add_argument("--dtypes", help="of given gradients", **dtypes, **some)
    parser.add_argument(
        "--transformer", choices=DTYPES, help="types to compute in", **any_number
    )
    parser.add_argument("--mesh", nargs="*", metavar="DEVICE:ROWSxCOLUMNS")
    parser.add_argument("--mesh-arrays", nargs="*", help="on each mesh", **arrays)
    parser.add_argument(
        "--mesh-transformer", choices=DTYPES, help="on each mesh", **any_number
    )
    parser.add_argument("--json", type=pathlib.Path, default=f"{platform}.json")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the steps on one device, those of the transformer, those on a mesh."""
    center, one = args.optimizers or CENTER, args.optimizers or CENTER[:1]
    for device, dtype in itertools.product(args.device, args.dtypes):
        for i, arrays in enumerate(args.arrays):
            every = args.optimizers or OPTIMIZERS
            for optimizer in one if i else every:
                yield Case(device, optimizer, dtype, arrays)
    for device, dtype in itertools.product(args.device, args.transformer):
        for optimizer in center:
            yield Case(device, optimizer, dtype)
    for i, mesh in enumerate(args.mesh):
        on_this = one if i else center
        of_arrays = itertools.product(args.mesh_arrays, args.dtypes, on_this)
        for arrays, dtype, optimizer in of_arrays:
            yield Case(mesh, optimizer, dtype, arrays)
        for dtype, optimizer in itertools.product(args.mesh_transformer, on_this):
            yield Case(mesh, optimizer, dtype)


def compile_case(case: Case, args: argparse.Namespace) -> list[Result]:
    shardings = topology.shardings(args.platform, case.device)
    replicated, loss_fn = shardings[-1], None
    if case.arrays is None:
        params, batch, loss_fn = transformer_on(replicated, jnp.dtype(case.dtype))
    else:
        number, *shape = case.arrays
        at = list(itertools.islice(itertools.cycle(shardings), number))
        params = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for s in at]
        batch = [jax.ShapeDtypeStruct(shape, case.dtype, sharding=s) for s in at]
    steps = make_steps(args.recipes, OPTIMIZERS[case.optimizer], loss_fn)
    return count(steps, params, batch, replicated, args.platform)


def transformer_on(replicated: jax.sharding.Sharding, dtype: jnp.dtype) -> tuple:
    """Return the shapes of parameters and batch, and the loss, on a device or mesh."""
    key, loss_fn = (
        jax.random.key(0),
        functools.partial(transformer.loss_fn, dtype=dtype),
    )
    if isinstance(replicated, jax.sharding.SingleDeviceSharding):
        sizes = transformer.LARGE
        params = jax.eval_shape(lambda: transformer.init(key, sizes))
        batch = jax.eval_shape(lambda: transformer.tokens(key, sizes))
        return *place((params, batch), replicated), loss_fn
    sizes, mesh = transformer.SCANNED, replicated.mesh
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = jax.eval_shape(lambda: transformer.stacked(transformer.init(key, sizes)))
    params = jax.tree.map(place, params, transformer.shardings(mesh))
    batch = place(jax.eval_shape(lambda: transformer.tokens(key, sizes)), rows)

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, rows)

    options = {"constrain": constrain, "around_layer": jax.checkpoint}
    return params, batch, functools.partial(loss_fn, **options)


def show(title: str, results: list[Result]) -> None:
    table = [[""], *([r.recipe] for r in results)]
    for heading, style, figure in COLUMNS:
        figures = [figure(r) for r in results]
        if any(figures):
            cells = [heading, *(format(x, style) for x in figures)]
            for row, cell in zip(table, cells, strict=True):
                row.append(cell)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{title}")
    for name, *cells in table:
        print(name.ljust(widths[0]), end="")
        pairs = zip(cells, widths[1:], strict=True)
        print("".join(f"  {cell:>{width}}" for cell, width in pairs), flush=True)


if __name__ == "__main__":
    main()
