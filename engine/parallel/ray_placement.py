"""On which nodes of a Ray cluster the ranks but the first run: here if they fit, else in a placement group."""

from dataclasses import dataclass, field
from typing import Any

from engine.errors import ModelError
from engine.sizing import available_memory

_PATIENCE_SECONDS = 60.0
"""For Ray to find nodes that are free, or to start some."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`machines` are the addresses of ranks 1 … n, "" for this node; `host` is this node's own."""

    host: str
    machines: tuple[str, ...]
    _strategies: tuple[Any, ...] = field(repr=False)
    _group: Any = field(default=None, repr=False)

    def strategy(self, rank: int) -> Any:
        """The scheduling strategy of the rank's actor."""
        return self._strategies[rank - 1]

    def close(self) -> None:
        """Gives the places back."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)


def place(ray: Any, size: int, num_weight_bytes: int) -> Placement:
    """Each rank takes a CPU and the memory of its part of the weights. Raises ModelError if there is too little.

    All run on this node if it has the CPUs and its machine the memory; or if there is no other one.
    """
    own: str = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    num_cpus = {each: node["Resources"].get("CPU", 0) for each, node in nodes.items()}
    fits = num_cpus[own] >= size - 1 and available_memory() >= num_weight_bytes
    if fits or (len(nodes) == 1 and num_cpus[own] >= size - 1):
        return _here(own, nodes[own]["NodeManagerAddress"], size)
    if sum(num_cpus.values()) < size - 1:
        raise ModelError(
            f"distributed_executor_backend = ray: tensor_parallel_size = {size} needs {size - 1} actors of one CPU; "
            f"the cluster's nodes have {', '.join(f'{each:g}' for each in num_cpus.values())}"
        )
    return _grouped(ray, own, nodes, size, num_weight_bytes // size)


def _here(node_id: str, host: str, size: int) -> Placement:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return Placement(host, ("",) * (size - 1), (here,) * (size - 1))


def _grouped(ray: Any, own: str, nodes: dict[str, Any], size: int, part_bytes: int) -> Placement:
    """On as few nodes as Ray can (PACK)."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1, "memory": part_bytes}] * (size - 1), strategy="PACK")
    if not group.wait(_PATIENCE_SECONDS):
        remove_placement_group(group)
        raise ModelError(
            f"distributed_executor_backend = ray: no nodes for {size - 1} ranks of one CPU and "
            f"{part_bytes / 2**30:.1f} GiB are free within {_PATIENCE_SECONDS:g} s (`ray status` shows who has them)"
        )
    nodes |= {node["NodeID"]: node for node in ray.nodes()}  # some may have been started for it
    places = placement_group_table(group)["bundles_to_node_id"]
    found = [places[index] for index in range(size - 1)]
    return Placement(
        nodes[own]["NodeManagerAddress"],
        tuple("" if each == own else nodes[each]["NodeManagerAddress"] for each in found),
        tuple(PlacementGroupSchedulingStrategy(group, index) for index in range(size - 1)),
        group,
    )
