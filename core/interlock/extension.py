"""Objects that plugins hand to the core in the cold tier; the core calls their methods directly.

Each protocol says when its methods are called and what they may do. `check` compares an object
with its protocol at start, so that one written for another interface is refused by name instead
of failing in the middle of a step.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs

from interlock.errors import PluginError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from interlock.engine.batch import Plan
    from interlock.engine.request import Request
    from interlock.layers.linear import RowKinds
    from interlock.weights.source import WeightTensor

STATE_GRID = 16
"""Recurrent states can be exported at multiples of so many tokens after a row's first one."""

API_VERSION = 1
"""Version of everything in this module and in `hookspec`; plugins declare the one they speak."""


@attrs.frozen
class Match:
    """What a `KVSource` can supply for a request, counted in tokens.

    ``blocks`` are blocks that already hold those tokens, as many as they fill (the last one
    possibly in part); the core takes its own reference on each, and copies a shared block before
    it writes to it. Without blocks the core allocates them, and the source fills them, holding the
    request until it has.

    On a model with recurrent layers (``geometry.num_states`` > 0) ``blocks`` come with ``state``,
    a slot that holds the state after exactly the last of those tokens; the core takes a reference
    on it and copies it before the request goes on. Without blocks the source fills
    ``request.state_slot`` too.
    """

    num_tokens: int
    blocks: tuple[int, ...] = ()
    state: int | None = None


class KVSource(Protocol):
    """Supplies tokens' cache entries that need not be computed. Scheduler process, rank 0.

    A source that can also supply recurrent states says so with an attribute
    ``supplies_states = True``; others are refused on models that have such layers.
    """

    def match(self, request: Request, start: int, stop: int) -> Match | None:
        """Tokens available from ``start`` on, not beyond ``stop``. Pure: may be asked repeatedly.

        ``start`` is the beginning of a block. Tokens before it are supplied by earlier sources.
        """

    def settle(self, request: Request, start: int, num_tokens: int) -> None:
        """The request is admitted, with ``num_tokens`` from ``start``. Once per admission, also 0.

        ``request.block_table`` has room for them. A source that fills it asynchronously takes its
        own references on those blocks until it has stopped writing: the request may be preempted
        or end at any time, and is then admitted (and settled) anew or never. Hold names must
        therefore differ from one admission to the next.
        """


class StateExports(Protocol):
    """Has recurrent states inside a row written to slots of their own, in the same pass."""

    def plan(self, request: Request, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """``(position, slot)`` pairs for a prefill row that computes tokens ``start`` to ``stop``.

        After the step, ``slot`` holds the state after exactly ``position`` tokens. Positions lie
        strictly between ``start`` and ``stop``, multiples of `STATE_GRID` after ``start``; slots
        come from ``engine.scheduler.memory.states`` and stay the plugin's. Called once for every
        row that is planned, which may still be preempted before it runs.
        """


class ChunkLimit(Protocol):
    """Says where a row's tokens must end. Pure; called for running and waiting requests alike."""

    def clip(self, request: Request, start: int, end: int) -> int:
        """The end to use instead of ``end``; ``start`` skips the request in this step."""


class Drafter(Protocol):
    """Proposes tokens that the next step verifies. A draft is invisible until it is accepted."""

    def input_slots(self, request: Request) -> int:
        """Input positions that drafting for ``request`` adds to a step, charged to its budget."""

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Draft tokens for each request (none is fine). Once per step, after commit."""


class LogitsProcessor(Protocol):
    """Changes logits before sampling. Rows are (request, draft position) pairs."""

    def apply(self, requests: Sequence[Request], offsets: Sequence[int], logits: Tensor) -> Tensor:
        """Return logits [S, V] float32, changed in place or new.

        Row ``i`` belongs to ``requests[i]``; ``offsets[i]`` counts the draft tokens before it.
        An exception ends the requests of the rows that it was called for, nobody else.
        """


class Geometry(NamedTuple):
    """What a runner can hold."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    num_states: int = 0
    """Slots for the state of recurrent layers; 0 for a model that has none."""


class Runner(Protocol):
    """Computes logits for a plan. The default runs the model; a simulator may take its place."""

    geometry: Geometry

    def forward(self, plan: Plan) -> Tensor:
        """Logits [S, V] for the rows' ``num_logits`` positions, in row order."""

    # A runner whose geometry has states also has
    # ``settle(plan: Plan, kept: Sequence[int]) -> None``: see `interlock.engine.states`.


class LinearMethod(Protocol):
    """How one linear layer stores and applies its weight. Called on every rank."""

    def create_weights(self, in_features: int, out_features: int) -> None:
        """Allocate nothing larger than the stored form."""

    def load(self, parts: Sequence[Any], bias: Tensor | None) -> None:
        """Take the layer's weight, given as row-wise parts (`weights.source.WeightTensor`)."""

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [T, in_features] to [T, out_features]. Hot: once per layer and step."""


@attrs.frozen(kw_only=True)
class ExpertLayer:
    """The routed experts of one layer, as a method for them must know them.

    An expert computes ``down(act(gate x, up x))`` for tokens of ``size`` numbers. ``activation``
    is ``("silu",)``, or ``("situ", beta, linear_beta)`` with linear_beta None for an unbounded up.
    """

    name: str
    """Such as ``model.layers.1.block_sparse_moe.experts``."""
    num_experts: int
    top: int
    """Experts that a token is sent to."""
    size: int
    inner: int
    """Of gate's and up's rows, on this rank: whole groups of 32 (the last one may be short)."""
    activation: tuple[Any, ...]
    weight_format: str
    """As stored in the checkpoint: ``BF16``, ``MXFP4`` and so on."""
    dtype: torch.dtype
    device: torch.device
    kinds: RowKinds
    """Says before each step how many leading tokens decode or verify; the others prefill."""
    batch_invariant: bool | None
    unfinalized_capacity: int
    """Of how many tokens a batch may at most have its result left unfinalized; 0 is never."""


@attrs.frozen(eq=False)
class UnfinalizedExperts:
    """What experts computed for each of a token's slots, not yet weighted and summed."""

    rows: Tensor
    """[R, size], in whatever order the kernel left them."""
    weights: Tensor
    """[T, top], wide."""
    row_map: Tensor
    """int32 [T, top]: the row of every slot, -1 for one that this rank does not have."""


class ExpertMethod(Protocol):
    """How the routed experts of one layer are stored and run. Called on every rank."""

    def load(self, matrix: Callable[[int, str], WeightTensor]) -> None:
        """Take the weights: ``matrix(expert, part)`` is this rank's ``w1``, ``w3`` or ``w2``.

        w1 (gate) and w3 (up) are [inner, size], w2 (down) is [size, inner].
        """

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor | UnfinalizedExperts:
        """``x`` [T, size], weights (wide) and ids [T, top] to this rank's part of the sum.

        Finished, it is wide [T, size], summed over the slots in ascending order. It may be left
        unfinalized if the layer's ``unfinalized_capacity`` is at least T.
        """


def check(thing: Any, protocol: type[Any], plugin: str) -> Any:
    """Return ``thing`` if it has every method of ``protocol`` with the same parameters.

    Raises PluginError naming the plugin and what is missing or different.
    """
    for name, wanted in _methods(protocol):
        method = getattr(thing, name, None)
        if not callable(method):
            raise PluginError(
                f"plugin {plugin!r}: {type(thing).__name__} has no method {name}(), which "
                f"{protocol.__name__} version {API_VERSION} requires"
            )
        _check_parameters(method, wanted, plugin, f"{protocol.__name__}.{name}")
    return thing


def noted(thing: Any, protocol: type[Any], plugin: str) -> Any:
    """The methods of ``protocol`` on ``thing``; what they raise carries the plugin's name."""
    methods = {
        name: _noting(getattr(thing, name), f"plugin {plugin!r}, {protocol.__name__}.{name}")
        for name, _ in _methods(protocol)
    }
    return types.SimpleNamespace(**methods)


def _methods(protocol: type[Any]) -> list[tuple[str, Any]]:
    return [
        (name, item)
        for name, item in vars(protocol).items()
        if inspect.isfunction(item) and not name.startswith("_")
    ]


def _noting(method: Callable[..., Any], note: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            error.add_note(note)
            raise

    return call


def _check_parameters(method: Any, wanted: Any, plugin: str, what: str) -> None:
    expected = list(inspect.signature(wanted).parameters)[1:]
    try:
        inspect.signature(method).bind(*expected)
    except (TypeError, ValueError):
        raise PluginError(
            f"plugin {plugin!r}: {what} must accept ({', '.join(expected)}), "
            f"but takes {inspect.signature(method)}"
        ) from None
