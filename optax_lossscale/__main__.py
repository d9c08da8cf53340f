"""The demonstration: train in float16 with and without loss scales, and compare."""

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
            "seed: in float32, and in float16 without a loss scale, with a fixed "
            "scale, with a dynamic scale, and with scale_block. Then compare the "
            "results."
        ),
    )
    add = parser.add_argument
    add(
        "--steps",
        type=functools.partial(_whole_number, 10, 100_000),
        default=150,
        help="training steps per run (150)",
    )
    add(
        "--seed",
        type=functools.partial(_whole_number, 0, 2**32 - 1),
        default=0,
        help="random seed (0)",
    )
    add("--plot", type=_png_file, metavar="FILE.png", help="draw losses and scales")
    add("--json", type=_file, metavar="FILE", help="write the numbers of every step")
    options = parser.parse_args(arguments)
    needed = ["rich", "matplotlib"] if options.plot else ["rich"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(
            f"{' and '.join(missing)} must be installed. Run "
            f"`pip install {' '.join(missing)}`."
        )
    run(options)


def run(options: argparse.Namespace) -> None:
    # Heavy imports wait until the arguments have been checked.
    import jax
    from rich.console import Console
    from rich.progress import Progress

    from ._demo import report, task, train

    console = Console(highlight=False, markup=False)
    train_on, held_out = positions = task.load_positions()
    true_words = float(task.labels(held_out).sum(axis=1).mean())
    console.print(
        f"The task is to predict which of the 1,000 most common words occur in the "
        f"next 4 positions of Python's manual. The training text has "
        f"{len(train_on):,} positions. The network has an embedding and a hidden "
        f"layer, and is trained with Adam for {options.steps} steps on "
        f"{jax.devices()[0].device_kind}."
    )
    start = time.monotonic()
    results = {}
    with Progress(console=console) as progress:
        for way in train.WAYS:
            watch = functools.partial(
                progress.track, total=options.steps, description=way.name
            )
            results[way.name] = train.train(
                way, positions, options.steps, options.seed, watch
            )
    console.print(report.make_table(results))
    for sentence in report.sentences(results, true_words):
        console.print(sentence, end="\n\n")
    if options.plot:
        report.save_plot(options.plot, results)
        console.print(f"Wrote {options.plot}.")
    if options.json:
        settings = {"steps": options.steps, "seed": options.seed}
        report.save_json(
            options.json, results, settings=settings, true_words=true_words
        )
        console.print(f"Wrote {options.json}.")
    console.print(f"Took {time.monotonic() - start:.0f} seconds.")


def _whole_number(lowest: int, highest: int, text: str) -> int:
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {lowest} to {highest}, got {text!r}."
        )
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists, got {text!r}. Create the folder "
            "first, or name another."
        )
    return path


def _png_file(text: str) -> Path:
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}.")
    return _file(text)


if __name__ == "__main__":
    main()
