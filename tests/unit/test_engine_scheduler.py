"""Whose turn it is, and where a start begins: the scheduler without a model.

Expected plans are hand arithmetic for the unit preset: window 8, four layers on each side of the
cut. The decoder needs 8 + 3 * 7 = 29 rows before a block end, the encoder 4 * 7 = 28 before the
first row that counts; starts are even, because groups of ratio 2 may not be cut.
"""

from dataclasses import replace

import pytest

from finwhale.config.engine import EngineConfig
from tests.uncached_engine import scheduler_of, sequence_of


def scheduler_with(jobs, **settings):
    plain = {"block_size": 8, "num_blocks": 64, "max_sequences": 4, "max_batch_tokens": 20}
    scheduler = scheduler_of(EngineConfig(**{**plain, **settings}))
    for job in jobs:
        scheduler.queue(job)
    return scheduler


def jobs_of(*lengths, new=4):
    """Jobs in order of arrival with prompts of these lengths, no two alike."""
    return [sequence_of(n, [n] * length, new) for n, length in enumerate(lengths)]


def compute(scheduler, work) -> None:
    """Pretend that a step ran: count its rows, draw tokens, end who has all."""
    for job, piece in work:
        scheduler.computed(job, piece.span.stop)
        if piece.span.stop == len(job.tokens):
            if not job.num_new:
                scheduler.save_windows(job)
            job.tokens.append(99)
            if job.num_new == job.params.max_new_tokens:
                scheduler.finish(job)


def run(scheduler, steps=1000) -> list[dict[int, int]]:
    """Return the rows of each arrival, step by step."""
    rows = []
    for _ in range(steps):
        work = scheduler.schedule()
        if not work:
            break
        rows.append({job.arrival: piece.span.num_rows for job, piece in work})
        compute(scheduler, work)
    return rows


def test_short_prompt_does_not_wait_for_a_long_one():
    rows = run(scheduler_with(jobs_of(400, 5)), 2)
    # An even share of 20 rows would be 10; who needs less leaves the rest.
    assert rows == [{0: 15, 1: 5}, {0: 19, 1: 1}]


def test_every_decoding_job_has_its_row_in_every_step():
    scheduler = scheduler_with(jobs_of(1, 1, 200, 200, new=9), max_batch_tokens=5)
    rows = run(scheduler, 4)
    # Two rows for those that decode, three for those that read.
    assert all(step[0] == step[1] == 1 for step in rows)
    assert all(sum(step.values()) == 5 for step in rows)
    assert all(step[2] and step[3] for step in rows)


def test_one_long_prompt_gets_the_whole_budget():
    assert run(scheduler_with(jobs_of(50)))[:4] == [{0: 20}, {0: 20}, {0: 10}, {0: 1}]


def test_nobody_overtakes_the_head_of_the_queue():
    # 31 tokens need 4 blocks of 6, 41 need 6: the second job waits for the end of the first. The
    # third would fit, and waits all the same.
    jobs = jobs_of(30, 40, 1)
    scheduler = scheduler_with(jobs, num_blocks=6)
    assert run(scheduler, 3) == [{0: 20}, {0: 10}, {0: 1}]
    assert [job.arrival for job in scheduler.waiting] == [1, 2]
    later = run(scheduler)
    assert min(n for n, step in enumerate(later) if 1 in step) == 2
    assert min(n for n, step in enumerate(later) if 2 in step) >= 2
    # Nobody was let in only to be thrown out again.
    assert not scheduler.stats.preemptions
    assert all(job.num_new == 4 for job in jobs)


def test_more_jobs_than_slots_start_in_order_and_all_end():
    jobs = jobs_of(*[5] * 12, new=2)
    scheduler = scheduler_with(jobs)
    rows = run(scheduler)
    first = [min(n for n, step in enumerate(rows) if job.arrival in step) for job in jobs]
    assert first == sorted(first)
    assert len(set(first)) >= 3
    assert all(job.num_new == 2 for job in jobs)
    assert not scheduler.running
    assert len(scheduler.free_slots) == 4


def test_missing_block_is_taken_from_the_youngest():
    # 3 jobs of 15 tokens take 2 blocks each; the 17th token of the first needs a seventh block.
    jobs = jobs_of(15, 15, 15, new=9)
    scheduler = scheduler_with(jobs, num_blocks=6, max_batch_tokens=50, prefix_cache=False)
    run(scheduler, 2)
    assert len(scheduler.running) == 3
    run(scheduler, 1)
    assert [job.num_preemptions for job in jobs] == [0, 0, 1]
    assert [job.arrival for job in scheduler.waiting] == [2]
    assert jobs[2] not in scheduler.running
    assert not jobs[2].blocks
    assert len(jobs[2].tokens) == 17
    run(scheduler)
    assert all(job.num_new == 9 for job in jobs)
    assert jobs[0].num_preemptions == 0
    assert scheduler.allocator.num_free == 6


def test_preempted_jobs_wait_in_order_of_arrival():
    jobs = jobs_of(*[5] * 6)
    scheduler = scheduler_with(jobs)
    run(scheduler, 1)
    assert [job.arrival for job in scheduler.waiting] == [4, 5]
    for n in (2, 0, 3, 1):
        scheduler.preempt(jobs[n])
    assert [job.arrival for job in scheduler.waiting] == [0, 1, 2, 3, 4, 5]


def test_job_that_waits_can_be_finished():
    jobs = jobs_of(*[5] * 6)
    scheduler = scheduler_with(jobs)
    run(scheduler, 1)
    scheduler.finish(jobs[4])
    assert [job.arrival for job in scheduler.waiting] == [5]
    free = scheduler.allocator.num_free
    scheduler.finish(jobs[0])
    # Five tokens and one drawn: one block, not full, so nobody keeps it.
    assert scheduler.allocator.num_free == free + 1


@pytest.mark.parametrize(
    ("length", "decoder_start"),
    [(1, 0), (8, 0), (29, 0), (39, 3), (40, 3), (41, 11), (300, 267)],
    ids=str,
)
def test_cold_start_runs_the_decoder_on_what_exactness_needs(length, decoder_start):
    # 29 rows before the last block end below the length: 32 - 29 = 3, 40 - 29 = 11, 296 - 29.
    scheduler = scheduler_with(jobs_of(length), max_batch_tokens=400)
    ((_, piece),) = scheduler.schedule()
    assert (piece.span.start, piece.span.stop, piece.span.stored) == (0, length, 0)
    assert piece.decoder_start == piece.decoder_floor == decoder_start
    assert piece.first_logits == length - 1


@pytest.mark.parametrize(
    ("prefill", "length", "decoder_start"),
    [("full", 300, 0), ("bounded", 5, 0), ("bounded", 300, 292)],
    ids=str,
)
def test_other_modes_start_the_decoder_where_they_say(prefill, length, decoder_start):
    scheduler = scheduler_with(jobs_of(length), max_batch_tokens=400, prefill=prefill)
    ((_, piece),) = scheduler.schedule()
    assert piece.decoder_start == decoder_start


def second_start(prompt, again, **settings):
    """Return job and work of the first step of `again` when `prompt` has been served before."""
    scheduler = scheduler_with(
        [sequence_of(0, prompt, 1)], max_batch_tokens=500, num_blocks=100, **settings
    )
    run(scheduler)
    job = sequence_of(1, again, 1)
    scheduler.queue(job)
    ((_, piece),) = scheduler.schedule()
    return job, piece


IDS = list(range(300))


@pytest.mark.parametrize(
    ("shared", "tail", "start", "decoder"),
    [
        # The hit ends behind the decoder's first row: 296 - 29 = 267, 267 - 28 = 239, even: 238.
        (296, 3, 238, 267),
        # It ends before it: 200 - 28 = 172; the decoder begins at 264 - 29 = 235.
        (200, 70, 172, 235),
        # Too short to leave anything out.
        (8, 3, 0, 0),
        (24, 9, 0, 3),
    ],
    ids=str,
)
def test_hit_without_saved_windows_replays_the_receptive_field(shared, tail, start, decoder):
    job, piece = second_start(IDS, IDS[:shared] + [7] * tail, snapshot_bytes=0)
    assert piece.span.stored == shared
    assert piece.span.start == piece.span.window_floor == start
    assert (piece.decoder_start, piece.decoder_floor) == (decoder, decoder)
    assert job.num_cached_tokens == min(shared, start)


def test_hit_with_saved_windows_begins_at_its_end():
    job, piece = second_start(IDS[:297], IDS[:297] + [7] * 3)
    assert (piece.span.start, piece.span.stored) == (296, 296)
    # Seven window rows were saved: positions 289 to 295.
    assert piece.span.window_floor == piece.decoder_floor == 289
    assert piece.decoder_start == 296
    assert job.num_cached_tokens == 296


def test_bounded_hit_replays_one_window():
    job, piece = second_start(IDS, IDS[:200] + [7] * 70, prefill="bounded")
    assert (piece.span.start, piece.span.window_floor) == (192, 192)
    assert piece.decoder_start == 262
    assert job.num_cached_tokens == 192


def test_windows_that_are_not_exact_yet_are_not_saved():
    # The second job replays from 238 and its decoder begins at 267: exact from 267 + 29 = 296.
    scheduler = scheduler_with(
        [sequence_of(0, IDS, 1)], max_batch_tokens=500, num_blocks=100, snapshot_bytes=0
    )
    run(scheduler)
    job = sequence_of(1, IDS[:296] + [7] * 20, 1)
    scheduler.queue(job)
    ((_, piece),) = scheduler.schedule()
    # It replays from 254 and its decoder begins at 283, 29 rows before the last block end.
    assert (piece.span.start, piece.decoder_start, job.exact_from) == (254, 283, 312)
    saved = []
    scheduler.config = replace(scheduler.config, snapshot_bytes=1 << 20)
    scheduler.windows.put = lambda key, value, size: saved.append(key)
    for stop in (300, 304, 311):
        scheduler.computed(job, stop)
        scheduler.save_windows(job)
    assert saved == []
    scheduler.computed(job, 316)
    scheduler.save_windows(job)
    assert saved == [job.keys[312 // 8 - 1]]


def test_saved_windows_of_a_damaged_job_are_not_kept():
    scheduler = scheduler_with(jobs_of(17))
    work = scheduler.schedule()
    ((job, piece),) = work
    scheduler.computed(job, piece.span.stop)
    keys = list(job.keys)
    assert len(keys) == 2
    scheduler.drop(job)
    assert keys[1] not in scheduler.windows
    # Without damage they are kept.
    scheduler = scheduler_with(jobs_of(17))
    ((job, piece),) = scheduler.schedule()
    scheduler.computed(job, piece.span.stop)
    scheduler.finish(job)
    assert keys[1] in scheduler.windows


def test_equal_blocks_made_at_once_are_kept_once():
    jobs = [sequence_of(n, IDS[:20], 2) for n in range(3)]
    scheduler = scheduler_with(jobs, max_batch_tokens=100)
    compute(scheduler, scheduler.schedule())
    assert jobs[0].blocks[:2] == jobs[1].blocks[:2] == jobs[2].blocks[:2]
    assert len({job.blocks[2] for job in jobs}) == 3
    assert 64 - scheduler.allocator.num_free == 2 + 3
