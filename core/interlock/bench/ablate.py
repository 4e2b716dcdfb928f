"""Which configurations show what each plugin of a list bought, and the reading of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from interlock.bench.metrics import Burst, Spread, gains
from interlock.bench.spec import Target, with_plugins
from interlock.errors import ConfigError

BARE = "none"
ALL = "all"


def variants(base: Target, plugins: Sequence[str]) -> list[Target]:
    """None, each alone, all but each, all; configurations that coincide appear once."""
    if not plugins:
        raise ConfigError("bench ablate: name the plugins to judge with --plugins a,b")
    chosen: dict[tuple[str, ...], str] = {(): BARE, tuple(plugins): ALL}
    for name in plugins:
        chosen.setdefault((name,), f"only {name}")
    for name in plugins:
        chosen.setdefault(tuple(p for p in plugins if p != name), f"without {name}")
    return [with_plugins(attrs.evolve(base, label=label), names) for names, label in chosen.items()]


@attrs.frozen
class Bought:
    """What one plugin did to a metric, as gains (above 1: better).

    ``alone`` compares it alone with the bare core, ``last`` all plugins with all but this one.
    """

    plugin: str
    metric: str
    alone: Spread
    last: Spread


def bought(
    plugins: Sequence[str], measured: Mapping[tuple[str, ...], Sequence[Burst]], metric: str
) -> list[Bought]:
    """Gains of every plugin in ``metric``; ``measured`` maps plugin tuples to their repeats."""
    rows = []
    for name in plugins:
        others = tuple(p for p in plugins if p != name)
        alone = Spread.of(gains(measured[(name,)], measured[()])[metric])
        last = Spread.of(gains(measured[tuple(plugins)], measured[others])[metric])
        if alone and last:
            rows.append(Bought(name, metric, alone, last))
    return rows
