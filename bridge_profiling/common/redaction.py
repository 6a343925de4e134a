"""Removes secrets from what is recorded about a process, so that manifests can be shared. Standard library only.

A value is a secret if its name says so: `--api-key=x`, `--token x`, `HF_TOKEN=x`, `{"password": "x"}`. Names that only look
like a secret's lose their values as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

#: Replaces a secret.
REDACTED = "***"

#: Words of which one makes a name a secret's: `hf_token`, `keyFile`, `auth-header`.
_WORDS = frozenset(
    """
    token key keys keyfile keyring password passwords pass pwd pw pin secret secrets credential credentials creds
    auth oauth authorization bearer jwt signature sas cookie cookies
    """.split()  # noqa: SIM905
)

#: The same for names without a border between words: `apikey`, `dbpassword`. Several tokens are a model's, as is a tokenizer.
_PARTS = re.compile(r"passw|passphrase|secret|credential|cookie|authoriz|bearer|token(?!iz|s)|oauth|\w(?<!mon)key$")

#: Attention's keys.
_NO_SECRETS = re.compile(r"keys?[-_. ]?values?", re.IGNORECASE)

_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

#: A name, and what stands between it and its value in an option, a variable, a query or a document.
_ASSIGNMENT = re.compile(r"""(?:(?<![\w.\-])([\w.\-]+)["'\\]*\s*(?:=|:(?!//))|(?<!\S)(-[\w.\-]+)\s)\s*["'\\]*(?=\S)""")

#: The user of a URL, with the password; without a scheme only where there is a password.
_USER = re.compile(r"""(?<=://)[^\s"'<>]{0,2000}@|(?<![\w/@.:+\-])[\w.+\-]+:[^\s/@:"']+@(?=[\w\[])""")


def is_secret(name: str) -> bool:
    """Whether an option, a variable or a key of this name holds a secret."""
    words = re.split(r"[^A-Za-z0-9]+", _CAMEL_CASE.sub("_", _NO_SECRETS.sub("", name)))
    return any(word in _WORDS or _PARTS.search(word) for word in map(str.lower, words))


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line without the values of options and variables that are named like secrets, and without users in URLs."""
    redacted, value_follows = [], False
    for argument in command:
        if value_follows and not argument.startswith("--"):
            redacted.append(REDACTED)
            value_follows = False
        else:
            redacted.append(_redact_argument(argument))
            value_follows = re.fullmatch(r"-[\w.\-]+[=:]?|\w[\w\-]*", argument) is not None and is_secret(argument)
    return redacted


def _redact_argument(argument: str) -> str:
    """Without everything from the first secret on: a secret can contain every delimiter."""
    for found in _ASSIGNMENT.finditer(argument):
        if is_secret(found[1] or found[2]):
            argument = argument[: found.end()] + REDACTED
            break
    return redact_urls(argument)


def redact_urls(text: str) -> str:
    """A text without the users and passwords of its URLs."""
    return _USER.sub(f"{REDACTED}@", text)


def redact_values(content: Any) -> Any:
    """Decoded JSON without the values of keys that are named like secrets, and with every list of texts as a command line."""
    if isinstance(content, Mapping):
        return {
            key: REDACTED if isinstance(value, str) and is_secret(str(key)) else redact_values(value)
            for key, value in content.items()
        }
    if isinstance(content, (list, tuple)):
        return redact_command(content) if all(isinstance(item, str) for item in content) else list(map(redact_values, content))
    return redact_urls(content) if isinstance(content, str) else content
