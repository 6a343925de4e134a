"""The captures are whole, small, and say nothing of the machine that they were made on."""

from __future__ import annotations

import json
import lzma
import re

import pytest

from tests.planted.cases import CASES, FOLDER, Case

#: Directories of one machine, addresses of people, GPUs' serial numbers, and what nsys writes down of the environment.
TELLING = re.compile(
    rb"(?<![\w./-])/(?:root|home|work|tmp|opt|mnt|Users|scratch|data)/[\w.-]+|(?<![a-z.])[a-z.]{2,32}+@[a-z-]{2,32}\.[a-z]{2}"
    rb"|GPU-[0-9a-f]{8}-|ENVIRONMENT_VARIABLE(?!(?:RANK|WORLD_SIZE)=)"
)

LARGEST_BYTES, ALL_BYTES = 1 << 20, 6 << 20

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_each_rank_that_was_captured_has_what_its_manifest_lists(case: Case):
    manifests = [json.loads(path.read_text()) for path in sorted(case.folder.glob("manifest/*/rank-*.json"))]
    assert sorted(manifest["rank"] for manifest in manifests) == case.captured
    for manifest in manifests:
        assert manifest["status"] == "complete"
        assert manifest["captured"]["iterations"] == case.iterations
        artifacts = [artifact for profiler in manifest["profilers"] for artifact in profiler["artifacts"]]
        assert artifacts
        for artifact in artifacts:
            assert (case.folder / artifact["path"]).stat().st_size == artifact["bytes"]


@every_case
def test_nothing_names_the_machine(case: Case):
    for path in sorted(path for path in case.folder.rglob("*") if path.is_file()):
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        assert TELLING.search(content) is None, path


def test_captures_are_small_enough_to_keep():
    sizes = [path.stat().st_size for path in FOLDER.rglob("*.xz")]
    assert max(sizes) < LARGEST_BYTES
    assert sum(sizes) < ALL_BYTES


def test_each_twin_is_clean_and_of_the_same_configuration():
    for case in CASES.values():
        assert (case.plant is None) == (case.twin is None) or case.finding is None
        if case.twin is not None:
            twin = CASES[case.twin]
            assert twin.plant is None
            assert (twin.configuration, twin.profiler) == (case.configuration, case.profiler)
