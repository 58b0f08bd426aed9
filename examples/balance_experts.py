"""Which experts get a second copy, and on which device each copy lies (EPLB, in plain numpy).

python examples/balance_experts.py
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LOADS = [  # the example of EPLB's README: two layers of 12 experts
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
DEVICES = 8


@dataclass(frozen=True)
class Balance:
    """Where the copies of each layer's experts lie, in both directions.

    Attributes:
        placement: The expert of each copy [layers, replicas]; the copies of a device are
            neighbours: the first replicas / devices are those of device 0.
        replicas: The copies of each expert [layers, experts, most], as indices into `placement`;
            -1 where an expert has fewer copies than another.
        counts: How many copies each expert has [layers, experts].
    """

    placement: np.ndarray
    replicas: np.ndarray
    counts: np.ndarray


def balance_experts(
    loads: npt.ArrayLike, replicas: int, groups: int, nodes: int, devices: int
) -> Balance:
    """Return how many copies each expert gets and on which device each lies, for even loads.

    Experts with heavy loads get copies, among which their tokens are divided. This is DeepSeek's
    EPLB (`rebalance_experts`). If `nodes` divides `groups`, each group of experts lies on one node
    (the hierarchical policy): groups are packed on nodes, then experts of a node are copied, then
    the copies are packed on its devices. Otherwise groups and nodes are ignored (the global
    policy). Packing is greedy, the heaviest first: good, not always the best. Of equal loads the
    first goes first, which EPLB leaves open.

    Args:
        loads: The load of each expert [layers, experts], such as its tokens in the last steps.
        replicas: How many copies a layer has in all, the first of each expert included: at least
            the number of experts, and a multiple of `devices`.
        groups: How many groups of neighbouring experts the router chooses from; 1 if it has none.
        nodes: How many nodes the devices are in; it divides `devices`.
        devices: How many devices hold the experts.

    Returns:
        An object with `placement` [layers, replicas], the expert of each copy; `replicas` [layers,
        experts, most], the copies of each expert, and -1 where there are fewer; `counts` [layers,
        experts].

    Example:
        >>> found = balance_experts([[6, 1, 1, 2]], replicas=6, groups=1, nodes=1, devices=2)
        >>> found.placement  # loads of 2 + 2 + 1 on each device
        array([[0, 0, 1, 3, 0, 2]])
        >>> found.counts
        array([[3, 1, 1, 1]])
    """
    checked = _checked_loads(loads)
    layers, experts = checked.shape
    _check_counts(experts, replicas=replicas, groups=groups, nodes=nodes, devices=devices)
    if groups % nodes:
        groups = nodes = 1
    # float32, as in EPLB: which of two nearly equal loads is the greater decides the result.
    copies = np.stack([_layer(row, replicas, groups, nodes, devices) for row in checked])
    placement, ranks = copies[..., 0], copies[..., 1]
    found = np.full((layers, experts, ranks.max() + 1), -1)
    found[np.arange(layers)[:, None], placement, ranks] = np.arange(replicas)
    return Balance(placement, found, (found >= 0).sum(-1))


def _layer(loads: np.ndarray, replicas: int, groups: int, nodes: int, devices: int) -> np.ndarray:
    """Return the expert of each copy of a layer and which of its copies it is [replicas, 2]."""
    members = np.arange(len(loads)).reshape(groups, -1)
    placed = []
    for chosen in _packed(loads[members].sum(-1), nodes):
        experts = members[chosen].ravel()
        copies, counts = _copied(loads[experts], replicas // nodes)
        shares = (loads[experts] / counts)[copies[:, 0]]
        for of_device in _packed(shares, devices // nodes):
            mine = copies[of_device]
            placed.append(np.stack([experts[mine[:, 0]], mine[:, 1]], -1))
    return np.concatenate(placed)


def _copied(loads: np.ndarray, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the copies, each as (expert, which of its copies), and how many each expert has.

    Every expert has one; each further one goes to the expert whose copies have the highest load.
    """
    copies = [(expert, 0) for expert in range(len(loads))]
    counts = np.ones(len(loads), np.float32)
    while len(copies) < replicas:
        expert = int(np.argmax(loads / counts))
        copies.append((expert, int(counts[expert])))
        counts[expert] += 1
    return np.array(copies), counts


def _packed(loads: np.ndarray, packs: int) -> list[list[int]]:
    """Return the items of each pack, as many in each: the heaviest first, to the lightest pack."""
    size = len(loads) // packs
    if size == 1:  # nothing to balance: EPLB leaves them in their order
        return [[item] for item in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    totals = np.zeros(packs, np.float32)
    for item in np.argsort(-loads, kind="stable"):
        pack = min((p for p in range(packs) if len(packed[p]) < size), key=lambda p: totals[p])
        packed[pack].append(int(item))
        totals[pack] += loads[item]
    return packed


def _checked_loads(loads: npt.ArrayLike) -> np.ndarray:
    """Return the loads as float32, or raise."""
    given = np.asarray(loads)
    if given.dtype.kind not in "iuf":
        raise ValueError(
            f"balance_experts(loads=…) of {given.dtype}: numbers are expected, [layers, experts]."
        )
    found = given.astype(np.float32)
    if found.ndim != 2 or not found.size:
        raise ValueError(
            f"balance_experts(loads=…) of shape {found.shape}: one row for each layer is expected, "
            "[layers, experts]. Of a single layer give [loads]."
        )
    wrong = np.argwhere(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        layer, expert = map(int, wrong[0])
        raise ValueError(
            f"balance_experts: the load of expert {expert} in layer {layer} is "
            f"{found[layer, expert]}. A load is a count or a mean of tokens, 0 or more."
        )
    return found


def _check_counts(experts: int, **counts: int) -> None:
    """Refuse counts that are none, that do not divide, or that leave an expert without a copy."""
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"balance_experts({name}={value!r}): an integer of at least 1.")
    replicas, devices = counts["replicas"], counts["devices"]
    least = -(-max(experts, replicas) // devices) * devices
    for name, whole, of in (("groups", experts, "experts"), ("nodes", devices, "devices")):
        if whole % counts[name]:
            fit = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
            raise ValueError(
                f"balance_experts({name}={counts[name]}) does not divide {whole} {of}. These do: "
                f"{fit}."
            )
    if replicas < experts or replicas % devices:
        raise ValueError(
            f"balance_experts(replicas={replicas}) of {experts} experts on {devices} devices: "
            f"every expert needs a copy, and every device the same number. Take {least}, or "
            f"another multiple of {devices} that is at least {experts}."
        )


def main() -> None:
    found = balance_experts(LOADS, replicas=16, groups=4, nodes=2, devices=DEVICES)
    shares = np.take_along_axis(LOADS / found.counts, found.placement, 1)
    for layer, (placement, share) in enumerate(zip(found.placement, shares, strict=True)):
        print(f"layer {layer}")
        of_devices = zip(*(x.reshape(DEVICES, -1) for x in (placement, share)), strict=True)
        for device, (experts, loads) in enumerate(of_devices):
            print(f"  device {device}: experts {experts.tolist()}, load {loads.sum():g}")


if __name__ == "__main__":
    main()
