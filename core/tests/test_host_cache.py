"""KV blocks in an engine's host memory: in which order they go, and that none is lost."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.sim.engine.host_cache import ASK_LATER, HostCache
from sluice_core.sim.engine.prefix_cache import POSITION_BITS


def make_keys(name, end, first=0):
    return [name << POSITION_BITS | position for position in range(first, end)]


def make_cache(num_blocks, *, block_s=1.0):
    return HostCache(num_blocks, 1, 1.0 / block_s)


def store(cache, index, keys, now=0.0):
    cache.offer(index, keys)
    cache.end_iteration(now)
    cache.settle(math.inf)


def test_blocks_are_found_up_to_the_first_that_is_missing():
    cache = make_cache(10)
    store(cache, 0, make_keys(1, 3))
    assert cache.find(make_keys(1, 5)) == 3
    assert cache.find(make_keys(2, 1)) == 0
    assert cache.find([]) == 0
    assert cache.find([*make_keys(2, 1), *make_keys(1, 3)]) == 0


def test_a_copy_to_the_host_begins_with_the_end_of_the_iteration_and_takes_bytes_over_bandwidth():
    cache = HostCache(10, 200, 100.0)  # two seconds per block
    cache.offer(0, make_keys(1, 3))
    assert cache.find(make_keys(1, 3)) == ASK_LATER
    cache.end_iteration(10.0)
    assert cache.find_next_store_end_s(math.inf) == 16.0
    cache.settle(15.9)
    assert cache.find(make_keys(1, 3)) == ASK_LATER
    cache.settle(16.0)
    assert cache.find(make_keys(1, 3)) == 3
    assert cache.find_next_store_end_s(math.inf) == math.inf


def test_copies_of_one_direction_go_one_behind_the_other():
    cache = make_cache(10)
    cache.offer(0, make_keys(1, 2))
    cache.end_iteration(0.0)
    cache.offer(1, make_keys(2, 1))
    cache.end_iteration(1.0)
    assert [end_s for end_s, _ in cache._stores] == [2.0, 3.0]
    cache.settle(3.0)
    assert cache.begin_load(2, make_keys(1, 2), 2, 3.0) == 5.0
    assert cache.begin_load(3, make_keys(2, 1), 1, 3.5) == 6.0
    cache.check()


def test_what_is_being_loaded_for_one_request_keeps_another_waiting():
    cache = make_cache(10)
    store(cache, 0, make_keys(1, 3))
    cache.begin_load(1, make_keys(1, 2), 2, 0.0)
    assert cache.find(make_keys(1, 3)) == ASK_LATER
    assert cache.find(make_keys(1, 3, 2)) == 1
    cache.end_load(make_keys(1, 2))
    assert cache.find(make_keys(1, 3)) == 3


def test_the_end_of_a_prompt_goes_before_its_start_once_its_request_has_ended():
    """Until then blocks go in the order in which they were stored."""
    cache = make_cache(3)
    store(cache, 0, make_keys(1, 3))
    assert cache.list_keys() == make_keys(1, 3)
    cache.end_request(0)
    assert cache.list_keys() == make_keys(1, 3)[::-1]
    store(cache, 1, make_keys(2, 1))
    assert cache.find(make_keys(1, 3)) == 2


def test_what_was_offered_in_vain_or_loaded_is_used_when_its_request_ends():
    cache = make_cache(4)
    for index, name in enumerate((1, 2)):
        store(cache, index, make_keys(name, 2))
        cache.end_request(index)
    cache.offer(2, make_keys(1, 2))  # are there: the second prompt's are now the longest unused
    cache.end_request(2)
    assert cache.list_keys() == make_keys(2, 2)[::-1] + make_keys(1, 2)[::-1]
    cache.begin_load(3, make_keys(2, 1), 1, 0.0)
    cache.end_load(make_keys(2, 1))
    cache.end_request(3)
    assert cache.list_keys() == [*make_keys(2, 2, 1), *make_keys(1, 2)[::-1], *make_keys(2, 1)]


def test_what_finds_no_room_is_offered_again():
    cache = make_cache(3)
    store(cache, 0, make_keys(1, 2))
    cache.begin_load(1, make_keys(1, 2), 2, 0.0)  # both stay
    cache.offer(2, make_keys(2, 2))
    assert (cache.num_refused, cache.count_offered(2)) == (1, 0)
    assert cache.list_keys() == make_keys(1, 2)
    cache.end_load(make_keys(1, 2))
    cache.offer(2, make_keys(2, 3))
    assert (cache.num_refused, cache.count_offered(2)) == (1, 3)
    assert cache.list_keys() == make_keys(2, 3)
    cache.check()


def test_an_offer_does_not_evict_its_own_blocks():
    cache = make_cache(2)
    store(cache, 0, make_keys(1, 2))
    cache.offer(1, make_keys(1, 3))
    assert (cache.num_refused, cache.list_keys()) == (1, make_keys(1, 2))


def test_what_is_loaded_is_not_offered():
    cache = make_cache(5)
    store(cache, 0, make_keys(1, 2))
    cache.begin_load(1, make_keys(1, 2, 1), 2, 0.0)
    assert cache.count_offered(1) == 2
    assert cache.count_offered(7) == 0


def test_changes_are_of_what_may_be_read():
    cache = make_cache(2)
    cache.take_changes()
    cache.offer(0, make_keys(1, 2))
    cache.end_iteration(0.0)
    assert not cache.take_changes().stored
    cache.settle(2.0)
    assert cache.take_changes().stored == set(make_keys(1, 2))
    assert cache.holds(make_keys(1, 1)[0])
    store(cache, 1, make_keys(2, 1))
    changes = cache.take_changes()
    assert (changes.stored, changes.removed) == (set(make_keys(2, 1)), set(make_keys(1, 1)))
    assert not cache.holds(make_keys(1, 1)[0])


class PlainHost:
    """The same with lists that are searched, and one dictionary for each fact."""

    def __init__(self, num_blocks):
        self.num_blocks, self.order, self.pinned, self.storing = num_blocks, [], set(), set()
        self.seen, self.offered = {}, {}

    def offer(self, index, keys):
        seen = self.seen.setdefault(index, [])
        missing = [key for key in keys if key not in self.order]
        seen += [key for key in keys if key not in self.storing]
        kept = {*keys, *self.storing, *self.pinned}
        victims = [key for key in self.order if key not in kept]
        num_victims = max(0, len(self.order) + len(missing) - self.num_blocks)
        if missing and num_victims > len(victims):
            return
        for key in victims[:num_victims]:
            self.order.remove(key)
        self.order += missing
        self.storing.update(missing)
        self.offered[index] = self.offered.get(index, 0) + len(keys)

    def load(self, index, keys):
        self.seen[index], self.offered[index] = list(keys), len(keys)
        self.pinned.update(keys)

    def end(self, index):
        for key in sorted(set(self.seen.pop(index, [])), key=lambda key: key % (1 << POSITION_BITS), reverse=True):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)
        self.offered.pop(index, None)


class Steps:
    """Does the same to a host and to a plain one."""

    def __init__(self, data, num_blocks):
        self.data, self.cache, self.plain = data, make_cache(num_blocks), PlainHost(num_blocks)
        self.now, self.loads, self.running, self.num_begun = 0.0, [], {}, 0

    def begin(self):
        """A request with one of three prompts comes, and loads what is there."""
        keys = make_keys(self.data.draw(st.integers(1, 3)), self.data.draw(st.integers(1, 6)))
        index = self.num_begun = self.num_begun + 1
        self.running[index] = keys
        found = self.cache.find(keys)
        assert (found == 0) == (keys[0] not in self.plain.order)
        if found > 0:
            self.cache.begin_load(index, keys[:found], found, self.now)
            self.loads.append((index, keys[:found]))
            self.plain.load(index, keys[:found])

    def offer(self):
        number = self.data.draw(st.sampled_from(sorted(self.running) or [0]))
        num_offered = self.plain.offered.get(number, 0)
        keys = self.running.get(number, [])[num_offered:]
        assert self.cache.count_offered(number) == num_offered
        if keys:
            keys = keys[: self.data.draw(st.integers(1, len(keys)))]
            self.cache.offer(number, keys)
            self.plain.offer(number, keys)

    def end_load(self):
        if self.loads:
            _, keys = self.loads.pop(0)
            self.cache.end_load(keys)
            self.plain.pinned -= set(keys)

    def end_request(self):
        ready = sorted(set(self.running) - {index for index, _ in self.loads})
        if ready:
            number = self.data.draw(st.sampled_from(ready))
            del self.running[number]
            self.cache.end_request(number)
            self.plain.end(number)

    def wait(self):
        self.now += self.data.draw(st.sampled_from((0.5, 3.0, 100.0)))
        self.cache.end_iteration(self.now)
        self.plain.storing = {
            key for key in self.plain.storing if self.cache.find([key]) == ASK_LATER and key not in self.plain.pinned
        }


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_blocks=st.integers(0, 12))
def test_order_and_room_are_those_of_a_plain_host_after_every_step(data, num_blocks):
    steps = Steps(data, num_blocks)
    for _ in range(data.draw(st.integers(1, 30))):
        data.draw(st.sampled_from((steps.begin, steps.offer, steps.end_load, steps.end_request, steps.wait)))()
        steps.cache.check()
        assert steps.cache.list_keys() == steps.plain.order
    while steps.loads:
        steps.end_load()
    steps.wait()
    steps.cache.settle(math.inf)
    while steps.running:
        steps.end_request()
    steps.cache.check_idle()


@pytest.mark.parametrize("break_it", [lambda cache: cache.begin_load(3, make_keys(1, 1), 1, 0.0), lambda cache: None])
def test_a_host_with_a_load_or_a_request_is_not_idle(break_it):
    cache = make_cache(4)
    store(cache, 0, make_keys(1, 2))
    break_it(cache)
    with pytest.raises(AssertionError):
        cache.check_idle()
