"""By which name Nsight Compute finds a kernel that a trace names.

ncu compares `--kernel-name` with the function's own name: no return type, no namespaces, no template arguments, no parameters
(`--kernel-name-base function`, its default). Where several instances of one template ran, that is not enough. Then the whole
name is compared (`--kernel-name-base demangled`), which ncu writes otherwise than torch's profiler: `(int)4` for `4`,
`<unnamed>` for `(anonymous namespace)`, `[lambda(int) (instance 1)]` for `{lambda(int)#1}`, and `T1` for types among the
parameters. So the expression holds only words of the template's arguments, in their order, with anything between them: as few
as tell the kernel from the others of its name. Looks at nothing but names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Characters that end a name; classes are written out, since which dialect of expressions ncu takes is not documented.
_END = "[^A-Za-z0-9_]"

_CLOSING = {"<": ">", "(": ")", "[": "]", "{": "}"}

#: What is written otherwise by ncu, or not at all, and types that it writes where torch's profiler does not.
_NOISE = frozenset(["lambda", "instance", "operator", "const", "void", "unsigned", "signed"])
_NUMBERS = frozenset(["char", "short", "int", "long", "bool"])

#: The type that ncu writes before a number.
_CAST = re.compile(r"\((?:unsigned |signed )?(?:char|short|int|long|long long)\)(?=-?\d)")

_BOOL = re.compile(r"\(bool\)([01])")
_BOOLS = {"true": "(true|[(]bool[)]1)", "false": "(false|[(]bool[)]0)"}

#: Operators whose signs look like the brackets of template arguments.
_OPERATORS = re.compile(r"operator\s*(?:->\*?|<=>|<<=?|>>=?|<=|>=|<|>)")

_WORD = re.compile(r"[A-Za-z_]\w*|\d+")

#: A template with its first argument, or a lambda with the type of its first parameter: `FillFunctor<int`, `lambda(float`. Not
#: with an argument that is a template itself: of a function, ncu writes what it returns before it.
_PAIR = re.compile(r"([A-Za-z_]\w*<|lambda\()((?:[A-Za-z_]\w*::)*[A-Za-z_]\w*)\b(?!::|\s*<)")

_MANGLED = re.compile(r"_Z\w+")


@dataclass(frozen=True)
class KernelFilter:
    """What makes ncu choose a kernel.

    Args:
        options: of ncu, unquoted.
        also: names of other kernels of the capture that these options choose too.
    """

    options: list[str]
    also: list[str]


def kernel_filter(name: str, others: Sequence[str]) -> KernelFilter:
    """The options that choose a kernel.

    Args:
        name: as a trace has it.
        others: of the other kernels that ran.
    """
    if _MANGLED.fullmatch(name):
        return KernelFilter(["--kernel-name-base", "mangled", "--kernel-name", name], [])
    function = function_name(name)
    namesakes = [other for other in others if other != name and function_name(other) == function]
    if not namesakes:
        return KernelFilter(["--kernel-name", function], [])
    arguments = {other: _arguments(other) for other in (name, *namesakes)}
    spelled = {other: f"{function}<{text}>" for other, text in arguments.items()}
    words = _chosen(function, _words(arguments[name]), [spelled[other] for other in namesakes])
    expression = _expression(function, words)
    also = [other for other in namesakes if re.search(expression, spelled[other])]
    return KernelFilter(["--kernel-name-base", "demangled", "--kernel-name", f"regex:{expression}"], also)


def function_name(name: str) -> str:
    """The name of a kernel's function alone, as ncu's `--kernel-name-base function` compares it.

    Args:
        name: demangled, as a trace has it.
    """
    bare = _outermost(_OPERATORS.sub("operator", name.replace("(anonymous namespace)", "").replace("<unnamed>", "")))
    words = [word for word in bare.split() if word not in ("const", "volatile")]
    return words[-1].split("::")[-1] if words else name


def _outermost(text: str) -> str:
    """A text without all that stands in brackets; of one that was cut off, what stands before the first that does not close."""
    kept: list[str] = []
    closing: list[str] = []
    for place, character in enumerate(text):
        if closing and character == closing[-1]:
            closing.pop()
        elif character in _CLOSING:
            if not closing and _CLOSING[character] not in text[place:]:
                break
            closing.append(_CLOSING[character])
        elif not closing:
            kept.append(character)
    return "".join(kept)


@dataclass(frozen=True)
class _Word:
    """Something that torch's profiler and ncu write alike, where it stands, and the expression that finds it."""

    begin: int
    end: int
    expression: str


def _words(arguments: str) -> list[_Word]:
    """What can be looked for among template arguments, in their order."""
    found = []
    for match in _PAIR.finditer(arguments):
        head, bracket = match[1][:-1], match[1][-1]
        if head not in _NOISE - {"lambda"} and match[2] not in _NOISE:
            opening = bracket if bracket == "<" else f"[{bracket}]"
            found.append(_Word(*match.span(), f"{head}{opening}{match[2]}{_END}"))
    for match in _WORD.finditer(arguments):
        word = match[0]
        if word.isdigit():
            # A number may have a suffix, as in 3ul.
            found.append(_Word(*match.span(), f"{word}[^0-9]"))
        elif word not in _NOISE | _NUMBERS:
            found.append(_Word(*match.span(), f"{_BOOLS.get(word, word)}{_END}"))
    return sorted(found, key=lambda word: (word.begin, word.end))


def _arguments(name: str) -> str:
    """The template arguments of a function, numbers plain, without parameters of functions that are templates themselves."""
    name = name.replace("(anonymous namespace)", "").replace("<unnamed>", "")
    name = _OPERATORS.sub("operator", name)
    start = re.search(rf"{re.escape(function_name(name))}\s*<", name)
    if start is None:
        return ""
    kept: list[str] = []
    # Brackets that are open, and whether what stands in each is left out.
    depth: list[tuple[str, bool]] = [(">", False)]
    before = ""
    for character in name[start.end() :]:
        if character == depth[-1][0]:
            depth.pop()
            if not depth:
                break
        elif character in _CLOSING:
            parameters = character == "(" and before == ">"
            depth.append((_CLOSING[character], depth[-1][1] or parameters))
        if not depth[-1][1]:
            kept.append(character)
        if not character.isspace():
            before = character
    text = _CAST.sub("", _BOOL.sub(lambda found: "true" if found[1] == "1" else "false", "".join(kept)))
    return re.sub(r"\b(\d+)(?:ull|ul|ll|u|l)\b", r"\1", text)


def _chosen(function: str, words: Sequence[_Word], namesakes: Sequence[str]) -> list[_Word]:
    """As few words as tell a kernel from its namesakes, or as far as words can; numbers where no word helps."""
    chosen: list[_Word] = []
    left = list(namesakes)
    while left:
        best, remaining = None, left
        for word in sorted(words, key=lambda word: word.expression[0].isdigit()):
            if best is not None and word.expression[0].isdigit() and not best.expression[0].isdigit():
                break
            if any(word.begin < other.end and other.begin < word.end for other in chosen):
                continue
            expression = re.compile(_expression(function, [*chosen, word]))
            still = [name for name in left if expression.search(name)]
            if len(still) < len(remaining):
                best, remaining = word, still
        if best is None:
            break
        chosen.append(best)
        left = remaining
    return chosen


def _expression(function: str, words: Sequence[_Word]) -> str:
    """What finds a function with these words among its template arguments, however ncu writes the rest."""
    ordered = sorted(words, key=lambda word: word.begin)
    return f"(^|{_END}){re.escape(function)}<" + "".join(f"(.*{_END})?{word.expression}" for word in ordered)
