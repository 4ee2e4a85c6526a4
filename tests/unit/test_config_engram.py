"""Engram bucket sizes: every prime of spec/backbone.md section 7.3, typed from its text."""

from math import isqrt

import pytest

from finwhale.config import engram_buckets, preset

# Written in the spec as 16000xxx: these are the last three digits, per layer and n-gram order.
LAYER_1 = [
    [57, 79, 81, 97, 121, 129, 133, 183],
    [189, 207, 211, 253, 277, 289, 307, 321],
    [339, 381, 393, 399, 403, 409, 447, 463],
]
LAYER_14 = [
    [477, 487, 499, 507, 511, 573, 609, 627],
    [667, 669, 693, 697, 711, 729, 759, 769],
    [781, 799, 813, 819, 841, 877, 879, 889],
]


def flat(orders: list[list[int]]) -> tuple[int, ...]:
    return tuple(16_000_000 + tail for order in orders for tail in order)


def released():
    return preset("flash").text_config.engram_buckets()


def test_every_prime_equals_the_spec():
    assert [b.primes for b in released()] == [flat(LAYER_1), flat(LAYER_14)]


def test_rows_of_a_table_are_the_sum_of_its_primes():
    assert [b.num_rows for b in released()] == [384_006_168, 384_016_682]
    assert preset("flash").text_config.engram_num_embeddings == (384_006_168, 384_016_682)


def test_offsets_of_the_orders_equal_the_spec():
    first, second = released()
    assert (first.offsets[0], first.offsets[8], first.offsets[16]) == (0, 128000880, 256002934)
    assert (second.offsets[0], second.offsets[8], second.offsets[16]) == (0, 128004290, 256009984)


def test_each_offset_is_the_end_of_the_column_before():
    for bucket in released():
        ends = [o + p for o, p in zip(bucket.offsets, bucket.primes, strict=True)]
        assert list(bucket.offsets[1:]) == ends[:-1]
        assert ends[-1] == bucket.num_rows


@pytest.mark.parametrize("name", ["unit", "demo", "nano", "mini", "small"])
def test_small_tables_have_distinct_primes_above_the_vocabulary(name):
    text = preset(name).text_config
    primes = [p for b in text.engram_buckets() for p in b.primes]
    assert len(set(primes)) == len(primes) == len(text.engram_layer_ids) * text.engram_columns
    for p in primes:
        assert p >= text.engram_vocab_size
        assert all(p % d for d in range(2, isqrt(p) + 1))


def test_search_restarts_at_every_order_and_skips_used_primes():
    # By hand: primes from 7 on are 7 11 13 17 19 23 29 31; two heads, orders 2 and 3, two layers.
    first, second = engram_buckets(num_layers=2, max_ngram_size=3, n_heads=2, vocab_size=7)
    assert first.primes == (7, 11, 13, 17)
    assert second.primes == (19, 23, 29, 31)
    assert first.offsets == (0, 7, 18, 31)
    assert second.num_rows == 19 + 23 + 29 + 31


def test_vocabulary_size_itself_may_be_a_bucket():
    for vocab_size, prime in ((97, 97), (98, 101)):
        one = engram_buckets(num_layers=1, max_ngram_size=2, n_heads=1, vocab_size=vocab_size)
        assert one[0].primes == (prime,)
