"""A compiled kernel as text: its instructions, labels, parameters and registers.

    @%p3 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd9 + 16];

is an `Instruction` with the words ("ld", "global", "v4", "b32"), two operands, and the predicate
%p3. https://docs.nvidia.com/cuda/parallel-thread-execution describes the language.
"""

import re
from typing import NamedTuple


class FaultError(Exception):
    """What a kernel must not do, or an instruction that nobody has taught the interpreter."""


class Instruction(NamedTuple):
    """An instruction; it runs where `predicate` holds, or where it does not if `negated`."""

    words: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str
    negated: bool
    line: int  # of the kernel's Python source

    def __str__(self) -> str:
        return f"{'.'.join(self.words)} {', '.join(self.operands)} (source line {self.line})"


class Program(NamedTuple):
    """The entry of a PTX file.

    `labels` and `tables` (lists of labels, for indirect branches) are places in `code`. `widths`
    has the bits of registers by the letters of their names.
    """

    code: list[Instruction]
    labels: dict[str, int]
    tables: dict[str, list[str]]
    widths: dict[str, int]
    parameters: list[str]
    threads: int
    shared_bytes: int


_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


def parse(ptx: str, shared_bytes: int) -> Program:
    """Read the only entry of a PTX file."""
    head, _, body = ptx[ptx.index(".entry") :].partition("\n{")
    body = re.sub(r"\s*\n\s*", "\n", re.sub(r"//.*", "", body[: body.index("\n}")]))
    threads = int(re.search(r"\.reqntid (\d+)", head)[1])
    parameters = re.findall(r"\b\w+_param_\d+", head)
    program = Program([], {}, {}, {}, parameters, threads, shared_bytes)
    line, label = 0, ""
    for text in re.findall(r"\.loc[^\n]*|[$\w]+:(?=\s)|[^;{}\n](?:[^;{}]|\{[^}]*\})*;", body):
        statement = text.strip().rstrip(";").strip()
        if statement.startswith(".loc"):
            line = int(statement.split()[2])
        elif statement.endswith(":"):
            label = statement[:-1]
            program.labels[label] = len(program.code)
        elif statement.startswith(".branchtargets"):
            program.tables[label] = re.findall(r"\$\w+", statement)
        elif register := re.match(r"\.reg \.([a-z])(\w+)\s+%([a-z]+)<", statement):
            kind, bits, letters = register.groups()
            program.widths[letters] = 1 if kind == "p" else int(bits)
        elif not statement.startswith("."):
            if not (found := _STATEMENT.fullmatch(statement)):
                raise FaultError(f"unknown statement {statement!r}")
            negated, predicate, words, rest = found.groups()
            operands = tuple(operand.strip() for operand in _OPERAND.findall(rest))
            words = tuple(words.replace("::cta", "").replace("::", "_").split("."))
            program.code.append(Instruction(words, operands, predicate or "", bool(negated), line))
    return program
