"""What is cached: a tree of blocks named by their prefixes, and states after some of them.

The index holds one reference on every block and state in it, so its size is bounded by the pools':
at most one entry per block and one per state slot. Eviction begins with what was used longest ago
among prefixes that nothing in the index continues, so that no entry is ever without its parents; a
prefix takes the states after it along.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

import attrs

from interlock.cache.blocks import BlockPool
from interlock_prefix_cache.hashing import Name, child

MOST_SIBLINGS = 32
"""Of the blocks that continue a prefix, so many, the newest, are compared token by token."""


@attrs.define(slots=True, eq=False)
class Node:
    """A cached block: the last one of the prefix that it is named by."""

    name: Name
    parent: Name
    block: int
    tokens: tuple[int, ...]
    """Fewer than a block for the last block of a request that has ended."""
    used: int = 0


@attrs.define(slots=True, eq=False)
class State:
    """A state slot: after a named prefix, and ``tail`` more tokens in ``block``."""

    name: Name
    tail: tuple[int, ...]
    slot: int
    block: int | None


class Index:
    """Blocks and states by the names of prefixes. Not thread-safe: for the scheduler's process."""

    def __init__(self, blocks: BlockPool, states: BlockPool) -> None:
        self._blocks, self._slots = blocks, states
        self.nodes: dict[Name, Node] = {}
        self._children: dict[Name, dict[Name, Node]] = {}
        self._states: dict[Name, dict[tuple[int, ...], State]] = {}
        self._state_order: OrderedDict[tuple[Name, tuple[int, ...]], State] = OrderedDict()
        self._leaves: list[tuple[int, Name]] = []
        self._own: Counter[int] = Counter()
        self._clock = 0

    @property
    def num_states(self) -> int:
        return len(self._state_order)

    def held_blocks(self) -> Iterator[int]:
        """Every block on which the index has a reference, as often as it has one."""
        yield from (node.block for node in self.nodes.values())
        yield from (s.block for s in self._state_order.values() if s.block is not None)

    def held_states(self) -> Iterator[int]:
        yield from (state.slot for state in self._state_order.values())

    # -- looking up: nothing changes -----------------------------------------------------------

    def find(self, name: Name) -> Node | None:
        return self.nodes.get(name)

    def overlap(self, parent: Name, tokens: Sequence[int]) -> tuple[int, Node | None]:
        """How many of ``tokens`` a cached block behind ``parent`` begins with, and which one."""
        best, found = 0, None
        siblings = self._children.get(parent, {})
        for node in islice(reversed(siblings.values()), MOST_SIBLINGS):
            same = common(node.tokens, tokens)
            if same > best:
                best, found = same, node
        return best, found

    def state_after(self, name: Name, tokens: Sequence[int]) -> State | None:
        """The state after ``name``'s prefix and as many of the ``tokens`` behind it as possible."""
        best: State | None = None
        for tail, state in self._states.get(name, {}).items():
            longer = best is None or len(tail) > len(best.tail)
            if longer and tuple(tokens[: len(tail)]) == tail:
                best = state
        return best

    def has_state(self, name: Name, tail: Sequence[int]) -> bool:
        return tuple(tail) in self._states.get(name, {})

    # -- adding --------------------------------------------------------------------------------

    def add_block(self, parent: Name, tokens: Sequence[int], block: int) -> bool:
        """Take a reference on ``block``, unless that prefix is known already.

        The parent must be a root or in the index.
        """
        name = child(parent, tokens)
        if name in self.nodes:
            self.touch([name])
            return False
        self._take(block)
        node = self.nodes[name] = Node(name, parent, block, tuple(tokens))
        self._children.setdefault(parent, {})[name] = node
        self._mark(node)
        return True

    def add_state(self, name: Name, tail: Sequence[int], slot: int, block: int | None) -> bool:
        """Keep ``slot``, whose reference passes to the index, or drop it if there is one already.

        ``block`` has the ``tail`` tokens behind the prefix, if any; the index takes a reference.
        """
        key = (name, tuple(tail))
        if key in self._state_order:
            self._state_order.move_to_end(key)
            self._slots.drop([slot])
            return False
        if block is not None:
            self._take(block)
        state = State(name, key[1], slot, block)
        self._states.setdefault(name, {})[key[1]] = state
        self._state_order[key] = state
        return True

    def touch(self, names: Sequence[Name]) -> None:
        """These prefixes were used now."""
        for name in names:
            if (node := self.nodes.get(name)) is not None:
                self._mark(node)

    def touch_state(self, state: State) -> None:
        self._state_order.move_to_end((state.name, state.tail))

    def _mark(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock
        if not self._children.get(node.name):
            heapq.heappush(self._leaves, (node.used, node.name))
        if len(self._leaves) > 4 * len(self.nodes) + 64:
            self._leaves = [(n.used, n.name) for n in self.nodes.values() if self._is_leaf(n)]
            heapq.heapify(self._leaves)

    def _is_current(self, entry: tuple[int, Name]) -> bool:
        """Whether an entry of the heap still says when a leaf was last used."""
        node = self.nodes.get(entry[1])
        return node is not None and node.used == entry[0] and self._is_leaf(node)

    def _is_leaf(self, node: Node) -> bool:
        return not self._children.get(node.name)

    # -- evicting ------------------------------------------------------------------------------

    def free_blocks(self, count: int) -> tuple[int, int]:
        """Drop least recently used prefixes until ``count`` blocks are free that were not.

        Blocks that others hold too free nothing, and go last. Returns dropped blocks and states.
        """
        states, before = self.num_states, len(self.nodes)
        wanted = self._blocks.num_free + count
        used: list[tuple[int, Name]] = []
        while self._blocks.num_free < wanted and (self._leaves or used):
            if self._leaves:
                entry = heapq.heappop(self._leaves)
                if self._is_current(entry) and self._in_use(self.nodes[entry[1]].block):
                    used.append(entry)
                    continue
            else:
                # What is in use keeps older blocks of its prefix, which may be nobody's.
                entry = used.pop(0)
            if self._is_current(entry):
                self._drop(self.nodes[entry[1]])
        for entry in used:
            heapq.heappush(self._leaves, entry)
        for state in list(self._state_order.values()):
            if self._blocks.num_free >= wanted:
                break
            if state.block is not None and not self._in_use(state.block):
                self._drop_state(state)
        return before - len(self.nodes), states - self.num_states

    def free_states(self, count: int) -> int:
        """Drop least recently used states until ``count`` slots are free that were not."""
        before, wanted = self.num_states, self._slots.num_free + count
        for state in list(self._state_order.values()):
            if self._slots.num_free >= wanted:
                break
            if self._slots.references(state.slot) == 1:
                self._drop_state(state)
        return before - self.num_states

    def clear(self) -> None:
        for state in list(self._state_order.values()):
            self._drop_state(state)
        for node in self.nodes.values():
            self._give_up(node.block)
        self.nodes, self._children, self._leaves = {}, {}, []

    def _drop(self, node: Node) -> None:
        for state in list(self._states.get(node.name, {}).values()):
            self._drop_state(state)
        del self.nodes[node.name]
        siblings = self._children[node.parent]
        del siblings[node.name]
        if not siblings:
            del self._children[node.parent]
            if (parent := self.nodes.get(node.parent)) is not None:
                heapq.heappush(self._leaves, (parent.used, parent.name))
        self._give_up(node.block)

    def _drop_state(self, state: State) -> None:
        del self._state_order[state.name, state.tail]
        tails = self._states[state.name]
        del tails[state.tail]
        if not tails:
            del self._states[state.name]
        self._slots.drop([state.slot])
        if state.block is not None:
            self._give_up(state.block)

    # -- references ----------------------------------------------------------------------------

    def _take(self, block: int) -> None:
        self._blocks.take([block])
        self._own[block] += 1

    def _give_up(self, block: int) -> None:
        self._blocks.drop([block])
        self._own[block] -= 1
        if not self._own[block]:
            del self._own[block]

    def _in_use(self, block: int) -> bool:
        """Whether anybody else holds it: giving it up would then free nothing."""
        return self._blocks.references(block) > self._own[block]


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading elements two sequences share."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
