"""Count what a compiled program does from its text: nothing is run, nothing is timed.

A kernel is an instruction of the ENTRY computation that computes or copies. It moves
its operands and its results, each a whole array, but a slice reads only what it
returns, and what a kernel carries along for a collective that runs beside it is not
moved. Arrays outside the device's main memory do not count (a TPU's on-chip memory is
``S(1)`` in a layout), so a prefetch is one read. A conditional counts as its costliest
branch, and the body of a loop as often as XLA knows that it runs, or once. Gathers are
not looked into; caches are left out.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

FREE = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
CONTROL_FLOW = {"call", "conditional", "while"}
COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*?$(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.-]+) = (.+?) ([a-z][a-z0-9-]*)\((.*)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_ELSEWHERE = re.compile(r"S\([1-9]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:true|false)_computation|branch_computations)="
    r"\{?(%[\w.-]+(?:, %[\w.-]+)*)"
)
_CARRIED = re.compile(r"\{(\d*)\}: \((\d+), \{\}")  # a result that is an operand
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAME = re.compile(r"%([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the text of a program tells."""

    bytes_moved: int = 0  # read from and written to main memory
    copied_bytes: int = 0  # written by copies within main memory
    kernels: int = 0
    estimated_cycles: int = 0  # the TPU compiler's model of its kernels
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    collective_bytes: int = 0  # of their results, on one device
    asynchronous_collectives: int = 0  # that other work may run beside


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    operands: list[str]
    attributes: str
    size: int  # bytes of the results
    main_size: int  # bytes of those in main memory

    @property
    def called(self) -> list[str]:
        return _NAME.findall(" ".join(_CALLED.findall(self.attributes)))

    @property
    def trips(self) -> int:
        """How often what it calls is run."""
        known = _TRIPS.search(self.attributes)
        return int(known[1]) if known else 1


def count(text: str) -> Counts:
    """Count in the text of a compiled program, as ``as_text`` returns it."""
    # Long lists carry comments, /*index=5*/, between their elements.
    text = re.sub(r"/\*.*?\*/", "", text)
    found = _COMPUTATION.findall(text)
    computations = {name: list(_instructions(body)) for _, name, body in found}
    entry = next(name for is_entry, name, _ in found if is_entry)
    sent = _sent(entry, computations)
    return Counts(
        **_cost(entry, computations),
        collective_bytes=sent.pop("bytes", 0),
        asynchronous_collectives=sent.pop("asynchronous", 0),
        collectives=dict(sent),
    )


def _cost(
    computation: str, computations: Mapping[str, list[_Instruction]]
) -> collections.Counter[str]:
    instructions = {i.name: i for i in computations[computation]}
    cost: collections.Counter[str] = collections.Counter()
    for instruction in instructions.values():
        if instruction.opcode in CONTROL_FLOW:
            costs = [_cost(name, computations) for name in instruction.called]
            once = max(costs, key=lambda c: c["bytes_moved"])
            cost += _times(instruction.trips, once)
        elif instruction.opcode not in FREE:
            cost += _kernel_cost(instruction, instructions)
    return cost


def _sent(
    computation: str,
    computations: Mapping[str, list[_Instruction]],
    asynchronous: bool = False,
) -> collections.Counter[str]:
    """Count collectives by their kind, the bytes of their results, and the async."""
    instructions = {i.name: i for i in computations[computation]}
    sent: collections.Counter[str] = collections.Counter()
    for instruction in instructions.values():
        kind = instruction.opcode.removesuffix("-done")
        if kind in COLLECTIVES:
            overlaps = asynchronous
            if kind != instruction.opcode:
                start = instructions[instruction.operands[0]]
                overlaps = '"is_sync":true' not in start.attributes
            sent.update({kind: 1, "bytes": instruction.size, "asynchronous": overlaps})
        for name in instruction.called:
            overlaps = asynchronous or instruction.opcode == "async-start"
            inside = _sent(name, computations, overlaps)
            sent += _times(instruction.trips, inside)
    return sent


def _times(n: int, cost: Mapping[str, int]) -> collections.Counter[str]:
    return collections.Counter({key: n * x for key, x in cost.items()})


def _kernel_cost(
    instruction: _Instruction, instructions: Mapping[str, _Instruction]
) -> collections.Counter[str]:
    cycles = sum(map(int, _CYCLES.findall(instruction.attributes)))
    cost = collections.Counter(estimated_cycles=cycles)
    if not instruction.opcode.endswith(("-done", "-update")):
        cost["kernels"] = 1
    if instruction.opcode.endswith(("-start", "-update")):
        return cost  # it moves when done, since its result repeats its operands
    source = instruction
    while source.opcode.endswith(("-done", "-update")):
        source = instructions[source.operands[0]]
    read = [instructions[name].main_size for name in source.operands]
    if source.opcode.startswith(("slice", "dynamic-slice")):
        read = [min(size, instruction.size) for size in read]
    cost["bytes_moved"] = sum(read) + instruction.main_size
    if source.opcode in ("copy", "copy-start") and sum(read):
        cost["copied_bytes"] = instruction.main_size
    return cost


def _instructions(body: str) -> Iterator[_Instruction]:
    for line in body.splitlines():
        if match := _INSTRUCTION.match(line):
            name, shape, opcode, rest = match.groups()
            operands, _, attributes = rest.partition("), ")
            inputs, arrays = _NAME.findall(operands), _ARRAY.findall(shape)
            if "async_collective" in attributes or name.startswith("async-collective"):
                carried = _CARRIED.findall(attributes)
                inputs = _without(inputs, {int(i) for _, i in carried})
                arrays = _without(arrays, {int(i or 0) for i, _ in carried})
            sizes = [(_bytes(dtype, dims), layout) for dtype, dims, layout in arrays]
            yield _Instruction(
                name,
                opcode,
                inputs,
                attributes,
                size=sum(size for size, _ in sizes),
                main_size=sum(s for s, at in sizes if not _ELSEWHERE.search(at)),
            )


def _without(items: list, positions: set[int]) -> list:
    return [x for i, x in enumerate(items) if i not in positions]


def _bytes(dtype: str, dimensions: str) -> int:
    """Return the size of ``f32[4,2]``; tokens and opaque values have none."""
    width = re.search(r"\d+", dtype.replace("pred", "u8"))
    elements = math.prod(int(n) for n in dimensions.split(",") if n)
    return elements * int(width[0]) // 8 if width else 0
