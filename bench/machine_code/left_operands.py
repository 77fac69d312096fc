"""Searches disassembled kernels for loops that overwrite the left operand of a wgmma.

The left operand of a wgmma can be in registers, four per instruction. In attention these registers
hold the queries, which stay the same over a loop. ptxas 13.0 has reused such registers for other
values without restoring the queries, so that only the first iteration was right
(bench/kernels/README.md).
"""

import dataclasses
import re

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_PRODUCTS = ("HGMMA", "QGMMA")  # of 16-bit and of 8-bit operands
_WITHOUT_RESULT = (  # in general-purpose registers
    *("ST", "RED", "BAR", "SYNCS", "BRA", "UTMA", "WARP", "EXIT", "NOP"),
    *("ISETP", "FSETP", "HSETP", "PLOP", "R2P"),
)
_OPERAND_REGISTERS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    operands: tuple[str, ...]

    @property
    def written(self) -> range:
        """General-purpose registers that it writes."""
        if self.name.startswith(_WITHOUT_RESULT):
            return range(0)
        found = re.fullmatch(r"R(\d+)(\.\w+)*", next(iter(self._numbers), ""))
        if found is None:
            return range(0)
        start = int(found[1])
        return range(start, start + self._width)

    @property
    def _numbers(self) -> list[str]:
        """Operands without predicates; the result is first."""
        return [x for x in self.operands if not re.fullmatch(r"!?U?PT|!?U?P\d", x)]

    @property
    def _width(self) -> int:
        if self.name.startswith(_PRODUCTS):
            return int(self.name.split(".")[1].split("x")[1]) // 2
        if ".128" in self.name or (self.name.startswith("LDSM") and ".4" in self.name):
            return 4
        return 2 if ".64" in self.name or ".WIDE" in self.name or self.name == "CS2R" else 1

    def changes(self, register: int) -> bool:
        """Whether the new value of the register depends on the old one."""
        return any(re.fullmatch(rf"R{register}(\.\w+)*", x) for x in self._numbers[1:])


def lost_operands(sass: str) -> list[str]:
    """A line for each wgmma whose left operand its loop overwrites; empty if there is none.

    Checks each wgmma that starts a new accumulator (the scores): in the innermost loop around it,
    only instructions that update the operand may write its registers.

    Args:
        sass: output of ``nvdisasm -c``.
    """
    code, loops = _read(sass)
    found, scores = [], set()
    for at, product in enumerate(code):
        if not product.name.startswith(_PRODUCTS):
            continue
        sums, left = product.operands[0], product.operands[1]
        if "RZ" in product.operands[2:]:
            scores.add(sums)
        match = re.fullmatch(r"R(\d+)(\.\w+)*", left)
        around = [loop for loop in loops if at in loop]
        # The P V wgmma reads its right operand transposed and accumulates.
        of_scores = sums in scores and ".tnspB" not in "".join(product.operands)
        if match is None or not of_scores or not around:
            continue
        first = int(match[1])
        for other in min(around, key=len):
            for register in code[other].written:
                inside = first <= register < first + _OPERAND_REGISTERS
                if inside and not code[other].changes(register):
                    found.append(f"{product.name} {left}: {code[other].name} writes R{register}")
    return sorted(set(found))


def _read(sass: str) -> tuple[list[_Instruction], list[range]]:
    """All instructions, and the ranges of them that are loops."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    loops = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            operands = tuple(x.strip() for x in found[2].split(",")) if found[2] else ()
            if found[1].startswith("BRA"):
                target = re.search(r"\.L_x_\d+", found[2])
                if target and target[0] in labels:
                    loops.append(range(labels[target[0]], len(code)))
            code.append(_Instruction(found[1], operands))
    return code, loops
