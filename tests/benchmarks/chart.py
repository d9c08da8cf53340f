"""Draw the picture of the page on costs, from its tables.

python tests/benchmarks/chart.py
"""

import pathlib
import sys

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.append(str(NOTEBOOKS.parent / "tests/helpers"))

from book import page, table  # noqa: E402

PICTURE = NOTEBOOKS / "images" / "what_it_costs.svg"
# Okabe and Ito's palette, as in picture.py.
COLORS = {
    "this package": "#0072B2",
    "apply_if_finite": "#009E73",
    "jmp's recipe": "#E69F00",
    "flax's recipe": "#D55E00",
}
LEFT, WIDTH, PER_UNIT, BAR = 130, 640, 130, 17


def figures() -> dict[str, list[float]]:
    """By case, the figures in the order of the colors."""
    costs = page("what_it_costs")

    def cells(first: str, row: str, *columns: int) -> list[float]:
        (found,) = [x for x in table(costs, first) if x[0] == row]
        return [float(found[i]) for i in columns]

    gpu, cpu = (1, 3, 2, 2), (1, 2, 3, 4)
    timed = "16.8 million float32 parameters in 64 arrays"
    step = "H100, whole step of a transformer"
    float16 = "whole step of a small transformer, float16"
    return {
        "H100, whole float16 step: memory traffic": cells(step, "adamw", *gpu),
        "H100, update by adamw: memory traffic": cells("H100 and T4", "adamw", *gpu),
        "CPU, whole float16 step: time": cells(timed, float16, *cpu),
        "CPU, update by adamw: time": cells(timed, "adamw", *cpu),
    }


def draw() -> str:
    """Return the picture. Bars begin at 1, the step without loss scaling."""
    marks, y = [], 8
    for case, ratios in figures().items():
        y += 26
        marks.append(f'<text x="8" y="{y}" font-weight="bold">{case}</text>')
        y += 8
        bottom = y + len(COLORS) * BAR
        marks.append(f'<path d="M{LEFT} {y}V{bottom}" stroke="#222"/>')
        for (name, color), ratio in zip(COLORS.items(), ratios, strict=True):
            length = PER_UNIT * (ratio - 1)
            middle = y + BAR - 4
            marks += [
                f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{name}</text>',
                f'<rect x="{LEFT}" y="{y + 2}" width="{max(length, 1):.1f}" '
                f'height="{BAR - 4}" fill="{color}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{ratio:.2f}</text>',
            ]
            y += BAR
    height = y + 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        'font-size="13" fill="#222">'
    )
    title = "<title>What a step costs, as a multiple of the plain step</title>"
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, title, back, *marks, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw())
