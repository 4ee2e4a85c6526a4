"""The batch order: every row once per epoch, from seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finwhale.data.batches import BatchOrder

ORDERS = st.builds(
    BatchOrder,
    num_rows=st.integers(1, 40),
    batch_rows=st.integers(1, 12),
    seed=st.integers(0, 5),
)


@given(order=ORDERS, epochs=st.integers(1, 3))
def test_every_row_is_visited_once_per_epoch(order, epochs):
    batches = -(-order.num_rows * epochs // order.batch_rows)
    visits = np.concatenate([order.rows(n) for n in range(batches)])
    for epoch in range(epochs):
        part = visits[epoch * order.num_rows : (epoch + 1) * order.num_rows]
        assert sorted(part.tolist()) == list(range(order.num_rows))


@given(order=ORDERS, position=st.integers(0, 50))
def test_a_batch_depends_on_its_position_alone(order, position):
    again = BatchOrder(num_rows=order.num_rows, batch_rows=order.batch_rows, seed=order.seed)
    for _ in range(3):
        again.rows(0)
    assert order.rows(position).tolist() == again.rows(position).tolist()
    assert order.rows(position).shape == (order.batch_rows,)


def test_seeds_and_epochs_differ():
    orders = [BatchOrder(num_rows=50, batch_rows=50, seed=seed) for seed in (0, 1)]
    first, second = orders[0].rows(0).tolist(), orders[1].rows(0).tolist()
    assert first != second
    assert first != orders[0].rows(1).tolist()


@pytest.mark.parametrize("field", ["num_rows", "batch_rows"])
def test_empty_orders_are_refused(field):
    sizes = {"num_rows": 3, "batch_rows": 2, "seed": 0} | {field: 0}
    with pytest.raises(ValueError, match=f"{field}: got 0, expected at least"):
        BatchOrder(**sizes)
