"""Only equal content under an equal key is shared, and only what nobody needs is evicted."""

import hashlib
import itertools
from dataclasses import fields, replace

import pytest

from finwhale.cache import prefix_index
from finwhale.cache.block_allocator import BlockAllocator
from finwhale.cache.prefix_index import PrefixIndex
from finwhale.cache.prefix_key import Namespace, PrefixError, block_key

SIZE = 4
SPACE = Namespace(
    weights_digest="w", layout="l", numerics="n", tokenizer="t", replay_mode="r", salt="s"
)


def fresh(num_blocks=16, max_blocks=None, space=SPACE, **options):
    allocator = BlockAllocator(num_blocks)
    return allocator, PrefixIndex(allocator, space, SIZE, max_blocks, **options)


def cache(index, tokens, salt="", images=()):
    """Insert every whole block of `tokens` and keep no reference; return the keys."""
    parent, keys = index.root_key(salt), []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        block = index.allocator.allocate()
        inside = [(at - start, image) for at, image in images if start <= at < start + SIZE]
        inserted = index.insert(parent, tokens[start : start + SIZE], block, inside)
        index.allocator.release(block)
        parent = inserted.key
        keys.append(parent)
    return keys


def num_matched(index, tokens, **options):
    """Tokens that match, with the references given back."""
    match = index.match(tokens, **options)
    for block in match.blocks:
        index.allocator.release(block)
    assert match.num_tokens == SIZE * len(match.blocks) == SIZE * len(match.keys)
    return match.num_tokens


def framed(*parts):
    """The documented bytes, built by hand: each part behind its length, 8 bytes little endian."""
    return b"".join(bytes([len(p) % 256, len(p) // 256, 0, 0, 0, 0, 0, 0]) + p for p in parts)


# Keys.


def test_block_key_is_the_documented_digest():
    ids = bytes([5, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0])
    at = bytes([1, 0, 0, 0, 0, 0, 0, 0])
    expected = hashlib.sha256(framed(b"finwhale.block", b"parent", ids, at, b"image")).digest()
    assert block_key(b"parent", [5, 513], [(1, b"image")]) == expected


def test_namespace_digest_is_the_documented_digest():
    text = b"weights_digest w layout l numerics n tokenizer t replay_mode r salt s"
    expected = hashlib.sha256(framed(b"finwhale.namespace", *text.split())).digest()
    assert SPACE.digest() == expected


@pytest.mark.parametrize("name", [f.name for f in fields(Namespace)])
def test_every_namespace_field_separates(name):
    other = replace(SPACE, **{name: getattr(SPACE, name) + "x"})
    assert other.digest() != SPACE.digest()
    _, index = fresh()
    _, other_index = fresh(space=other)
    assert index.root_key() != other_index.root_key()


def test_text_moved_between_fields_gives_another_digest():
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    digests = {replace(SPACE, weights_digest=a, layout=b).digest() for a, b in pairs}
    assert len(digests) == len(pairs)
    neighbours = {replace(SPACE, numerics=a, tokenizer=b).digest() for a, b in pairs}
    assert len(neighbours | digests) == 2 * len(pairs)


def test_joined_fields_without_lengths_would_collide():
    # The negative control of the test above: the usual mistake does not separate the pairs.
    def careless(a, b):
        return hashlib.sha256((a + b).encode()).digest()

    assert careless("ab", "c") == careless("a", "bc")


def test_salt_of_the_server_and_of_the_request_are_apart():
    roots = {
        fresh(space=replace(SPACE, salt=server))[1].root_key(request)
        for server, request in itertools.product(["", "a", "b"], repeat=2)
    }
    assert len(roots) == 9


def test_namespace_value_that_is_no_string_is_refused():
    with pytest.raises(PrefixError, match=r"layout: got 3"):
        replace(SPACE, layout=3)


def test_salt_may_be_any_text():
    _, index = fresh()
    salts = ["", "\0", "\ud800", "\ud801", "é", "e\u0301"]
    assert len({index.root_key(salt) for salt in salts}) == len(salts)


def test_block_key_depends_on_each_part():
    keys = [
        block_key(b"p", [1, 2]),
        block_key(b"q", [1, 2]),
        block_key(b"p", [2, 1]),
        block_key(b"p", [1]),
        block_key(b"p", []),
        block_key(b"p", [1, 2, 0]),
        block_key(b"p", [1, 2 + 2**32]),
        block_key(b"p", [1, 2], [(0, b"x")]),
        block_key(b"p", [1, 2], [(1, b"x")]),
        block_key(b"p", [1, 2], [(0, b"y")]),
        block_key(b"p", [1, 2], [(0, b"x"), (1, b"x")]),
        block_key(b"p", [1], [(2, b"")]),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}


def test_image_order_in_the_list_does_not_matter():
    pair = [(0, b"x"), (1, b"y")]
    assert block_key(b"p", [1, 2], pair) == block_key(b"p", [1, 2], pair[::-1])


@pytest.mark.parametrize("token", [-1, 2**64, 1.5])
def test_token_id_out_of_range_is_refused(token):
    with pytest.raises(PrefixError, match=r"0 \.\.\. 2\*\*64 - 1"):
        block_key(b"p", [0, token])


# Match and insert.


@pytest.mark.parametrize("length", range(15))
def test_match_is_whole_blocks_and_leaves_one_token(length):
    _, index = fresh()
    tokens = list(range(12))
    cache(index, tokens)
    # Hand arithmetic: 4 tokens need a fifth to compute, and three blocks are all there is.
    expected = {0: 0, 4: 0, 5: 4, 8: 4, 9: 8, 12: 8, 13: 12, 14: 12}
    found = num_matched(index, [*tokens, 100, 101][:length])
    assert found == expected.get(length, (length - 1) // 4 * 4)


def test_match_ends_at_the_first_difference():
    _, index = fresh()
    tokens = list(range(16))
    cache(index, tokens)
    for at in range(16):
        changed = [*tokens, 99]
        changed[at] = 77
        assert num_matched(index, changed) == at // SIZE * SIZE


def test_match_gives_the_inserted_blocks_and_retains_them():
    allocator, index = fresh()
    keys = cache(index, list(range(8)))
    match = index.match(range(9))
    assert match.keys == keys
    assert match.parent_key == keys[-1]
    assert match.blocks == [0, 1]
    assert [allocator.num_holders(block) for block in match.blocks] == [2, 2]
    again = index.match(range(9))
    assert [allocator.num_holders(block) for block in again.blocks] == [3, 3]


def test_empty_match_has_the_root_as_parent():
    _, index = fresh()
    match = index.match([], salt="a")
    assert (match.blocks, match.num_tokens, match.keys) == ([], 0, [])
    assert match.parent_key == index.root_key("a")


def test_salts_share_nothing():
    _, index = fresh()
    cache(index, list(range(8)), salt="a")
    found = {salt: num_matched(index, range(9), salt=salt) for salt in ("", "a", "b")}
    assert found == {"": 0, "a": 8, "b": 0}


def test_namespaces_on_one_allocator_share_nothing():
    allocator, index = fresh()
    other = PrefixIndex(allocator, replace(SPACE, numerics="m"), SIZE)
    cache(index, list(range(8)))
    assert num_matched(other, range(9)) == 0
    assert num_matched(index, range(9)) == 8


def test_images_separate_from_their_block_on():
    _, index = fresh()
    tokens = [7] * 13
    cache(index, tokens, images=[(5, b"cat")])
    assert num_matched(index, tokens, images=[(5, b"cat")]) == 12
    assert num_matched(index, tokens, images=[(5, b"dog")]) == 4
    assert num_matched(index, tokens, images=[(6, b"cat")]) == 4
    assert num_matched(index, tokens, images=[(3, b"cat")]) == 0
    assert num_matched(index, tokens) == 4
    assert num_matched(index, tokens, images=[(5, b"cat"), (12, b"dog")]) == 12


def test_equal_content_keeps_the_older_block():
    allocator, index = fresh()
    first, second = allocator.allocate(), allocator.allocate()
    root = index.root_key()
    old = index.insert(root, [1, 2, 3, 4], first)
    new = index.insert(root, [1, 2, 3, 4], second)
    assert old == new
    assert (old.block, index.num_cached) == (first, 1)
    assert [allocator.num_holders(block) for block in (first, second)] == [2, 1]


def test_block_behind_a_missing_parent_is_not_cached():
    allocator, index = fresh()
    [key] = cache(index, [1, 2, 3, 4])
    assert index.evict(1) == 1
    block = allocator.allocate()
    assert index.insert(key, [5, 6, 7, 8], block) is None
    assert (index.num_cached, allocator.num_holders(block)) == (0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 2, 3]}, "tokens: got 3"),
        ({"tokens": [1, 2, 3, 4, 5]}, "tokens: got 5"),
        ({"tokens": []}, "tokens: got 0"),
        ({"block": 5}, "block: 5 is free"),
        ({"images": [(4, b"x")]}, "position 4"),
        ({"images": [(-1, b"x")]}, "position -1"),
        ({"tokens": [9, 9, 9, 9]}, "another key"),
    ],
)
def test_insert_of_what_is_no_full_block_is_refused_and_changes_nothing(change, message):
    allocator, index = fresh()
    block = allocator.allocate()
    index.insert(index.root_key(), [1, 2, 3, 4], block)
    call = {"parent_key": index.root_key(), "tokens": [1, 2, 3, 4], "block": block} | change
    with pytest.raises(PrefixError, match=message):
        index.insert(**call)
    assert (index.num_cached, allocator.num_holders(block)) == (1, 2)
    allocator.check()


def test_match_refuses_an_image_behind_the_tokens():
    _, index = fresh()
    with pytest.raises(PrefixError, match="position 3"):
        index.match([1, 2, 3], images=[(3, b"x")])


# A planted collision: the key forgets the tokens.


def plant_collision(monkeypatch):
    def weak(parent, tokens, images=()):
        return hashlib.sha256(parent).digest()

    monkeypatch.setattr(prefix_index, "block_key", weak)
    allocator, index = fresh()
    block = allocator.allocate()
    index.insert(index.root_key(), [1, 2, 3, 4], block)
    return allocator, index, block


def test_collision_with_other_tokens_is_a_miss(monkeypatch):
    allocator, index, block = plant_collision(monkeypatch)
    assert num_matched(index, [1, 2, 3, 4, 0]) == 4
    assert num_matched(index, [1, 2, 3, 5, 0]) == 0
    assert num_matched(index, [1, 2, 3, 4, 0], images=[(0, b"x")]) == 0
    other = allocator.allocate()
    assert index.insert(index.root_key(), [1, 2, 3, 5], other) is None
    assert (allocator.num_holders(block), allocator.num_holders(other)) == (2, 1)


def test_collision_with_another_prefix_or_salt_is_a_miss(monkeypatch):
    def weak(parent, tokens, images=()):
        return hashlib.sha256(bytes(tokens)).digest()

    monkeypatch.setattr(prefix_index, "block_key", weak)
    allocator, index = fresh()
    block = allocator.allocate()
    key, _ = index.insert(index.root_key("a"), [1, 2, 3, 4], block)
    assert num_matched(index, [1, 2, 3, 4, 0], salt="a") == 4
    assert num_matched(index, [1, 2, 3, 4, 0]) == 0
    assert num_matched(index, [1, 2, 3, 4, 1, 2, 3, 4, 0], salt="a") == 4
    assert index.insert(key, [1, 2, 3, 4], allocator.allocate()) is None


def test_collision_would_be_served_without_the_comparison(monkeypatch):
    _, index, _ = plant_collision(monkeypatch)
    monkeypatch.setattr(PrefixIndex, "_is_same", staticmethod(lambda *content: True))
    assert num_matched(index, [1, 2, 3, 5, 0]) == 4


# Eviction.


def test_oldest_leaf_goes_first_and_children_before_parents():
    allocator, index = fresh()
    a = cache(index, [1] * 12)
    b = cache(index, [2] * 8)
    num_matched(index, [1] * 9)  # the first two blocks of chain a are the youngest now
    order = []
    while index.num_cached:
        before = {key for key in (*a, *b) if key in index._cached}
        assert index.evict(1) == 1
        order += [key for key in before if key not in index._cached]
    assert order == [a[2], b[1], b[0], a[1], a[0]]
    assert allocator.num_free == 16


def test_parent_is_as_young_as_its_last_child():
    _, index = fresh()
    [parent] = cache(index, [1] * 4)
    [other] = cache(index, [2] * 4)
    block = index.allocator.allocate()
    [child, _] = index.insert(parent, [3] * 4, block)  # uses the parent, younger than other now
    index.allocator.release(block)
    index.pin(other)
    assert index.evict(1) == 1
    assert child not in index._cached
    index.unpin(other)
    assert index.evict(1) == 1
    assert (parent in index._cached, other in index._cached) == (True, False)


def test_insert_of_what_is_cached_makes_it_young():
    _, index = fresh()
    cache(index, [1] * 4)
    cache(index, [2] * 4)
    cache(index, [1] * 4)
    assert index.evict(1) == 1
    assert (index.num_cached, index.stats.evictions) == (1, 1)
    [survivor] = index._cached.values()
    assert survivor.key == block_key(index.root_key(), [1] * 4)
    assert index.evict(1) == 1


def test_block_in_use_is_never_evicted():
    allocator, index = fresh()
    cache(index, [1] * 12)
    match = index.match([1] * 9)
    assert index.num_evictable == 1
    assert index.evict(100) == 1
    assert all(allocator.num_holders(block) == 2 for block in match.blocks)
    for block in match.blocks:
        allocator.release(block)
    assert index.num_evictable == index.evict(100) == 2


def test_parent_of_a_block_in_use_stays_though_nobody_else_holds_it():
    allocator, index = fresh()
    [parent] = cache(index, [1] * 4)
    block = allocator.allocate()
    index.insert(parent, [2] * 4, block)
    assert (index.num_evictable, index.evict(100)) == (0, 0)
    allocator.release(block)
    assert (index.num_evictable, index.evict(100)) == (2, 2)


def test_block_shared_before_it_is_inserted_is_evictable_after_both_releases():
    allocator, index = fresh()
    block = allocator.allocate()
    allocator.retain(block)
    index.insert(index.root_key(), [1] * 4, block)
    for evictable in (0, 0, 1):
        assert index.num_evictable == evictable
        if not evictable:
            allocator.release(block)
    assert index.evict(1) == 1


def test_pin_protects_the_chain_up_to_its_key():
    _, index = fresh()
    keys = cache(index, [1] * 12)
    index.pin(keys[1])
    index.pin(keys[1])
    assert (index.num_evictable, index.evict(100), index.num_cached) == (1, 1, 2)
    index.unpin(keys[1])
    assert index.evict(100) == 0
    index.unpin(keys[1])
    assert index.evict(100) == 2


def test_pin_of_what_is_not_cached_is_refused():
    _, index = fresh()
    [key] = cache(index, [1] * 4)
    for call, bad in ((index.pin, b"no"), (index.unpin, b"no"), (index.pin, index.root_key())):
        with pytest.raises(PrefixError, match="is not cached"):
            call(bad)
    with pytest.raises(PrefixError, match="has no pin"):
        index.unpin(key)


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 3, 4])
def test_evict_frees_the_count_or_all(count):
    allocator, index = fresh()
    cache(index, [1] * 12)
    freed = min(max(count, 0), 3)
    assert index.evict(count) == freed == index.stats.evictions
    assert allocator.num_free == 13 + freed


def test_full_index_makes_room_by_the_oldest():
    _, index = fresh(max_blocks=2)
    for token in (1, 2, 3):
        cache(index, [token] * 4)
    assert [num_matched(index, [token] * 5) for token in (1, 2, 3)] == [0, 4, 4]
    assert (index.num_cached, index.stats.evictions) == (2, 1)


def test_full_index_never_evicts_the_parent_of_the_new_block():
    allocator, index = fresh(max_blocks=1)
    [parent] = cache(index, [1] * 4)
    block = allocator.allocate()
    assert index.insert(parent, [2] * 4, block) is None
    assert (index.num_cached, index.num_evictable, allocator.num_holders(block)) == (1, 1, 1)


def test_index_of_no_blocks_caches_nothing():
    allocator, index = fresh(max_blocks=0)
    assert index.insert(index.root_key(), [1] * 4, allocator.allocate()) is None
    assert num_matched(index, [1] * 5) == 0


def test_clear_gives_everything_back_but_what_others_hold():
    allocator, index = fresh()
    cache(index, [1] * 12)
    match = index.match([1] * 9)
    index.clear()
    assert (index.num_cached, index.num_evictable) == (0, 0)
    assert allocator.num_free == 14
    for block in match.blocks:
        allocator.release(block)
    assert (allocator.num_free, index.evict(100)) == (16, 0)
    assert num_matched(index, [1] * 13) == 0
    cache(index, [1] * 12)
    assert num_matched(index, [1] * 13) == 12


def test_clear_with_a_pin_is_refused():
    _, index = fresh()
    keys = cache(index, [1] * 8)
    index.pin(keys[0])
    with pytest.raises(PrefixError, match="1 keys are pinned"):
        index.clear()
    assert num_matched(index, [1] * 9) == 8


def test_queue_stays_in_proportion_to_the_blocks():
    _, index = fresh()
    cache(index, [1] * 12)
    for _ in range(500):
        num_matched(index, [1] * 13)
        cache(index, [1] * 4)
    assert len(index._queue) <= 2 * 3 + 64
    assert index.evict(100) == 3


def test_stats_count_blocks():
    _, index = fresh()
    cache(index, [1] * 8)
    for tokens in ([1] * 8, [1] * 13, [2] * 5, [1] * 4, []):
        num_matched(index, tokens)
    # Whole blocks asked for: 1 + 3 + 1 + 0 + 0; found: 1 + 2.
    assert (index.stats.hits, index.stats.misses) == (3, 2)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"max_blocks": -1}])
def test_sizes_that_make_no_sense_are_refused(options):
    with pytest.raises(PrefixError, match=next(iter(options))):
        PrefixIndex(BlockAllocator(1), SPACE, **{"block_size": 4} | options)
