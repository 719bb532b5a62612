"""Model setup if `modelopt` can be imported and `megatron.post_training` cannot."""

from pathlib import Path

import pytest

from tests.support import patched, pristine, python

SETUP = """
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

# As if NVIDIA ModelOpt were installed.
names = ["modelopt", "modelopt.torch", "modelopt.torch.distill", "modelopt.torch.distill.plugins",
         "modelopt.torch.distill.plugins.megatron"]
for name in names:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
module.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None

from megatron.training import training

assert training.has_nvidia_modelopt
SCRATCH = Path(SCRATCH)


class Built(Exception):
    pass


def outcome(training=training, **given):
    args = types.SimpleNamespace(load=None, virtual_pipeline_model_parallel_size=None)
    args.init_model_with_meta_device = False
    args.__dict__.update(given)
    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = types.SimpleNamespace(pp=group, tp=group)
    with mock.patch.object(training, "get_args", return_value=args):
        try:
            training.get_model(mock.Mock(side_effect=Built), pg_collection=groups)
        except Exception as error:
            return type(error).__name__, str(error), args


spec = importlib.util.spec_from_file_location("megatron.training.stock_training", STOCK)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
assert outcome(stock)[:2] == ("ModuleNotFoundError", "No module named 'megatron.post_training'")

assert outcome()[0] == "Built"
plain, modelopt = SCRATCH / "plain", SCRATCH / "modelopt"
(plain / "iter_0000001").mkdir(parents=True)
(modelopt / "iter_0000001" / "modelopt_state").mkdir(parents=True)
assert outcome(load=str(plain))[0] == "Built"
assert outcome(load=str(SCRATCH / "none"))[0] == "Built"
name, message, _ = outcome(load=str(modelopt))
assert name == "RuntimeError" and str(modelopt) in message, message
assert outcome(export_kd_teacher_load="teacher")[0] == "RuntimeError"

# Where post_training is there (a checkout), it decides; one of its own imports failing is said.
package = types.ModuleType("megatron.post_training")
package.__path__ = []
there = types.ModuleType("megatron.post_training.checkpointing")
there.has_modelopt_state = lambda load: load == "quantized"
sys.modules |= {package.__name__: package, there.__name__: there}
name, _, args = outcome(load="quantized")
assert name == "Built" and args.modelopt_enabled
assert not hasattr(outcome(load="plain")[2], "modelopt_enabled")
del sys.modules[there.__name__]
package.__path__ = [str(SCRATCH)]
(SCRATCH / "checkpointing.py").write_text("import not_there_at_all")
assert outcome()[:2] == ("ModuleNotFoundError", "No module named 'not_there_at_all'")
print("done")
"""


TRAINING = "megatron/training/training.py"


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2"])
def test_setup_needs_no_post_training(version: str, tmp_path: Path) -> None:
    stock = str(pristine(version) / TRAINING)
    code = f"SCRATCH, STOCK = {str(tmp_path)!r}, {stock!r}\n" + SETUP
    done = python(patched(version, "modelopt_without_post_training"), code)
    assert done.stdout.endswith("done\n"), done.stderr
