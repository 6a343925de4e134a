"""Each sentence about a capture is said somewhere, and each that is said is there."""

import re
from pathlib import Path

import bridge_profiling.traces
from bridge_profiling.traces.types import texts


def test_every_caveat_has_a_sentence_and_every_sentence_a_caveat():
    code = "".join(path.read_text() for path in Path(bridge_profiling.traces.__file__).parent.rglob("*.py"))
    keys = {key for key, text in texts("bridge_profiling.traces", "caveats.toml").items() if isinstance(text, str)}
    said = set(re.findall(r'(?:caveat|say)\(\s*"(\w+(?:\.\w+)?)"', code))
    assert said <= keys
    assert not [key for key in keys if f'"{key}"' not in code and not key.startswith("links_not_followed.")]
