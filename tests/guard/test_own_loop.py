"""A loop of one's own under the guard: what it gives, what it is asked, and when it is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cppmega.catalogue.megatron_args import has_experts, has_mtp, layer_pattern, uses_fsdp
from cppmega.guard import given
from cppmega.sizes.megatron_args import OTHER_NAMES
from tests import forkserver
from tests.support import PATIENCE, REPOSITORY, environment, pages, patched, pristine

EXAMPLE = REPOSITORY / "examples" / "own_loop" / "train.py"
MARKED = "guard.steps(batches(steps), model.config, ddp.ddp_config, torch_only)"


def train(version: str, script: Path) -> subprocess.CompletedProcess[str]:
    root = patched(version)  # with every page
    command = [forkserver.executable(), "-m", "cppmega.run", "-v", "--megatron", str(root)]
    return subprocess.run(
        [*command, str(script), "--steps", "3"],
        env=environment(root),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
def test_the_example_trains_with_every_page(version: str) -> None:
    """Pages of DSA, of megatron.training and of Transformer Engine are not demanded of it."""
    assert len(EXAMPLE.read_text().splitlines()) <= 90
    done = train(version, EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "step 3  loss" in done.stdout
    for page in ("dsa_indexer_kernels", "te_plain_layers"):
        assert f"{page} (this run's arguments do not use it)" in done.stderr


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("batches(steps)", ("no-step-seen", "AdamW steps a second time")),
        (
            "guard.steps(batches(steps))",
            ("mtp_num_layers", "(of TransformerConfig)", "OptimizerConfig"),
        ),
    ],
)
def test_a_loop_that_marks_or_gives_nothing_is_refused_in_its_first_steps(
    tmp_path: Path, instead: str, said: tuple[str, ...]
) -> None:
    text = EXAMPLE.read_text()
    assert MARKED in text
    script = tmp_path / "train.py"
    script.write_text(text.replace(MARKED, instead))
    done = train("0.19.2", script)
    assert done.returncode == 1 and "step 1  loss" in done.stdout, done.stderr
    assert "step 2" not in done.stdout
    for each in said:
        assert each in done.stderr
    assert len(done.stderr) < 3000, "neither 28 names of pages nor a traceback"


@dataclasses.dataclass
class TransformerConfig:
    num_moe_experts: int | None = None
    mtp_num_layers: int | None = None


@dataclasses.dataclass
class DistributedDataParallelConfig:
    use_megatron_fsdp: bool = False
    check_for_nan_in_grad: bool = False


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that has these two configurations."""
    for kind in (TransformerConfig, DistributedDataParallelConfig):
        module = ModuleType("made")
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, given._CONFIGS[kind.__name__], module)
    monkeypatch.delitem(sys.modules, "megatron.core.models.hybrid.hybrid_model", raising=False)
    monkeypatch.delitem(sys.modules, "megatron.core.models.mamba.mamba_model", raising=False)


MOE, DDP = TransformerConfig(num_moe_experts=4), DistributedDataParallelConfig()


@pytest.mark.parametrize(
    ("sources", "question", "answer"),
    [
        ((MOE,), has_experts, True),
        ((TransformerConfig(),), has_experts, False),
        (({"num_experts": 4},), has_experts, True),
        (({"num_moe_experts": 4},), has_experts, True),
        ((MOE, {"num_experts": None}), has_experts, False),  # a dict comes first
        ((SimpleNamespace(num_experts=2),), has_experts, True),
        (({},), has_mtp, {"mtp_num_layers"}),
        ((DDP,), has_experts, {"num_experts"}),
        ((MOE,), uses_fsdp, {"use_megatron_fsdp"}),
        ((MOE, DDP), uses_fsdp, False),
        ((MOE, DDP), lambda args: args.check_for_nan_in_loss_and_grad, False),
        ((MOE,), lambda args: has_experts(args) and getattr(args, "sft", False), {"sft"}),
        ((MOE,), lambda args: bool(getattr(args, "sft", False)) and has_mtp(args), False),
        ((MOE,), lambda args: not getattr(args, "sft", False) and has_experts(args), {"sft"}),
        ((MOE,), lambda args: getattr(args, "of_another_release", None) == 1, False),
        ((MOE,), lambda args: args.of_the_script, {"of_the_script"}),
        ((MOE,), lambda args: bool(layer_pattern(args)), False),  # no hybrid model was imported
        ((), lambda args: getattr(args, "anything", False), {"anything"}),
    ],
)
def test_what_a_loop_gives_answers_questions_about_megatrons_arguments(
    release: None, sources: tuple[object, ...], question: object, answer: object
) -> None:
    from cppmega.catalogue import gates

    found = given.Given(*sources).answer(lambda args: gates.wanted("page", question, args))
    assert found == answer


def test_megatrons_own_namespace_is_taken_as_it_is() -> None:
    args = SimpleNamespace(**dict.fromkeys(given._WHOLE, 1))
    assert given.of(MOE, args) is args


def test_the_way_to_give_what_is_missing_is_named(release: None) -> None:
    told, how = given.ways({"num_experts", "use_megatron_fsdp", "sft"})
    assert told == (
        "num_experts (of TransformerConfig), "
        "use_megatron_fsdp (of DistributedDataParallelConfig), sft"
    )
    assert how == (
        "the loop's TransformerConfig, the loop's DistributedDataParallelConfig, {\"sft\": ...}"
    )


class Asked:
    """Arguments of which some are given, and which remembers what it was asked for."""

    def __init__(self, given: dict[str, object]) -> None:
        self.given, self.names = given, set[str]()

    def __getattr__(self, name: str) -> object:
        self.names.add(name)
        if name not in self.given:
            raise AttributeError(name)
        return self.given[name]


USED = {
    **dict.fromkeys(("bf16", "fp8", "use_distributed_optimizer", "async_save", "sft"), True),
    **dict.fromkeys(("cross_entropy_loss_fusion", "te_rng_tracker"), True),
    **{"experimental_attention_variant": "dsa", "hybrid_layer_pattern": "M*", "num_experts": 4},
    **{"mtp_num_layers": 1, "recompute_granularity": "full", "cuda_graph_impl": "local"},
}


@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
def test_every_argument_that_pages_ask_for_can_be_given_by_a_loop(version: str) -> None:
    """Of those that the release has: a new one is in a configuration, or in a table of `given`."""
    asked = Asked({}), Asked(USED)
    for page in pages().values():
        for args in asked if page.patch.when is not None else ():
            with contextlib.suppress(Exception):
                page.patch.when(args)
    core, training = (pristine(version) / "megatron" / part for part in ("core", "training"))
    fields = {
        line.partition(":")[0].strip()
        for file in core.rglob("*config.py")
        for line in file.read_text().splitlines()
        if re.match(r"    \w+: ", line)
    }
    words = set(re.findall(r"\w+", "".join(file.read_text() for file in training.rglob("*.py"))))
    tables = {*given._IN_NO_CONFIG, *given._SEEN, *OTHER_NAMES}
    names = asked[0].names | asked[1].names
    assert "num_experts" in names
    assert sorted((names & words) - fields - tables) == []
