"""The cache as the scheduler meets it: a KV source, exports of states, cuts of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interlock.errors import RequestError
from interlock.extension import Match
from interlock_prefix_cache.boundaries import cut, wanted
from interlock_prefix_cache.hashing import Chain, Name, root
from interlock_prefix_cache.index import Index, Node, State
from interlock_prefix_cache.settings import PrefixCacheSettings

if TYPE_CHECKING:
    from interlock.engine.engine import Engine
    from interlock.engine.request import Request

PLUGIN = "prefix_cache"
Spans = Sequence[tuple["Request", int, int]]


class Cache:
    """One engine's prefix cache. Its methods are the hooks and protocols of the same names."""

    supplies_states = True

    def __init__(self, engine: Engine, settings: PrefixCacheSettings) -> None:
        memory = engine.scheduler.memory
        self._settings = settings
        self._size = memory.block_size
        self._pool, self._slots = memory.pool, memory.states
        self._hybrid = memory.has_states
        self._engine = engine
        self.index = Index(memory.pool, memory.states)
        self._chains: dict[str, Chain] = {}
        self._exported: dict[str, list[tuple[int, int]]] = {}
        self.counts: Counter[str] = Counter()

    # -- names ---------------------------------------------------------------------------------

    def _chain(self, request: Request) -> Chain:
        chain = self._chains.get(request.id)
        if chain is None:
            parts = [
                ("engine", self._engine.info.fingerprint),
                ("salt", self._settings.salt),
                ("request", request.extras.get("cache_salt")),
            ]
            chain = Chain(root(parts), self._size)
            self._chains[request.id] = chain
        return chain

    def _name(self, request: Request, blocks: int) -> Name:
        return self._chain(request).name(blocks, request.token_ids)

    # -- KVSource ------------------------------------------------------------------------------

    def match(self, request: Request, start: int, stop: int) -> Match | None:
        """The deepest point at which all blocks, and on a hybrid model a state, are known."""
        if not takes_part(request):
            return None
        nodes = self._nodes(request, start, stop)
        if self._hybrid:
            return self._with_state(request, start, stop, nodes)
        return self._with_part(request, start, stop, nodes)

    def _nodes(self, request: Request, start: int, stop: int) -> list[Node]:
        """Cached whole blocks from ``start`` on, as far as they go."""
        first, found = start // self._size, []
        for blocks in range(first + 1, stop // self._size + 1):
            node = self.index.find(self._name(request, blocks))
            if node is None:
                break
            found.append(node)
        return found

    def _with_part(
        self, request: Request, start: int, stop: int, nodes: list[Node]
    ) -> Match | None:
        """The blocks, and the beginning of one that continues them otherwise (copied on write)."""
        reached = start + len(nodes) * self._size
        rest = request.token_ids[reached : min(stop, reached + self._size)]
        same, node = self.index.overlap(self._name(request, reached // self._size), rest)
        blocks = [each.block for each in nodes]
        if node is not None:
            blocks.append(node.block)
        return Match(reached + same - start, tuple(blocks)) if blocks else None

    def _with_state(
        self, request: Request, start: int, stop: int, nodes: list[Node]
    ) -> Match | None:
        found = self._deepest_state(request, start, stop, len(nodes))
        if found is None:
            return None
        count, state = found
        end = start + count * self._size + len(state.tail)
        blocks = [node.block for node in nodes[:count]]
        if state.block is not None:
            blocks.append(state.block)
        return Match(end - start, tuple(blocks), state.slot)

    def _deepest_state(
        self, request: Request, start: int, stop: int, most: int
    ) -> tuple[int, State] | None:
        """A state behind at most ``most`` blocks after ``start``, and behind how many."""
        for count in range(most, -1, -1):
            reached = start + count * self._size
            name = self._name(request, reached // self._size)
            state = self.index.state_after(name, request.token_ids[reached:stop])
            if state is not None and reached + len(state.tail) > start:
                return count, state
        return None

    def settle(self, request: Request, start: int, num_tokens: int) -> None:
        self.counts["queries_total"] += 1
        self.counts["query_tokens_total"] += request.num_tokens
        chain = self._chain(request)
        chain.published = 0
        if not takes_part(request):
            return
        self.counts["hits_total"] += bool(num_tokens)
        self.counts["hit_tokens_total"] += num_tokens
        self.counts["partial_hits_total"] += bool(num_tokens % self._size)
        nodes = self._nodes(request, start, request.num_tokens - 1)
        self.index.touch([node.name for node in nodes])
        shared = start + len(nodes) * self._size
        chain.junction = shared if self._hybrid and shared > start + num_tokens else 0
        if self._hybrid and num_tokens:
            found = self._deepest_state(request, start, start + num_tokens, len(nodes))
            if found is not None:
                self.index.touch_state(found[1])

    # -- states inside a prompt ----------------------------------------------------------------

    def plan(self, request: Request, start: int, stop: int) -> list[tuple[int, int]]:
        """Slots for the states that this row exports; they are nobody's hit before it is done."""
        self._abandon(request)
        if self._settings.checkpoints != "internal" or not takes_part(request):
            return []
        positions = self._wanted(request, start, stop)
        chosen = [p for p in positions if not self._has_state(request, p)]
        exports = []
        for position in chosen:
            if not self._slots.num_free:
                self.counts["evicted_states_total"] += self.index.free_states(1)
            if self._slots.num_free:
                exports.append((position, self._slots.allocate(1)[0]))
        if exports:
            self._exported[request.id] = exports
        return exports

    def _wanted(self, request: Request, start: int, stop: int) -> list[int]:
        return wanted(
            start,
            stop,
            request.prefill_target,
            interval=self._settings.interval,
            junction=self._chain(request).junction,
        )

    def _has_state(self, request: Request, position: int) -> bool:
        blocks = position // self._size
        tail = request.token_ids[blocks * self._size : position]
        return self.index.has_state(self._name(request, blocks), tail)

    def clip(self, request: Request, start: int, end: int) -> int:
        """The old way: the junction and the last block boundary end rows, whose states are kept."""
        if self._settings.checkpoints != "split" or not self._hybrid:
            return end
        junction, target = self._chain(request).junction, request.prefill_target
        if start < junction < end:
            return junction
        return cut(start, end, target, self._size) if start < target <= end else end

    def _abandon(self, request: Request) -> None:
        for _, slot in self._exported.pop(request.id, ()):
            self._slots.drop([slot])

    # -- publishing: only what was accepted ----------------------------------------------------

    def committed(self, spans: Spans) -> None:
        size = self._size
        for request, start, stop in spans:
            exports = self._exported.pop(request.id, []) if self._exported else []
            # A decode step inside a block, which most are, has nothing to tell.
            inside = start // size == stop // size and start >= request.prefill_target
            if (inside and not request.finished) or not takes_part(request):
                continue
            if stop // size > self._chain(request).published or request.finished:
                self._publish_blocks(request, stop)
            for position, slot in exports:
                self._publish_state(request, position, slot)
                self.counts["exported_states_total"] += 1
            if self._hybrid and self._keeps_own(request, stop):
                assert request.state_slot is not None
                self._slots.take([request.state_slot])
                self._publish_state(request, stop, request.state_slot)

    def _keeps_own(self, request: Request, stop: int) -> bool:
        """Whether the request's own slot, which is the state after ``stop`` tokens, is kept."""
        if request.state_slot is None or stop < 1:
            return False
        if request.finished:
            return True
        if self._settings.checkpoints == "off":
            return False
        target = request.prefill_target
        if (
            self._settings.checkpoints == "split"
            and stop == (target - 1) // self._size * self._size
        ):
            return True
        interval = self._settings.interval
        on_interval = interval is not None and stop < target and stop % interval == 0
        return on_interval or stop == self._chain(request).junction

    def _publish_blocks(self, request: Request, stop: int) -> None:
        """All whole blocks up to ``stop``, and the rest of an ended request of a plain model."""
        chain, size, tokens = self._chain(request), self._size, request.token_ids
        if chain.published and self.index.find(self._name(request, chain.published)) is None:
            # Evicted since: no block is ever in the index without those before it.
            chain.published = 0
        for index in range(chain.published, stop // size):
            parent, block = self._name(request, index), request.block_table[index]
            part = tokens[index * size : (index + 1) * size]
            self.counts["published_blocks_total"] += self.index.add_block(parent, part, block)
        chain.published = stop // size
        rest = tokens[chain.published * size : stop]
        if request.finished and rest and not self._hybrid:
            parent, block = (
                self._name(request, chain.published),
                request.block_table[chain.published],
            )
            self.counts["published_blocks_total"] += self.index.add_block(parent, rest, block)

    def _publish_state(self, request: Request, position: int, slot: int) -> None:
        """Takes over the caller's reference on ``slot``."""
        blocks = position // self._size
        name = self._name(request, blocks)
        if blocks and self.index.find(name) is None:
            # Its blocks were evicted within this step: nobody could use the state.
            self._slots.drop([slot])
            return
        tail = request.token_ids[blocks * self._size : position]
        block = request.block_table[blocks] if tail else None
        self.index.add_state(name, tail, slot, block)

    # -- giving back ---------------------------------------------------------------------------

    def reclaim(self, num_blocks: int, num_states: int) -> None:
        wanted = self._slots.num_free + num_states
        if num_blocks > 0:
            blocks, states = self.index.free_blocks(num_blocks)
            self.counts["evicted_blocks_total"] += blocks
            self.counts["evicted_states_total"] += states
        # Blocks may have taken states along.
        missing = wanted - self._slots.num_free
        self.counts["evicted_states_total"] += self.index.free_states(missing)

    def preempted(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._abandon(request)

    def finished(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._abandon(request)
            self._chains.pop(request.id, None)

    def close(self) -> None:
        self.index.clear()

    # -- looking in ----------------------------------------------------------------------------

    def held(self) -> list[int]:
        """Blocks on which the cache has references."""
        return list(self.index.held_blocks())

    def held_states(self) -> list[int]:
        pending = [slot for exports in self._exported.values() for _, slot in exports]
        return [*self.index.held_states(), *pending]

    def counters(self) -> dict[str, float]:
        levels = {"blocks_now": len(self.index.nodes), "states_now": self.index.num_states}
        return {**dict.fromkeys(COUNTERS, 0), **self.counts, **levels}


def check_options(options: Any) -> None:
    """Raise `RequestError` for options of a request that are not ``{"enabled": bool}``."""
    known = isinstance(options, Mapping) and set(options) <= {"enabled"}
    if not known or not isinstance(options.get("enabled", True), bool):
        text = repr(options)[:100]
        raise RequestError(
            f'plugins.{PLUGIN} takes {{"enabled": true}} or {{"enabled": false}}, not {text}',
            param=f"plugins.{PLUGIN}",
        )


def takes_part(request: Request) -> bool:
    """Whether a request reads and fills the cache: ``plugins.prefix_cache.enabled`` of its body."""
    return bool(request.extras.get(PLUGIN, {}).get("enabled", True))


COUNTERS = (
    "queries_total", "query_tokens_total", "hits_total", "hit_tokens_total", "partial_hits_total",
    "published_blocks_total", "exported_states_total", "evicted_blocks_total",
    "evicted_states_total",
)  # fmt: skip
