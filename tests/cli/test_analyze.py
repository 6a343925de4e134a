"""`bridge-profiling analyze` as it is typed: what it prints, where, and the exit code."""

from tests.cli.ranks import write


def test_piped_it_is_plain_text_with_every_number_in_its_place(typed, folder):
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
    assert any("only 2 iterations were captured" in line for line in lines)
    # A rank on a CPU has iterations, and no device that was idle.
    typical = lines.index("A typical iteration, ms")
    on_device, on_cpu = (line.split() for line in lines[typical + 2 : typical + 4])
    assert on_device[:3] == ["0", "0.90", "0.25"]
    assert on_cpu[:8] == ["1", "0.90", *"––––––"]
    assert any("rank 1: no work on a device was recorded: not compared" in line for line in lines)
