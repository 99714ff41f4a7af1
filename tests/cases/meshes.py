from functools import cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh over all ranks. Collective, the first time.

    torch keeps the groups of a mesh until all groups are destroyed, and the thread of a gloo group
    polls 100 times a second. With a mesh for each test, 100 tests leave enough threads to use most
    of two cores.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
