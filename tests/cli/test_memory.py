"""`bridge-profiling memory` as it is typed, on a real snapshot."""

import pytest


@pytest.fixture
def snapshot(captures, folder):
    """A copy of the real snapshot, so that what is cached lies next to it."""
    source = captures / "memory" / "tp2_dp2" / "snapshot_0.pickle.xz"
    (folder / source.name).write_bytes(source.read_bytes())
    return source.name


def test_the_peak_what_was_live_at_it_and_growth(snapshot, typed, folder):
    done = typed("memory", snapshot, "-o", "memory.html")
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (0, "Rank 0 peaks at 5.61 GiB; at most 5.92 GiB reserved.")
    assert "megatron/core/fusions/fused_softmax.py:335: 1.00 GiB" in lines[1]
    assert lines[2] == "It does not grow from one iteration to the next."
    assert "▃" in next(line for line in lines if "█" in line)
    assert any("param_and_grad_buffer.py:803" in line for line in lines)
    page = (folder / "memory.html").read_text()
    assert "Rank 0 peaks at 5.61 GiB" in page
    assert 'data-figure="over-time"' in page
