"""The arguments of a loop of one's own, by Megatron's names, from whatever the loop has.

A loop on megatron.core parses no arguments: it has configurations, some of whose fields have other
names than the arguments that Megatron's own loop makes them of, or a dict of either names. A
question about a name that was not given is remembered, since no answer is not the answer "no".
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard.objects import MISSING
from cppmega.sizes.megatron_args import synonyms

_CONFIGS = {
    "TransformerConfig": "megatron.core.transformer.transformer_config",
    "DistributedDataParallelConfig": "megatron.core.distributed.distributed_data_parallel_config",
    "OptimizerConfig": "megatron.core.optimizer.optimizer_config",
}
_WHOLE = ("micro_batch_size", "num_layers", "optimizer", "train_iters", "transformer_impl")
"""Arguments by which the whole namespace of Megatron's parser is recognized."""
_IN_NO_CONFIG = {
    *("async_save", "async_strategy", "dist_ckpt_optim_fully_reshardable"),
    *("dataloader_inter_document_masking", "moe_use_upcycling", "sft"),
    "use_persistent_ckpt_worker",
}
"""Arguments that pages ask for and that no configuration has: a dict has to state them."""


def _pattern() -> Any:
    """None where no hybrid model can have been built."""
    for name in ("hybrid.hybrid_model", "mamba.mamba_model"):
        if f"megatron.core.models.{name}" in sys.modules:
            raise AttributeError
    return None


def _te_tracker() -> bool:
    random: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = getattr(random, "_CUDA_RNG_STATE_TRACKER", None)
    return type(tracker).__name__ == "TECudaRNGStatesTracker"


_SEEN: dict[str, Callable[[], Any]] = {
    "hybrid_layer_pattern": _pattern,
    "override_opt_param_scheduler": lambda: False,  # whoever builds a scheduler reaches its page
    "skip_train": lambda: False,
    "te_rng_tracker": _te_tracker,
    "use_torch_fsdp2": lambda: False,
}
"""Arguments that no configuration has, and that this process, or that it has such a loop, shows."""


class _Anything:
    """A value of which every question is answered with yes."""

    def __bool__(self) -> bool:
        return True

    def __contains__(self, _: object) -> bool:
        return True

    def _yes(self, _: object) -> bool:
        return True

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _yes
    __hash__ = None  # type: ignore[assignment]


class Given:
    """What a loop of one's own has given, with the names of Megatron's arguments."""

    is_own_loop = True
    """Megatron's parsed arguments have no such name."""

    def __init__(self, *sources: Any, else_anything: bool = False) -> None:
        """Collect the sources; what a dict states takes precedence.

        Args:
            sources: configurations, namespaces and dicts.
            else_anything: whether what is missing has a value that fits every question.
        """
        self._else_anything = else_anything
        self._sources = sorted(sources, key=lambda one: not isinstance(one, Mapping))
        self.missing: set[str] = set()
        """Arguments that were asked for and not given."""
        self.unknown: set[str] = set()
        """The same, of names that neither this release nor its configurations have."""

    def answer(self, question: Callable[[Given], bool]) -> bool | set[str]:
        """Ask a question, or name the arguments on which its answer depends.

        The answer is no if it is no without what is missing, and whatever value that may have.

        Raises:
            CppmegaError: of the question, where nothing was missing.
        """
        answers, lacking = set[object](), set[str]()
        for else_anything in (False, True):
            asked = Given(*self._sources, else_anything=else_anything)
            try:
                answers.add(answer := question(asked))
                if not asked.missing:
                    return answer
            except CppmegaError:
                if not (asked.missing or asked.unknown):
                    raise
                answers.add(None)
            if not else_anything:  # what is asked next, given these, may not be asked at all
                lacking = asked.missing or asked.unknown
        return False if answers == {False} else lacking

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "cppmega_variables":
            raise AttributeError(name)
        names = [name, *synonyms(name)]
        for value in (_read(source, one) for source in self._sources for one in names):
            if value is not MISSING:
                return value
        for one in names:
            if one in _SEEN:
                try:
                    return _SEEN[one]()
                except AttributeError:
                    break
        if self._misses(name, names):
            self.missing.add(name)
            if self._else_anything:
                return _Anything()
        else:
            self.unknown.add(name)
        raise AttributeError(name)

    def _misses(self, name: str, names: Collection[str]) -> bool:
        homes = tuple(home for one in names for home in _homes(one))
        stated_elsewhere = homes and not any(isinstance(one, homes) for one in self._sources)
        return not self._sources or name in {*_IN_NO_CONFIG, *_SEEN} or bool(stated_elsewhere)


def _read(source: Any, name: str) -> Any:
    """What a configuration, a namespace or a dict has under a name; `MISSING` if it has nothing."""
    if isinstance(source, Mapping):
        return source.get(name, MISSING)
    return getattr(source, name, MISSING)


def of(*sources: Any) -> Any:
    """The arguments of a loop: Megatron's own namespace, or `Given`."""
    for one in sources:
        if all(hasattr(one, name) for name in _WHOLE):
            return one
    return Given(*sources)


def ways(names: Collection[str]) -> tuple[str, str]:
    """Name arguments that were not given, and how to give them.

    Returns:
        The names with the configurations that have them, and what `steps` has to be given.
    """
    by_config: dict[str, list[str]] = {}
    for name in sorted(names):
        homes = [home for one in (name, *synonyms(name)) for home in _homes(one)]
        by_config.setdefault(homes[0].__name__ if homes else "", []).append(name)
    alone = by_config.pop("", [])
    told = [f"{', '.join(fields)} (of {config})" for config, fields in by_config.items()]
    told += [", ".join(alone)] if alone else []
    give = [f"the loop's {config}" for config in by_config]
    give += ["{" + ", ".join(f'"{name}": ...' for name in alone) + "}"] if alone else []
    return ", ".join(told), ", ".join(give)


def _homes(name: str) -> Iterator[type]:
    """The configurations of this release that have a field, their subclasses' included."""
    for config, module in _CONFIGS.items():
        kind = getattr(sys.modules.get(module), config, None)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            fields = (dataclasses.fields(one) for one in (kind, *kind.__subclasses__()))
            if any(field.name == name for each in fields for field in each):
                yield kind
