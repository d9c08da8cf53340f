"""The demonstration: train in float16 with scales and without, and compare."""

import argparse
import functools
import importlib.util
import time
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m optax_lossscale",
        description=(
            "Train a small network on Python's own manual five times from the same "
            "seed (float32, and float16 without a loss scale, with a fixed and with a "
            "dynamic one, and with scale_backward) and compare."
        ),
    )
    parser.add_argument(
        "--steps", type=_steps, default=150, help="training steps of each run (150)"
    )
    parser.add_argument("--seed", type=_seed, default=0, help="random seed (0)")
    parser.add_argument(
        "--plot", type=_png_file, metavar="FILE.png", help="draw losses and scales"
    )
    parser.add_argument(
        "--json", type=_file, metavar="FILE", help="write the figures of every step"
    )
    options = parser.parse_args(arguments)
    missing = [
        name
        for name in ("rich", *(("matplotlib",) if options.plot else ()))
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        parser.error(
            f"{' and '.join(missing)} must be installed, which `pip install "
            "'optax_lossscale[demo]'` does."
        )
    run(options)


def run(options: argparse.Namespace) -> None:
    # Heavy imports wait until the arguments are known to be good.
    import jax
    from rich.console import Console
    from rich.progress import Progress

    from ._demo import report
    from ._demo.task import load_task
    from ._demo.train import WAYS, labels, train

    console = Console()
    task = load_task()
    true_words = float(labels(task.held_out).sum(axis=1).mean())
    console.print(
        f"Which of the 1,000 commonest words stand in the next 4 positions of Python's "
        f"manual? {len(task.train.words):,} positions, an embedding, a hidden layer, "
        f"Adam; {options.steps} steps on {jax.devices()[0].device_kind}.",
        highlight=False,
    )
    start = time.monotonic()
    results = {}
    with Progress(console=console) as progress:
        for way in WAYS:
            bar = progress.add_task(way.name, total=options.steps)
            advance = functools.partial(progress.advance, bar)
            results[way.name] = train(way, task, options.steps, options.seed, advance)
    console.print(report.make_table(results, true_words))
    sentences = [
        report.compare(results),
        report.explain(),
        *map(report.explain_poisoned, results.values()),
    ]
    for sentence in filter(None, sentences):
        console.print(sentence, end="\n\n", highlight=False)
    if options.plot:
        report.save_plot(options.plot, results)
        console.print(f"Wrote {options.plot}.", highlight=False)
    if options.json:
        settings = {"steps": options.steps, "seed": options.seed}
        report.save_json(options.json, settings, results, true_words)
        console.print(f"Wrote {options.json}.", highlight=False)
    console.print(f"{time.monotonic() - start:.0f} seconds.", highlight=False)


def _whole_number(text: str, lowest: int, highest: int, advice: str) -> int:
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {lowest} to {highest}, got {text!r}. {advice}"
        )
    return int(text)


def _steps(text: str) -> int:
    return _whole_number(text, 10, 100_000, "100 and more show the difference well.")


def _seed(text: str) -> int:
    return _whole_number(text, 0, 2**32 - 1, "Any seed shows the same.")


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists, got {text!r}. Make the folder "
            "first, or name another."
        )
    return path


def _png_file(text: str) -> Path:
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}.")
    return _file(text)


if __name__ == "__main__":
    main()
