"""A NeMo-Run experiment of any origin: reading it connects to nothing and runs nothing; what is wrong in it is one line."""

import base64
import json
import os
import sys
import zlib

import pytest

from bridge_profiling.experiments import captures, jobs


def packed(document):
    """A document as NeMo-Run serializes one."""
    return base64.urlsafe_b64encode(zlib.compress(document if isinstance(document, bytes) else json.dumps(document).encode()))


def serialized(value):
    """A value as Fiddle writes it: of a dict with the key "" the class by that name, of a list a list, of others a leaf."""
    objects = {}

    def node(value):
        if not isinstance(value, (dict, list)):
            return {"type": "leaf", "value": value}
        name = f"o{len(objects)}"
        objects[name] = None
        keys = {f"Index(index={place})": each for place, each in enumerate(value)} if isinstance(value, list) else value
        module, _, kind = keys.get("", "builtins.list" if isinstance(value, list) else "builtins.dict").rpartition(".")
        pairs = [(key if "(" in key else f"Attr(name='{key}')", node(each)) for key, each in keys.items() if key]
        objects[name] = {"type": {"module": module, "name": kind}, "items": pairs}
        return {"type": "ref", "key": name}

    return {"root": node(value), "objects": objects}


def tasks(executor=None, task=None, **job):
    """An experiment's file with one job."""
    tunnel = {"": "nemo_run.SSHTunnel", "host": "far.example", "user": "me", "job_dir": "/far"}
    given = {"": "nemo_run.SlurmExecutor", "tunnel": tunnel, "job_dir": "/here/job"} | (executor or {})
    script = {"": "nemo_run.Script", "args": ["profiling.output_dir=/nemo_run/profiles"]} | (task or {})
    parts = {"": "nemo_run.run.job.Job", "id": "job", "executor": given} | job
    return json.dumps([[packed(serialized(parts)).decode(), packed(serialized(script)).decode()]])


def one(document):
    return json.dumps([[packed(document).decode(), ""]])


def _aliases(levels, width=2):
    """Each object refers to the next several times."""

    def ref(number):
        return {"type": "ref", "key": f"o{number}"}

    objects = {
        f"o{number}": {
            "type": {"module": "builtins", "name": "list"},
            "items": [[f"Index(index={each})", ref(number + 1)] for each in range(width)],
        }
        for number in range(levels)
    }
    return {"root": ref(0), "objects": objects | {f"o{levels}": {"type": {"module": "a", "name": "list"}, "items": []}}}


def _chain(document, **changed):
    document["objects"]["o0"] |= changed
    return document


LEAF = {"type": "leaf", "value": 1}

#: What a file of an experiment holds, in place of what NeMo-Run writes. Large ones are made when they are needed.
FILES = {
    "bomb": lambda: one(b'{"root": "' + b" " * (80 << 20) + b'"}'),
    "bombs": lambda: json.dumps([[packed(b" " * (30 << 20)).decode(), ""]] * 3),
    "small values": lambda: one(b'{"objects": {"a": [' + b"[]," * 3_000_000 + b"[]]}}"),
    "aliases": one(_aliases(60)),
    "cycle": one(_chain(_aliases(1), items=[["Index(index=0)", {"type": "ref", "key": "o0"}]])),
    "chain": one(_aliases(5000, 1)),
    "nested": "[" * 100_000,
    "nested inside": one(b"[" * 100_000),
    "long number": one(b'{"root": ' + b"9" * 5000 + b"}"),
    "not utf-8": b"\xff\xfe[[",
    "surrogate": tasks(executor={"job_dir": "/a/\ud800"}),
    "empty": "",
    "null": "null",
    "a pair too short": '[["a"]]',
    "not base64": '[["a", "b"]]',
    "not zlib": '[["aGVsbG8=", ""]]',
    "no root": one({"objects": {}}),
    "a key that is a list": one({"root": {"type": "ref", "key": []}, "objects": {}}),
    "an item of three": one(_chain(_aliases(1), items=[["Index(index=0)", LEAF, LEAF]])),
    "null for a type": one(_chain(_aliases(1), type=None)),
    "a number for an id": tasks(id=7),
    "no executors": tasks(executors=[None]),
    "a number for arguments": tasks(task={"args": 5}),
    "a number for a directory": tasks(executor={"job_dir": 5}),
    "a text for a tunnel's directory": tasks(executor={"tunnel": {"": "a.SSHTunnel", "job_dir": ["x"]}}),
    "a number for a host": tasks(executor={"tunnel": {"": "a.SSHTunnel", "host": 5, "user": "u", "job_dir": "/x"}}),
    "a job that is elsewhere": tasks(id="../../elsewhere"),
    "a job in the root": tasks(id="/elsewhere"),
}


@pytest.fixture
def connected(monkeypatch):
    """The tunnels that were opened."""
    opened = []
    monkeypatch.setattr(captures, "ssh_tunnel", lambda tunnel: opened.append(tunnel) or pytest.fail("connected"))
    return opened


def _write(folder, content):
    content = content() if callable(content) else content
    (folder / "experiment").mkdir()
    (folder / "experiment" / "_TASKS").write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_what_nemo_run_does_not_write_is_one_line(typed, folder, connected, content):
    _write(folder, content)
    for command in (["report", "experiment", "--no-page", "--fetch"], ["trigger", "experiment"]):
        done = typed(*command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert len(done.stderr) < 1000
    assert "Traceback" not in typed("doctor", "experiment").stderr
    assert connected == []


#: Commands that read an experiment.
READING = [
    "report",
    "analyze",
    "memory",
    "merge",
    "flamegraph",
    "compare run",
    "compare run run",
    "compare --also-base run run",
]


@pytest.mark.parametrize("command", READING)
def test_no_command_connects_without_being_told_to(typed, folder, connected, command):
    _write(folder, tasks())
    done = typed(*command.split(), "experiment")
    assert (done.returncode, done.stdout, connected) == (2, "", [])
    assert "in /far/job/profiles at me@far.example; nothing is copied from there without --fetch. Add --fetch" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["experiment", "run"]
    assert [path.name for path in (folder / "experiment").iterdir()] == ["_TASKS"]


def test_nothing_that_an_experiment_names_is_imported_or_called(typed, folder):
    (folder / "planted.py").write_text("raise SystemExit('imported')")
    target = {"type": "pyref", "module": "planted", "name": "run"}
    document = serialized({"": "fiddle._src.config.Config", "command": "touch called"})
    document["objects"]["o0"]["metadata"] = {"type": "ref", "key": "m"}
    document["objects"]["m"] = {"type": {"module": "a", "name": "b"}, "items": [["Attr(name='fn_or_cls')", target]]}
    assert jobs._read(packed(document).decode()).target == "planted.run"
    _write(folder, json.dumps([[packed(document).decode()] * 2]))
    for command in ("report", "doctor", "trigger"):
        assert typed(command, "experiment").returncode in (1, 2)
    assert not (folder / "called").exists()
    assert "planted" not in sys.modules


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)]
)
def test_something_else_in_place_of_the_file_is_not_read(typed, folder, make):
    (folder / "experiment").mkdir()
    make(folder / "experiment" / "_TASKS")
    done = typed("report", "experiment")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr


def test_a_copy_stays_below_the_experiment(folder, monkeypatch):
    """A folder of the experiment, or one in it, can be a link that leads elsewhere."""
    _write(folder, tasks())
    (folder / "elsewhere").mkdir()
    experiment, listed = folder / "experiment", "12 1.5 torch/rank-0.json.gz\n"

    class Far:
        def run(self, command, **options):
            return type("Done", (), {"stdout": listed, "ok": True})

        def get(self, remote_path, local_path):
            pytest.fail("copied")

        def cleanup(self):
            pass

    for link in (experiment / "job", experiment / "job" / "profiles", experiment / "job" / "profiles" / "torch"):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(folder / "elsewhere")
        with pytest.raises((ValueError, RuntimeError), match=r"is not below|a link leads out of"):
            captures.captures_of(experiment, remote=True, tunnel_to=lambda tunnel: Far())
        link.unlink()
    assert list((folder / "elsewhere").iterdir()) == []


def test_a_remote_path_is_never_an_action_of_find(folder):
    _write(folder, tasks(task={"args": ["profiling.output_dir=-delete"]}))
    typed_there = []

    class Far:
        def run(self, command, **options):
            typed_there.append(command)
            return type("Done", (), {"stdout": "not a size 1.0 x\n1 2 ../x.pickle\n", "ok": True})

        def cleanup(self):
            pass

    with pytest.raises(RuntimeError, match="holds no captures"):
        captures.captures_of(folder / "experiment", remote=True, tunnel_to=lambda tunnel: Far())
    assert typed_there[0].startswith("find -L ./-delete -mindepth 1 ")
