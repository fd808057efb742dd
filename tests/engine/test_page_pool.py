"""Page and slot pools: nothing is ever owned twice, and everything comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxattn.engine.scheduling.page_pool import PagePool, PoolError, SlotPool


@given(
    num_pages=st.integers(1, 12),
    page_size=st.integers(1, 8),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40),
)
def test_no_page_is_owned_twice_and_all_come_back(num_pages, page_size, steps):
    pool = PagePool(num_pages, page_size)
    owned = []
    for allocate, number in steps:
        if allocate:
            before = pool.available
            pages = pool.allocate(number)
            if pages is None:
                assert pool.pages_for(number) > before == pool.available
            else:
                assert len(pages) * page_size >= number > (len(pages) - 1) * page_size
                owned.append(pages)
        elif owned:
            pool.free(owned.pop(number % len(owned)))
        held = [page for pages in owned for page in pages]
        assert len(set(held)) == len(held) == pool.in_use
        assert set(held) <= set(range(num_pages))
        assert pool.available + pool.in_use == num_pages == pool.size
    for pages in owned:
        pool.free(pages)
    assert pool.in_use == 0
    assert sorted(pool.allocate(num_pages * page_size)) == list(range(num_pages))


@pytest.mark.parametrize("freed", [[3], [0, 0], [0, 9]], ids=["unowned", "twice", "one wrong"])
def test_freeing_what_is_not_owned_is_an_error_and_frees_nothing(freed):
    pool = PagePool(4, 2)
    assert pool.allocate(4) == [0, 1]
    with pytest.raises(PoolError, match="cannot free pages"):
        pool.free(freed)
    assert pool.in_use == 2


def test_a_slot_is_owned_once_and_reused_after_it_was_freed():
    pool = SlotPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert {first, second} == {0, 1}
    assert pool.allocate() is None
    pool.free(first)
    assert pool.allocate() == first
    pool.free(second)
    with pytest.raises(PoolError, match=f"cannot free slots \\[{second}\\]"):
        pool.free(second)


def test_empty_pools_are_refused():
    with pytest.raises(ValueError, match="at least one page; got 0"):
        PagePool(0, 64)
    with pytest.raises(ValueError, match="page_size must be at least 1; got 0"):
        PagePool(1, 0)
    with pytest.raises(ValueError, match="at least one slot; got 0"):
        SlotPool(0)
