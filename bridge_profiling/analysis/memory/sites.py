"""Which line of a program an allocation belongs to, from its call stack. Text in, text out."""

from __future__ import annotations

import re
from functools import lru_cache

#: What stands for a stack that was not recorded.
UNRECORDED = "no call stack was recorded"

# Where a frame's function is written, "function file:line".
_FRAME = re.compile(r"^(?P<function>.*?)\s+(?P<file>\S+):(?P<line>\d+)$")
_AUTOGRAD = re.compile(r"(\w+Backward\d*)::apply\(")
_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")

#: Python files that allocate on behalf of whoever calls them: torch itself, and what wraps functions.
_INTERNAL = re.compile(r"(?:^|/)(?:torch|torchgen|triton|functorch)/|(?:^|/)(?:contextlib|functools|threading)\.py$|^<")


@lru_cache(maxsize=1 << 16)
def site(stack: str | None) -> str:
    """The innermost frame of the user's or the framework's own code, as recorded: "forward megatron/core/….py:147".

    torch's frames and those of C++ are passed over. A backward pass runs on a thread of autograd, whose stack holds no Python:
    the site is then the autograd function or operator, "autograd MulBackward0", "operator mm".

    Args:
        stack: innermost frame first, newline between frames; None when it was not recorded.
    """
    if not stack:
        return UNRECORDED
    frames = stack.split("\n")
    internal = None
    for frame in frames:
        found = _FRAME.match(frame)
        if found is None or not found["file"].endswith(".py"):
            continue
        if not _INTERNAL.search(found["file"]):
            return frame
        internal = internal or frame
    for pattern, word in ((_AUTOGRAD, "autograd"), (_OPERATOR, "operator")):
        named = next((match for frame in frames if (match := pattern.search(frame))), None)
        if named is not None:
            return f"{word} {named[1]}"
    return internal or frames[0]
