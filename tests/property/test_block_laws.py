"""Any order of allocate, insert, match, release, evict, pin and clear follows a plain model.

The model keeps each cached block under its path (salt, block, block, ...), knows neither keys nor
counters, and looks at everything anew for each question.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from finwhale.cache.block_allocator import BlockAllocator, NoBlockError
from finwhale.cache.prefix_index import PrefixIndex
from finwhale.cache.prefix_key import Namespace

SIZE, NUM_BLOCKS, MAX_CACHED = 2, 8, 6
SPACE = Namespace(weights_digest="w", layout="l", numerics="n", tokenizer="t", replay_mode="r")
BLOCKS = st.sampled_from([(0, 1), (1, 0)])
SALTS = st.sampled_from(["", "a"])


class Node:
    """A cached block of the model."""

    def __init__(self, key, block):
        self.key, self.block, self.pins, self.last_used = key, block, 0, 0


class Sequence:
    """A running sequence: the blocks it holds, and the path behind which it inserts."""

    def __init__(self, path, held, parent_key):
        self.path, self.held, self.parent_key, self.is_open = path, held, parent_key, True


class BlockMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.index = PrefixIndex(self.allocator, SPACE, SIZE, MAX_CACHED)
        self.nodes, self.sequences, self.clock = {}, [], 0

    # The model.

    def holders(self):
        held = Counter(block for sequence in self.sequences for block in sequence.held)
        return held + Counter(node.block for node in self.nodes.values())

    def below(self, path):
        return [p for p in self.nodes if p[: len(path)] == path]

    def evictable(self):
        """Paths that nothing at or below keeps: no other holder, no pin."""
        holders = self.holders()
        kept = {p for p, node in self.nodes.items() if node.pins or holders[node.block] > 1}
        return [p for p in self.nodes if not kept & set(self.below(p))]

    def evict_model(self, count, spared=()):
        for freed in range(count):
            leaves = [p for p in self.evictable() if len(self.below(p)) == 1 and p != spared]
            if not leaves:
                return freed
            del self.nodes[min(leaves, key=lambda p: self.nodes[p].last_used)]
        return count

    def touch(self, path):
        """To use a block is to use all before it."""
        self.clock += 1
        for stop in range(2, len(path) + 1):
            self.nodes[path[:stop]].last_used = self.clock

    # What a run does.

    @rule(salt=SALTS, blocks=st.lists(BLOCKS, max_size=4), rest=st.integers(0, SIZE))
    def start(self, salt, blocks, rest):
        self.match(salt, [token for block in blocks for token in block] + [0] * rest)

    def match(self, salt, tokens):
        # The longest cached path, by trying every length against every path.
        best = (salt,)
        for stop in range(1, len(tokens)):
            path = (salt, *(tuple(tokens[at : at + SIZE]) for at in range(0, stop, SIZE)))
            if stop % SIZE == 0 and path in self.nodes:
                best = path
        if len(best) > 1:
            self.touch(best)
        match = self.index.match(tokens, salt=salt)
        chain = [self.nodes[best[:stop]] for stop in range(2, len(best) + 1)]
        assert match.blocks == [node.block for node in chain]
        assert match.keys == [node.key for node in chain]
        assert match.num_tokens == SIZE * len(chain)
        self.sequences.append(Sequence(best, match.blocks, match.parent_key))

    @precondition(lambda self: any(s.is_open for s in self.sequences))
    @rule(data=st.data(), tokens=BLOCKS, adopts=st.booleans())
    def grow(self, data, tokens, adopts):
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s.is_open]))
        self.insert(sequence, tokens, adopts)

    @rule(salt=SALTS, blocks=st.lists(BLOCKS, min_size=1, max_size=4), adopts=st.booleans())
    def serve(self, salt, blocks, adopts):
        """A request from start to end: idle chains come from here."""
        self.match(salt, [token for block in blocks for token in block])
        sequence = self.sequences[-1]
        for tokens in blocks[len(sequence.path) - 1 :]:
            if sequence.is_open:
                self.insert(sequence, tokens, adopts)
        for block in self.sequences.pop().held:
            self.allocator.release(block)

    def insert(self, sequence, tokens, adopts):
        try:
            block = self.allocator.allocate()
        except NoBlockError:
            assert len(self.holders()) == NUM_BLOCKS
            sequence.is_open = False
            return
        assert block not in self.holders()
        sequence.held.append(block)
        parent, path = sequence.path, (*sequence.path, tokens)
        inserted = self.index.insert(sequence.parent_key, tokens, block)
        if len(parent) > 1 and parent not in self.nodes:
            assert inserted is None
        elif path in self.nodes:
            assert inserted == (self.nodes[path].key, self.nodes[path].block)
            self.touch(path)
            if adopts:
                self.allocator.retain(inserted.block)
                self.allocator.release(block)
                sequence.held[-1] = inserted.block
        elif len(self.nodes) == MAX_CACHED and not self.evict_model(1, spared=parent):
            assert inserted is None
        else:
            assert inserted.block == block
            assert inserted.key not in {node.key for node in self.nodes.values()}
            self.nodes[path] = Node(inserted.key, block)
            self.touch(path)
        if inserted is None:
            sequence.is_open = False
        else:
            sequence.path, sequence.parent_key = path, inserted.key

    @precondition(lambda self: any(s.held for s in self.sequences))
    @rule(data=st.data())
    def release_one(self, data):
        # A sequence that gives a block back early still inserts behind it.
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s.held]))
        at = data.draw(st.integers(0, len(sequence.held) - 1))
        self.allocator.release(sequence.held.pop(at))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        for block in data.draw(st.permutations(sequence.held)):
            self.allocator.release(block)

    @rule(count=st.sampled_from([0, 1, 1, 1, 2, 3, NUM_BLOCKS]))
    def evict(self, count):
        claimed = self.index.num_evictable
        freed = self.index.evict(count)
        assert freed == min(count, claimed) == self.evict_model(count)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def pin(self, data):
        node = self.nodes[data.draw(st.sampled_from(list(self.nodes)))]
        self.index.pin(node.key)
        node.pins += 1

    @precondition(lambda self: any(node.pins for node in self.nodes.values()))
    @rule(data=st.data())
    def unpin(self, data):
        pinned = [p for p, node in self.nodes.items() if node.pins]
        node = self.nodes[data.draw(st.sampled_from(pinned))]
        self.index.unpin(node.key)
        node.pins -= 1

    @precondition(lambda self: not any(node.pins for node in self.nodes.values()))
    @rule()
    def clear(self):
        self.index.clear()
        self.nodes.clear()

    # What always holds.

    @invariant()
    def counts_add_up(self):
        holders = self.holders()
        self.allocator.check()
        assert self.allocator.num_free == NUM_BLOCKS - len(holders)
        for block in range(NUM_BLOCKS):
            assert self.allocator.num_holders(block) == holders[block]
        assert self.index.num_cached == len(self.nodes) <= MAX_CACHED
        assert self.index.num_evictable == len(self.evictable())

    @invariant()
    def no_chain_has_a_hole(self):
        assert set(self.index._cached) == {node.key for node in self.nodes.values()}
        assert all(len(path) == 2 or path[:-1] in self.nodes for path in self.nodes)

    def teardown(self):
        """Nothing leaks."""
        for sequence in self.sequences:
            for block in sequence.held:
                self.allocator.release(block)
        for node in self.nodes.values():
            for _ in range(node.pins):
                self.index.unpin(node.key)
        assert self.index.num_evictable == len(self.nodes)
        self.index.clear()
        assert self.allocator.num_free == NUM_BLOCKS
        self.allocator.check()


test_any_order_of_calls_follows_the_model = BlockMachine.TestCase
test_any_order_of_calls_follows_the_model.settings = settings(
    max_examples=60, stateful_step_count=40
)
