"""What a run takes on paper: a recurrence of steps that wait for one another, and the time of messages.

    N      workers, of whom the first is on the server's rank
    d      seconds of a step of a worker that is not slow; f, p: how many times as long, and with which probability
    a, b   latency of a message, and seconds per byte; M: the bytes of the weights, and of a gradient
    K      batches' worth of gradients: N K gradients in all

    bsp, ring       K (E[slowest of N] + 2 (N-1) a + 2 (N-1)/N M b)
    bsp, server     K (E[slowest of N] + 2 a + (N-1 + L) M b)       L: gradients that come last, together
    asp             the N K-th gradient of workers who go on for themselves: own step, a + M b each way
    ssp             the same, but step s begins when all have done step s - S - 1; and the slow one, for whom the
                    others wait, gets the weights at the same moment as they, over the same link: (N-2) M b more
    local           K/8 (E[slowest of N, 8 steps each] + an all-reduce)
    gossip          step s is over when the neighbours' step s is; and a + M b for each neighbour

One worker f times slower: E[slowest] = f d, and the others use up their lead of S + 1 steps once; then all go at its
pace. So ssp takes about f d (K - (S+1)(N-1)/N), and asp K d N / (N - 1 + 1/f).
Slow by chance: E[slowest] = d (1 + (f-1)(1 - (1-p)^N)), the mean step is d (1 + (f-1) p); asp goes at the mean's pace,
ssp somewhere between: the nearer to it, the larger S.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.synchrony.modes import CHANCE, EQUAL, FACTOR, ONE, PROBABILITY
from nnmpi.comm.cost import ring_all_reduce
from nnmpi.synchrony.neighbours import RING, matching, ring
from nnmpi.synchrony.sync import Sync

Times = NDArray[np.float64]
ENOUGH = 1.5  # times the steps that equal workers do: a worker that is never slow does more of them than others
SEED = 1  # of other draws than those of the runs


@dataclass(frozen=True)
class StepCosts:
    """What steps and messages take.

    Attributes:
        workers: N.
        step_s: d.
        nbytes: M.
        alpha_s, beta: a and b.
        slow: who is slow; see `modes`.
        factor, probability: f and p.
    """

    workers: int
    step_s: float
    nbytes: int
    alpha_s: float = 0.0
    beta: float = 0.0
    slow: str = EQUAL
    factor: float = FACTOR
    probability: float = PROBABILITY

    def durations(self, steps: int) -> Times:
        """Return (steps, N): how long each step of each worker takes."""
        times = np.full((steps, self.workers), self.step_s)
        if self.slow == ONE:
            times[:, -1] *= self.factor
        if self.slow == CHANCE:
            times[np.random.default_rng(SEED).random(times.shape) < self.probability] *= self.factor
        return times

    def slowest_s(self) -> float:
        """Return E[slowest of N] of one step."""
        more = {EQUAL: 0.0, ONE: 1.0, CHANCE: 1 - (1 - self.probability) ** self.workers}[self.slow]
        return self.step_s * (1 + (self.factor - 1) * more)

    def message_s(self) -> float:
        """Return a + M b."""
        return self.alpha_s + self.nbytes * self.beta

    def ring_s(self) -> float:
        """Return the time of an all-reduce on a ring."""
        return ring_all_reduce(self.workers, self.nbytes, self.alpha_s, self.beta)


def predict(sync: Sync, costs: StepCosts, batches: float) -> float:
    """Return the seconds that so many batches' worth of gradients take.

    Args:
        sync: the way of synchronization.
        costs: of steps and messages.
        batches: K.
    """
    if not sync.asynchronous:
        return batches * (costs.slowest_s() + costs.ring_s())
    if sync.mode == "bsp":
        return batches * (costs.slowest_s() + _serve_s(costs))
    if sync.mode == "local":
        return batches / sync.local_steps * (_slowest_stretch_s(costs, sync.local_steps) + costs.ring_s())
    steps = max(1, round(batches))
    if sync.mode == "gossip":
        return batches * float(_gossip(costs, sync.neighbours, steps)[-1].max()) / steps
    steps = int(ENOUGH * steps) + 2
    begun = np.sort(_served(costs, sync.bound, steps).ravel())
    return float(begun[round(batches * costs.workers) - 1])


def _serve_s(costs: StepCosts) -> float:
    """Return how long a server needs after the slowest worker: its gradient's way, and the weights to all at once."""
    others = costs.workers - 1
    last = {EQUAL: others, ONE: 1, CHANCE: others * costs.probability}[costs.slow]
    if costs.slow == CHANCE:  # nobody slow: all come last
        last += others * (1 - costs.probability) ** costs.workers
    return 2 * costs.alpha_s + (others + last) * costs.nbytes * costs.beta


def _slowest_stretch_s(costs: StepCosts, steps: int) -> float:
    """Return E[slowest of N, of so many steps each]."""
    if costs.slow != CHANCE:
        return steps * costs.slowest_s()
    draws = np.random.default_rng(SEED).binomial(steps, costs.probability, (20_000, costs.workers)).max(axis=1)
    return costs.step_s * (steps + (costs.factor - 1) * float(draws.mean()))


def _served(costs: StepCosts, bound: int | None, steps: int) -> Times:
    """Return (steps, N): when each step of each worker is over, its reply included."""
    own = costs.durations(steps)
    own[:, 1:] += 2 * costs.message_s()
    if bound is not None and costs.slow == ONE:  # whoever waits for the slow one gets the weights when it does
        own[:, -1] += (costs.workers - 2) * costs.nbytes * costs.beta
    ends, before = np.zeros((steps, costs.workers)), np.zeros(costs.workers)
    for step in range(steps):
        if bound is not None and step > bound:
            before = np.maximum(before, ends[step - bound - 1].max())
        before = ends[step] = before + own[step]
    return ends


def _gossip(costs: StepCosts, neighbours: str, steps: int) -> Times:
    """Return (steps, N): when each worker has averaged after each step."""
    workers, own = costs.workers, costs.durations(steps)
    ends, before = np.zeros((steps, workers)), np.zeros(workers)
    beside = [list(ring(worker, workers)) for worker in range(workers)]
    for step in range(steps):
        done = before + own[step]
        if neighbours != RING:
            beside = [[other] for other in matching(workers, SEED, step)]
        late = np.array([max(done[worker], *done[others]) for worker, others in enumerate(beside)])
        before = ends[step] = late + len(beside[0]) * costs.message_s()
    return ends
