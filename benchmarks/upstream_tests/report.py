"""The differences between stock and patched, and their table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.harness import results
from benchmarks.upstream_tests.worker import FILE_LIMIT, NOT_RUN, Outcomes
from cppmega.errors import CppmegaError

ABSENT = ("absent", "")


@dataclass(frozen=True, slots=True)
class Meant:
    """A test that a page makes differ on purpose; it must differ in just this way."""

    test: str
    stock: str
    patched: str
    page: str
    reason: str


def _meant(page: str, reason: str, stock: str, patched: str, *tests: str) -> tuple[Meant, ...]:
    return tuple(Meant(f"tests/unit_tests/{x}", stock, patched, page, reason) for x in tests)


_NO_MAKEFILE = "on stock, the dataset helpers are built with a Makefile that the wheel lacks"
_LAYERS = "ssm/test_hybrid_layer_allocation.py"
_DSA = "transformer/experimental_attention_variant/test_attention_variant_dsa.py"
_HOLDER = f"{_DSA}::TestDSAIndexShareHelpers::test_index_share_holder_uses"
_MTP = "transformer/test_multi_token_prediction.py::TestMultiTokenPrediction::test"
MEANT: tuple[Meant, ...] = (
    *_meant(
        *("dataset_helpers_prebuilt", _NO_MAKEFILE, "failed", "passed"),
        "data/test_gpt_dataset.py::test_inter_document_masking",
        "data/test_gpt_dataset.py::test_mock_gpt_dataset",
        "data/test_multimodal_dataset.py::test_mock_multimodal_dataset",
    ),
    *_meant(
        *("dataset_helpers_prebuilt", _NO_MAKEFILE, "error", "skipped"),
        "export/trtllm/test_single_device_fp8.py::TestTRTLLMSingleDeviceConverterFP8"
        "::test_get_model_weights_converter",
    ),
    *_meant(
        *("own_mixers", "hybrid models have one more kind of layer, R", "passed", "failed"),
        f"{_LAYERS}::TestGetLayerMapsFromLayerTypeList::test_standard_layer_types",
        *(
            f"{_LAYERS}::TestGetHybridLayerCounts::test_{name}"
            for name in (
                *("all_layer_types", "dsa_pattern", "empty_pattern", "gdn_hybrid_pattern"),
                *("gdn_pattern", "mla_pattern", "moe_pattern", "mtp_with_attention"),
                *("simple_pattern", "with_mtp", "with_pipes", "with_pipes_and_mtp"),
            )
        ),
    ),
    *_meant(
        "dsa_index_share_holder",
        "the keys that layers share belong to a forward pass, not to the mask or the pack",
        *("passed", "failed"),
        f"{_HOLDER}_attention_mask_without_packed_seq_params",
        f"{_HOLDER}_packed_seq_params_when_available",
    ),
    *_meant(
        "grad_accumulation_without_apex",
        "on stock, adding to a gradient needs an extension of Apex, which is not installed",
        *("failed", "passed"),
        f"{_MTP}_packed_sequences[1-1]",
        f"{_MTP}_packed_sequences_with_full_recompute",
        f"{_MTP}_sharded_state_dict[1-1]",
    ),
)
"""The only differences that are no regression. One that is not seen any more fails the run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A test with different outcomes on the two sides; several outcomes if it ran again."""

    test: str
    stock: tuple[str, ...]
    patched: tuple[str, ...]
    stock_reason: str
    patched_reason: str

    @property
    def flaky(self) -> bool:
        """Whether both sides can give the same outcome."""
        return bool(set(self.stock) & set(self.patched))

    @property
    def meant(self) -> Meant | None:
        """The entry of the page that causes it on purpose."""
        sides = (self.test, {*self.stock}, {*self.patched})
        return next((e for e in MEANT if (e.test, {e.stock}, {e.patched}) == sides), None)


def differences(rounds: Sequence[tuple[Outcomes, Outcomes]]) -> list[Difference]:
    """Tests that differ in the first round of (stock, patched), with their later outcomes."""
    stock, patched = rounds[0]
    found = []
    for test in sorted({*stock, *patched}):
        pair = (stock.get(test, ABSENT), patched.get(test, ABSENT))
        if pair[0][0] == pair[1][0] or not _is_known(pair):
            continue
        seen = [(one.get(test, ABSENT), other.get(test, ABSENT)) for one, other in rounds]
        known = [pair for pair in seen if _is_known(pair)]
        left, right = (tuple(pair[side][0] for pair in known) for side in (0, 1))
        found.append(Difference(test, left, right, seen[0][0][1], seen[0][1][1]))
    return found


def _is_known(pair: tuple[tuple[str, str], tuple[str, str]]) -> bool:
    """Whether a round is conclusive for a test: it started on both sides, or is missing on one.

    The limit of a file meets whichever test happens to run, and says nothing of it; a test that
    hangs meets its own limit before.
    """
    outcomes = {outcome for outcome, _ in pair}
    cut = any(reason == FILE_LIMIT for _, reason in pair)
    return NOT_RUN not in outcomes and outcomes != {ABSENT[0]} and not cut


def other_reasons(stock: Outcomes, patched: Outcomes) -> list[tuple[str, str, str]]:
    """Tests that fail on both sides with different messages."""
    return [
        (test, stock[test][1], patched[test][1])
        for test in sorted({*stock} & {*patched})
        if stock[test][0] == patched[test][0] in ("failed", "error", "crashed")
        and _plain(stock[test][1]) != _plain(patched[test][1])
    ]


def _plain(reason: str) -> str:
    """Remove addresses and numbers, which differ between any two processes."""
    return re.sub(r"0x[0-9a-f]+|[\d.]+(e[+-]\d+)?", "#", reason)


def no_longer_seen(found: Iterable[Difference], stock: Outcomes, patched: Outcomes) -> list[Meant]:
    """Entries of MEANT whose test ran as on stock then, and does not differ as it says."""
    seen = {difference.test for difference in found if difference.meant}
    ran = [one for one in MEANT if stock.get(one.test, ABSENT)[0] == one.stock]
    return [one for one in ran if one.test in patched and one.test not in seen]


def counts(outcomes: Outcomes) -> dict[str, int]:
    return dict(sorted(Counter(how for how, _ in outcomes.values()).items()))


def summary(
    facts: Mapping[str, Any],
    rounds: Mapping[str, Sequence[tuple[Outcomes, Outcomes]]],
    left_out: Sequence[str],
) -> dict[str, Any]:
    """The content of the result file, from the rounds of each file."""
    stock, patched = (
        {test: how for parts in rounds.values() for test, how in parts[0][side].items()}
        for side in (0, 1)
    )
    found = [one for parts in rounds.values() for one in differences(parts)]
    return {
        **facts,
        "counts": {"stock": counts(stock), "patched": counts(patched)},
        "passed_on_both": sum(
            how == "passed" == patched.get(test, ABSENT)[0] for test, (how, _) in stock.items()
        ),
        **_sorted_out(found),
        "no_longer_seen": [asdict(entry) for entry in no_longer_seen(found, stock, patched)],
        "other_reasons": other_reasons(stock, patched),
        "cut_short": sorted(
            file for file, parts in rounds.items() if any(NOT_RUN in counts(x) for x in parts[0])
        ),
        "files": {
            file: {"stock": counts(parts[0][0]), "patched": counts(parts[0][1])}
            for file, parts in sorted(rounds.items())
        },
        "files_without_time": sorted(left_out),
    }


def _sorted_out(found: Iterable[Difference]) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {name: [] for name in _KINDS}
    for one in found:
        if one.meant is not None:
            said = {"page": one.meant.page, "reason": one.meant.reason}
            kinds["meant"].append({**asdict(one), **said})
        else:
            kinds["flaky" if one.flaky else "differences"].append(asdict(one))
    return kinds


_DIFFERENCE = tuple(field.name for field in fields(Difference))
_KINDS = ("differences", "flaky", "meant")
SAME = ("device", "megatron-core", "torch", "overlay", "gates", "tests", "selected")
"""What two results must agree on to be put together."""
_LISTS = ("no_longer_seen", "other_reasons", "cut_short")


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge an earlier result with that of the files for which it had no time."""
    other = [name for name in SAME if old.get(name) != new.get(name)]
    if other:
        raise CppmegaError(
            "other-result",
            f"the earlier result has another {', '.join(other)}.",
            "Outcomes of different code or tests would be counted together.",
            "run everything again, without --onto",
        )
    both = (old, new)
    known = (
        Difference(*(tuple(x) if isinstance(x, list) else x for x in map(one.get, _DIFFERENCE)))
        for result in both
        for kind in _KINDS
        for one in result[kind]
    )
    files = {**old["files"], **new["files"]}
    return {
        **new,
        "minutes": round(sum(result.get("minutes", 0) for result in both), 1),
        "counts": {
            side: dict(sorted(sum((Counter(x[side]) for x in files.values()), Counter()).items()))
            for side in ("stock", "patched")
        },
        "passed_on_both": sum(result["passed_on_both"] for result in both),
        **_sorted_out(known),
        **{name: [entry for result in both for entry in result[name]] for name in _LISTS},
        "files": dict(sorted(files.items())),
    }


def fine(result: Mapping[str, Any]) -> bool:
    """Whether nothing differs that should not, and anything was compared at all."""
    return bool(
        result["passed_on_both"] and not result["differences"] and not result["no_longer_seen"]
    )


def table(result: Mapping[str, Any]) -> str:
    kinds = sorted({kind for side in result["counts"].values() for kind in side})
    rows = (
        [side, *(result["counts"][side].get(kind, 0) for kind in kinds)]
        for side in ("stock", "patched")
    )
    return results.page(
        "# Megatron's own unit tests, stock against patched",
        "Written by `benchmarks/upstream_tests.py`: the same tests in the same processes on a\n"
        "pristine megatron-core and on a copy with the pages that `cppmega apply` applies.",
        results.bullets({name: _shown(result[name]) for name in FACTS if result.get(name)}),
        results.table(["tree", *kinds], rows),
        f"{result['passed_on_both']} tests pass on both trees; "
        f"{len(result['differences'])} differ.",
        *(
            f"## {title}\n\n" + "\n".join(f"- {told(entry)}" for entry in result[key])
            for key, title, told in SECTIONS
            if result[key]
        ),
    )


FACTS = (
    *("date", "device", "megatron-core", "torch", "transformer-engine", "tilelang", "triton"),
    *("python", "cppmega", "overlay", "pages", "gates", "tests", "stand-ins", "processes"),
    "minutes",
)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _told(entry: Mapping[str, Any]) -> str:
    stock, patched = (", ".join(entry[side]) for side in ("stock", "patched"))
    reason = entry["patched_reason"] or entry["stock_reason"]
    return f"`{entry['test']}`: {stock} on stock, {patched} on patched: {reason}"


def _told_meant(entry: Mapping[str, Any]) -> str:
    return f"`{entry['test']}` ({entry['page']}): {entry['reason']}"


SECTIONS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("differences", "Differences", _told),
    ("flaky", "Flaky: both trees give the same outcomes in turns", _told),
    ("meant", "Intended: a page makes it differ on purpose", _told_meant),
    ("no_longer_seen", "Intended, and no longer seen", _told_meant),
    ("cut_short", "Files that ran into their own limit", str),
    ("files_without_time", "Files for which there was no time", str),
)
