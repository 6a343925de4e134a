"""Where ranks stand, from meshes and wrapped models, against the mesh's own coordinates; process groups without peers."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bridge_profiling.frameworks.ddp_fsdp import repeat_annotations
from bridge_profiling.frameworks.parallel_layout import describe, layout_of_mesh
from bridge_profiling.frameworks.phases import PhaseWatch


@pytest.fixture
def mesh_of():
    """torch.distributed as one of many ranks that are not there: groups are made, and nothing is sent."""

    def mesh_of(shape, names, rank=0):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(backend="fake", rank=rank, world_size=torch.Size(shape).numel(), store=FakeStore())
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    yield mesh_of
    dist.destroy_process_group()


#: Parameters of the model.
PARAMETERS = 4 * 8 + 8 + 8 * 4 + 4


def small():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("shape", "names"), [((2, 4), ("tp", "dp")), ((2, 2, 2, 2, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp"))]
)
def test_every_ranks_coordinates_are_the_meshs(shape, names, mesh_of):
    mesh = mesh_of(shape, names)
    found = layout_of_mesh(mesh)
    assert found.notes == []
    sizes = dict(zip(names, shape, strict=True))
    for rank in range(torch.Size(shape).numel()):
        place = dict(zip(names, (mesh.mesh == rank).nonzero()[0].tolist(), strict=True))
        coordinates = found.layout.coordinates(rank)
        for dimension in ("tp", "cp", "pp"):
            assert coordinates[dimension] == (place.get(dimension, 0), sizes.get(dimension, 1))
        replicate, shard = place.get("dp_replicate", 0), place.get("dp_shard", place.get("dp", 0))
        sharded, replicas = sizes.get("dp_shard", sizes.get("dp", 1)), sizes.get("dp_replicate", 1)
        assert coordinates["dp"] == (replicate * sharded + shard, sharded * replicas)


@pytest.mark.parametrize(
    ("shape", "names", "note"),
    [((2, 2), ("dp", "experts"), "'experts'"), ((2, 2, 2), ("dp_replicate", "tp", "dp_shard"), "not neighbours")],
)
def test_what_is_unknown_is_a_note_and_a_flat_layout(shape, names, note, mesh_of):
    found = layout_of_mesh(mesh_of(shape, names))
    assert note in found.notes[0]
    assert found.layout.dp == torch.Size(shape).numel()
    assert found.mesh == dict(zip(names, shape, strict=True))


def test_a_mesh_whose_ranks_are_not_in_order_gives_no_coordinates(mesh_of):
    mesh_of((4,), ("dp",))
    found = layout_of_mesh(dist.device_mesh.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")))
    assert "in order" in found.notes[0]


def tensor_parallel(mesh):
    return parallelize_module(small(), mesh["tp"] if mesh.ndim == 2 else mesh, {"0": ColwiseParallel()})


def ddp_of_two_ranks(mesh):
    return DistributedDataParallel(small(), process_group=dist.new_group([0, 3]), static_graph=True)


def sharded_by_the_unit(mesh):
    fully_shard((model := small())[0], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def wrapped(mesh):
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(small(), device_mesh=mesh, sharding_strategy=strategy, device_id=torch.device("cpu"))


@pytest.mark.parametrize(
    ("model_on", "shape", "names", "note", "coordinates", "facts"),
    [
        # Tensor parallelism alone wraps nothing.
        (tensor_parallel, (4,), ("tp",), None, {"tp": (3, 4)}, {"name": "torch"}),
        (tensor_parallel, (4,), None, None, {"tp": (3, 4)}, {"name": "torch"}),
        (tensor_parallel, (2, 2), ("dp", "tp"), None, {"tp": (1, 2), "dp": (1, 2)}, {"name": "torch"}),
        # Dimensions of fully_shard are data-parallel whatever they are called; a part of a mesh has the whole one's layout.
        (sharded_by_the_unit, (2, 2), ("outer", "inner"), None, {"dp": (3, 4)}, {"sharded_over": {"outer": 2, "inner": 2}}),
        (
            lambda mesh: fully_shard(tensor_parallel(mesh), mesh=mesh["dp"]),
            *((4, 2), ("dp", "tp"), None, {"tp": (1, 2), "dp": (1, 4)}, {"name": "fully_shard", "sharded_over": {"dp": 4}}),
        ),
        (wrapped, (2, 4), ("replicate", "shard"), None, {"dp": (3, 8)}, {"name": "fsdp", "sharding_strategy": "HYBRID_SHARD"}),
        (ddp_of_two_ranks, (4,), ("dp",), "among 2 of 4 ranks", {"dp": (3, 4)}, {"name": "ddp"}),
    ],
)
def test_a_models_layout_and_facts_are_found_in_what_wraps_it(model_on, shape, names, note, coordinates, facts, mesh_of):
    found, known = describe(model_on(mesh_of(shape, names, rank=3)))
    assert note in found.notes[0] if note else found.notes == []
    assert coordinates.items() <= found.layout.coordinates(3).items()
    assert (facts | {"parameters": PARAMETERS}).items() <= known.items()


def test_annotations_of_fully_shard_are_repeated_for_a_profiler_that_does_not_see_them(mesh_of):
    mesh_of((2,), ("dp",))
    seen = []

    def range_of(name):
        return nullcontext(seen.append(name))

    model = small()
    for module in (model[0], model[2], model):
        fully_shard(module)
    watch = PhaseWatch(range_of)
    repeat_annotations(watch, range_of)
    model(torch.randn(2, 4)).sum().backward()
    watch.detach()
    model(torch.randn(2, 4))
    for name, units in (("FSDP::all_gather", (0, 2, 2, 0)), ("FSDP::post_backward_reduce", (2, 0))):
        assert [one for one in seen if one.startswith(f"{name} (")] == [f"{name} ({unit})" for unit in units]
