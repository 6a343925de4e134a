"""No secret of a command line, a setting or a framework's facts is in a manifest."""

import json
import sys
from pathlib import Path

import pytest

from bridge_profiling.common.redaction import is_secret, redact_command
from tests.capture.conftest import run

__all__ = ["run"]

SECRET = "hunter2"

#: Command lines with a secret, as `§`.
WITH_SECRETS = [
    *(["--api-key=§"], ["--api-key", "§"], ["--hub_token", "-§"], ["--hfToken=§"], ["-token", "§"], ["--token=", "§"]),
    *(["HF_TOKEN=§"], ["env", "WANDB_API_KEY=§", "python"], ["--export=ALL,HF_TOKEN=§,B=1"], ["-e", "AWS_SECRET_ACCESS_KEY=§"]),
    *(["--DB_PASSWORD", "§"], ["--passwd=a §"], ["--wandbkey", "§"], ["--cookie", "§"], ["--auth-header", "§"]),
    *(["++model.hub.token=§"], ["overrides={hf_token:§}"], ["--c", '{"api_key": "§"}'], ["--c", '{\\"token\\": \\"§\\"}']),
    *(["-H", "Authorization: Bearer §"], ["sh", "-c", "HF_TOKEN=§ t.py"], ["sh", "-c", "t.py --token §"], ["-c", "key = '§'"]),
    *(["https://user:§@host/x"], ["https://§@host"], ["--db=pg://u:a@§@h/d"], ["redis://:§@h"], ["--proxy", "user:§@host:80"]),
    *(["https://h/p?access_token=§&x=1"], ["--conf=spark.ssl.keyPassword=§"], ['--token=""§'], ["--x=token=§"], ["--token:§"]),
]

#: Arguments that stay as they are.
WITHOUT_SECRETS = r"""
train.py --lr=1e-4 --tokenizer-model=t.model --num-tokens=4096 --max_tokens 5 --monkey=1 x.y=[0,1] s3://bucket/a
git@github.com:o/r.git http://h:80/p --author me --num_key_value_heads=8 C:\x key.py --keyboard=2 --compass=1 --passes=3
a:b --master-addr=h:29500
"""


@pytest.mark.parametrize("command", WITH_SECRETS, ids=str)
def test_a_secret_of_a_command_line_is_replaced(command):
    redacted = redact_command(["python", "-m", "train", *(part.replace("§", SECRET) for part in command), "--lr=1"])
    assert SECRET not in str(redacted)
    assert [*redacted[:3], redacted[-1]] == ["python", "-m", "train", "--lr=1"]


def test_what_is_no_secret_stays():
    arguments = WITHOUT_SECRETS.split()
    assert redact_command(arguments) == arguments


@pytest.mark.parametrize("text", ["a", "-a", "a:", "://", '"', ' "', "=", "aB", "a "])
def test_a_command_line_of_any_length_takes_linear_time(text):
    redact_command([text * (100_000 // len(text))])
    is_secret(text * 100_000)


def test_a_manifest_can_be_shared(run, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "t.py", "--token", SECRET, f"https://u:{SECRET}@h"])
    error = OSError(f"https://u:{SECRET}@h cannot be reached")

    def on_iteration(iteration, hook):
        hook.facts |= {"hub": {"apiKey": SECRET, "url": f"https://u:{SECRET}@h"}}
        hook.facts |= {"launcher": ("--token", SECRET), "auth": Path(SECRET)}
        raise error

    with pytest.raises(OSError, match="cannot be reached"):
        run.train(run.config(0, 2), range(3), between=on_iteration)
    manifest = run.manifest("iter-0-2")
    assert SECRET not in json.dumps(manifest)
    assert manifest["command"][1:] == ["t.py", "--token", "***", "https://***@h"]
    assert "cannot be reached" in manifest["reason"]
