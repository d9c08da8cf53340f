"""What a train step costs with loss scaling: time, memory, compilation.

    pip install -e '.[plots]' --group bench && python tests/benchmarks/step.py

Every figure is compared with the plain step, without scaling, check and masks, of the
same round of the same run.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformer
from measure import Result, measure, run_times
from picture import draw
from recipes import RECIPES, make_steps, plain_first
from workload import DTYPES, OPTIMIZERS

import optax_lossscale as ls

LEAVES = [16, 64, 400]
CENTRE = ("adamw", 64, "float32")


def main() -> None:
    args = parse_args()
    report: dict[str, Any] = {"machine": machine(), "optimizer_steps": []}
    print(report["machine"])
    for optimizer, leaves, dtype in cases(args):
        results = optimizer_step(optimizer, leaves, dtype, args)
        row = {"optimizer": optimizer, "leaves": leaves, "dtype": dtype}
        row["parameters"] = args.parameters
        row["results"] = [dataclasses.asdict(r) for r in results]
        report["optimizer_steps"].append(row)
        show(f"{optimizer}, {leaves} leaves, {dtype} gradients", results)
    report["check"] = [check(dtype, args) for dtype in DTYPES]
    report["eager"] = [eager(leaves, args) for leaves in (4, 40)]
    report["transformer_steps"] = []
    for dtype in args.transformer:
        results = transformer_step(dtype, args)
        row = {"dtype": dtype, "results": [dataclasses.asdict(r) for r in results]}
        report["transformer_steps"].append(row)
        show(f"transformer, {dtype} compute, adamw", results)
    args.json.write_text(json.dumps(report, indent=1))
    draw(report, args.plot)
    print(f"\nwritten: {args.json}, {args.plot}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Without --optimizers, --leaves and --dtypes each of them is varied "
        "alone, around adamw, 64 leaves, float32; with any of them, all combinations.",
    )
    names = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--optimizers", choices=OPTIMIZERS, **names)
    parser.add_argument("--leaves", type=int, nargs="+", metavar="N")
    parser.add_argument("--dtypes", choices=DTYPES, help="of the gradients", **names)
    parser.add_argument("--recipes", choices=RECIPES, default=list(RECIPES), **names)
    parser.add_argument("--transformer", choices=DTYPES, nargs="*", metavar="NAME")
    parser.add_argument("--parameters", type=int, default=2**24, help="in all leaves")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=pathlib.Path, default="step.json")
    parser.add_argument("--plot", type=pathlib.Path, default="step.png")
    args = parser.parse_args()
    if args.transformer is None:
        args.transformer = ["float32", "float16"]
    args.recipes = plain_first(args.recipes)
    return args


def cases(args: argparse.Namespace) -> list[tuple[str, int, str]]:
    if args.optimizers or args.leaves or args.dtypes:
        chosen = (args.optimizers, args.leaves, args.dtypes)
        axes = (axis or [c] for axis, c in zip(chosen, CENTRE, strict=True))
        return list(itertools.product(*axes))
    star = [(o, CENTRE[1], CENTRE[2]) for o in OPTIMIZERS]
    star += [(CENTRE[0], n, CENTRE[2]) for n in LEAVES if n != CENTRE[1]]
    return star + [(CENTRE[0], CENTRE[1], d) for d in DTYPES if d != CENTRE[2]]


def optimizer_step(
    optimizer: str, leaves: int, dtype: str, args: argparse.Namespace
) -> list[Result]:
    params = make_params(leaves, args.parameters)
    grads = [(0.01 * p).astype(dtype) for p in params]
    steps = make_steps(args.recipes, OPTIMIZERS[optimizer])
    return measure(steps, params, grads, args.repeats)


def make_params(
    leaves: int, parameters: int, dtype: str = "float32"
) -> list[jax.Array]:
    shape = (max(parameters // leaves // 256, 1), 256)
    keys = jax.random.split(jax.random.key(0), leaves)
    return [jax.random.normal(key, shape).astype(dtype) for key in keys]


def transformer_step(dtype: str, args: argparse.Namespace) -> list[Result]:
    params = transformer.init(jax.random.key(0))
    tokens = transformer.tokens(jax.random.key(1))
    loss_fn = functools.partial(transformer.loss_fn, dtype=jnp.dtype(dtype))
    steps = make_steps(args.recipes, OPTIMIZERS["adamw"], loss_fn)
    return measure(steps, params, tokens, args.repeats)


def eager(leaves: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure an update outside of jit, where each operation is started alone."""
    params = make_params(leaves, 4096 * leaves)
    seconds = {}
    for tx in (optax.adam(1e-3), ls.with_loss_scaling(optax.adam(1e-3))):
        update = functools.partial(tx.update, state=tx.init(params), params=params)
        seconds[tx] = np.median(run_times(update, params, args.repeats))
    ratio = np.divide(*reversed(seconds.values()))
    print(f"\nadam, {leaves} leaves, outside of jit: {ratio:.2f} times plain adam")
    return {"leaves": leaves, "ratio": ratio}


def check(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure how fast gradients are checked and reported, and memory copied."""
    grads = make_params(CENTRE[1], args.parameters, dtype)
    programs = {
        "check": jax.jit(ls.all_finite),
        "report": jax.jit(ls.gradient_report),
        "copy": jax.jit(lambda tree: jax.tree.map(jnp.copy, tree)),
    }
    read = sum(g.nbytes for g in grads)
    moved = {"check": read, "report": read, "copy": 2 * read}
    seconds = {name: run_times(f, grads, args.repeats) for name, f in programs.items()}
    speed = {name: moved[name] / np.median(s) / 1e9 for name, s in seconds.items()}
    print(f"\n{dtype}: checked at {speed['check']:.1f} GB/s, ", end="")
    print(f"reported at {speed['report']:.1f} GB/s, ", end="")
    print(f"copied at {speed['copy']:.1f} GB/s, read and written")
    return {"dtype": dtype, "gigabytes_per_second": speed}


def machine() -> dict[str, str]:
    device = jax.devices()[0]
    return {
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
    }


def show(title: str, results: list[Result]) -> None:
    print(f"\n{title}")
    print(f"{'':16} {'ms':>8} {'/ plain':>8} {'quartiles':>14}", end="")
    print(f" {'temp MB':>8} {'trace s':>8} {'compile s':>9} {'/ plain':>8}")
    for r in results:
        low, high = r.ratio_quartiles
        print(f"{r.recipe:16} {r.milliseconds:8.2f} {r.ratio:8.3f}", end="")
        print(f"  {low:5.3f} to {high:5.3f} {r.temporary_bytes / 1e6:8.1f}", end="")
        print(f" {r.trace_seconds:8.2f} {r.compile_seconds:9.2f}", end="")
        print(f" {r.trace_and_compile_ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
