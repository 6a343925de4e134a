"""Names of checkpoints, and which one is resumed from, whatever a killed job left behind."""

import os

import pytest

from bridge_profiling import ProfilingConfigError
from recipes.megatron import checkpoint_files as files


def write(root, iteration):
    files.prepare(root, iteration)
    (files.unfinished(root, iteration) / "weights").write_text(str(iteration))
    return files.publish(root, iteration, {"iteration": iteration})


def test_a_checkpoint_that_was_never_finished_has_no_name_and_is_begun_anew(tmp_path):
    write(tmp_path, 5)
    files.prepare(tmp_path, 10)
    (files.unfinished(tmp_path, 10) / "half").touch()
    assert files.latest_iteration(tmp_path) == 5
    assert [folder.name for folder in tmp_path.glob("iter_*")] == ["iter_0000005"]
    for _ in range(2):
        # One of the same iteration is replaced as well.
        folder = write(tmp_path, 10)
        assert sorted(os.listdir(folder)) == ["training.json", "weights"]
        (folder / "old").touch()
    assert sorted(os.listdir(tmp_path)) == ["iter_0000005", "iter_0000010", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("text", ["release", "-3", "12"])
def test_a_pointer_that_names_no_checkpoint_is_refused_with_those_that_are_there(tmp_path, text):
    (tmp_path / files.POINTER).write_text(text)
    with pytest.raises(ProfilingConfigError, match=r"Remove .* to start from scratch"):
        files.latest_iteration(tmp_path)
    write(tmp_path, 5)
    (tmp_path / files.POINTER).write_text(text)
    with pytest.raises(ProfilingConfigError, match="Write the number of one of these into it: iter_0000005"):
        files.latest_iteration(tmp_path)


def test_a_description_that_cannot_be_read_is_a_broken_checkpoint(tmp_path):
    folder = write(tmp_path, 5)
    (folder / files.DESCRIPTION).write_text('{"iteration": 5')
    with pytest.raises(ProfilingConfigError, match=r"iter_0000005 cannot be loaded; JSONDecodeError.*older checkpoint"):
        files.read_description(folder)
