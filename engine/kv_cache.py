"""Which page of the KV cache belongs to whom, and which pages hold a prefix that can be used again.

Owns the numbers of pages, their reference counts and the prefix cache; the keys and values
themselves live in the runner. Does not know tensors, steps, budgets or why a request grows.

A full page is named by a hash chain: blake2b-128 of the parent's digest and the page's token ids,
rooted in the target's weight version. New weights therefore make old pages unreachable without a
flush; they are reclaimed as least recently used. A page becomes matchable as soon as the rows that
fill it are *scheduled*: a forward stores the keys and values of all its rows before attention reads
any, so samples of one prompt admitted in one step share its pages at once. Until ``commit_step``
such pages are pending, and ``unregister_step`` takes them back.

Invariants: a page is either free or owned, by as many as its reference count says; a page that may
still be written has one owner, or is pending and its other owners only read it behind those rows; a
matchable page holds exactly what its digest names, all of it computed under that version.

    match_prefix(token_ids) -> pages      allocate(request, max_rows, reserve_pages) -> rows or 0
    grow(request, num_tokens) -> bool     trim(request, num_tokens)
    free(request)                         slots_for(request, start, count) -> slots
    register(request, num_tokens)         commit_step() / unregister_step()
    set_version(version)                  reset_prefix_cache() -> bool
    capacity(request) -> num_tokens       check(live_requests)

Tree nodes use slots behind the committed tokens (``grow`` past them, write at ``slots_for``); the
accepted ones are moved down by the runner before ``Scheduler.commit``, which trims the rest.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine.request import Request

PAGE_SIZE = 16
DIGEST_BYTES = 16


class KVCache:
    """Bookkeeping of ``num_pages`` pages of ``page_size`` tokens. Deterministic: same calls, same
    pages."""

    def __init__(
        self, num_pages: int, page_size: int = PAGE_SIZE, enable_prefix_caching: bool = True
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"the KV cache needs at least one page of one token, got {num_pages} pages of "
                f"{page_size}; raise kv_cache_bytes"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref = [0] * num_pages
        self._digest: list[bytes | None] = [None] * num_pages  # of matchable pages
        self._page_of: dict[bytes, int] = {}
        self._blank = list(range(num_pages - 1, -1, -1))  # free, nothing to reuse; a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # free but matchable, oldest first
        self._pending: list[tuple[Request, int, list[int]]] = []  # this step's registrations
        self._epoch = 0  # counts version changes and resets: pages of one epoch are of one version
        self.version = 0
        self._root = _root_digest(0)
        self.num_query_tokens = 0  # of admitted requests that may read the cache
        self.num_hit_tokens = 0
        self.num_evictions = 0

    # ---- counts

    @property
    def num_free_pages(self) -> int:
        """Pages that can be had now, those with reusable content included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - self.num_free_pages

    @property
    def num_matchable_pages(self) -> int:
        return len(self._page_of)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def capacity(self, request: Request) -> int:
        """Tokens the request could hold if it took every free page."""
        return (len(request.pages) + self.num_free_pages) * self.page_size

    def pages_wanted(self, request: Request) -> int:
        """Pages for its whole sequence and one page of growth, as far as it can ever grow."""
        num_tokens = min(len(request.token_ids) + self.page_size, request.max_kv_tokens)
        return self.num_pages_for(num_tokens)

    # ---- pages of a request

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Pages that hold the longest cached prefix, at least one token short: a row must be
        computed."""
        return self._match(token_ids, [])

    def allocate(self, request: Request, max_rows: int, reserve_pages: int = 0) -> int:
        """Admit a request: take its cached prefix, and pages for its first ``max_rows`` rows behind
        it.

        Sets ``num_computed`` to the cached prefix. Takes nothing and returns 0 unless all that it
        wants (``pages_wanted``) fits beside ``reserve_pages``: who is let in half will be preempted
        soon.

        Returns:
            rows granted, from 1 to max_rows; 0 if there is no room.
        """
        assert not request.pages, request
        if self.num_free_pages <= reserve_pages:
            return 0
        hits: list[int] = []
        if request.reads_prefix_cache:
            hits = self._match(request.token_ids, self._digests_of(request))
        num_revived = sum(1 for page in hits if self._ref[page] == 0)
        num_fresh = self.pages_wanted(request) - len(hits)
        if num_fresh + reserve_pages > self.num_free_pages - num_revived:
            return 0
        for page in hits:
            if self._ref[page] == 0:
                del self._cached[page]
            self._ref[page] += 1
        request.pages = hits
        request.num_computed = len(hits) * self.page_size
        request.num_registered_pages = len(hits)
        request.kv_epoch = self._epoch
        num_rows = min(max_rows, len(request.token_ids) - request.num_computed)
        grown = self.grow(request, request.num_computed + num_rows)
        assert grown, (request, num_rows, self.num_free_pages)
        if request.reads_prefix_cache and self.enable_prefix_caching:
            self.num_query_tokens += len(request.token_ids)
            self.num_hit_tokens += request.num_computed
        return num_rows

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens in all; takes every page needed, or none and returns
        False."""
        num_new = self.num_pages_for(num_tokens) - len(request.pages)
        if num_new <= 0:
            return True
        if num_new > self.num_free_pages:
            return False
        for _ in range(num_new):
            request.pages.append(self._take())
        return True

    def trim(self, request: Request, num_tokens: int) -> None:
        """Give back the pages behind the first ``num_tokens`` tokens."""
        keep = self.num_pages_for(num_tokens)
        while len(request.pages) > keep:
            self._release(request.pages.pop(), reusable=False)

    def free(self, request: Request) -> None:
        """Give back all pages. The prefix is released last: it is the part most worth keeping."""
        reusable = request.kv_epoch == self._epoch
        for page in reversed(request.pages):
            self._release(page, reusable)
        request.pages = []
        request.num_registered_pages = 0

    def slots_for(self, request: Request, start: int, count: int) -> list[int]:
        """Slots of the logical positions ``start : start + count``."""
        size, pages = self.page_size, request.pages
        return [pages[p // size] * size + p % size for p in range(start, start + count)]

    # ---- prefix cache

    def register(self, request: Request, num_tokens: int) -> None:
        """Make the full pages among the first ``num_tokens`` tokens matchable; their rows are
        scheduled.

        A request that runs over a change of weights registers nothing more: its pages are mixed.
        """
        first, last = request.num_registered_pages, num_tokens // self.page_size
        if last <= first or request.kv_epoch != self._epoch or not self.enable_prefix_caching:
            return
        digests = self._digests_of(request)
        registered = []
        for index in range(first, last):
            page, digest = request.pages[index], self._chain(request.token_ids, digests, index)
            if digest not in self._page_of:  # else a twin computed meanwhile is matchable already
                self._page_of[digest] = page
                self._digest[page] = digest
                registered.append(page)
        request.num_registered_pages = last
        self._pending.append((request, first, registered))

    def commit_step(self) -> None:
        """The rows scheduled since the last call have been computed."""
        self._pending.clear()

    def unregister_step(self) -> None:
        """The rows scheduled since ``commit_step`` were not computed: nothing of theirs may be
        matched."""
        for request, first, registered in reversed(self._pending):
            for page in registered:
                self._forget(page)
            request.num_registered_pages = first
        self._pending.clear()

    def set_version(self, version: int) -> None:
        """From now on pages are computed by target weights ``version``. Call it between two
        steps."""
        assert not self._pending, ("weights changed while a step was running", len(self._pending))
        if version == self.version:
            return
        self.version = version
        self._root = _root_digest(version)
        self._epoch += 1

    def reset_prefix_cache(self) -> bool:
        """Forget every reusable prefix; running requests keep their pages. False: a step runs,
        nothing done."""
        if self._pending:
            return False
        for page in list(self._page_of.values()):
            self._forget(page)
        self._blank.extend(self._cached)
        self._cached.clear()
        self._epoch += 1
        return True

    # ---- self-check

    def check(self, live_requests: Iterable[Request]) -> None:
        """Raise AssertionError, with values, if an invariant is broken. ``live_requests`` own all
        used pages."""
        live = list(live_requests)
        pending = {page for _, _, pages in self._pending for page in pages}
        owners = [0] * self.num_pages
        writers: dict[int, str] = {}
        for request in live:
            held = len(request.pages) * self.page_size
            assert request.num_computed <= held, (request, held)
            assert len(set(request.pages)) == len(request.pages), ("page twice", request)
            for index, page in enumerate(request.pages):
                owners[page] += 1
                if (index + 1) * self.page_size > request.num_computed:
                    assert page not in writers, (page, writers[page], request)
                    writers[page] = request.request_id
            self._check_chain(request)
        for page, num_owners in enumerate(owners):
            assert self._ref[page] == num_owners, ("refs", page, self._ref[page], num_owners)
        for page, writer in writers.items():
            if page not in pending:
                assert self._digest[page] is None, ("matchable, not written", page, writer)
                assert self._ref[page] == 1, ("shared, not written", page, writer)
        free = self._blank + list(self._cached)
        assert len(set(free)) == len(free), ("free twice", sorted(free))
        assert set(free) == {p for p in range(self.num_pages) if not owners[p]}, (free, owners)
        for page in self._blank:
            assert self._digest[page] is None, ("blank but matchable", page)
        for page in self._cached:
            assert self._digest[page] is not None, ("cached but not matchable", page)
        named = {digest: page for page, digest in enumerate(self._digest) if digest is not None}
        assert named == self._page_of, (named, self._page_of)

    def _check_chain(self, request: Request) -> None:
        """Every matchable page of a request holds the tokens its digest names."""
        if request.kv_epoch != self._epoch:
            return
        digests: list[bytes] = []
        for index in range(min(len(request.pages), len(request.token_ids) // self.page_size)):
            digest = self._chain(request.token_ids, digests, index)
            found = self._digest[request.pages[index]]
            assert found is None or found == digest, ("digest", index, request)

    # ---- inside

    def _take(self) -> int:
        """A free page, by preference without reusable content, else the least recently used."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self.num_evictions += 1
        assert self._ref[page] == 0, (page, self._ref[page])
        self._ref[page] = 1
        return page

    def _release(self, page: int, reusable: bool) -> None:
        """One owner fewer. Content of a past epoch cannot be matched by anyone and is dropped at
        once."""
        assert self._ref[page] > 0, ("released once too often", page)
        self._ref[page] -= 1
        if self._ref[page]:
            return
        if reusable and self._digest[page] is not None:
            self._cached[page] = None
            return
        self._forget(page)
        self._blank.append(page)

    def _forget(self, page: int) -> None:
        digest = self._digest[page]
        if digest is not None:
            self._digest[page] = None
            del self._page_of[digest]

    def _match(self, token_ids: Sequence[int], digests: list[bytes]) -> list[int]:
        pages: list[int] = []
        if self._page_of:
            for index in range((len(token_ids) - 1) // self.page_size):
                page = self._page_of.get(self._chain(token_ids, digests, index))
                if page is None:
                    break
                pages.append(page)
        return pages

    def _chain(self, token_ids: Sequence[int], digests: list[bytes], index: int) -> bytes:
        """Digest of full page ``index``; ``digests`` holds those before it and is extended by
        it."""
        if index < len(digests):
            return digests[index]
        assert index == len(digests), (index, len(digests))
        parent = digests[-1] if digests else self._root
        ids = array("q", token_ids[index * self.page_size : (index + 1) * self.page_size])
        digests.append(blake2b(parent + ids.tobytes(), digest_size=DIGEST_BYTES).digest())
        return digests[-1]

    def _digests_of(self, request: Request) -> list[bytes]:
        """The request's hash chain under the present version, as far as it has been computed."""
        if request.digest_version != self.version:
            request.page_digests = []
            request.digest_version = self.version
        return request.page_digests


def _root_digest(version: int) -> bytes:
    return blake2b(f"target version {version}".encode(), digest_size=DIGEST_BYTES).digest()
