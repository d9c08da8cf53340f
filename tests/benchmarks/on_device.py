"""What loss scaling costs on the device that is here: timed, in one command.

    pip install -e '.[test]' --group slow && python tests/benchmarks/on_device.py

On a GPU or TPU, install jax for it first. It runs in parts of at most eight minutes
and adds each one to ``on_device.json`` and to the tables in ``on_device.md``. If it is
stopped, the next call goes on with the parts that are missing. Nothing is downloaded.
On a CPU the sizes are tiny: that shows that it works, and measures nothing.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import kernels
import nbclient
import nbformat
import transformer
from casts import TRANSFORMERS
from measure import measure
from recipes import DYNAMIC, RECIPES, lossscale, make_steps
from step import machine, make_params
from workload import DTYPES, OPTIMIZERS

import optax_lossscale as ls

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 8 * 60  # seconds for a part
ON_CPU = jax.default_backend() == "cpu"
REPEATS = 3 if ON_CPU else 40
ARRAYS, PARAMETERS = (8, 2**14) if ON_CPU else (64, 2**26)
TINY = transformer.Sizes(layers=1, width=64, vocabulary=64, batch=2, length=16)
SIZES = TINY if ON_CPU else transformer.LARGE
# What differs from device to device: rounding, fused checks, masks and loops.
TESTS = ["test_finite.py", "transform/test_rounding.py", "transform/test_steps.py"]
if not ON_CPU:
    TESTS += ["transform", "gradients", "rules", "diagnostics"]
NOTEBOOKS = ["quickstart"] if ON_CPU else ["quickstart", "how_the_scale_moves"]
PEERS = ["plain", "optax_lossscale", "check_updates", "apply_if_finite", "jmp", "flax"]
STEPS = [name for name in RECIPES if name != "its masks alone"]


def update(optimizer: str) -> list[dict[str, Any]]:
    """One update, given the gradients."""
    params = make_params(ARRAYS, PARAMETERS)
    grads = [0.01 * p for p in params]
    steps = make_steps(PEERS, OPTIMIZERS[optimizer])
    results = measure(steps, params, grads, REPEATS, builds=1)
    return list(map(dataclasses.asdict, results))


def step(dtype: str) -> list[dict[str, Any]]:
    """A whole step of a transformer that computes in a type."""
    params = transformer.init(jax.random.key(0), SIZES)
    tokens = transformer.tokens(jax.random.key(1), SIZES)
    loss_fn = functools.partial(transformer.loss_fn, dtype=jnp.dtype(dtype))
    steps = make_steps(STEPS, OPTIMIZERS["clip + adamw"], loss_fn)
    results = measure(steps, params, tokens, REPEATS, builds=1)
    per_step = 1e3 * SIZES.batch * SIZES.length
    return [
        dataclasses.asdict(r) | {"tokens_per_second": per_step / r.milliseconds}
        for r in results
    ]


def small_model(layers: int, optimizer: str) -> list[dict[str, Any]]:
    """A whole step of a small network, which on a GPU is bound by launches."""
    keys = jax.random.split(jax.random.key(0), layers)
    params = [(0.2 * jax.random.normal(k, (64, 64)), jnp.zeros(64)) for k in keys]
    x = jax.random.normal(jax.random.key(1), (256, 64))
    tx = kernels.OPTIMIZERS[optimizer]
    steps = make_steps(kernels.RECIPES, tx, kernels.loss_fn)
    return list(map(dataclasses.asdict, measure(steps, params, x, REPEATS, builds=1)))


def casts(dtype: str, name: str) -> list[dict[str, Any]]:
    """A whole step of a transformer: in float32, cast by hand, and by `autocast`."""
    options = dict(TRANSFORMERS[name])
    params = transformer.init(jax.random.key(0), SIZES)
    if options.pop("scan", False):
        params = transformer.stacked(params)
    around_loss = options.pop("around_loss", lambda loss_fn: loss_fn)

    def loss_in(dtype: str) -> Any:
        options["dtype"] = jnp.dtype(dtype)
        return around_loss(functools.partial(transformer.loss_fn, **options))

    tokens = transformer.tokens(jax.random.key(1), SIZES)
    rule = DYNAMIC if dtype == "float16" else ls.FixedLossScale(1.0)
    losses = {
        "float32": loss_in("float32"),
        "by hand": loss_in(dtype),
        "autocast": ls.autocast(loss_in("float32"), dtype),
    }
    optimizer = OPTIMIZERS["adamw"]
    steps = {key: lossscale(optimizer, loss, rule) for key, loss in losses.items()}
    results = measure(steps, params, tokens, REPEATS, builds=1)
    return list(map(dataclasses.asdict, results))


def tests(folder: str) -> list[dict[str, Any]]:
    """The tests of the package, on this device."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*pytest, f"tests/{folder}"], cwd=ROOT, capture_output=True, text=True
    )
    last = run.stdout.strip().splitlines()[-1]
    failed = re.findall(r"^FAILED (\S+)", run.stdout, re.M)
    return [{"tests": folder, "outcome": last.strip("= "), "failed": failed}]


def notebook(name: str) -> list[dict[str, Any]]:
    """A notebook, from top to bottom."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    client = nbclient.NotebookClient(nbformat.read(path, 4), timeout=LIMIT)
    outcome = "runs from top to bottom"
    try:
        client.execute(cwd=str(path.parent))
    except nbclient.exceptions.CellExecutionError as error:
        outcome = f"fails with {error.ename}: {error.evalue}"
    return [{"tests": path.name, "outcome": outcome, "failed": []}]


PARTS = {
    **{f"update by {x}": (update, x) for x in ("sgd", "adamw", "clip + adamw")},
    **{f"step in {x}": (step, x) for x in DTYPES},
    **{
        f"{2 * layers} small arrays, {x}": (small_model, layers, x)
        for layers in (3, 8, 32)
        for x in kernels.OPTIMIZERS
    },
    **{
        f"casts in {x}, {name}": (casts, x, name)
        for x in ("float16", "bfloat16")
        for name in TRANSFORMERS
    },
    **{f"tests of {x}": (tests, x) for x in TESTS},
    **{f"notebook {x}": (notebook, x) for x in NOTEBOOKS},
}


def markdown(report: dict[str, Any]) -> str:
    """Return all that is known so far as tables."""
    facts = ", ".join(f"{key} {x}" for key, x in report["machine"].items())
    timed = "| variant | ms | / plain | quartiles | temporary MB | tokens / s |"
    lines = [f"Timed on {facts}; medians of {REPEATS} rounds.", ""]
    for title, rows in report["parts"].items():
        if "recipe" in rows[0]:
            lines += ["", f"**{title}**", "", timed, "|---|---:|---:|---|---:|---:|"]
        for r in rows:
            if "recipe" not in r:
                lines += ["", f"**{title}**: {', '.join([r['outcome'], *r['failed']])}"]
                continue
            low, high = r["ratio_quartiles"]
            tokens = r.get("tokens_per_second")
            lines.append(
                f"| {r['recipe']} | {r['milliseconds']:.3f} | {r['ratio']:.3f} "
                f"| {low:.3f} to {high:.3f} | {r['temporary_bytes'] / 1e6:.1f} "
                f"| {f'{tokens:,.0f}' if tokens else ''} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--json", type=pathlib.Path, default="on_device.json")
    parser.add_argument("--print", dest="part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        function, *arguments = PARTS[args.part]
        print(json.dumps(function(*arguments)))
        return
    report = {"machine": machine(), "parts": {}}
    if args.json.exists():
        report = json.loads(args.json.read_text())
        if report["machine"] != machine():
            sys.exit(f"{args.json} is of another machine. Name another with --json.")
    for part in args.parts:
        if part in report["parts"]:
            continue
        # A process of its own: it leaves no memory taken, and can be stopped.
        command = [sys.executable, __file__, "--print", part]
        try:
            run = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            print(f"{part}: stopped after {LIMIT} s", flush=True)
            continue
        if run.returncode:
            print(f"{part}: failed", flush=True)
            continue
        report["parts"][part] = json.loads(run.stdout.splitlines()[-1])
        args.json.write_text(json.dumps(report, indent=1))
        args.json.with_suffix(".md").write_text(markdown(report))
        print(f"{part}: done", flush=True)
    print(args.json.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
