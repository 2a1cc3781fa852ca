"""Proposition 1, exactly: (A, B, V) of the target policy minimise Eq. 6 off-policy, alone do so where the policy goes, and make the
package's own residual vanish.

Small POMDPs with every history enumerated (tabular.py), float64. The first part checks the proposition itself and what it leaves
out; the second puts the true functions into `dae.objective`; the third are the paper's confounding example and a game of chance.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dae import objective as obj
from tabular import POMDP, Array, History, Policy, Tree, Truth, last_observation, least_squares

# ----------------------------------------------------------------------------------------------------- the proposition itself


@dataclass(frozen=True)
class Case:
    """A random POMDP, two policies, and the truth about the second."""

    tree: Tree
    behaviour: Policy
    target: Policy
    true: Truth


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    tree = Tree(POMDP.random(rng))
    behaviour, target = tree.random_policy(rng), tree.random_policy(rng)
    return Case(tree, behaviour, target, tree.truth(target))


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(0)


def test_all_histories_are_enumerated(case: Case) -> None:
    """A lost or doubled history would make the checks below easier than they are, not fail."""
    assert len(case.tree.decisions) == 2 + 2 * 8 + 2 * 8**2
    assert len(case.tree.ends) == 2 * 8**3
    reach = case.tree.reach(case.behaviour)
    for time in range(4):
        assert sum(p for h, p in reach.items() if len(h) // 3 == time) == pytest.approx(1)
    assert all(p.sum((1, 2)) == pytest.approx(1) for p in case.tree.outcome.values())


def test_dynamic_programming_agrees_with_a_sum_over_trajectories(case: Case) -> None:
    """The truth itself: E_pi of the discounted return, typed out over all trajectories; both functions are centred."""
    reach, world = case.tree.reach(case.target), case.tree.pomdp
    expected = sum(reach[h] * sum(world.discount**t * world.rewards[c] for t, c in enumerate(h[2::3])) for h in case.tree.ends)
    assert sum(reach[h] * case.true.value[h] for h in case.tree.opening) == pytest.approx(expected)
    for h in case.tree.decisions:
        assert case.target[h] @ case.true.adv[h] == pytest.approx(0, abs=1e-12)
        assert (case.tree.outcome[h] * case.true.luck[h]).sum((1, 2)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_off_policy_data_of_full_coverage_determine_everything(n: int) -> None:
    """The claim: whatever the behaviour, the minimiser is the truth, and it is the only one. Catches wrong rows or constraints."""
    case = random_case(n)
    solution = least_squares(case.tree, case.behaviour, case.target, n)
    kinds = [key[0] for key in solution.x]
    assert (kinds.count("V"), kinds.count("A"), kinds.count("B")) == (146, 292, 1168)
    assert solution.all_unique()
    assert max(solution.errors(case.true).values()) < 1e-9
    assert solution.loss < 1e-20


def covered(tree: Tree, policy: Policy) -> set[tuple]:
    """Coordinates of Eq. 6 at trajectories that the policy may take."""
    reach, keys = tree.reach(policy), set()
    for h in tree.decisions:
        if reach[h] > 0:
            keys.add(("V", h))
            keys |= {("A", h, a) for a in np.flatnonzero(policy[h])}
            keys |= {("B", h, *z) for z in tree.branches(h) if policy[h][z[0]] > 0}
    return keys


def with_one_action(policy: Policy, histories: list[History], rng: np.random.Generator) -> dict[History, Array]:
    """The policy, made deterministic at the given histories."""
    return {**policy, **{h: np.eye(2)[rng.integers(2)] for h in histories}}


def test_coverage_of_the_target_policy_is_enough(case: Case) -> None:
    """Prop. 1 with pi = 0 wherever mu = 0: exact and unique at trajectories covered by pi. What lies elsewhere may be anything,
    and some of it is, so that the mask is seen to tell the two apart."""
    rng = np.random.default_rng(1)
    narrow = [h for h in case.tree.decisions if rng.random() < 0.4]
    behaviour = with_one_action(case.behaviour, narrow, rng)
    target = {h: behaviour[h] if h in set(narrow) else case.target[h] for h in case.tree.decisions}
    solution, true = least_squares(case.tree, behaviour, target, 2), case.tree.truth(target)
    on, errors = covered(case.tree, target), solution.errors(true)
    assert 100 < len(on) < 1400
    assert all(solution.unique[key] for key in on)
    assert max(errors[key] for key in on) < 1e-9
    assert solution.loss < 1e-20
    unvisited = {h for h, p in case.tree.reach(behaviour).items() if p == 0 and h in case.tree.outcome}
    assert unvisited
    assert not any(solution.unique["V", h] for h in unvisited)
    assert not any(solution.unique["A", h, int(behaviour[h].argmin())] for h in narrow)


def test_without_coverage_values_are_not_determined(case: Case) -> None:
    """mu deterministic at part of the histories, pi full: the loss is 0 all the same, so only the null space shows that the data
    say nothing about V and A at these histories, nor about what leads to them. No number is asserted: it would be the solver's."""
    rng = np.random.default_rng(2)
    narrow = [h for h in case.tree.decisions if rng.random() < 0.4]
    behaviour = with_one_action(case.behaviour, narrow, rng)
    solution, reach = least_squares(case.tree, behaviour, case.target, 2), case.tree.reach(behaviour)
    assert solution.loss < 1e-20
    for h in narrow:
        assert not solution.unique["V", h]
        assert not any(solution.unique["A", h, a] for a in range(2))
    # V of a visited history is determined where every action was tried, there and in all that can follow, and nowhere else.
    sure: dict[History, bool] = {}
    for h in reversed(case.tree.decisions):
        sure[h] = h not in set(narrow) and all(sure.get(h + z, True) for z in case.tree.branches(h))
        if reach[h] > 0:
            assert solution.unique["V", h] == sure[h]
    assert 10 < sum(solution.unique["V", h] for h in case.tree.decisions) < 136
    assert max(e for key, e in solution.errors(case.true, "V").items() if solution.unique[key]) < 1e-9


@pytest.mark.parametrize("n", [1, 2])
def test_residuals_from_the_first_step_alone_determine_nothing(case: Case, n: int) -> None:
    """What the proposition does not say: uniqueness needs residuals from all start times. Catches training on the opening only."""
    solution = least_squares(case.tree, case.behaviour, case.target, n, starts="first")
    assert solution.loss < 1e-20
    assert not any(solution.unique.values())


def test_whole_episodes_from_the_first_step_determine_all_but_later_values(case: Case) -> None:
    """With n the horizon, the starts t = 0 do give A, B and the first V."""
    solution = least_squares(case.tree, case.behaviour, case.target, 3, starts="first")
    assert {key for key, sure in solution.unique.items() if not sure} == {("V", h) for h in case.tree.decisions if len(h) > 1}
    assert max(e for key, e in solution.errors(case.true).items() if solution.unique[key]) < 1e-9


def test_without_luck_off_policy_is_biased_and_on_policy_is_not(case: Case) -> None:
    """B = 0 is the original DAE (Eq. 2): right where the behaviour is the target policy, wrong elsewhere, and no more data mend it.
    Catches a luck term that does nothing. Backups run to the end of the episode, so there is nothing to bootstrap."""
    off = least_squares(case.tree, case.behaviour, case.target, 3, luck=False)
    on = least_squares(case.tree, case.target, case.target, 3, luck=False)
    assert all(solution.all_unique() and solution.loss > 0.1 for solution in (off, on))  # luck is left over in both
    assert max(off.errors(case.true, "V").values()) > 0.3
    assert max(off.errors(case.true, "A").values()) > 0.3
    assert max(abs(off.x["V", h] - case.true.value[h]) for h in case.tree.opening) > 0.01
    assert max(on.errors(case.true, "VA").values()) < 1e-9


@pytest.mark.parametrize("n", [1, 2])
def test_without_luck_eq_6_taken_literally_is_biased_on_policy_too(case: Case, n: int) -> None:
    """Where V(h_{t+n}) is unknown as well, squared luck is traded for wrong values (the double sampling of Bellman residuals), and
    only A comes out right. With B there is no luck left over, hence nothing to trade: why Prop. 1 needs no fixed target, and the
    ablations without B do."""
    solution = least_squares(case.tree, case.target, case.target, n, luck=False)
    assert max(solution.errors(case.true, "A").values()) < 1e-9
    assert max(solution.errors(case.true, "V").values()) > 0.1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_without_luck_and_with_values_given_to_bootstrap_from(case: Case, n: int) -> None:
    """The same with V_target fixed at the truth, as the slow network's would be: on-policy exact for every n. Off-policy, one step
    is exact too: there is no second action that the first luck could be mistaken for."""
    on = least_squares(case.tree, case.target, case.target, n, luck=False, given=case.true.value)
    off = least_squares(case.tree, case.behaviour, case.target, n, luck=False, given=case.true.value)
    assert max(on.errors(case.true, "VA").values()) < 1e-9
    error = max(off.errors(case.true, "VA").values())
    assert error < 1e-9 if n == 1 else error > 0.3


# ------------------------------------------------------------------------------------------ the truth in the package's own loss


GAMMA = 0.9
FINAL = 2  # the observation that ends an episode for good
JUNK = 1e3


@dataclass(frozen=True)
class Stream:
    """Slots of one environment, episode after episode, with what a perfect network would say of each; time first.

    A slot holds an observation and the transition that left it; an episode's last observation has a slot without a transition,
    full of junk except for the value to bootstrap from, and that is junk too where the episode ended for good.
    """

    action: Tensor  # [T]
    reward: Tensor  # [T]
    reward_class: Tensor  # [T]
    outcome: Tensor  # o_{t+1} [T]
    terminal: Tensor  # [T]
    valid: Tensor  # [T]
    value: Tensor  # V(h_t) [T]
    ema_value: Tensor  # the same, to bootstrap from [T]
    adv: Tensor  # A(h_t, .) plus something [T, A]
    log_policy: Tensor  # [T, A]
    luck: Tensor  # B(h_t, a_t, .) plus something [T, C, O]
    log_prior: Tensor  # [T, C, O]


def play(case: Case, slots: int, rng: np.random.Generator) -> Stream:
    """Episodes of the behaviour policy; a time limit cuts some of them off."""
    tree, true, columns = case.tree, case.true, {name: [] for name in Stream.__dataclass_fields__}

    def write(**slot: object) -> None:
        for name, entry in slot.items():
            columns[name].append(torch.as_tensor(np.asarray(entry)))  # a Python float would become float32

    openings = {h: p for h, p in tree.opening.items() if not tree.is_over(h)}
    shares = np.array(list(openings.values())) / sum(openings.values())
    while len(columns["valid"]) < slots:
        h = list(openings)[rng.choice(len(openings), p=shares)]
        truncated = False
        while not tree.is_over(h) and not truncated:
            a = int(rng.choice(2, p=case.behaviour[h]))
            p = tree.outcome[h][a]
            c, o = (int(i) for i in np.unravel_index(rng.choice(p.size, p=p.ravel()), p.shape))
            after = (*h, a, c, o)
            write(
                action=a, reward=tree.pomdp.rewards[c], reward_class=c, outcome=o, terminal=tree.is_over(after), valid=True,
                value=true.value[h], ema_value=true.value[h], adv=true.adv[h] + rng.normal(), log_policy=np.log(case.target[h]),
                luck=true.luck[h][a] + rng.normal(), log_prior=np.log(p),
            )  # fmt: skip
            h = after
            truncated = not tree.is_over(h) and rng.random() < 0.2
        write(
            action=0, reward=JUNK, reward_class=0, outcome=0, terminal=bool(rng.random() < 0.5), valid=False,
            value=JUNK, ema_value=true.value[h] if truncated else JUNK, adv=JUNK * rng.normal(size=2),
            log_policy=np.log([0.3, 0.7]), luck=JUNK * rng.normal(size=p.shape), log_prior=np.log(np.full_like(p, 1 / p.size)),
        )  # fmt: skip
    return Stream(**{name: torch.stack(slot) for name, slot in columns.items()})


def windows(x: Tensor, n: int) -> Tensor:
    """All windows of n slots, one for each slot that they can start at.  [n, B, ...]"""
    return x.unfold(0, n, 1).movedim(-1, 0)


def segment_residual(s: Stream, n: int, backup_steps: int, correct_skill: bool = True) -> tuple[Tensor, Tensor]:
    """`dae.objective`, strung together as in Algorithm 1, on all windows of the stream. Returns the residuals and `valid`."""

    def cut(x: Tensor) -> Tensor:
        return windows(x[:-1], n)

    temperature = torch.tensor(0.7, dtype=torch.float64)
    policy = obj.target_policy(temperature * cut(s.log_policy) + 3.0, temperature)
    adv = obj.centre_advantage(cut(s.adv), policy, cut(s.action))
    posterior_o = torch.nn.functional.one_hot(cut(s.outcome), s.luck.shape[-1]).to(torch.float64)
    posterior = obj.joint_posterior(posterior_o, cut(s.reward_class), s.luck.shape[-2])
    z = s.luck.mT.flatten(-2), s.log_prior.mT.flatten(-2)  # outcome first, then the reward's class
    luck = obj.centre_luck(cut(z[0]), posterior, cut(z[1]))
    discount = GAMMA * (~cut(s.terminal)).to(torch.float64)
    valid = cut(s.valid)
    bootstrap = windows(s.ema_value, n + 1)
    residual = obj.dae_residual(cut(s.reward), discount, adv, luck, cut(s.value), bootstrap, valid, backup_steps, correct_skill)
    return residual, valid


@pytest.fixture(scope="module")
def episodes() -> tuple[Case, Stream]:
    """Episodes of one to four steps: a third observation ends them for good, the horizon too, and a time limit cuts some off."""
    rng = np.random.default_rng(5)
    tree = Tree(POMDP.random(rng, horizon=4, observations=3, final=frozenset({FINAL})))
    behaviour, target = tree.random_policy(rng), tree.random_policy(rng)
    case = Case(tree, behaviour, target, tree.truth(target))
    return case, play(case, 1500, rng)


def test_the_stream_holds_every_kind_of_boundary(episodes: tuple[Case, Stream]) -> None:
    """Without terminals, truncations and resets of all lengths the tests below would say little."""
    _, s = episodes
    last = torch.nonzero(~s.valid).flatten()
    lengths = set(torch.diff(last).tolist())
    assert lengths == {2, 3, 4, 5}  # slots, the last observation included
    truncated = ~s.terminal[last - 1]
    assert min(truncated.sum(), (~truncated).sum()) > 50
    assert (s.ema_value[last][~truncated] == JUNK).all()
    assert s.ema_value[last][truncated].min() > 0.1  # far from 0, so that to bootstrap or not makes a difference


@pytest.mark.parametrize(("n", "backup_steps"), [(1, 1), (4, 4), (7, 7), (16, 16), (6, 1), (6, 2), (6, 3), (16, 8)])
def test_the_true_functions_make_the_package_s_residual_vanish(episodes: tuple[Case, Stream], n: int, backup_steps: int) -> None:
    """At every real slot of every window, wherever it starts, whatever episodes end, are cut off or begin inside."""
    residual, valid = segment_residual(episodes[1], n, backup_steps)
    assert residual[valid].abs().max() < 1e-9
    for starts in ("all", "first"):
        mask = obj.start_mask(valid, backup_steps, starts)
        assert mask.sum() > 100
        assert obj.masked_mean(residual.square(), mask) < 1e-18


def shift(x: Tensor) -> Tensor:
    """One slot late."""
    return x.roll(1, 0)


MISTAKES = {
    "terminal one slot late": lambda s: replace(s, terminal=shift(s.terminal)),
    "terminal one slot early": lambda s: replace(s, terminal=s.terminal.roll(-1, 0)),
    "every end is terminal": lambda s: replace(s, terminal=s.terminal | ~s.valid.roll(-1, 0)),
    "no end is terminal": lambda s: replace(s, terminal=torch.zeros_like(s.terminal)),
    "reward one slot late": lambda s: replace(s, reward=shift(s.reward)),
    "reward class one slot late": lambda s: replace(s, reward_class=shift(s.reward_class)),
    "action one slot late": lambda s: replace(s, action=shift(s.action)),
    "outcome is o_t": lambda s: replace(s, outcome=shift(s.outcome)),
    "value after the step": lambda s: replace(s, value=s.value.roll(-1, 0)),
    "bootstrap one slot late": lambda s: replace(s, ema_value=shift(s.ema_value)),
    "luck one slot late": lambda s: replace(s, luck=shift(s.luck), log_prior=shift(s.log_prior)),
    "no luck": lambda s: replace(s, luck=torch.zeros_like(s.luck)),
    "prior is uniform": lambda s: replace(s, log_prior=torch.full_like(s.log_prior, -np.log(s.log_prior[0].numel()))),
    "policy is uniform": lambda s: replace(s, log_policy=torch.zeros_like(s.log_policy)),
    "policy one slot late": lambda s: replace(s, log_policy=shift(s.log_policy)),
    "no slot is last": lambda s: replace(s, valid=torch.ones_like(s.valid)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_alignment_leaves_a_residual(episodes: tuple[Case, Stream], mistake: str) -> None:
    """The zero above is not a coincidence: each slip in what goes in shows."""
    s = episodes[1]
    residual, _ = segment_residual(MISTAKES[mistake](s), 7, 7)
    assert (residual[windows(s.valid[:-1], 7)].abs() > 1e-2).float().mean() > 0.05


def test_plain_multi_step_targets_are_exact_over_one_step_only(episodes: tuple[Case, Stream]) -> None:
    """`correct_skill=False` leaves later actions uncorrected: right for one-step backups, wrong off-policy for longer ones."""
    residual, valid = segment_residual(episodes[1], 6, 1, correct_skill=False)
    assert residual[valid].abs().max() < 1e-9
    residual, valid = segment_residual(episodes[1], 6, 3, correct_skill=False)
    row = torch.arange(6) % 3 == 2
    assert residual[row][valid[row]].abs().max() < 1e-9  # the last start of each block has one step
    assert residual[~row][valid[~row]].abs().max() > 1e-2


# ------------------------------------------------------------------------------------------------- the paper's confounding example


UP, DOWN = 0, 1


def confounding_toy() -> Tree:
    """Fig. "toy confounding": s_0 to s_1 or s_2, which look alike (o_1); reward 1 for the action taken before, then s_3."""
    step = np.zeros((4, 2, 2, 4))
    step[0, UP, 0, 1] = step[0, DOWN, 0, 2] = 1
    step[1, UP, 1, 3] = step[1, DOWN, 0, 3] = step[2, UP, 0, 3] = step[2, DOWN, 1, 3] = 1
    step[3, :, 0, 3] = 1
    see = np.eye(3)[[0, 1, 1, 2]]
    return Tree(POMDP(np.eye(4)[0], step, see, np.array([0.0, 1.0]), horizon=2, discount=GAMMA))


def up(p: float) -> Array:
    return np.array([p, 1 - p])


def by_history(tree: Tree, first: float, second: float | None = None) -> dict[History, Array]:
    """`up` with probability `first`, then with `second`, or, without it, the first action once more."""
    policy = {h: up(first) if len(h) == 1 else up(float(h[1] == UP) if second is None else second) for h in tree.decisions}
    assert len(policy) == 3
    return policy


def memoryless(first: float, second: float) -> dict[int, Array]:
    """By observation alone."""
    return {0: up(first), 1: up(second)}


def q1(x: dict, feature: object) -> tuple[float, float]:
    """Q(feature, up) and Q(feature, down)."""
    return tuple(x["V", feature] + x["A", feature, a] for a in (UP, DOWN))


TARGETS = [(0.5, 0.5), (1.0, 0.0), (1.0, 1.0), (0.3, 0.9)]


@pytest.mark.parametrize("target", TARGETS)
def test_the_toy_s_truth_for_memoryless_policies(target: tuple[float, float]) -> None:
    """E r_1 = p q + (1 - p)(1 - q): 1/2 for the uniform policy, 0 for up-then-down, 1 for always up."""
    tree, (p, q) = confounding_toy(), target
    true = tree.truth(by_history(tree, p, q))
    assert true.value[(0,)] == pytest.approx(GAMMA * (p * q + (1 - p) * (1 - q)))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_a_memoryless_learner_is_fooled_by_a_behaviour_that_remembers(n: int, target: tuple[float, float]) -> None:
    """Confounding: behaviour repeats its first action, so every trajectory pays 1, and the learner, who sees o_1 alone, infers
    V(o_1) = Q(o_1, .) = 1 for any target policy. Its loss is 0: nothing in the loss shows the mistake."""
    tree, (p, q) = confounding_toy(), target
    solution = least_squares(tree, by_history(tree, 0.5), memoryless(p, q), n, feature=last_observation)
    assert solution.all_unique()
    assert solution.loss < 1e-20
    assert solution.x["V", 1] == pytest.approx(1)
    assert q1(solution.x, 1) == pytest.approx((1, 1))
    assert [solution.x["A", 1, a] for a in (UP, DOWN)] == pytest.approx([0, 0], abs=1e-9)
    assert solution.x["V", 0] == pytest.approx(GAMMA)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_a_memoryless_behaviour_is_not_enough_for_a_memoryless_learner(n: int, target: tuple[float, float]) -> None:
    """Uniform behaviour without memory: all values 1/2, which is right for the uniform target policy and wrong for always up, whose
    value is 1 ("deleting the red arrows is not enough"): what the learner forgot still decides the reward."""
    tree, (p, q) = confounding_toy(), target
    solution = least_squares(tree, by_history(tree, 0.5, 0.5), memoryless(p, q), n, feature=last_observation)
    assert solution.all_unique()
    assert solution.x["V", 1] == pytest.approx(0.5)
    assert q1(solution.x, 1) == pytest.approx((0.5, 0.5))
    assert solution.x["V", 0] == pytest.approx(GAMMA / 2)
    truth = tree.truth(by_history(tree, p, q)).value[(0,)]
    assert (abs(solution.x["V", 0] - truth) < 1e-9) == (p == 0.5)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_what_a_memoryless_learner_infers_depends_on_the_behaviour(n: int, target: tuple[float, float]) -> None:
    """Up first with 0.8: Q(o_1, up) = 0.8 and Q(o_1, down) = 0.2, the frequency of s_1 in the data and not under the policy."""
    tree, (p, q) = confounding_toy(), target
    solution = least_squares(tree, by_history(tree, 0.8, 0.5), memoryless(p, q), n, feature=last_observation)
    assert solution.all_unique()
    assert q1(solution.x, 1) == pytest.approx((0.8, 0.2))
    assert solution.x["V", 1] == pytest.approx(0.8 * q + 0.2 * (1 - q))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_a_learner_with_the_whole_history_is_not_fooled(n: int, target: tuple[float, float]) -> None:
    """Q(h_1, a_1) = 1[a_1 = a_0], from any behaviour that tries everything, for every target policy."""
    tree, (p, q) = confounding_toy(), target
    policy = by_history(tree, p, q)
    solution = least_squares(tree, by_history(tree, 0.8, 0.3), policy, n)
    assert solution.all_unique()
    assert max(solution.errors(tree.truth(policy)).values()) < 1e-9
    assert q1(solution.x, (0, UP, 0, 1)) == pytest.approx((1, 0), abs=1e-9)
    assert q1(solution.x, (0, DOWN, 0, 1)) == pytest.approx((0, 1), abs=1e-9)


@pytest.mark.parametrize("n", [1, 2])
def test_the_optimal_behaviour_says_nothing_of_other_policies(n: int) -> None:
    """It never tries a_1 != a_0, so even the whole history leaves V and A at h_1 open, unless the target policy repeats too."""
    tree = confounding_toy()
    later = [h for h in tree.decisions if len(h) > 1]
    for target in (by_history(tree, 0.5, 0.5), by_history(tree, 1.0, 1.0)):
        solution = least_squares(tree, by_history(tree, 0.5), target, n)
        for h in later:
            assert solution.unique["V", h] == (target[h][h[1]] == 1)  # the target policy repeats here
            for a in (UP, DOWN):
                assert solution.unique["A", h, a] == (target[h][a] == 1)  # 0, by the constraint alone
    solution = least_squares(tree, by_history(tree, 0.5), by_history(tree, 0.3), n)
    for h in later:
        assert solution.unique["V", h]
        assert solution.unique["A", h, h[1]]
        assert not solution.unique["A", h, 1 - h[1]]
        assert (solution.x["V", h], solution.x["A", h, h[1]]) == pytest.approx((1, 0), abs=1e-9)


# --------------------------------------------------------------------------------------------------------------- a game of chance


WIN, LOSS, NOTHING, COST = range(4)
RIGHT, WRONG = 0, 1


def coin_and_choice(discount: float) -> Tree:
    """A coin of +-10, whatever one does; then a choice that costs 0.5 when wrong. What the coin paid is part of the history."""
    step = np.zeros((2, 2, 4, 2))
    step[0, :, [WIN, LOSS], 1] = 0.5
    step[1, RIGHT, NOTHING, 1] = step[1, WRONG, COST, 1] = 1
    return Tree(POMDP(np.eye(2)[0], step, np.ones((2, 1)), np.array([10.0, -10.0, 0.0, -0.5]), 2, discount))


def wrong_after(x: dict, tree: Tree) -> dict[int, float]:
    """A(wrong) after a win and after a loss, the first action having been 0."""
    return {h[2]: x["A", h, WRONG] for h in tree.decisions if len(h) > 1 and h[1] == 0}


@pytest.mark.parametrize("discount", [1.0, 0.99])
def test_without_luck_a_wrong_choice_looks_good_after_a_win(discount: float) -> None:
    """Where B matters: uniform behaviour, a target policy that chooses right, B = 0, both starts. What the coin paid is laid at the
    door of the choice: A(wrong) is +6.2 after a win and -7.2 after a loss, -0.5 +- 20 gamma / (1 + 2 gamma^2), and not -0.5."""
    tree = coin_and_choice(discount)
    uniform = {h: np.array([0.5, 0.5]) for h in tree.decisions}
    target = {h: uniform[h] if len(h) == 1 else np.eye(2)[RIGHT] for h in tree.decisions}
    adv = wrong_after(least_squares(tree, uniform, target, 2, luck=False).x, tree)
    bias = 20 * discount / (1 + 2 * discount**2)
    assert adv == pytest.approx({WIN: -0.5 + bias, LOSS: -0.5 - bias})
    assert (round(adv[WIN], 1), round(adv[LOSS], 1)) == (6.2, -7.2)
    # On-policy nothing is mistaken for anything: the luck that went before does not depend on the action.
    assert wrong_after(least_squares(tree, uniform, uniform, 2, luck=False).x, tree) == pytest.approx({WIN: -0.25, LOSS: -0.25})


@pytest.mark.parametrize("discount", [1.0, 0.99])
@pytest.mark.parametrize("n", [1, 2])
def test_with_luck_the_choice_is_judged_by_itself(discount: float, n: int) -> None:
    """The same data, with B: exact."""
    tree = coin_and_choice(discount)
    uniform = {h: np.array([0.5, 0.5]) for h in tree.decisions}
    target = {h: uniform[h] if len(h) == 1 else np.eye(2)[RIGHT] for h in tree.decisions}
    solution = least_squares(tree, uniform, target, n)
    assert solution.all_unique()
    assert wrong_after(solution.x, tree) == pytest.approx({WIN: -0.5, LOSS: -0.5})
    assert max(solution.errors(tree.truth(target)).values()) < 1e-9
