"""1F1B on two pipeline stages: layers that share keys, with several microbatches under way."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests.support import patched, pristine, python

pytestmark = pytest.mark.slow

STEPS = """
import json, os, torch
from functools import partial
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from cppmega.proof import cpu_shims
from cppmega.proof.small_models import arguments
from tests.upstream_patches.dsa import dsa_models as models
from tests.upstream_patches.optimizer.distributed_optimizer import on_cpu
from tests.upstream_patches.dsa.dsa_models import ATTENTION, FULL, batch, gradients, same

cpu_shims.shim()
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
models.start()


def step(model):
    # The gradients of this stage, summed over four microbatches.
    def forward(batches, model):
        out = model(**arguments(model, **batch(next(batches))))
        return out, lambda per_token: (per_token.sum(), {})

    with on_cpu():
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter((1, 2, 3, 4)), model=[model],
            num_microbatches=4, seq_length=models.LENGTH, micro_batch_size=2, forward_only=False,
        )
    return gradients(model)


given = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
share, recomputed = {"dsa_indexer_topk_freq": 2}, ATTENTION
if not models.NEW:  # neither the option, nor recomputation of the attention alone
    os.environ |= {"CPPMEGA_INDEX_CACHE": "1", "CPPMEGA_DSA_INDEX_PATTERN": "FSFS"}
    share, recomputed = {}, FULL
cases = [("gpt", partial(models.gpt, **share), recomputed)]
if models.HAS_HYBRID:
    cases.append(("hybrid, MTP", partial(models.hybrid, "DD|DD/DD", **share), FULL))
found = {}
for name, make, options in cases:
    wanted = step(make(**given))  # nothing is recomputed
    model = make(**given, **options)
    found[name] = {"same": same(step(model), wanted), "left": models.left_over(model)}
print(json.dumps(found))
"""


@cache
def stages(root: Path) -> list[dict[str, dict]]:
    """What each stage finds."""
    done = python(root, STEPS, nproc=2)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


OLD = ("dsa_index_share", "dsa_index_share_backport", "mtp_full_recompute")


@pytest.mark.parametrize(
    ("version", "pages"),
    [("0.16.1", OLD), ("0.18.2", OLD), ("0.19.2", ("dsa_index_share_holder",))],
)
def test_every_stage_keeps_to_the_keys_of_each_microbatch(
    version: str, pages: tuple[str, ...]
) -> None:
    first, last = stages(patched(version, *pages))
    assert len(first) == 1 + (version >= "0.18")
    for answer in (*first.values(), *last.values()):
        assert answer == {"same": True, "left": []}


def test_the_first_stage_of_stock_uses_the_keys_of_a_later_microbatch() -> None:
    first, _ = stages(pristine("0.19.2"))
    assert not any(answer["same"] for answer in first.values())
