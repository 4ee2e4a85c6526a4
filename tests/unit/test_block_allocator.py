"""A block is free or held, never both; counts add up; nothing is lost or given out twice."""

import pytest

from finwhale.cache.block_allocator import BlockAllocator, BlockError, NoBlockError


def test_fresh_allocator_gives_every_block_once():
    allocator = BlockAllocator(3)
    assert [allocator.allocate() for _ in range(3)] == [0, 1, 2]
    assert allocator.num_free == 0
    allocator.check()


def test_allocate_without_a_free_block_is_refused_and_changes_nothing():
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    with pytest.raises(NoBlockError, match="all 1 blocks are held"):
        allocator.allocate()
    assert allocator.num_holders(block) == 1
    allocator.release(block)
    assert allocator.allocate() == block


def test_block_freed_last_is_used_first():
    allocator = BlockAllocator(5)
    for _ in range(4):
        allocator.allocate()
    for block in (2, 0, 3):
        allocator.release(block)
    assert [allocator.allocate() for _ in range(4)] == [3, 0, 2, 4]


def test_block_is_free_after_as_many_releases_as_holders():
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.retain(block)
    allocator.retain(block)
    for holders in (3, 2, 1):
        assert allocator.num_holders(block) == holders
        assert allocator.is_shared(block) == (holders > 1)
        assert allocator.num_free == 1
        allocator.release(block)
        allocator.check()
    assert allocator.num_free == 2


@pytest.mark.parametrize("call", ["retain", "release"])
def test_free_block_is_refused(call):
    allocator = BlockAllocator(2)
    with pytest.raises(BlockError, match=f"{call}: block 1 is free"):
        getattr(allocator, call)(1)
    block = allocator.allocate()
    allocator.release(block)
    with pytest.raises(BlockError, match=f"{call}: block {block} is free"):
        getattr(allocator, call)(block)
    assert allocator.num_free == 2
    allocator.check()


@pytest.mark.parametrize("call", ["retain", "release", "num_holders", "is_shared"])
@pytest.mark.parametrize("block", [-1, 2])
def test_block_outside_the_pool_is_refused(call, block):
    allocator = BlockAllocator(2)
    allocator.allocate()
    allocator.allocate()
    with pytest.raises(BlockError, match=r"expected 0 \.\.\. 1"):
        getattr(allocator, call)(block)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_pool_without_blocks_is_refused(num_blocks):
    with pytest.raises(BlockError, match="num_blocks"):
        BlockAllocator(num_blocks)


def test_watcher_hears_of_each_change_of_sharing_and_of_nothing_else():
    allocator, heard = BlockAllocator(2), []
    allocator.watch(lambda block: heard.append((block, allocator.is_shared(block))))
    block = allocator.allocate()
    assert heard == []
    allocator.retain(block)
    allocator.retain(block)
    assert heard == [(block, True)]
    allocator.release(block)
    assert heard == [(block, True)]
    allocator.release(block)
    allocator.release(block)
    assert heard == [(block, True), (block, False)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a._free.append(2), "more than once"),
        (lambda a: a._free.append(0), "block 0: 1 holders, but in the free list"),
        (lambda a: a._free.remove(2), "block 2: 0 holders, but not in the free list"),
        (lambda a: a._num_holders.__setitem__(0, 0), "block 0: 0 holders, but not in"),
        (lambda a: a._num_holders.__setitem__(0, -1), "block 0: -1 holders"),
        (lambda a: a._free.append(3), "outside"),
    ],
)
def test_planted_damage_is_found_by_check(damage, message):
    allocator = BlockAllocator(3)
    allocator.allocate()
    allocator.check()
    damage(allocator)
    with pytest.raises(BlockError, match=message):
        allocator.check()
