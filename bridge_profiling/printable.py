"""Makes text of any origin safe to print: the one place through which names, paths and messages reach a terminal or a page.

Names in captures, manifests and file systems can hold escape sequences that recolor, hide or retype what a terminal shows, and
characters that reorder a line. Standard library only.
"""

from __future__ import annotations

import re

#: C0 and C1 controls, marks and overrides of direction, invisible characters, line separators, and surrogates, which cannot be
#: encoded.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str, *, lines: bool = False) -> str:
    r"""A text on one line, with every character that is not printed as one replaced by its escape: `\x1b`, `\u202e`.

    Args:
        text: of any origin.
        lines: keep line breaks, in a text of ours.
    """
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: "\n" if lines and found[0] == "\n" else _escape(found[0]), text)


def _escape(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode() if ord(character) > 0x7F else repr(character)[1:-1]
