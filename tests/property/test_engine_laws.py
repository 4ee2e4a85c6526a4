"""Any order of additions, steps, preemptions, rollbacks, cancellations, evictions changes no bit.

Two machines. The first drives a real engine with few blocks and slots, poisoned memory and prompts
that share prefixes; every finished request is compared with one whole pass from nothing
(`tests/uncached_engine.py`). The second drives the scheduler alone, where a step costs nothing, so
it sees thousands of steps: budgets, order, whole ownership of what is written, no starvation.
"""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from finwhale.cache.paged_pools import PagedLayout
from finwhale.config.engine import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.request import SamplingParams
from finwhale.engine.sampler import choice_seed
from finwhale.engine.scheduler import Scheduler
from finwhale.model import Numerics
from finwhale.tiers.memory_store import OVERHEAD_BYTES, MemoryStore
from tests.models import token_ids, unit_model
from tests.uncached_engine import expected, scheduler_of, sequence_of

MODEL = unit_model(Numerics())
STREAMS = token_ids(2, 80, seed=3).tolist()
SLOTS = 3
SMALL = EngineConfig(
    block_size=4,
    num_blocks=24,
    max_sequences=SLOTS,
    max_batch_tokens=17,
    snapshot_bytes=4000,
    kernels="numba",
    poison=True,
)


def assert_memory_is_accounted_for(allocator, index, scheduler) -> None:
    """Every block and slot is free or has exactly the holders that say so."""
    allocator.check()
    holders = sum(allocator.num_holders(block) for block in range(allocator.num_blocks))
    assert holders == index.num_cached + sum(len(sequence.blocks) for sequence in scheduler.running)
    slots = [sequence.slot for sequence in scheduler.running] + scheduler.free_slots
    assert sorted(slots) == list(range(scheduler.config.max_sequences))
    arrivals = [sequence.arrival for sequence in scheduler.waiting]
    assert arrivals == sorted(arrivals)


class EngineMachine(RuleBasedStateMachine):
    """`open` holds what each running choice was asked and has answered so far."""

    def __init__(self):
        super().__init__()
        self.open: dict[tuple[str, int], dict] = {}
        self.steps = 0

    @initialize(blocks=st.sampled_from((0, 12, 200)))
    def begin(self, blocks):
        """With a memory behind the pool for as many blocks, or none."""
        size = PagedLayout(config=MODEL.config.text_config, block_size=4, storage="fp4").block_bytes
        self.memory = MemoryStore(blocks * (size + OVERHEAD_BYTES)) if blocks else None
        tier = None if self.memory is None else lambda *_: self.memory
        self.engine = Engine(MODEL, SMALL, open_tier=tier)

    def names(self, data) -> tuple[str, int]:
        return data.draw(st.sampled_from(sorted(self.open)))

    @precondition(lambda self: len(self.open) < 6)
    @rule(
        stream=st.integers(0, 1),
        # Long ones leave rows out when they start behind a hit: 29 + 28 rows are needed.
        length=st.integers(1, 24) | st.integers(66, 75),
        tail=st.integers(0, 2),
        new=st.integers(1, 4),
        seed=st.integers(0, 1),
        n=st.sampled_from((1, 1, 2)),
        penalty=st.sampled_from((0.0, 2.0)),
    )
    def add(self, stream, length, tail, new, seed, n, penalty):
        prompt = STREAMS[stream][:length] + [7] * tail
        params = SamplingParams(
            max_new_tokens=new,
            temperature=0.8,
            seed=seed,
            logprobs=True,
            n=n,
            presence_penalty=penalty,
            frequency_penalty=penalty,
        )
        name = self.engine.add(prompt, params)
        for index in range(n):
            own = choice_seed(seed, index)
            self.open[name, index] = {
                "prompt": prompt,
                "params": params,
                "seed": own,
                "results": [],
            }

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.take(self.engine.step())

    def take(self, outputs):
        for output in outputs:
            assert output.error is None
            if output.finish_reason == "cancelled":
                assert (output.request_id, output.index) not in self.open
                continue
            choice = self.open[output.request_id, output.index]
            choice["results"] += output.new
            if output.is_last:
                del self.open[output.request_id, output.index]
                self.check(choice)

    def check(self, choice):
        results, params = choice["results"], choice["params"]
        assert len(results) == params.max_new_tokens
        tokens = [result.token for result in results]
        assert results == expected(MODEL, choice["prompt"], tokens, params, seed=choice["seed"])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def preempt(self, data):
        name, index = self.names(data)
        self.engine.preempt(name, index=index)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def rollback(self, data):
        name, index = self.names(data)
        results = self.open[name, index]["results"]
        count = data.draw(st.integers(0, len(results)))
        self.engine.rollback(name, count, index=index)
        del results[len(results) - count :]

    @precondition(lambda self: len(self.open) > 3)
    @rule(data=st.data())
    def cancel(self, data):
        name, _ = self.names(data)
        running = sum(s.request_id == name for s in self.engine.scheduler.running)
        free = len(self.engine.scheduler.free_slots)
        assert self.engine.cancel(name)
        assert len(self.engine.scheduler.free_slots) == free + running
        for choice in [key for key in self.open if key[0] == name]:
            del self.open[choice]

    @rule(count=st.integers(1, 3))
    def evict(self, count):
        self.engine.index.evict(count)

    @precondition(lambda self: self.open)
    @rule()
    def finish_all_and_empty_the_pool(self):
        """What comes next finds its prefix behind the pool or nowhere."""
        while self.engine.has_work:
            self.take(self.engine.step())
        self.engine.index.evict(SMALL.num_blocks)

    @rule(place=st.integers(0, 50))
    def lose_windows_or_a_block_behind_the_pool(self, place):
        """A lifetime that ends, a tier that gives up what it wants."""
        if self.memory is None or not self.memory._held:
            self.engine.scheduler.windows.clear()
        else:
            keys = [key for _, key in self.memory._held]
            self.memory.evict(keys[place % len(keys)])

    @invariant()
    def memory_is_accounted_for(self):
        engine = self.engine
        assert_memory_is_accounted_for(engine.allocator, engine.index, engine.scheduler)

    def teardown(self):
        steps = 0
        while self.engine.has_work:
            self.take(self.engine.step())
            self.memory_is_accounted_for()
            steps += 1
            assert steps < 400, "somebody starves"
        assert not self.open
        assert self.memory is None or not any(held.pins for held in self.memory._held.values())
        self.engine.index.clear()
        assert self.engine.allocator.num_free == SMALL.num_blocks
        assert len(self.engine.scheduler.free_slots) == SLOTS


# A failing life is short enough to read; to shrink it would take minutes.
EngineMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=22, phases=[Phase.explicit, Phase.generate]
)
test_any_life_of_an_engine_changes_no_bit = EngineMachine.TestCase


def check_plan(scheduler: Scheduler, work) -> None:
    """What one step may do."""
    config, allocator = scheduler.config, scheduler.allocator
    assert sum(piece.span.num_rows for _, piece in work) <= config.max_batch_tokens
    assert len(work) <= config.max_sequences
    planned = {sequence.arrival for sequence, _ in work}
    for sequence in scheduler.running:
        # Nobody who only needs one row is passed over.
        assert sequence.num_left != 1 or sequence.arrival in planned
    for sequence, piece in work:
        span = piece.span
        assert span.num_rows >= 1
        assert span.start == sequence.num_computed
        assert span.stop <= len(sequence.tokens)
        assert len(span.blocks) * config.block_size >= max(span.stop, span.stored)
        assert len(set(span.blocks)) == len(span.blocks)
        first = max(span.start, span.stored) // config.block_size
        for block in span.blocks[first:]:
            # What is written belongs to nobody else.
            assert allocator.num_holders(block) == 1


@settings(max_examples=60)
@given(st.data())
def test_scheduler_serves_everyone_within_its_means(data):
    slots = data.draw(st.integers(1, 5))
    config = EngineConfig(
        block_size=4,
        num_blocks=data.draw(st.integers(8, 20)),
        max_sequences=slots,
        max_batch_tokens=data.draw(st.integers(slots + 1, 40)),
        prefix_cache=data.draw(st.booleans()),
        snapshot_bytes=data.draw(st.sampled_from((0, 3000, 1 << 20))),
        prefill=data.draw(st.sampled_from(("exact", "full", "bounded"))),
    )
    scheduler = scheduler_of(config)
    # Three times as many as can run at once; each fits alone.
    wishes = data.draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 26), st.integers(1, 6)),
            min_size=1,
            max_size=3 * slots,
        )
    )
    late = data.draw(st.integers(0, 4))
    coming = [sequence_of(n, [kind] * length, new) for n, (kind, length, new) in enumerate(wishes)]
    done, steps = [], 0
    while len(done) < len(wishes):
        if coming and (steps >= late * len(done) or not scheduler.running):
            scheduler.waiting.append(coming.pop(0))
        work = scheduler.schedule()
        check_plan(scheduler, work)
        assert work or coming, "nobody runs and nobody comes"
        for sequence, piece in work:
            scheduler.computed(sequence, piece.span.stop)
            if piece.span.stop == len(sequence.tokens):
                if not sequence.num_new:
                    scheduler.save_windows(sequence)
                sequence.tokens.append(len(sequence.tokens) % 3)
                if sequence.num_new == sequence.params.max_new_tokens:
                    scheduler.finish(sequence)
                    done.append(sequence)
        assert_memory_is_accounted_for(scheduler.allocator, scheduler.index, scheduler)
        steps += 1
        assert steps < 3000, "somebody starves"
    first = min(done, key=lambda sequence: sequence.arrival)
    assert first.num_preemptions == 0
    scheduler.index.clear()
    assert scheduler.allocator.num_free == config.num_blocks
