"""Commands that read one run, as they are typed: what they print, the page, the files, and the exit code."""

import json
import os

from tests.cli.conftest import write


def test_a_piped_analysis_is_plain_text_with_every_number_in_its_place(typed, folder):
    write(folder / "run" / "rank-1.json.gz", 1, device=False)
    done = typed("analyze", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert not set("\x1b│┃━─") & set(done.stdout)
    lines = done.stdout.splitlines()
    device = lines.index("Device time over the whole capture, ms")
    assert lines[device + 1].split()[:5] == ["rank", "span", "busy", "idle", "compute"]
    assert lines[device + 2].split()[:5] == ["0", "1.25", "0.50", "0.75", "0.50"]
    _, gemm = (line for line in lines if line.endswith("my_gemm_kernel"))
    assert gemm.split() == ["matrix", "product", "2", "0.50", "100%", "250.0", "250.0", "250.0", "my_gemm_kernel"]
    # A rank on a CPU has iterations, and no device that was idle.
    typical = lines.index("A typical iteration, ms")
    on_device, on_cpu = (line.split() for line in lines[typical + 2 : typical + 4])
    assert on_device[:3] == ["0", "0.90", "0.25"]
    assert on_cpu[:8] == ["1", "0.90", *"––––––"]


def test_a_piped_report_prints_the_verdict_and_writes_the_page(typed, folder):
    done = typed("report", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "An iteration takes 0.9 ms" in done.stdout
    assert "low_device_busy" in done.stdout
    assert done.stdout.endswith("\npage: report.html\n")
    assert "my_gemm_kernel" in (folder / "report.html").read_text()
    assert "low_device_busy" not in typed("report", "run", "--threshold", "device_busy=0.1").stdout
    named = typed("report", "run", "--threshold", "data_loading_ranges=^my_range$", "--threshold", "device_busy=0.1")
    assert (named.returncode, named.stderr) == (0, "")


def test_of_several_windows_the_newest_is_shown_and_named_first(typed, folder):
    traces = [folder / "runs" / "torch" / window / "rank-0.pt.trace.json.gz" for window in ("iter-5-7", "iter-2-4")]
    for age, trace in enumerate(traces):
        write(trace, 0)
        os.utime(trace, (9 - age, 9 - age))
    done = typed("report", "runs")
    assert "iter-5-7" in done.stdout.splitlines()[0]
    page = (folder / "report.html").read_text()
    assert page.index("iter-5-7") < page.index('id="verdict"'), "a notice above the verdict"


def test_a_flame_graph_is_speedscope_or_folded_text_and_says_what_was_not_recorded(typed, folder):
    write(folder / "run" / "rank-1.json.gz", 1)
    done = typed("flamegraph", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("flamegraph.speedscope.json: 4 stacks by host time. Open it at https://www.speedscope.app\n")
    document = json.loads((folder / "flamegraph.speedscope.json").read_text())
    assert [profile["weights"] for profile in document["profiles"]] == [[1_796_000, 4_000]] * 2
    done = typed("flamegraph", "run", "--folded", "--weight", "device", "--ranks", "1", "-q")
    assert (done.returncode, done.stdout) == (0, "")
    assert (folder / "flamegraph.folded.txt").read_text() == "rank 1;thread 1;ProfilerStep 500000\n"


def test_memory_shows_the_peak_what_was_live_at_it_and_growth(captures, typed, folder):
    # A copy of the real snapshot, so that what is cached lies next to it.
    source = captures / "memory" / "tp2_dp2" / "snapshot_0.pickle.xz"
    (folder / source.name).write_bytes(source.read_bytes())
    done = typed("memory", source.name, "-o", "memory.html")
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (0, "Rank 0 peaks at 5.61 GiB; at most 5.92 GiB reserved.")
    assert "megatron/core/fusions/fused_softmax.py:335: 1.00 GiB" in lines[1]
    assert lines[2] == "It does not grow from one iteration to the next."
    assert "▃" in next(line for line in lines if "█" in line)
    assert "Rank 0 peaks at 5.61 GiB" in (folder / "memory.html").read_text()
