"""Scheduler and block manager under random loads, against models of what must hold."""

from __future__ import annotations

import numpy as np
import pytest
from kv_content import KvContent, groups
from scheduler_simulation import CheckedManager, Simulation


def long(*case: int) -> object:
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("seed", "steps", "scale"), [(0, 2000, 1), long(1000, 10_000, 1), long(2000, 2000, 8)]
)
def test_random_loads(seed, steps, scale):
    """Submissions, cancellations, failures and steps launched ahead, in many small caches."""
    done, totals = 0, np.zeros(5, int)
    while done < steps:
        print(f"seed {seed}")
        simulation = Simulation(seed, scale)
        for _ in range(50):
            simulation.step()
        simulation.drain()
        manager, scheduler = simulation.manager, simulation.scheduler
        totals += [
            simulation.ended, scheduler.preempted, sum(manager.evictions.values()), manager.hits,
            manager.found,
        ]  # fmt: skip
        done += simulation.steps
        seed += 1
    ended, preempted, evictions, hits, found = totals.tolist()
    print(f"{done} steps: {ended=} {preempted=} {evictions=} {hits=} {found=}")
    assert min(totals) > steps // 100 // scale  # each of these happens often


@pytest.mark.parametrize(("seed", "steps"), [(0, 500), long(1000, 10_000)])
def test_random_forks(seed, steps):
    """Sequences that begin, fork, grow and end in any order, without a scheduler."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        if step % 100 == 0:
            windows = [{"full": 0}, {"window": int(rng.integers(1, 12))}]
            specs = groups(**rng.choice([*windows, {**windows[0], **windows[1]}]))
            block = int(rng.integers(1, 6))
            sizes = {spec.name: int(rng.integers(8, 40)) for spec in specs}
            manager = CheckedManager(specs, sizes, block, 40 // block, bool(step % 200))
            manager.content = KvContent(specs, sizes, block)
            live = []
        most = manager.width * block
        event = rng.choice(["begin", "fork", "extend", "release"], p=[0.15, 0.15, 0.5, 0.2])
        if event == "begin":
            tokens = rng.integers(0, 2, rng.integers(1, most + 1)).tolist()
            prefix = min(len(tokens), int(rng.choice([0, 0, 3, 7])))
            live.append([manager.begin(tokens, prefix), tokens, prefix])
        elif live:
            at = int(rng.integers(len(live)))
            blocks, tokens, prefix = live[at]
            computed = blocks.computed
            if event == "fork" and computed >= max(prefix, 1):
                count = int(rng.integers(max(prefix, 1), computed + 1))
                copy = bool(rng.random() < 0.5)
                free = all(pool.available for pool in manager.pools.values())
                fork = manager.fork(blocks, tokens[:count], copy)
                manager.content.copy(fork.copies)
                assert bool(fork.copies) == (fork.cached % block > 0)
                assert fork.cached <= count and (fork.cached == 0 or fork.cached >= prefix)
                if all(pool.window == 0 for pool in manager.pools.values()):
                    full = count // block * block
                    full = count if copy and free else full
                    assert fork.cached == (full if full >= prefix else 0)
                more = rng.integers(0, 2, rng.integers(1, most - count + 1 + 1)).tolist()
                live.append([fork, [*tokens[:count], *more][:most], prefix])
            elif event == "extend" and computed < len(tokens):
                stop = int(rng.integers(max(computed + 1, prefix), len(tokens) + 1))
                if manager.reserve(blocks, computed, stop):
                    manager.content.compute(blocks, tokens[:stop], computed, prefix)
                    manager.commit(blocks, tokens, stop)
            elif event == "release":
                manager.release(blocks)
                del live[at]
        manager.check()
