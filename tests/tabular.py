"""Small POMDPs with every history written out: the true A, B and V, and Eq. 6 as a constrained least squares problem.

Nothing here imports the package: it is what the package is checked against.

A history is a tuple of indices (o_0, a_0, c_0, o_1, a_1, c_1, ..., o_t), c being the class of the reward, so that (*h, a, c, o) is
the history one step later and `len(h) // 3` is its time. A policy is a dict from histories to probabilities of the actions.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
History = tuple[int, ...]
Policy = Mapping[Hashable, Array]
Feature = Callable[[History], Hashable]
"""What the learner knows of a history."""


def whole_history(h: History) -> Hashable:
    """The learner of Proposition 1."""
    return h


def last_observation(h: History) -> Hashable:
    """The memoryless learner."""
    return h[-1]


@dataclass(frozen=True)
class POMDP:
    """p(s_0), p(c, s' | s, a) and p(o | s). Episodes end after `horizon` steps, or earlier with an observation of `final`."""

    start: Array  # [S]
    step: Array  # [S, A, C, S]
    see: Array  # [S, O]
    rewards: Array  # [C]
    horizon: int
    discount: float
    final: frozenset[int] = frozenset()

    @classmethod
    def random(cls, rng: np.random.Generator, horizon: int = 3, observations: int = 2, final: frozenset[int] = frozenset()) -> Self:
        """Three hidden states, two actions, rewards 0 and 1 that go together with the next state. No probability is 0."""
        s, a, c, o = 3, 2, 2, observations
        step = rng.dirichlet(np.ones(c * s), size=(s, a)).reshape(s, a, c, s)
        return cls(rng.dirichlet(np.ones(s)), step, rng.dirichlet(np.ones(o), size=s), np.array([0.0, 1.0]), horizon, 0.9, final)


@dataclass(frozen=True)
class Truth:
    """V, Q, A and B of a policy, by dynamic programming over the histories."""

    value: dict[History, float]
    q: dict[History, Array]  # [A]
    adv: dict[History, Array]  # [A]
    luck: dict[History, Array]  # [A, C, O]


class Tree:
    """All histories of a POMDP that have a positive probability under some policy."""

    def __init__(self, pomdp: POMDP):
        self.pomdp = pomdp
        belief = {(o,): pomdp.start * pomdp.see[:, o] for o in range(pomdp.see.shape[1])}  # p(h, s), actions given
        self.opening = {h: float(b.sum()) for h, b in belief.items() if b.sum() > 0}
        self.decisions: list[History] = []  # in order of time
        self.ends: list[History] = []
        self.outcome: dict[History, Array] = {}  # p(c, o' | h, a)  [A, C, O]
        level = list(self.opening)
        while level:
            following = []
            for h in level:
                if self.is_over(h):
                    self.ends.append(h)
                    continue
                self.decisions.append(h)
                joint = np.einsum("s,sacn,no->acon", belief[h], pomdp.step, pomdp.see)
                self.outcome[h] = joint.sum(-1) / belief[h].sum()
                for a, c, o in np.ndindex(joint.shape[:3]):
                    if joint[a, c, o].sum() > 0:
                        belief[*h, a, c, o] = joint[a, c, o]
                        following.append((*h, a, c, o))
            level = following

    def is_over(self, h: History) -> bool:
        """No decision follows."""
        return len(h) // 3 == self.pomdp.horizon or h[-1] in self.pomdp.final

    def branches(self, h: History) -> Iterator[tuple[int, int, int]]:
        """The (a, c, o') that can follow."""
        return zip(*(i.tolist() for i in self.outcome[h].nonzero()), strict=True)

    def reach(self, policy: Policy) -> dict[History, float]:
        """p_policy(h)."""
        p = dict(self.opening)
        for h in self.decisions:
            for a, c, o in self.branches(h):
                p[*h, a, c, o] = p[h] * policy[h][a] * self.outcome[h][a, c, o]
        return p

    def truth(self, policy: Policy) -> Truth:
        """Backwards from the ends, whose value is 0."""
        true = Truth(dict.fromkeys(self.ends, 0.0), {}, {}, {})
        for h in reversed(self.decisions):
            outcome = np.zeros_like(self.outcome[h])  # r + gamma V(h')
            for a, c, o in self.branches(h):
                outcome[a, c, o] = self.pomdp.rewards[c] + self.pomdp.discount * true.value[*h, a, c, o]
            true.q[h] = (self.outcome[h] * outcome).sum((1, 2))
            true.value[h] = float(policy[h] @ true.q[h])
            true.adv[h] = true.q[h] - true.value[h]
            true.luck[h] = outcome - true.q[h][:, None, None]
        return true

    def random_policy(self, rng: np.random.Generator) -> dict[Hashable, Array]:
        """Every action has a positive probability, of at least 0.1, in every history of two actions."""
        return {h: 0.2 / len(p) + 0.8 * rng.dirichlet(np.ones(len(p))) for h, p in self.outcome.items()}


# ------------------------------------------------------------------------------------------------------- Eq. 6, solved exactly


@dataclass
class Solution:
    """The minimiser of Eq. 6, and which of its coordinates all minimisers agree on.

    Coordinates: ("V", f), ("A", f, a) and ("B", f, a, c, o), f being the learner's feature of the history.
    """

    loss: float
    x: dict[Hashable, float] = field(default_factory=dict)
    unique: dict[Hashable, bool] = field(default_factory=dict)

    def all_unique(self) -> bool:
        """Every coordinate is determined."""
        return all(self.unique.values())

    def errors(self, true: Truth, letters: str = "VAB") -> dict[Hashable, float]:
        """|estimate - truth| of every coordinate of a learner that knows the whole history."""
        tables = {"V": lambda h: true.value[h], "A": lambda h, a: true.adv[h][a], "B": lambda h, *z: true.luck[h][z]}
        return {key: abs(x - tables[key[0]](*key[1:])) for key, x in self.x.items() if key[0] in letters}


def _null_space(constraint: Array) -> Array:
    """Orthonormal columns that the one linear form maps to 0."""
    return np.linalg.svd(constraint[None])[2][1:].T


def _constraints(
    tree: Tree, reach: dict[History, float], behaviour: Policy, target: Policy, feature: Feature, luck: bool
) -> tuple[list[Hashable], list[tuple[list[Hashable], Array]]]:
    """Groups of coordinates with the weights that make their sum 0: the two conditions of Eq. 6, as far as the learner can tell.

    The learner's p(c, o' | f, a) is the frequency in its data, which is the true one where f is the whole history.
    """
    groups: list[tuple[list[Hashable], Array]] = []
    members: dict[Hashable, list[History]] = {}
    for h in tree.decisions:
        members.setdefault(feature(h), []).append(h)
    for f, histories in members.items():
        groups.append(([("A", f, a) for a in range(len(target[f]))], target[f]))
        for a in range(len(target[f])) if luck else ():
            seen = [reach[h] * behaviour[h][a] for h in histories]
            weights = seen if sum(seen) > 0 else [1.0] * len(histories)
            p = sum(w * tree.outcome[h][a] for w, h in zip(weights, histories, strict=True)) / sum(weights)
            cells = [(c, o) for c, o in np.ndindex(p.shape) if p[c, o] > 0]
            groups.append(([("B", f, a, c, o) for c, o in cells], np.array([p[z] for z in cells])))
    return list(members), groups


def _rows(
    tree: Tree,
    reach: dict[History, float],
    n: int,
    starts: str,
    feature: Feature,
    luck: bool,
    given: Mapping[History, float] | None,
) -> Iterator[tuple[float, dict[Hashable, float], float]]:
    """(weight, {coordinate: coefficient}, constant) of each residual: coefficients @ x + constant.

    One row for each history e that a backup ends in, and each start s = e - n, or s > e - n where the episode is over. The
    expectation over the trajectories through e is taken: only their probability p_mu(h_e) matters.
    """
    gamma = tree.pomdp.discount
    for end in tree.decisions + tree.ends:
        e = len(end) // 3
        for s in range(max(0, e - n), e):
            if reach[end] == 0 or (s != e - n and not tree.is_over(end)) or (starts == "first" and s > 0):
                continue
            row: dict[Hashable, float] = {}
            constant = 0.0

            def add(key: Hashable, coefficient: float, row: dict[Hashable, float] = row) -> None:
                row[key] = row.get(key, 0.0) + coefficient

            for t in range(s, e):
                h, (a, c, o) = end[: 3 * t + 1], end[3 * t + 1 : 3 * t + 4]
                constant += gamma ** (t - s) * tree.pomdp.rewards[c]
                add(("A", feature(h), a), -(gamma ** (t - s)))
                if luck:
                    add(("B", feature(h), a, c, o), -(gamma ** (t - s)))
            if not tree.is_over(end):
                if given is None:
                    add(("V", feature(end)), gamma ** (e - s))
                else:
                    constant += gamma ** (e - s) * given[end]
            add(("V", feature(end[: 3 * s + 1])), -1.0)
            yield reach[end], row, constant


def _components(count: int, groups: list[list[int]]) -> list[list[int]]:
    """Coordinates that some row or constraint ties together: independent problems are solved one by one, which is much faster."""
    root = list(range(count))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    for group in groups:
        for i in group[1:]:
            root[find(i)] = find(group[0])
    parts: dict[int, list[int]] = {}
    for i in range(count):
        parts.setdefault(find(i), []).append(i)
    return list(parts.values())


def least_squares(
    tree: Tree,
    behaviour: Policy,
    target: Policy,
    n: int,
    *,
    starts: str = "all",
    luck: bool = True,
    feature: Feature = whole_history,
    given: Mapping[History, float] | None = None,
) -> Solution:
    """Eq. 6 in expectation over the behaviour, minimised exactly.

    `target` is a policy over features. Backups are n steps long, or as long as the episode lasts. `luck=False` leaves B out.
    `given` are fixed values to bootstrap from (V_target of Eq. 2); without, V(h_e) is an unknown like V(h_s), as in Eq. 6.
    """
    reach = tree.reach(behaviour)
    features, groups = _constraints(tree, reach, behaviour, target, feature, luck)
    keys: list[Hashable] = [("V", f) for f in features] + [key for members, _ in groups for key in members]
    column = {key: i for i, key in enumerate(keys)}
    rows = list(_rows(tree, reach, n, starts, feature, luck, given))
    matrix, constant = np.zeros((len(rows), len(keys))), np.zeros(len(rows))
    for i, (weight, row, c) in enumerate(rows):
        for key, coefficient in row.items():
            matrix[i, column[key]] = weight**0.5 * coefficient
        constant[i] = weight**0.5 * c
    tied = [[column[key] for key in row] for _, row, _ in rows] + [[column[key] for key in members] for members, _ in groups]

    solution = Solution(0.0)
    for part in _components(len(keys), tied):
        place = {i: j for j, i in enumerate(part)}
        used = (matrix[:, part] != 0).any(1)
        blocks = [([place[i]], np.eye(1)) for i in part if keys[i][0] == "V"]
        blocks += [([place[column[k]] for k in ks], _null_space(w)) for ks, w in groups if column[ks[0]] in place]
        basis = np.zeros((len(part), sum(block.shape[1] for _, block in blocks)))  # x = basis @ y satisfies the constraints
        j = 0
        for members, block in blocks:
            basis[members, j : j + block.shape[1]] = block
            j += block.shape[1]
        m, rest = torch.tensor(matrix[np.ix_(used, part)] @ basis), torch.tensor(constant[used])
        scale, v = torch.linalg.eigh(m.T @ m)
        largest = max(scale.tolist(), default=0.0)
        kept = scale > 1e-11 * largest
        assert not ((scale > 1e-14 * largest) & (scale < 1e-9 * largest)).any(), "rank in doubt"
        y = torch.zeros(m.shape[1], dtype=torch.float64)  # the shortest of the minimisers
        for _ in range(3):  # repeated, because the product above costs half the digits
            y -= v[:, kept] @ ((v[:, kept].T @ (m.T @ (m @ y + rest))) / scale[kept])
        x = basis @ y.numpy()
        free = np.abs(basis @ v[:, ~kept].numpy()).max(1, initial=0.0)  # how far the others move each coordinate
        solution.loss += float(((matrix[np.ix_(used, part)] @ x + constant[used]) ** 2).sum())
        solution.x.update({keys[i]: float(x[j]) for i, j in place.items()})
        solution.unique.update({keys[i]: bool(free[j] < 1e-7) for i, j in place.items()})
    return solution
