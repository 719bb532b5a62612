"""The kinds of the DSA layers that are being built: whether they choose keys, or share others'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from cppmega.host import env
from cppmega.sizes.dsa_layers import Sources, check_stage, decide, options_of
from cppmega.sizes.dsa_layers import dsa_layers as dsa_layers

_building: ContextVar[Sources | None] = ContextVar("_building", default=None)


@contextmanager
def decoder(config: Any, layers: Sequence[int], stage: Sequence[int]) -> Iterator[None]:
    """Context in which the layers of a decoder's stage are built, and `kind` knows theirs.

    Args:
        config: Megatron's configuration of the model.
        layers: the numbers of all DSA layers of the decoder.
        stage: those of this stage.

    Raises:
        CppmegaError: as `decide` and `check_stage`.
    """
    if not layers:
        yield
        return
    frequency, offset = options_of(config)
    pattern, asked = env.DSA_INDEX_PATTERN.read(), env.INDEX_CACHE.read()
    sources = decide(pattern, frequency, offset, layers, asked)
    check_stage(sources, stage)
    if sources != {number: number for number in sources}:
        # The layers have different weights, so these cannot be stacked in one tensor each.
        config.hetereogenous_dist_checkpoint = True
    token = _building.set(sources)
    try:
        yield
    finally:
        _building.reset(token)


def kind(layer_number: int) -> tuple[bool, int] | None:
    """Whether the layers of a decoder share keys, and the source of the layer being built.

    None where Megatron's options decide. Layers outside a decoder, those of an MTP depth, choose
    their own keys: their tokens are shifted, and their numbers start from 1 again.
    """
    if not env.DSA_INDEX_PATTERN.read():
        return None
    sources = _building.get()
    if sources is None:
        return False, layer_number
    shares = any(number != source for number, source in sources.items())
    return shares, sources[layer_number]
