"""Makes text of any origin safe to print: the one place through which names, paths and messages reach a terminal or a page.

Names in captures, manifests and file systems can hold escape sequences that recolor, hide or retype what a terminal shows, and
characters that reorder a line. Standard library only.
"""

from __future__ import annotations

import re
import shlex

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


def shell_word(word: str) -> str:
    r"""A word as bash, zsh and ksh read it, in a command to copy: `a b` as `'a b'`, a line break as `$'\012'`."""
    return shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_in_ansi_quotes, word))}'"


def shell_path(path: object) -> str:
    """A path as `shell_word` quotes it, and never an option: `-x` as `./-x`."""
    text = str(path)
    return shell_word(f"./{text}" if text.startswith("-") else text)


def _in_ansi_quotes(character: str) -> str:
    if character.isprintable():
        return f"\\{character}" if character in "\\'" else character
    # A file's name may have bytes that are not UTF-8, which Python keeps as surrogates.
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors=errors))


def _escape(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode() if ord(character) > 0x7F else repr(character)[1:-1]
