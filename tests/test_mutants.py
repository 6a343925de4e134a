"""tools/mutants.py changes one expression at a time."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "mutants.py"


def test_a_mutant_is_one_change_and_leaves_messages_and_comments_alone(tmp_path):
    script, path = runpy.run_path(str(SCRIPT)), tmp_path / "module.py"
    source = "if not é == 10:  # 1\n    raise ValueError(f'{é + 1}', 2)\n"
    path.write_text(source, encoding="utf-8")
    changed = {script["mutated"](source, mutant) for mutant in script["candidates"]("any", str(path))}
    assert changed == {
        source.replace(*change) for change in (("not é == 10", "(é == 10)"), ("é == 10", "(é != 10)"), ("10", "20"))
    }
