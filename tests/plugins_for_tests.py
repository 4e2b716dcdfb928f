"""Small real plugins over the simulated runner, which prove that the seams compose.

Each keeps to `interlock.extension` and takes what it needs from the engine it is given; none knows
another one. Their ``held`` lists the blocks on which they hold references.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

import attrs

from interlock.engine.request import Request
from interlock.extension import Match
from interlock.hookspec import hookimpl
from sim import SimRunner, entries_of


class Base:
    api_version = 1

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def held(self) -> list[int]:
        return []

    def held_states(self) -> list[int]:
        return []

    @hookimpl
    def interlock_counters(self):
        return dict(self.counts)


class LookupDrafter(Base):
    """Drafts what followed the last two tokens the last time, in any sequence: right or wrong."""

    def __init__(self, tokens: int = 4, slots: int = 1) -> None:
        super().__init__()
        self.tokens, self.slots = tokens, slots
        self.after: dict[tuple[int, ...], list[int]] = {}

    @hookimpl
    def interlock_drafter(self):
        return self

    def input_slots(self, request: Request) -> int:
        return self.slots

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self._drafts(request) for request in requests]

    def _drafts(self, request: Request) -> list[int]:
        for known in (request.token_ids[-3:], request.token_ids[-1:]):
            if tuple(known) in self.after:
                return list(self.after[tuple(known)])
        return []

    @hookimpl
    def interlock_requests_finished(self, requests):
        for request in requests:
            tokens = request.token_ids
            for i in range(len(tokens) - 1):
                follow = tokens[i + 1 : i + 1 + self.tokens]
                self.after[tuple(tokens[max(0, i - 2) : i + 1])] = follow
                self.after[(tokens[i],)] = follow

    @hookimpl
    def interlock_step_done(self, stats):
        self.counts["drafted_total"] += stats.num_draft_tokens
        self.counts["accepted_total"] += stats.num_accepted_tokens


class PrefixCache(Base):
    """Blocks by all tokens up to their end. A block may be shared in part, and is then copied."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.published: dict[str, int] = {}

    def held(self) -> list[int]:
        return list(self.entries.values())

    @hookimpl
    def interlock_kv_source(self, engine):
        self.pool = engine.scheduler.memory.pool
        self.size = engine.runner.geometry.block_size
        return self

    def key(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens)

    def match(self, request: Request, start: int, stop: int) -> Match | None:
        tokens, blocks, reached = request.token_ids[:stop], [], start
        while True:
            parent = self.key(tokens[:reached])
            best, share = 0, None
            for child in self.children.get(parent, ()):
                same = _overlap(child, tuple(tokens[reached : reached + self.size]))
                if same > best:
                    best, share = same, parent + child
            if share is None:
                break
            blocks.append(self.entries[share])
            reached += best
            if best < self.size:
                break
        return Match(reached - start, tuple(blocks)) if blocks else None

    def settle(self, request: Request, start: int, num_tokens: int) -> None:
        self.published[request.id] = 0
        self.counts["settled_total"] += 1
        self.counts["hit_tokens_total"] += num_tokens
        self.counts["partial_hits_total"] += bool(num_tokens % self.size)

    def committed(self, request: Request, stop: int) -> int:
        """How many tokens may be published. Everything before ``stop`` is in the cache too."""
        return stop

    @hookimpl
    def interlock_kv_committed(self, spans):
        for request, _start, stop in spans:
            stop = self.committed(request, stop)
            first = self.published.get(request.id, 0)
            for begin in range(first, stop, self.size):
                end = min(begin + self.size, stop)
                # A block that is still being written is shared only once its request has ended.
                if end - begin == self.size or request.finished:
                    self.publish(request, begin, end)
            self.published[request.id] = stop // self.size * self.size

    def publish(self, request: Request, begin: int, end: int) -> None:
        parent = self.key(request.token_ids[:begin])
        child = tuple(request.token_ids[begin:end])
        if parent + child in self.entries or len(child) < end - begin:
            return
        block = request.block_table[begin // self.size]
        self.take(block)
        self.entries[parent + child] = block
        self.children.setdefault(parent, []).append(child)
        self.counts["published_total"] += 1

    def take(self, block: int) -> None:
        self.pool.take([block])

    def drop(self, block: int) -> None:
        self.pool.drop([block])

    @hookimpl
    def interlock_requests_finished(self, requests):
        for request in requests:
            self.published.pop(request.id, None)

    @hookimpl
    def interlock_reclaim(self, num_blocks):
        unused = [k for k, block in self.entries.items() if self.pool.references(block) == 1]
        for key in unused[:num_blocks]:
            self.forget(key)
            self.counts["evicted_total"] += 1

    def forget(self, key: tuple[int, ...]) -> None:
        block = self.entries.pop(key)
        for length in range(max(0, len(key) - self.size), len(key)):
            siblings = self.children.get(key[:length], [])
            if key[length:] in siblings and key[:length] + key[length:] not in self.entries:
                siblings.remove(key[length:])
        self.drop(block)


class LedgerCache(PrefixCache):
    """The same, with whole blocks only, announced on admission through the core's ledger."""

    @hookimpl
    def interlock_kv_source(self, engine):
        self.ledger = engine.scheduler.ledger
        return super().interlock_kv_source(engine)

    def held(self) -> list[int]:
        return list(self.entries.values())

    def match(self, request: Request, start: int, stop: int) -> Match | None:
        blocks: list[int] = []
        for end in range(start + self.size, stop + 1, self.size):
            block = self.ledger.find(tuple(request.token_ids[:end]))
            if block is None:
                break
            blocks.append(block)
        return Match(len(blocks) * self.size, tuple(blocks)) if blocks else None

    def settle(self, request: Request, start: int, num_tokens: int) -> None:
        super().settle(request, start, num_tokens)
        end = min(len(request.block_table) * self.size, request.num_tokens)
        for stop in range(start + num_tokens + self.size, end + 1, self.size):
            key, block = tuple(request.token_ids[:stop]), request.block_table[stop // self.size - 1]
            self.ledger.reserve(
                request.id,
                key,
                block,
                num_tokens=stop,
                on_commit=self.on_commit,
                on_abort=self.on_abort,
            )
            self.counts["reserved_total"] += 1

    def on_commit(self, key: tuple[int, ...], block: int) -> None:
        # Only now: a reference on a block that is still to be written would make the core copy it.
        self.take(block)
        self.entries[key] = block
        self.counts["published_total"] += 1

    def on_abort(self, key: tuple[int, ...], block: int) -> None:
        self.counts["aborted_total"] += 1

    @hookimpl
    def interlock_kv_committed(self, spans):
        """The ledger has done this already."""

    def forget(self, key: tuple[int, ...]) -> None:
        self.ledger.retract(key)
        self.drop(self.entries.pop(key))


def _overlap(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


@attrs.define(eq=False)
class Load:
    request: Request
    name: str
    first: int
    tokens: list[int]
    blocks: list[int]
    polls_left: int


class RemoteSource(Base):
    """Holds a request while its first tokens' entries are "transferred" into its blocks.

    Its own references keep the blocks alive until the transfer has ended, whatever becomes of the
    request in the meantime.
    """

    def __init__(self, runner: SimRunner, polls: int = 3) -> None:
        super().__init__()
        self.runner, self.polls = runner, polls
        self.loads: list[Load] = []

    def held(self) -> list[int]:
        return [block for load in self.loads for block in load.blocks]

    @hookimpl
    def interlock_kv_source(self, engine):
        self.pool = engine.scheduler.memory.pool
        self.size = engine.runner.geometry.block_size
        return self

    def match(self, request: Request, start: int, stop: int) -> Match | None:
        """It has prompts whose sum is even, without their last three tokens."""
        if sum(request.prompt_token_ids) % 2:
            return None
        return Match(max(0, min(stop, request.num_prompt_tokens - 3) - start))

    def settle(self, request: Request, start: int, num_tokens: int) -> None:
        self.counts["settled_total"] += 1
        if num_tokens == 0:
            return
        stop = start + num_tokens
        blocks = request.block_table[start // self.size : -(-stop // self.size)]
        self.take(blocks)
        name = f"transfer {self.counts['loads_total']}"
        self.counts["loads_total"] += 1
        self.loads.append(Load(request, name, start, request.token_ids[:stop], blocks, self.polls))
        self.hold(request, name)

    def hold(self, request: Request, name: str) -> None:
        request.hold(name)

    def take(self, blocks: Sequence[int]) -> None:
        self.pool.take(blocks)

    def drop(self, blocks: Sequence[int]) -> None:
        self.pool.drop(blocks)

    @hookimpl
    def interlock_poll(self):
        for load in list(self.loads):
            load.polls_left -= 1
            if load.polls_left <= 0:
                self.loads.remove(load)
                self.complete(load)

    def complete(self, load: Load) -> None:
        entries = entries_of(load.tokens)
        for position in range(load.first, len(load.tokens)):
            block = load.blocks[(position - load.first) // self.size]
            self.runner.cache[block * self.size + position % self.size] = entries[position]
            self.counts["loaded_tokens_total"] += 1
        self.drop(load.blocks)
        load.request.release(load.name)


class StrideLimit(Base):
    """A prefilling row ends at a multiple of ``stride`` unless it ends the prompt."""

    def __init__(self, stride: int = 5) -> None:
        super().__init__()
        self.stride = stride

    @hookimpl
    def interlock_chunk_limit(self):
        return self

    def clip(self, request: Request, start: int, end: int) -> int:
        if not request.is_prefilling:
            return end
        cut = end // self.stride * self.stride
        if end >= request.prefill_target or cut <= start:
            return end
        self.counts["clipped_total"] += 1
        return cut


class Bias(Base):
    """Adds ``amount`` to one token's logit, everywhere."""

    def __init__(self, token: int, amount: float = 100.0) -> None:
        super().__init__()
        self.token, self.amount = token, amount

    @hookimpl
    def interlock_logits_processor(self):
        return self

    def apply(self, requests, offsets, logits):
        self.counts["rows_total"] += len(requests)
        logits[:, self.token] += self.amount
        return logits


class Rotates(Base):
    """Raises one token's logit, another one at each position: drafts must be judged likewise."""

    @hookimpl
    def interlock_logits_processor(self):
        return self

    def apply(self, requests, offsets, logits):
        for row, (request, offset) in enumerate(zip(requests, offsets, strict=True)):
            logits[row, (7 * (request.num_tokens + offset)) % 64] += 3.0
            self.counts["rows_total"] += 1
        return logits


GOOD = """
from interlock.hookspec import hookimpl

class Plugin:
    api_version = 1
    def __init__(self):
        self.steps = 0
    @hookimpl
    def interlock_step_done(self, stats):
        self.steps += 1
    @hookimpl
    def interlock_counters(self):
        return {"steps_total": self.steps}
"""


class Site:
    """A folder on ``sys.path`` into which distributions are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, source: str = GOOD, *, dist: str = "", version: str = "1.0") -> None:
        dist = dist or f"interlock-{name}"
        module = dist.replace("-", "_")
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[interlock.plugins]\n{name} = {module}:Plugin\n")
